#!/bin/sh
# Makes a password for the store of docker-compose.yml, and names its file in .env, unless a file is
# named there already:
#
#   deploy/store_password.sh
#
# To change it: remove .secrets, run this again, and `docker compose up -d store coordinator`.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .secrets
# The users of two containers read the file; on the host, the folder keeps all others out.
chmod 700 .secrets
if [ ! -s .secrets/store-password ]; then
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > .secrets/store-password
    chmod 644 .secrets/store-password
fi
grep -qs '^ROLEMESH_STORE_PASSWORD_FILE=' .env ||
    printf 'ROLEMESH_STORE_PASSWORD_FILE=%s/.secrets/store-password\n' "$PWD" >> .env
