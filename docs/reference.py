"""Writer of the reference pages, from the code: recipe keys, metrics, reasons, commands, classes.

The site's hooks call `pages()` at each build. No page that it gives is ever written by hand or
committed. It imports no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rolemesh.coordinator import sdk
from rolemesh.coordinator.commands.cli import COMMANDS, load_command
from rolemesh.coordinator.explained.keys import REQUIRED, Key, keys_of, text_of, type_of
from rolemesh.coordinator.explained.metrics import METRICS
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.rpc.reasons import REASONS
from rolemesh.services.runtime.server.config import ServiceConfig

REPOSITORY = Path(__file__).resolve().parents[1]

RECIPE_PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "run": ("The run", ("run",)),
    "algorithm": ("The algorithm", ("algorithm",)),
    "roles": (
        "Roles: models, data, sampling",
        ("actor", "critic", "reference", "teacher", "rollout"),
    ),
    "rewards": ("Rewards and costs", ("reward", "cost")),
    "mesh": (
        "Placement, services, outputs",
        (
            *("schedule", "pools", "services", "certificates", "store", "api", "trackers"),
            *("tracing", "plan"),
        ),
    ),
}
"""Pages of the recipe's keys: name, title, top-level keys."""

CLASSES: Mapping[str, tuple[str, ...]] = {
    "Environments": (
        "rolemesh.engine.environments.base",
        "rolemesh.engine.data.prompts.Prompt",
    ),
    "Trackers": ("rolemesh.coordinator.trackers.tracker",),
    "Handles of an algorithm": ("rolemesh.coordinator.dataflow.roles",),
    "Estimators": (
        "rolemesh.engine.algorithms.estimators.estimation",
        "rolemesh.engine.algorithms.estimators.own_estimators",
    ),
    "Losses": (
        "rolemesh.engine.algorithms.losses.base",
        "rolemesh.engine.algorithms.losses.policy_losses",
        "rolemesh.engine.algorithms.losses.own_losses",
    ),
    "Experience": ("rolemesh.engine.experience", "rolemesh.engine.specs.columns"),
    "Samplers": ("rolemesh.engine.rollout.base",),
    "Reward sources": ("rolemesh.engine.rewards.sources",),
}
"""Modules and classes of the engine and the coordinator that users write or call."""


def pages() -> dict[str, str]:
    """All reference pages: Markdown by path below the site's root."""
    return {
        **{f"reference/recipe-{name}.md": text for name, text in _recipe_pages()},
        "reference/metrics.md": _metrics_page(),
        "reference/reasons.md": _reasons_page(),
        "reference/commands.md": _commands_page(),
        "reference/recipes.md": _recipes_page(),
        "reference/sdk.md": _sdk_page(),
        "reference/classes.md": _classes_page(),
    }


def _plain(text: str) -> str:
    """Text in which stars and angle brackets are characters, but for code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def _cell(text: str) -> str:
    """Text that may stand in a table: bars, stars and brackets have no meaning there."""
    return " ".join(_plain(text).replace("|", "\\|").split())


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


# Keys of a recipe


def _recipe_pages() -> Iterator[tuple[str, str]]:
    """One page for a few top-level keys; a section stands where a recipe has it first."""
    places = _places()
    page_of = {key: name for name, (_, keys) in RECIPE_PAGES.items() for key in keys}
    homes = {section: page_of[paths[0].split(".")[0]] for section, paths in places.items()}
    top = {key.name: key for key in keys_of(Recipe)}
    assert set(page_of) == set(top), "RECIPE_PAGES lacks a top-level key, or has one too many"
    for name, (title, keys) in RECIPE_PAGES.items():
        parts = [
            f"# {title}\n\n"
            "Written from the schema. A key without a default has to be given. "
            "`rolemesh train RECIPE --print-config` shows the keys of your recipe like this.\n",
            _key_table([top[key] for key in keys], homes, name),
        ]
        for section, paths in places.items():
            if homes[section] == name:
                parts.append(_section(section, paths, homes, name))
        yield name, "\n".join(parts)


def _places() -> dict[type[BaseModel], list[str]]:
    """Sections of a recipe with all paths under which they stand, in the order of the schema."""
    places: dict[type[BaseModel], list[str]] = {}

    def walk(section: type[BaseModel], path: str) -> None:
        for key in keys_of(section):
            inner_path = f"{path}.{key.name}" if path else key.name
            for inner in key.sections:
                known = places.setdefault(inner, [])
                if inner_path not in known:
                    known.append(inner_path)
                    walk(inner, inner_path)

    walk(Recipe, "")
    return places


def _anchor(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Spec").lower()


def _section(
    section: type[BaseModel], paths: list[str], homes: Mapping[type[BaseModel], str], page: str
) -> str:
    kind = type_of(section)
    title = f"{paths[0]}, type {kind}" if kind else paths[0]
    lines = [f"## {title} {{ #{_anchor(section)} }}\n", _prose(text_of(section)), ""]
    if len(paths) > 1:
        others = ", ".join(_code(path) for path in paths[1:])
        lines.append(f"Also as {others}.\n")
    keys = list(keys_of(section))
    lines.append(_key_table(keys, homes, page) if keys else "It has no further keys.\n")
    return "\n".join(lines)


def _key_table(keys: list[Key], homes: Mapping[type[BaseModel], str], page: str) -> str:
    def row(key: Key) -> tuple[str, ...]:
        links = [
            f"[{type_of(section) or 'keys'}]"
            f"({'' if homes[section] == page else f'recipe-{homes[section]}.md'}"
            f"#{_anchor(section)})"
            for section in key.sections
        ]
        default = "required" if key.default == REQUIRED else _code(key.default)
        text = _cell(key.text) + (f" {', '.join(links)}" if links else "")
        return _code(key.name), _cell(key.values), default, key.unit, text

    return _table(("key", "type", "default", "unit", "what it does"), map(row, keys))


def _prose(text: str) -> str:
    """A docstring as Markdown: indented parts become code, and sections of Google's form lists."""
    # Nothing is escaped in code, where Markdown shows every character as it is.
    lines = (line if line.startswith("    ") else _plain(line) for line in text.split("\n"))
    return re.sub(r"^(Example|Invariant):+", r"**\1.**", "\n".join(lines), flags=re.MULTILINE)


