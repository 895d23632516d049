"""A process that holds a user's environment: one instance for each trajectory.

Used as `python -m rolemesh.engine.environments.worker SOCKET PARENT_PID`. The first message names
the class and its sandbox; each further one makes an instance, or asks one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.base import Environment, observation_of, opening_of, raised
from rolemesh.engine.environments.factory import environment_maker
from rolemesh.engine.sandbox import frames
from rolemesh.engine.sandbox.inside import begin, is_of_system
from rolemesh.engine.specs import PythonEnvironmentSpec
from rolemesh.engine.user_code import UserCodeError


def main(arguments: list[str]) -> int:
    """Serves one sampler over the socket that it inherits, until the other end closes."""
    connection, order = begin(arguments)
    if order is None:
        return 0
    environments: dict[int, Environment] = {}
    try:
        make = environment_maker(PythonEnvironmentSpec.model_validate(order["spec"]))
    except UserCodeError as error:
        found = {"error": str(error), "of_system": is_of_system(error)}
        connection.sendall(frames.encode(found, frames.MAX_ANSWER_BYTES))
        return 1
    connection.sendall(frames.encode({}, frames.MAX_ANSWER_BYTES))
    while (call := frames.read(connection, frames.MAX_CALL_BYTES)) is not None:
        for number in call["dropped"]:
            environments.pop(number, None)
        try:
            frame = frames.encode(_answer(call, environments, make), frames.MAX_ANSWER_BYTES)
        except BaseException as error:  # of the user's code, SystemExit too
            failed = {
                "error": raised(error),
                "of_system": is_of_system(error),
                "is_spent": isinstance(error, MemoryError),
            }
            frame = frames.encode(failed, frames.MAX_ANSWER_BYTES)
        connection.sendall(frame)
    return 0


def _answer(
    call: Mapping[str, Any], environments: dict[int, Environment], make: Callable[[], Environment]
) -> dict[str, Any]:
    number = call["number"]
    if call["ask"] == "make":
        environments[number] = make()
        return {"stop": environments[number].stop}
    environment = environments[number]
    if call["ask"] == "reset":
        return {"text": opening_of(environment, Prompt(**call["row"]))}
    said = observation_of(environment, call["text"], call["end"])
    return {
        "text": said.text,
        "messages": [dict(message) for message in said.messages],
        # As the service reads them: numbers of libraries are no JSON.
        "reward": float(said.reward),
        "done": bool(said.done),
    }


if __name__ == "__main__":
    # Under its own name, by which our frames are told from a user's.
    from rolemesh.engine.environments import worker

    sys.exit(worker.main(sys.argv[1:]))
