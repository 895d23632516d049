"""Programs that stand for Slurm's and for rolemesh where only the shell of a job is tested."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_PROGRAMS = {
    # Runs the command of a step, on a node whose last eight GPUs are the job's.
    "srun": 'while [[ $1 == --* ]]; do o+=" $1"; shift; done\n'
    'echo "srun$o" >> calls\nexport CUDA_VISIBLE_DEVICES=8,9,10,11,12,13,14,15\n'
    "export SLURM_NTASKS=${o#*--ntasks=}; SLURM_NTASKS=${SLURM_NTASKS%% *}\n"
    'for ((i = 1; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i $0-task "$@" & done\n'
    'SLURM_PROCID=0 exec "$@"',
    "srun-task": 'exec "$@"',
    "scontrol": 'echo "scontrol $*" >> calls',
    "sleep": "exec /bin/sleep 0.05",
    "rolemesh": """
case $1 in
certs) mkdir -p "$3"; touch "$3/authority.pem"; echo "$*" >> calls ;;
serve)
    role=$2
    while [ $# -gt 0 ]; do
        [ "$1" != --port ] || port=$2
        [ "$1" != --announce ] || file=$2
        [[ $1 != --host* && $1 != --meet ]] || where+=" $1=$2"
        shift
    done
    echo "serve $role gpus=$CUDA_VISIBLE_DEVICES port=$port$where" >> calls
    [ ! -e "$role.broken" ] || exit 2
    [ "$port" != 0 ] || port=4$$
    echo "{\\"address\\": \\"$role-host:$port\\", \\"rank\\": 0}" > "$file"
    until [ -e end ] || [ -e "$role.dies" ]; do /bin/sleep 0.05; done
    rm -f "$role.dies" ;;
train)
    env | grep '^ROLEMESH_SERVICES' | sort > addresses
    echo "train gpus=$CUDA_VISIBLE_DEVICES $*" >> calls
    mkdir -p "${@: -1}"
    [ ! -e steps ] || cat steps >> "${@: -1}/metrics.jsonl"
    trap 'echo "told to end" >> calls; touch end' TERM
    touch trains
    until [ -e end ]; do /bin/sleep 0.05; done
    exit "$(cat end code 2>/dev/null)" ;;
esac
""",
}


class FakeSlurm:
    """A job's script in a folder of its own, with programs that write what they were asked.

    `code` is the exit status of the coordinator, which ends once a file `end` is there.
    """

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in _PROGRAMS.items():
            program = programs / name
            program.write_text(f"#!/bin/bash\n{text}\n")
            program.chmod(0o755)
        (folder / "job.sh").write_text(script)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *, code: int, variables: Mapping[str, str] | None = None) -> None:
        """Starts the script as Slurm does."""
        (self.folder / "code").write_text(str(code))
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            # A shell cannot trap what was ignored before it began, as INT is in `make test &`.
            ["env", "--default-signal=INT", "bash", "job.sh"],
            cwd=self.folder,
            env={"PATH": path, "SLURM_JOB_ID": "7", **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; fails after 20 s."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.calls
            time.sleep(0.02)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def wait(self) -> tuple[int, str]:
        """Exit status of the script, and what it said."""
        assert self.process is not None
        status = self.process.wait(timeout=20)
        self.close()  # As Slurm does with the steps of a job that has ended.
        assert self.process.stdout is not None
        return status, self.process.stdout.read()

    @property
    def calls(self) -> list[str]:
        """What the programs were asked, oldest first."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def close(self) -> None:
        """Ends what is left of it."""
        if self.process is not None:
            self.touch("end")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
