#!/bin/sh
# What a person with a GPU runs once and sends back: tests/gpu/gpu_minutes.sh --out DIR/report.json
#
# It runs the checks and measures the figures that only a device can show, the most telling ones
# first, each in a process of its own with a time limit, and writes one JSON report, anew after each
# part: ok, failed (with the error), skipped (with the reason) or left out for want of time. A
# further call with the same --out goes on with what is not done. It needs no installation and no
# network, 3 GB of TMPDIR and 16 GB of /dev/shm. PYTHON names the Python whose torch is meant, and
# GPU_MINUTES_COMMIT the commit where there is no git.
#
#   --budget 540       seconds of this call; parts that do not fit are left out
#   --wheels DIR       installs DIR/*.whl (of make gpu-wheels) into a temporary folder first
#   --only probe,mesh  these parts alone     --again mesh  also if it is done
#   --scale 2          twice the limits      --list        the parts and their seconds
#   --rehearse         every part with tiny shapes on the CPU
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
exec "$python" tests/gpu/gpu_minutes.py "$@"
