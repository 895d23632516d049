#!/bin/sh
# Takes out of an image's environment what no service reads: trim.sh ENVIRONMENT MODULE...
#
# Goes: pip, tests and headers of packages, and the byte code of modules that MODULE... do not
# import, which is most of it. A start then compiles nothing, although containers can write none.
set -eu
environment=$1
shift
packages=$(echo "$environment"/lib/python3*/site-packages)

rm -rf "$packages"/pip "$packages"/pip-*.dist-info "$environment"/bin/pip* \
    "$packages"/torch/test "$packages"/torch/include "$packages"/pyarrow/include "$packages"/pyarrow/src
# Programs for protobuf and tests; torch starts the manager.
find "$packages"/torch/bin -type f ! -name torch_shm_manager -delete 2> /dev/null || true
for package in matplotlib networkx numpy pyarrow sympy; do
    [ ! -d "$packages/$package" ] \
        || find "$packages/$package" -depth -type d -name tests -exec rm -rf {} +
done

find "$environment" -depth -type d -name __pycache__ -exec rm -rf {} +
for module in "$@"; do
    PYTHONDONTWRITEBYTECODE='' "$environment/bin/python" -W ignore -c "import $module"
done
