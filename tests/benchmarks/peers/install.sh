#!/bin/sh
# Makes the peers' environment with a given Python: install.sh path/to/python path/to/environment
set -eu
environment=$2
folder=$(dirname "$0")
torch=$(sed -n 's/^torch==/torch==/p' "$folder/requirements.txt")

"$1" -m venv --clear "$environment"
python=$environment/bin/python

# The +cpu build is not on PyPI: if no configured index has it, PyTorch's own one does.
if ! "$python" -m pip install "$torch"; then
    echo "No configured index has $torch: trying PyTorch's own." >&2
    "$python" -m pip install --extra-index-url https://download.pytorch.org/whl/cpu "$torch"
fi
"$python" -m pip install -r "$folder/requirements.txt"
"$python" -m pip install --no-deps --target "$environment/ppo" -r "$folder/requirements_ppo.txt"
