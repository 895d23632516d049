"""Tries rewards from outside: python -m rolemesh.services.reward.outside.check SOURCE...

SOURCE is a URL or python:... as in a recipe, or a mapping in YAML with a type. Exit code 0: nothing
is wrong; 1: something is; 2: the source or the rows cannot be read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import (
    EndpointRewardSpec,
    GrpcRewardSpec,
    JudgeRewardSpec,
    OutsideRewardSpec,
    PythonRewardSpec,
    SingleRewardSpec,
    outside_source,
)
from rolemesh.services.reward.outside.base import OutsideRewardError, RewardRow, shown
from rolemesh.services.reward.outside.check import samples
from rolemesh.services.reward.outside.check.probes import Finding, Level, Malformed, Prober
from rolemesh.services.reward.outside.check.samples import CheckInputError
from rolemesh.services.reward.outside.counts import RequestCounts
from rolemesh.services.reward.outside.make import make_client, make_outside_reward
from rolemesh.services.reward.outside.parts import means
from rolemesh.services.reward.outside.protocols.grpc_reward import GrpcRewardClient
from rolemesh.services.reward.outside.protocols.http import JsonEndpoint
from rolemesh.services.runtime.server.config import sandbox_mode

MOST_TRIES = 5
"""Times that a request is sent at most. A run sends it until the source's deadline has passed."""

EXIT_WRONG = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_SOURCE: TypeAdapter[Any] = TypeAdapter(SingleRewardSpec)
_SHOWN_CHARACTERS = 60
_REQUEST_METRICS = {*RequestCounts(seconds=[0.0]).metrics()}
"""Metrics of the requests, which do not come from the reward itself."""


def main(arguments: Sequence[str]) -> int:
    """Tries the sources one after another and prints what it finds."""
    parser = argparse.ArgumentParser(prog="rolemesh reward check")
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--prompt")
    parser.add_argument("--completion")
    parser.add_argument("--answer", default="")
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--recipe-rows", help="a RecipeRowsSpec in JSON")
    parser.add_argument("--timeout", type=float, help="timeout_s of the sources")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    # The output of a function is shown, but logs of libraries are not.
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("rolemesh").addHandler(handler)
    logging.getLogger("rolemesh").setLevel(logging.INFO)
    try:
        rows = _rows(given)
        targets = [target for text in given.sources for target in _targets(text, given.timeout)]
        report = Report(as_json=given.json)
        return asyncio.run(_check_all(targets, rows, report))
    except CheckInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


@dataclass(frozen=True, slots=True)
class Target:
    """A reward to try: one replica, so that each is tried alone."""

    name: str
    spec: OutsideRewardSpec
    """As the recipe has it, but for settings that would hide how the endpoint itself behaves."""
    tries: int
    """Times that a request is sent to it at most."""


