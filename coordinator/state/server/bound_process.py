"""Runs a program that cannot outlive the process that started it.

Used as `python -I -S bound_process.py PARENT_PID PROGRAM ARGUMENT...`: asks the kernel for SIGTERM
when the parent ends, however it ends, then becomes the program (same process id). A wrapper, since
code between fork and exec in a process with threads and gRPC may dead-lock. Standard library only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bound(*program: str) -> tuple[str, ...]:
    """The command of a program that is not to outlive this process."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *program)


def main() -> None:
    """Binds this process to its parent and becomes the program."""
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {os.strerror(number)}")
    else:
        print(f"{program[0]} is not bound to its parent: needs Linux", file=sys.stderr)
    # The parent may have ended before the request to the kernel.
    if os.getppid() != parent_pid:
        raise SystemExit(f"parent {parent_pid} is gone")
    # execv keeps the process id and the binding.
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
