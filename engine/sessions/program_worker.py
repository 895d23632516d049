"""A process that confines itself, and then becomes an agent's program.

Used as `python -m rolemesh.engine.sessions.program_worker SOCKET PARENT_PID`. The one message
on the socket says which program, and what it finds in its environment.
"""

from __future__ import annotations

import os
import sys

from rolemesh.engine.sandbox.inside import begin


def main(arguments: list[str]) -> int:
    """Confines the process and runs the program in its place."""
    connection, order = begin(arguments)
    if order is None:
        return 0
    connection.close()
    command = order["command"]
    try:
        os.execvpe(command[0], command, {**os.environ, **order["environment"]})
    except OSError as error:
        print(f"{command[0]!r} cannot be run: {error}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
