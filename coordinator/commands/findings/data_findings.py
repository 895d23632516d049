"""What the process that looks at a recipe's data has told, as findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rolemesh.coordinator.commands.findings.findings import Finding, fail, ok, warn
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.installation import INSTALL
from rolemesh.engine.specs import ArithmeticRewardSpec, named_sources

_SHOWN_CHARACTERS = 800
"""Of a prompt."""


def told_findings(
    recipe: Recipe, services: Mapping[str, str | None], told: Mapping[str, Any]
) -> Iterator[Finding]:
    """The findings in one line of the process."""
    match told["type"]:
        case "error" if told["what"] == "packages":
            yield warn("data", f"not looked at: {told['text']}", INSTALL)
        case "error" if told["what"] == "models":
            yield fail("models", told["text"])
        case "error":
            what = {"functions": "own functions"}.get(told["what"], told["what"])
            role = "actor"
            if what == "environment" and recipe.rollout is not None:
                role = recipe.services_of("rollout")[0]
            address = services.get(role)
            if address is None:
                yield fail(what, told["text"])
            else:
                yield warn(
                    what,
                    f"not looked at: {told['text']}",
                    f"the {role} at {address} reads its own disk: run the check there",
                )
        case "models" if told["families"]:
            families = ", ".join(f"{field} {name}" for field, name in told["families"].items())
            yield ok("models", f"known to transformers, and whole: {families}")
        case "functions":
            yield ok("own functions", f"loaded {', '.join(told['names'])}")
        case "environment":
            yield ok("environment", f"{told['name']} begins an episode with the first prompt")
        case "data":
            yield from _data(recipe, told)
        case "prompt":
            yield ok("prompt", _shown_prompt(told))
        case "lengths":
            yield from _lengths(recipe, told)
        case "teachers":
            yield _teachers(recipe, told)
        case "reward":
            yield _reward(services, told)


def _data(recipe: Recipe, told: Mapping[str, Any]) -> Iterator[Finding]:
    left_out = f", {told['filtered']} left out for their length" if told["filtered"] else ""
    yield ok("data", f"{told['train']} rows to train on, {told['held_out']} held out{left_out}")
    sources = [] if recipe.reward is None else named_sources(recipe.reward.source)
    if told["unanswered"] and any(isinstance(s.source, ArithmeticRewardSpec) for s in sources):
        yield fail(
            "data",
            f"{told['unanswered']} rows have no expected answer (the first: "
            f"{told['first_unanswered']}), which the reward 'arithmetic' compares with",
            "name the column of the answer in actor.data.columns.answer, or take another reward",
        )


def _shown_prompt(told: Mapping[str, Any]) -> str:
    text = told["text"]
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    lines = [f"the first of the run, as the model sees it ({told['num_tokens']} tokens):"]
    lines += [f"{'':21}| {line}" for line in cut.rstrip("\n").split("\n")]
    if told["completion"]:
        lines.append(f"{'':21}given completion: {told['completion'][:_SHOWN_CHARACTERS]!r}")
    if told["answer"]:
        lines.append(f"{'':21}expected answer: {told['answer'][:_SHOWN_CHARACTERS]!r}")
    return "\n".join(lines)


def _lengths(recipe: Recipe, told: Mapping[str, Any]) -> Iterator[Finding]:
    sampling, sampler = recipe.sampling, recipe.sampler
    assert sampling is not None
    assert sampler is not None
    limit, wanted = sampler.max_model_len, sampling.max_new_tokens
    bound = f"rollout.max_model_len {limit} minus algorithm.sampling.max_new_tokens {wanted}"
    longest = f"the longest has {told['longest']} tokens: {told['where']}"
    remedy = f"raise rollout.max_model_len to {told['longest'] + wanted}"
    if limit > wanted:
        remedy += f", or set actor.data.max_prompt_tokens to {limit - wanted} to leave them out"
    if told["no_room"]:
        yield fail(
            "lengths",
            f"{told['no_room']} of {told['prompts']} prompts have rollout.max_model_len ({limit}) "
            f"tokens or more ({longest}); the run does not start with them",
            remedy,
        )
    if told["less_room"]:
        yield warn(
            "lengths",
            f"{told['less_room']} of {told['prompts']} prompts are longer than {bound} ({longest})"
            ": their completions are cut sooner",
            remedy,
        )
    if not told["no_room"] and not told["less_room"]:
        yield ok("lengths", f"all {told['prompts']} prompts fit into {bound}")


def _teachers(recipe: Recipe, told: Mapping[str, Any]) -> Finding:
    shown = ", ".join(f"{count} to {names}" for names, count in told["rows"].items() if names)
    if not told["lost"]:
        return ok("teachers", f"rows go {shown}")
    where, value = told["lost"]
    assert recipe.teacher is not None
    assert recipe.teacher.route is not None
    return fail(
        "teachers",
        f"{told['rows']['']} rows go to no teacher (the first: {where}, with {value} as "
        f"{recipe.teacher.route.by})" + (f"; {shown}" if shown else ""),
        "add the value to teacher.route.to, or give teacher.route.default for all others",
    )


def _reward(services: Mapping[str, str | None], told: Mapping[str, Any]) -> Finding:
    if "error" not in told:
        shown = "None (it does not apply)" if told["reward"] is None else f"{told['reward']:g}"
        text = f"{told['name']} gives {shown} to the first prompt with {told['completion'][:60]!r}"
        return ok("reward", text)
    remedy = "`rolemesh reward check --recipe` tries it at length"
    address = services.get("reward")
    if address is not None:
        remedy += f"; the reward service at {address} may reach what this machine cannot"
    found = fail if address is None else warn
    return found("reward", f"{told['name']}: {told['error']}", remedy)
