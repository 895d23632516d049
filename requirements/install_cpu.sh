#!/bin/sh
# Installs requirements/cpu.lock with a given Python: install_cpu.sh path/to/python
set -eu
python=$1
lock=$(dirname "$0")/cpu.lock
torch=$(sed -n 's/^torch==/torch==/p' "$lock")

# The +cpu build is not on PyPI: if no configured index has it, PyTorch's own one does.
if ! "$python" -m pip install --no-deps "$torch"; then
    echo "No configured index has $torch: trying PyTorch's own." >&2
    "$python" -m pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
"$python" -m pip install --no-deps -r "$lock"

# vLLM's CPU kernels link to libnuma, which no wheel brings and a bare Debian does not have.
if ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2> /dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        apt-get update
        apt-get install --yes --no-install-recommends libnuma1
    else
        echo "vLLM needs libnuma: install it (Debian: sudo apt-get install libnuma1), then again." >&2
        exit 1
    fi
fi
