#!/bin/sh
# Makes an environment for each client: install.sh path/to/python path/to/environments
# They want versions of mcp and others that exclude each other.
set -eu
environments=$2
folder=$(dirname "$0")

mkdir -p "$environments"
for requirements in "$folder"/requirements/*.txt; do
    client=$(basename "$requirements" .txt)
    "$1" -m venv --clear "$environments/$client"
    "$environments/$client/bin/python" -m pip install --quiet -r "$requirements"
done
