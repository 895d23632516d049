#!/bin/sh
# What a person with 1, 2 or 8 GPUs runs once and sends back: tests/gpu/first_hour.sh > report.json
#
# It runs the checks that only a device can show, in the order of what breaks first, each in a
# process of its own with a time limit, and prints one JSON report: ok, failed (with the error) or
# skipped (with the reason) for each. Where there is no GPU it says so. It takes an hour at most,
# 20 GB of disk in TMPDIR, and no network. PYTHON names the Python whose torch and cupy are meant.
#
#   --only devices,nccl   these parts alone        --list   the parts and their limits in seconds
#   --scale 2             twice the time for each  --out F  the report into a file as well
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
PYTHONPATH=$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
exec "$python" tests/gpu/first_hour.py "$@"
