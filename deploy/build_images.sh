#!/bin/sh
# Builds the images of a role and of the coordinator, names them in .env, and prints their sizes:
#
#   deploy/build_images.sh [cpu|gpu] [flags of docker build, e.g. --network=host]
#
# Docker Compose reads .env, so that `docker compose up` finds them. Only the two names are changed
# in a file that is there, and the store's password is added if none is named. PYTHON_IMAGE names another base image, PIP_INDEX_URL another index.
set -eu
cd "$(dirname "$0")/.."
device=${1:-cpu}
[ $# = 0 ] || shift
base=${PYTHON_IMAGE:-python:3.11-slim-bookworm}

fail() {
    echo "build_images.sh: $*" >&2
    exit 1
}

case $device in cpu | gpu) ;; *) fail "device is '$device': give cpu or gpu" ;; esac
deploy/check_engine.sh
docker image inspect "$base" > /dev/null 2>&1 || docker pull "$base"

build() { # build TARGET NAME
    target=$1
    name=$2
    shift 2
    docker build "$@" --file deploy/Dockerfile --target "$target" --tag "$name" \
        --build-arg DEVICE="$device" --build-arg PYTHON_IMAGE="$base" \
        --build-arg PIP_INDEX_URL="${PIP_INDEX_URL:-}" \
        --build-arg PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" .
}

build coordinator rolemesh:coordinator "$@"
build role "rolemesh:$device" "$@"

[ ! -f .env ] || sed -i '/^ROLEMESH_IMAGE=/d; /^ROLEMESH_COORDINATOR_IMAGE=/d' .env
printf 'ROLEMESH_IMAGE=rolemesh:%s\nROLEMESH_COORDINATOR_IMAGE=rolemesh:coordinator\n' "$device" >> .env
deploy/store_password.sh

size_mb() { echo $(($(docker image inspect --format '{{.Size}}' "$1") / 1000000)); }
base_mb=$(size_mb "$base")
for image in rolemesh:coordinator "rolemesh:$device"; do
    mb=$(size_mb "$image")
    echo "$image: $mb MB, $((mb - base_mb)) MB of them above $base"
done
