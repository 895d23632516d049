"""What the programs with Tinker's SDK share: which of its public methods they called, and data.

The SDK itself is left as it is: calls are seen by the interpreter's profile hook.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tinker
from tinker import types

CLASSES = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
    tinker.APIFuture,
)
PROGRAMS = str(Path(__file__).parent)

_WRAPPERS = ("typing_extensions.py", "sdk_method.py", "telemetry.py", "sync_only.py")
"""Files of decorators, which stand between a method and its caller."""


def public_methods() -> dict[str, list[CodeType]]:
    """Code of all public methods by name, `Class.method`; of an abstract one, that of its kinds."""
    found = {}
    for kind in CLASSES:
        for name in dir(kind):
            if not name.startswith("_") and inspect.isfunction(getattr(kind, name)):
                found[f"{kind.__name__}.{name}"] = _codes(kind, name)
    return found


def _codes(kind: type, name: str) -> list[CodeType]:
    return [_code(each, name) for each in _kinds(kind)]


def _code(kind: type, name: str) -> CodeType:
    function: Any = getattr(kind, name)
    code: CodeType = inspect.unwrap(function).__code__
    return code


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    each: list[type] = type.__subclasses__(kind)
    for one in each:
        yield from _kinds(one)


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Names of the public methods that the program calls within the block, on this thread."""
    names = {code: name for name, codes in public_methods().items() for code in codes}
    called: set[str] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in names:
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.endswith(_WRAPPERS):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename.startswith(PROGRAMS):
            called.add(names[frame.f_code])

    sys.setprofile(see)
    try:
        yield called
    finally:
        sys.setprofile(None)


def floats(values: Sequence[float]) -> types.TensorData:
    """Numbers, one a place."""
    return types.TensorData(data=list(values), dtype="float32", shape=[len(values)])


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """A sequence whose tokens behind the first are the targets, with inputs of a loss."""
    targets = list(tokens[1:])
    return types.Datum(
        model_input=prompt(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            **{name: floats(values) for name, values in inputs.items()},
        },
    )


def weighed(begin: Sequence[int], sequence: Any, advantage: float) -> types.Datum:
    """A sample behind a prompt, for losses with ratios."""
    tokens, unscored = list(sequence.tokens), [0.0] * (len(begin) - 1)
    return datum(
        [*begin, *tokens],
        logprobs=[*unscored, *sequence.logprobs],
        advantages=[*unscored, *([advantage] * len(tokens))],
    )


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    """Tokens as an input."""
    return types.ModelInput.from_ints(list(tokens))


def logprobs(output: Any) -> list[list[float]]:
    """Log-probs of the targets of each datum."""
    return [one["logprobs"].data for one in map(dict, output.loss_fn_outputs)]


def base_of(service: Any) -> str:
    """The name of the server's base."""
    (model,) = service.get_server_capabilities().supported_models
    return str(model.model_name)
