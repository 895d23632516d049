"""A policy behind a URL: its folder is written where need be, and a child of this process serves.

Invariant: outside of `served` neither the child nor the folder is left. A child whose parent was
killed ends by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from rolemesh.coordinator.commands.policies.exporting import export_command
from rolemesh.coordinator.commands.policies.model_card import has_adapter
from rolemesh.coordinator.commands.policies.policy import Policy, longest_sequence
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import read_overrides
from rolemesh.coordinator.run.checks.installation import INSTALL
from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.engine.messages import on_one_line, said_last
from rolemesh.engine.specs import EndpointSpec, VllmSpec

USUAL_TOKENS = 4096
"""Longest sequence that is served where nothing says otherwise and the model can see as much."""

STOP_S = 40.0
"""How long the child may take to end. It gives its own front 30 s."""

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


class ServingError(RuntimeError):
    """The policy cannot be served; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A policy that answers."""

    url: str
    """Base URL for clients, e.g. "http://127.0.0.1:8000/v1"."""
    model: str
    """What clients call the model."""
    folder: Path
    """Hugging Face folder that is served."""
    process: subprocess.Popen[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wished:
    """How a policy is to be served."""

    rollout: Mapping[str, Any]
    """Keys of rollout, of vLLM."""
    endpoint: EndpointSpec
    has_length: bool
    """Whether its user has given the longest sequence. That of a run's recipe is the least here:
    it bounds rows of training."""


def wished(policy: Policy, overrides: list[str], port: int = 0) -> Wished:
    """What the run's recipe says of its sampler, and over it what the command line does.

    Args:
        policy: To be served.
        overrides: Texts "rollout.a=b" and "endpoint.a=b".
        port: Of the endpoint, where no override names one.

    Raises:
        RecipeError: A field is unknown, or its value is wrong.
    """
    given = read_overrides(overrides)
    unknown = sorted(set(given) - {"rollout", "endpoint"})
    if unknown or not all(isinstance(section, dict) for section in given.values()):
        raise RecipeError(
            f"--set {', '.join(unknown) or 'rollout'}: give fields of rollout or endpoint, e.g. "
            "--set rollout.max_model_len=2048"
        )
    rollout = _rollout_of_run(policy) | dict(given.get("rollout", {}))
    endpoint = {"port": port, **_endpoint_of_run(policy), **given.get("endpoint", {})}
    spec: Any
    for name, section, spec in (
        ("rollout", rollout, VllmSpec),
        ("endpoint", endpoint, EndpointSpec),
    ):
        try:
            spec.model_validate(section)
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join((name, *map(str, problem["loc"])))
            raise RecipeError(f"--set {field}: {on_one_line(problem['msg'])}") from error
    return Wished(
        rollout=rollout,
        endpoint=EndpointSpec.model_validate(endpoint),
        has_length="max_model_len" in given.get("rollout", {}),
    )


def _rollout_of_run(policy: Policy) -> dict[str, Any]:
    config = policy.config or {}
    # Its services sample where there are some, else the actor does.
    section = config.get("rollout") or config.get("actor") or {}
    given = dict(section.get("rollout") or {})
    if given.get("type") == "vllm":
        # An adapter becomes a part of its base.
        return {name: value for name, value in given.items() if name != "adapters"}
    return {name: given[name] for name in ("dtype", "max_model_len") if name in given}


def _endpoint_of_run(policy: Policy) -> dict[str, Any]:
    """What the policy's agents saw of it: how it is called, and how its tools are read."""
    actor = {} if policy.config is None else policy.config.get("actor", {})
    given = dict(actor.get("endpoint") or {})
    kept = ("model_name", "tool_parser", "reasoning_parser", "chat_template")
    return {name: given[name] for name in kept if given.get(name) is not None}


def check_can_serve(endpoint: EndpointSpec) -> None:
    """Refuses at once what would fail after a model has been loaded; raises ValueError."""
    missing = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"a policy is served with vLLM, but {' and '.join(missing)} is not installed here: "
            f"{INSTALL}"
        )
    if endpoint.port:
        try:
            family, kind, number, _, address = socket.getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise ValueError(
                f"port {endpoint.port} on {endpoint.host} cannot be bound ({error.strerror}): "
                "choose another one, or 0 for any"
            ) from error


