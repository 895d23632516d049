#!/bin/sh
# Makes an environment for each client: install.sh path/to/python path/to/environments
# They want versions of mcp and others that exclude each other. One that is there, made from the
# same requirements, is left as it is. NeMo-Gym's needs a newer Python, which is looked for here;
# NEWER_PYTHON names one. Without one, its environment is not made, and its tests are skipped.
set -eu
environments=$2
folder=$(dirname "$0")

# What pyenv has put on the PATH fails for versions that are not chosen, so each one is tried.
newer_python() {
    for python in ${NEWER_PYTHON:-python3.12 python3.13 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python}; do
        if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
            2> /dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

# Into the environment of the client that the loop is at.
pip_install() {
    "$environments/$client/bin/python" -m pip install --quiet "$@"
}

mkdir -p "$environments"
for requirements in "$folder"/requirements/*.txt; do
    client=$(basename "$requirements" .txt)
    made_from=$environments/$client/made-from.txt
    if cmp -s "$requirements" "$made_from"; then
        continue
    fi
    python=$1
    if [ "$client" = nemo_gym ] && ! python=$(newer_python); then
        if [ -n "${NEWER_PYTHON:-}" ]; then
            echo "NEWER_PYTHON is $NEWER_PYTHON, which is no Python 3.12 or 3.13 with ensurepip" >&2
            exit 1
        fi
        rm -rf "${environments:?}/$client"
        echo "no Python 3.12 or 3.13 was found for nemo_gym: its tests are skipped" >&2
        continue
    fi
    "$python" -m venv --clear "$environments/$client"
    if [ "$client" = tinker_cookbook ]; then
        # The +cpu build is not on PyPI: if no configured index has it, PyTorch's own one does.
        torch=$(cat "$folder/../../requirements/torch_cpu.txt")
        pip_install --no-deps "$torch" ||
            pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
        pip_install --no-deps -r "$requirements"
    else
        pip_install -r "$requirements"
    fi
    cp "$requirements" "$made_from"
done
