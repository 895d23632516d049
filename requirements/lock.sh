#!/bin/sh
# Writes the locks with uv: lock.sh path/to/uv [more options of uv, e.g. --upgrade]
#
# Each lock holds for Python 3.11 to 3.14: a package that only some of them need carries a marker.
# A version that is locked already stays, unless --upgrade is given.
set -eu
cd "$(dirname "$0")/.."
uv=$1
shift

# lock NAME TEXT ARGUMENTS...: what the arguments ask for, with the hash of every file.
lock() {
    output=requirements/$1.lock
    text=$2
    shift 2
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --no-header --output-file "$output" "$@" > /dev/null
    {
        printf '# %s\n# For Python 3.11 to 3.14 on Linux. ' "$text"
        printf 'Written by `make lock`; requirements/install.sh installs it.\n'
        cat "$output"
    } > "$output.new"
    mv "$output.new" "$output"
}

lock cpu "A role on a CPU, but for torch itself, which is in torch_cpu.txt." \
    --config-file requirements/uv_cpu.toml --no-emit-package torch \
    pyproject.toml --extra cpu --extra tasks --extra otel requirements/model.in "$@"
lock light "The coordinator, the command line and the SDK." \
    --config-file requirements/uv_cpu.toml \
    pyproject.toml --extra otel --constraints requirements/cpu.lock "$@"
lock dev "What developers need beside cpu.lock." \
    --config-file requirements/uv_cpu.toml --no-emit-package torch \
    --group dev --constraints requirements/cpu.lock "$@"
lock docs "The documentation site, beside light.lock." \
    --config-file requirements/uv_cpu.toml \
    --group docs --constraints requirements/light.lock --constraints requirements/dev.lock "$@"
# An index or a folder of wheels that the machine names beside PyPI may have torch for the CPU, and
# uv takes what such an index has before it looks further.
unset UV_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS
lock gpu "A role on a GPU, for CUDA 13." \
    --config-file requirements/uv_gpu.toml \
    pyproject.toml --extra gpu --extra tasks --extra otel requirements/model.in "$@"
if grep -q '^torch==.*+' requirements/gpu.lock; then
    echo "lock.sh: gpu.lock has $(grep '^torch==' requirements/gpu.lock): an index of this machine" \
        "has another build than PyPI; resolve without it" >&2
    exit 1
fi
