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
