#!/bin/sh
# Sees that this machine has what no wheel brings: system_packages.sh [test]
#
# vLLM's CPU kernels link to libnuma; with "test", the dashboard's tests drive a Chromium. On a Debian
# root installs what is missing; anybody else is told everything at once.
set -eu

missing=
ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
"$ldconfig" -p | grep -q 'libnuma\.so\.1' || missing=libnuma1
if [ "${1:-}" = test ] && ! command -v chromium > /dev/null \
    && ! command -v chromium-browser > /dev/null && ! command -v google-chrome > /dev/null; then
    missing="$missing chromium fonts-dejavu-core"
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing
else
    echo "This machine lacks packages of the system. Install them, then again:" >&2
    echo "    sudo apt-get install" $missing >&2
    exit 1
fi
