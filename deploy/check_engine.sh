#!/bin/sh
# Says what is wrong with the Docker engine of this machine, if anything: check_engine.sh
# 20.10 is the oldest whose containers know host-gateway and join each other's namespaces as ours do.
set -eu
oldest=20.10

command -v docker > /dev/null || {
    echo "There is no docker here: install Docker Engine $oldest or newer." >&2
    exit 1
}
version=$(docker version --format '{{.Server.Version}}' 2>&1) || {
    echo "No Docker engine answers: start it, or set DOCKER_HOST. docker says: $version" >&2
    exit 1
}
[ "$(printf '%s\n%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest" ] || {
    echo "The Docker engine is $version: rolemesh needs $oldest or newer." >&2
    exit 1
}
