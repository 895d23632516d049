#!/bin/sh
# Installs the browser that the dashboard's tests drive: install_chromium.sh
# Debian's own, through apt; no other download. Nothing to do when there is one.
set -eu

if command -v chromium > /dev/null || command -v chromium-browser > /dev/null \
    || command -v google-chrome > /dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update
    apt-get install --yes --no-install-recommends chromium fonts-dejavu-core
else
    echo "The dashboard's tests need Chromium: install it (Debian: sudo apt-get install chromium), then again." >&2
    exit 1
fi
