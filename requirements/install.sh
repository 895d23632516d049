#!/bin/sh
# Installs locks into a new or an existing environment: install.sh PYTHON ENVIRONMENT LOCK...
#
#   requirements/install.sh python3 .venv cpu dev
#
# LOCK is cpu, gpu, light, dev or docs. Nothing is resolved and nothing is compiled: a lock names every
# package with its hashes. What this machine lacks is said before anything is downloaded.
# TORCH names another build than torch_cpu.txt, for a Python that this one does not exist for.
set -eu
base_python=${1:-}
environment=${2:-.venv}
[ $# -lt 2 ] || shift 2
folder=$(dirname "$0")

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

[ $# -gt 0 ] || fail "no lock is named: give cpu, gpu, light, dev or docs"
[ -n "$base_python" ] && command -v "$base_python" > /dev/null \
    || fail "there is no Python here: install Python 3.11 to 3.14 (Debian: apt-get install python3-venv)"
"$base_python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
    || fail "$base_python is $("$base_python" --version 2>&1), rolemesh needs 3.11 to 3.14:" \
        "install one, or name it: make setup BASE_PYTHON=/path/to/python3.11"
"$base_python" -c 'import ensurepip, venv' 2> /dev/null \
    || fail "$base_python has no module venv: install it (Debian: apt-get install python3-venv)"

# cpu was measured at 2,500 MiB installed and 2,900 while it installs, dev at 720 (2026-11-29); the rest
# is for pip's cache, where that lies on the same disk.
needed_mib=100
for lock in "$@"; do
    [ -f "$folder/$lock.lock" ] || fail "no lock $lock: there are cpu, gpu, light, dev, docs"
    case $lock in
    cpu) needed_mib=$((needed_mib + 3300)) ;;
    gpu) needed_mib=$((needed_mib + 20000)) ;;
    dev) needed_mib=$((needed_mib + 800)) ;;
    esac
done
mkdir -p "$environment"
free_mib=$(df -Pm "$environment" | awk 'NR == 2 { print $4 }')
[ "$free_mib" -ge "$needed_mib" ] || [ -x "$environment/bin/python" ] \
    || fail "$environment needs $needed_mib MiB of disk space, and $free_mib are free: make room"

[ -x "$environment/bin/python" ] || "$base_python" -m venv "$environment"
python=$environment/bin/python
pip="$python -m pip --disable-pip-version-check"

# Asks once and briefly for one small package: by itself pip tries for minutes and says little.
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
first=$(sed -n 's/^\([a-z0-9-]*==[^ ]*\).*/\1/p' "$folder/$1.lock" | head -n 1)
answer=$($pip download --quiet --no-deps --retries 1 --timeout 20 --dest "$probe" "$first" 2>&1) \
    || fail "no package index answers, so nothing can be installed: let this machine reach PyPI, or" \
        "set PIP_INDEX_URL to an index that it reaches. pip says: $(echo "$answer" | head -n 1)"

for lock in "$@"; do
    if [ "$lock" = cpu ] && ! "$python" -c 'import torch' 2> /dev/null; then
        torch=${TORCH:-$(cat "$folder/torch_cpu.txt")}
        # The +cpu build is not on PyPI: if no configured index has it, PyTorch's own one does.
        $pip install --no-deps "$torch" \
            || $pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" \
            || fail "no index has $torch for $("$python" --version): let this machine reach" \
                "download.pytorch.org, use another Python (BASE_PYTHON), or set TORCH to a build" \
                "that you have, e.g. TORCH=/path/to/torch.whl"
    fi
    $pip install --no-deps --require-hashes -r "$folder/$lock.lock"
    # To pip a torch that is there already and built for the CPU is the version that the lock wants.
    if [ "$lock" = gpu ]; then
        torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
        case $torch in
        *+cpu) fail "$environment has torch $torch, which knows no GPU: take a new environment, and" \
            "no index or folder of wheels that has such builds (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS)" ;;
        esac
    fi
done
