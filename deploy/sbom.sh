#!/bin/sh
# Writes what is in an image, for scanners: sbom.sh IMAGE PYTHON [FOLDER]
#
#   deploy/sbom.sh rolemesh:cpu .venv/bin/python dist
#
# FOLDER/<image>.cdx.json: every Python package, as CycloneDX. FOLDER/<image>.debian.txt: every
# package of Debian with its version. PYTHON has cyclonedx-bom (`make tools`).
set -eu
image=$1
python=$2
folder=${3:-dist}
name=$(echo "$image" | tr ':/' '--')

docker image inspect "$image" > /dev/null 2>&1 || {
    echo "There is no image $image here: build it with make images, or pull it." >&2
    exit 1
}
copy=$(mktemp -d)
container=$(docker create "$image")
trap 'docker rm "$container" > /dev/null; rm -rf "$copy"' EXIT
docker cp "$container:/opt/rolemesh" "$copy/" > /dev/null
# Its own Python is a link that leads nowhere outside of the image.
ln -sf "$(readlink -f "$python")" "$copy/rolemesh/bin/python"

mkdir -p "$folder"
"$python" -m cyclonedx_py environment --output-reproducible --output-format JSON \
    --output-file "$folder/$name.cdx.json" "$copy/rolemesh/bin/python"
docker run --rm --entrypoint dpkg-query "$image" --show > "$folder/$name.debian.txt"
echo "$folder/$name.cdx.json $folder/$name.debian.txt"