@contextlib.contextmanager
def served(
    policy: Policy, wish: Wished, *, key: str | None = None, tell: Callable[[str], None]
) -> Iterator[Served]:
    """Serves a policy until the block ends, also where a signal ends this process.

    Args:
        policy: Whose weights.
        wish: How.
        key: Of the endpoint, where it is not the user's own; in a variable of the child alone.
        tell: Is told what happens meanwhile.

    Raises:
        ServingError: It cannot be served.
        RecipeError: Its model is at the hub, and cannot be had.
    """
    with _ended_by_signals(), _folder(policy, wish, tell) as folder:
        rollout = dict(wish.rollout)
        if not wish.has_length:
            known = rollout.get("max_model_len", 0)
            rollout["max_model_len"] = max(known, _usual_length(folder))
        endpoint = wish.endpoint.model_dump(mode="json", exclude_defaults=True)
        environment = child_environment(
            os.environ, [wish.endpoint.token_variable] if wish.endpoint.token_variable else ()
        )
        if key is not None:
            endpoint["token_variable"] = KEY_VARIABLE
            environment[KEY_VARIABLE] = key
        command = [
            *(sys.executable, "-m", "rolemesh.services.endpoint", str(folder)),
            *("--version", str(policy.version), "--parent", str(os.getpid())),
            *("--rollout", json.dumps(rollout), "--endpoint", json.dumps(endpoint)),
        ]
        tell("loading the model")
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
            )
            try:
                told = _first_line(process)
                if told is None:
                    log.seek(0)
                    raise ServingError(f"{policy.name} cannot be served: {_said(log.read())}")
                yield Served(
                    url=f"{told['url']}/v1", model=told["model"], folder=folder, process=process
                )
                if process.poll() is not None:
                    log.seek(0)
                    raise ServingError(
                        f"the process that served {policy.name} has ended with code "
                        f"{process.returncode}: {_said(log.read())}"
                    )
            finally:
                _end(process)


KEY_VARIABLE = "POLICY_KEY"
"""Of the child, for the key of a policy that is served for a command alone."""


def _first_line(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """What the child says when it answers; None: it has ended without it."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict) and {"url", "model"} <= told.keys():
                return told
    process.wait()
    return None


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _said(stderr: str) -> str:
    return said_last(stderr).removeprefix("error: ")


def _usual_length(folder: Path) -> int:
    return min(USUAL_TOKENS, longest_sequence(folder) or USUAL_TOKENS)


@contextlib.contextmanager
def _folder(policy: Policy, wish: Wished, tell: Callable[[str], None]) -> Iterator[Path]:
    """The folder to serve; that of a checkpoint lies beside the run's files meanwhile."""
    if policy.folder is not None:
        yield policy.folder.absolute()
        return
    run, step = policy.run, policy.step
    assert run is not None
    assert step is not None
    assert policy.config is not None
    try:
        aside = tempfile.TemporaryDirectory(prefix=".serve-", dir=run)
    except OSError:
        # Somebody else's run.
        aside = tempfile.TemporaryDirectory(prefix="rolemesh-serve-")
    with aside as scratch:
        folder = Path(scratch) / "model"
        tell(f"writing the policy of step {step} as a model folder")
        command = [
            *export_command(run, step, folder, is_pushed=False),
            # What a run's sampler is given is rounded to this type.
            *("--dtype", wish.rollout.get("dtype") or "bfloat16"),
            *(("--merge",) if has_adapter(policy.config) else ()),
        ]
        ended = subprocess.run(
            command,
            env={**child_environment(os.environ), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise ServingError(f"{policy.name} cannot be served: {_said(ended.stderr)}")
        yield folder


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal that would kill this process ends it in order, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # nohup has one of them ignored, which stays so.
    heard = [one for one in _ENDINGS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