class Report:
    """Prints findings for people, or as one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self.num_wrong = 0

    def begin(self, name: str, rows: Sequence[RewardRow]) -> None:
        """Announces the source that is tried next."""
        if not self._as_json:
            count = f"{len(rows)} row{'s' * (len(rows) > 1)}"
            print(f"{name}: sending {count}, and variations", flush=True)

    def judged(self, name: str, rows: Sequence[RewardRow], prober: Prober) -> None:
        """Shows the answer to the first call."""
        assert prober.first is not None
        rewards = prober.first.rewards
        if self._as_json:
            shown_rows = [
                {
                    "prompt": row.prompt,
                    "completion": row.completion,
                    "answer": row.answer,
                    "reward": rewards[at],
                    "parts": dict(prober.first.parts_of(at)),
                }
                for at, row in enumerate(rows)
            ]
            self._write("judged", source=name, seconds=round(prober.seconds, 4), rows=shown_rows)
            return
        if prober.first.failures:
            return
        for row, reward in zip(rows, rewards, strict=True):
            text = f"{row.prompt!r} -> {row.completion!r}"
            cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
            print(f"  {'None' if reward is None else f'{reward:g}':>10}  {cut}")
        for part, mean in means(prober.first.parts).items():
            print(f"  {mean:>10g}  mean of part {part}")
        own = prober.first.metrics.keys() - _REQUEST_METRICS
        for metric in sorted(own):
            print(f"  {prober.first.metrics[metric]:>10g}  metric {metric}")

    def found(self, name: str, finding: Finding) -> None:
        """Shows one finding."""
        self.num_wrong += finding.level is Level.FAIL
        if self._as_json:
            self._write(
                "finding",
                source=name,
                probe=finding.probe,
                level=finding.level.value,
                text=finding.text,
                remedy=finding.remedy,
            )
            return
        print(f"{finding.level.value.upper():4}  {finding.probe:<12}{finding.text}", flush=True)
        if finding.remedy:
            print(f"{'':18}-> {finding.remedy}", flush=True)

    def end(self) -> None:
        """Shows the verdict."""
        if self._as_json:
            self._write("verdict", num_wrong=self.num_wrong)
        elif self.num_wrong:
            print(f"{self.num_wrong} found that a run would fail or learn wrong things from")
        else:
            print("nothing found that a run would fail from")

    def _write(self, kind: str, **values: Any) -> None:
        print(json.dumps({"type": kind, **values}), flush=True)


async def _check_all(targets: Sequence[Target], rows: Sequence[RewardRow], report: Report) -> int:
    for target in targets:
        report.begin(target.name, rows)
        await _check(target, rows, report)
    report.end()
    return EXIT_WRONG if report.num_wrong else 0


async def _check(target: Target, rows: Sequence[RewardRow], report: Report) -> None:
    name, spec = target.name, target.spec
    try:
        reward = make_outside_reward(name, spec, find_sandbox(sandbox_mode(os.environ)))
    except ValueError as error:
        raise CheckInputError(str(error)) from error
    try:
        await reward.open()
        prober = Prober(
            reward,
            rows,
            at_once=spec.concurrency,
            malformed=_malformed(spec),
            is_keyed=isinstance(spec, GrpcRewardSpec),
            tries=target.tries,
        )
        async for finding in prober.run():
            if finding.probe == "answer":
                report.judged(name, rows, prober)
            report.found(name, finding)
    except OutsideRewardError as error:
        report.found(name, Finding(probe="open", level=Level.FAIL, text=str(error)))
    finally:
        await reward.close()


def _malformed(spec: OutsideRewardSpec) -> Malformed | None:
    """Returns a function that sends a malformed request of this protocol."""
    if not isinstance(spec, EndpointRewardSpec):
        return None
    url = spec.urls[0]
    if isinstance(spec, GrpcRewardSpec):

        async def without_rows() -> object:
            client = GrpcRewardClient(url, spec)
            try:
                return await client.ask([])
            finally:
                await client.close()

        return without_rows
    if isinstance(spec, JudgeRewardSpec) or not url.startswith("http"):
        return None

    async def broken_json() -> object:
        client = make_client(url, spec)
        endpoint = JsonEndpoint(client.endpoint, spec)
        try:
            answer, _ = await endpoint.post(b'{"broken')
            return answer
        finally:
            await endpoint.close()
            await client.close()

    return broken_json


def _rows(given: argparse.Namespace) -> list[RewardRow]:
    if given.jsonl is not None:
        if given.prompt is not None or given.completion is not None:
            raise CheckInputError("--jsonl stands with --prompt or --completion: give one kind")
        return samples.read_rows(given.jsonl)
    if given.prompt is None and given.completion is None:
        if given.recipe_rows is not None:
            return _recipe_rows(given.recipe_rows)
        return samples.sample_rows()
    if given.prompt is None or given.completion is None:
        raise CheckInputError("--prompt and --completion stand together: give both")
    return [samples.make_row(given.prompt, given.completion, given.answer)]


def _recipe_rows(text: str) -> list[RewardRow]:
    remedy = "give rows of your own with --jsonl"
    try:
        # It reads data and a tokenizer, which no other source of rows needs.
        from rolemesh.services.reward.outside.check import recipe_rows

        return recipe_rows.recipe_rows(recipe_rows.RecipeRowsSpec.model_validate_json(text))
    except ModuleNotFoundError as error:
        raise CheckInputError(
            f"the recipe's data cannot be read here: {error.name} is not installed; {remedy}"
        ) from error
    except ValueError as error:
        raise CheckInputError(f"the recipe's data cannot be read: {error}; {remedy}") from error


def _problems(error: ValidationError) -> str:
    texts = []
    for problem in error.errors():
        # The first name of the error's place is the type, which the source states already.
        field = ".".join(map(str, problem["loc"][1:]))
        texts.append(f"{field}: {problem['msg']}" if field else problem["msg"])
    return "; ".join(texts)


def _targets(text: str, timeout_s: float | None) -> list[Target]:
    """What to try of a source."""
    try:
        try:
            source: Any = outside_source(text)
        except ValueError:
            source = yaml.safe_load(text)
            if not isinstance(source, dict):
                raise
        spec = _SOURCE.validate_python(source)
    except ValidationError as error:
        raise CheckInputError(f"SOURCE {shown(text)}: {_problems(error)}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise CheckInputError(f"SOURCE {shown(text)}: {error}") from error
    if not isinstance(spec, OutsideRewardSpec):
        raise CheckInputError(
            f"SOURCE {shown(text)} is a reward that the reward service computes itself: there is "
            "no server or function to call"
        )
    changes: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s}
    if isinstance(spec, PythonRewardSpec):
        return [Target(f"python:{spec.function}", spec.model_copy(update=changes), 1)]
    assert isinstance(spec, EndpointRewardSpec)
    # These settings would hide the endpoint's own behaviour.
    changes |= {"tries": 1, "cache_rows": 0, "hedge_after_s": None, "breaker_failures": 1 << 30}
    return [
        Target(url, spec.model_copy(update={**changes, "urls": (url,)}), spec.tries or MOST_TRIES)
        for url in spec.urls
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
