#!/bin/sh
# Sees that this machine has what no wheel brings: system_packages.sh [test]
#
# vLLM's CPU kernels link to libnuma. With "test" the dashboard's tests drive a Chromium, by a program
# that links to libatomic. On a Debian root installs what is missing; a user is told all of it.
set -eu

missing=
ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
has_library() { "$ldconfig" -p | grep -q "$1"; }

has_library 'libnuma\.so\.1' || missing=libnuma1
[ "${1:-}" != test ] || has_library 'libatomic\.so\.1' || missing="$missing libatomic1"
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
