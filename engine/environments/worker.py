"""A process that holds a user's environment: one instance for each trajectory.

Used as `python -m rolemesh.engine.environments.worker SOCKET PARENT_PID`. The first message names
the class and its sandbox; each further one makes an instance, or asks one.
"""

from __future__ import annotations

import sys

from rolemesh.engine.sandbox.inside import begin


def main(arguments: list[str]) -> int:
    """Serves one sampler over the socket that it inherits, until the other end closes."""
    connection, order = begin(arguments)
    if order is None:
        return 0
    # Not before: numpy starts threads when it is imported, which would stay outside the sandbox.
    from rolemesh.engine.environments.serving import serve

    return serve(connection, order)


if __name__ == "__main__":
    # Under its own name, by which our frames are told from a user's.
    from rolemesh.engine.environments import worker

    sys.exit(worker.main(sys.argv[1:]))