# Tables


def _metrics_page() -> str:
    parts = [
        "# Metrics\n\n"
        "Every step is one object in `metrics.jsonl`, in TensorBoard, and in the dashboard. "
        "Where two roles of a step report the same name, it becomes `<role>/name`, e.g. "
        "`actor/grad_norm`. Values of an evaluation stand under `held_out/`. A step has only the "
        "metrics of what it did.\n"
    ]
    for topic, metrics in METRICS.items():
        rows = ((_code(name), _cell(text)) for name, text in metrics.items())
        parts.append(f"## {topic}\n\n" + _table(("metric", "formula or meaning"), rows))
    return "\n".join(parts)


def _reasons_page() -> str:
    rows = (
        (f'<span id="{name}">{_code(name)}</span>', _cell(reason.meaning), _cell(reason.remedy))
        for name, reason in REASONS.items()
    )
    return (
        "# Reasons of errors\n\n"
        "Every error of a call has a reason for programs (`error.reason` in the SDK, `reason` in "
        "REST) and a message for people, which names the field and the value.\n\n"
        + _table(("reason", "meaning", "remedy"), rows)
    )


# Commands


def _commands_page() -> str:
    parts = [
        "# Commands\n\n"
        "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. `rolemesh COMMAND --help` "
        "shows the same on a terminal.\n"
    ]
    for name in COMMANDS:
        parts.extend(_command(f"rolemesh {name}", load_command(name)))
        if name == "serve":
            parts.append(_settings_of_services())
    return "\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n\n{_prose(command.help or '')}\n"
    inner = getattr(command, "commands", None)
    if inner:
        for word, each in inner.items():
            yield from _command(f"{name} {word}", each)
        return
    rows = [
        (
            ", ".join(_code(option) for option in (*each.opts, *each.secondary_opts))
            if each.param_type_name == "option"
            else _code(each.metavar or each.name.upper()),
            _cell(_value_of(each)),
            _cell(getattr(each, "help", None) or ""),
        )
        for each in command.params
        if each.name != "help" and not getattr(each, "hidden", False)
    ]
    if rows:
        yield _table(("argument or option", "value", "what it does"), iter(rows))


def _value_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument" or getattr(parameter, "is_flag", False):
        return ""
    text = parameter.metavar or "VALUE"
    has_default = parameter.default is not None and not callable(parameter.default)
    return f"{text}, default {parameter.default}" if has_default else text


def _settings_of_services() -> str:
    rows = (
        (
            _code(f"--{key.name.replace('_', '-')}"),
            _cell(key.values),
            _code(key.default),
            _cell(key.text),
        )
        for key in keys_of(ServiceConfig)
        if key.name != "role"
    )
    return (
        f"Roles are {', '.join(f'`{role}`' for role in ROLES)}. Settings of all of them; "
        "`ROLEMESH_SERVICE__PORT` sets `--port`, and so on:\n\n"
        + _table(("setting", "type", "default", "what it does"), rows)
    )


# Recipes, classes


def _recipes_page() -> str:
    def row(path: Path) -> tuple[str, ...]:
        # The first paragraph of the comment; commands follow it.
        comment = re.match(r"((?:# \S.*\n)*)", path.read_text())
        lead = " ".join(line.strip("# ") for line in comment[1].splitlines()) if comment else ""
        name = path.relative_to(REPOSITORY)
        return f"[`{name}`](../files/{name}.md)", _cell(lead)

    paths = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    return "# Recipes of the repository\n\n" + _table(("recipe", "what it is"), map(row, paths))


def _sdk_page() -> str:
    """Classes of the SDK; the asynchronous ones have the same methods."""
    twins = {name for name in sdk.__all__ if f"Async{name}" in sdk.__all__}
    first = ["Client", "Mesh", "Role"]
    assert set(first) == twins, "a class of the SDK exists twice, and its page does not say so"
    others = [
        name
        for name in sdk.__all__
        if name not in first
        and not name.startswith("Async")
        and inspect.isclass(getattr(sdk, name))
    ]
    blocks = "\n\n".join(f"::: rolemesh.coordinator.sdk.{name}" for name in (*first, *others))
    return (
        "# Classes of the SDK\n\n"
        "Import them from `rolemesh.coordinator.sdk`. `AsyncClient`, `AsyncMesh` and `AsyncRole` "
        f"have the same methods, to be awaited. [The SDK by example](../sdk.md).\n\n{blocks}\n"
    )


def _classes_page() -> str:
    parts = [
        "# Classes that you write or call\n\n"
        "Parts of the engine and the coordinator for code of your own: environments, trackers, "
        "algorithms, estimators, losses.\n"
    ]
    for title, modules in CLASSES.items():
        blocks = "\n\n".join(f"::: {module}" for module in modules)
        parts.append(f"## {title}\n\n{blocks}\n")
    return "\n".join(parts)
