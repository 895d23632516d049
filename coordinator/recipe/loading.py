"""Reads a recipe: YAML files, environment, command line, each over the one before.

Precedence: defaults < files (a later one wins) < ROLEMESH_SECTION__FIELD < `--set a.b=c`. A layer
that gives a section another `type` replaces that section whole: keys of one variant mean nothing
to another. `--set pools={...}` replaces all pools, since a role stands in exactly one. Relative
paths in a recipe are relative to the current directory, not to the file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rolemesh.coordinator.recipe.errors import RecipeError, describe
from rolemesh.coordinator.recipe.hub.hf_names import named_values
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs.urls import masked_url

ENVIRONMENT_PREFIX = "ROLEMESH_"
"""ROLEMESH_RUN__SEED sets run.seed, and so on."""

SERVICE_PREFIX = "ROLEMESH_SERVICE__"
"""Settings of service processes, which are not of the recipe."""

_SECTIONS = tuple(Recipe.model_fields)

_FIELDS_AT_THE_TOP = ("certificates",)
"""Fields of a recipe that are no section: ROLEMESH_CERTIFICATES."""

# YAML 1.1, which PyYAML reads, takes 1e-5 for a string: it wants a dot and a sign.
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


_PASSWORD_IN_URL = re.compile(r"//[^/\s@]*:[^/\s]*@")

MAX_BYTES = 2**20
"""Bytes of a recipe. One with every default spelled out has 20,000."""

MAX_NODES = 20_000
"""Values and keys of a recipe, where an alias counts as all that it stands for. One with every
default spelled out has 1,000, lists of data files and trackers included."""

MAX_DEPTH = 50
"""Levels of nesting. The schema has 6, and data of the user a few more."""


class _RecipeYaml(yaml.SafeLoader):
    """Plain data only. Refuses a key that is given twice; reads 1e-5 as a number.

    Nodes are counted while the text is read, before anything is made of them: a few hundred bytes
    of aliases of aliases could stand for billions of values.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_nodes = 0
        self._sizes: dict[yaml.Node, int] = {}
        """By each node that is read to its end how many it stands for."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark, is_alias = event.start_mark, isinstance(event, yaml.AliasEvent)
        before = self._num_nodes
        self._depth += 1
        self._num_nodes += 1
        self._check(self._depth <= MAX_DEPTH, f"it nests more than {MAX_DEPTH} levels deep", mark)
        self._check_number(mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and is_alias:
            self._check(node in self._sizes, "an alias stands for what it is a part of", mark)
            self._num_nodes = before + self._sizes[node]
            self._check_number(mark)
        elif node is not None:
            self._sizes[node] = self._num_nodes - before
        return node

    def _check_number(self, mark: yaml.Mark) -> None:
        self._check(
            self._num_nodes <= MAX_NODES,
            f"it has more than {MAX_NODES} values and keys, with all that aliases stand for",
            mark,
        )

    @staticmethod
    def _check(holds: bool, problem: str, mark: yaml.Mark) -> None:
        if not holds:
            raise yaml.composer.ComposerError(None, None, f"{problem}: write less", mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"the key {key_node.value!r} is given twice",
                        key_node.start_mark,
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# Own constructors: a library that vLLM imports changes that of dates for all of yaml's loaders.
_RecipeYaml.yaml_constructors = {
    **_RecipeYaml.yaml_constructors,
    "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp,
}
_RecipeYaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_recipe(
    files: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Recipe:
    """Reads and validates a recipe.

    Args:
        files: YAML files; keys of a later one win.
        overrides: Texts "a.b=c" of the command line; c is read as YAML.
        environment: Environment variables; None takes none.

    Raises:
        RecipeError: One message that names each wrong field, its value, where it was set and what
            to do.

    Example::

        load_recipe([Path("recipes/quickstart-ppo.yaml")], overrides=["run.seed=7"]).run.seed  # 7
    """
    return _validated([_from_file(path) for path in files], overrides, environment)


def read_recipe(
    text: str,
    source: str,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Recipe:
    """The same for a recipe that is no file.

    Args:
        text: YAML or JSON.
        source: What messages call it.
        overrides: As in load_recipe.
        environment: As in load_recipe.

    Raises:
        RecipeError: As load_recipe.
    """
    return _validated([_from_text(text, source)], overrides, environment)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The fields that texts "a.b=c" of the command line set, as a tree; raises RecipeError.

    Example: ["rollout.kv_cache_gib=2"] gives {"rollout": {"kv_cache_gib": 2}}.
    """
    return _from_overrides(overrides)[0]


def read_yaml(path: Path) -> Any:
    """Plain data of a YAML file, within the bounds of a recipe; raises RecipeError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    return _parsed(text, str(path), has_lines=True)


def _validated(
    layers: Sequence[_Layer], overrides: Sequence[str], environment: Mapping[str, str] | None
) -> Recipe:
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for layer, layer_origins in (
        *layers,
        _from_environment(environment or {}),
        _from_overrides(overrides),
    ):
        if ("pools",) in layer_origins:
            tree = {key: value for key, value in tree.items() if key != "pools"}
        tree = _merged(tree, layer)
        for where, source in layer_origins.items():
            # Newest last, also when an older layer has set the same field.
            origins.pop(where, None)
            origins[where] = source
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(describe(error, origins)) from error


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every default spelled out; loads to an equal one."""
    return yaml.safe_dump(named_values(recipe), sort_keys=False, allow_unicode=True)


_Layer = tuple[dict[str, Any], dict[tuple[str, ...], str]]


def _from_file(path: Path) -> _Layer:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe{_neighbours(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {error}") from error
    return _from_text(text, str(path))


def _from_text(text: str, source: str) -> _Layer:
    tree = _parsed(text, source, has_lines=True)
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source}: a recipe is a YAML mapping with the sections {', '.join(_SECTIONS)}, "
            f"this is {_kind(tree)}"
        )
    return tree, {where: source for where, _ in leaves(tree)}


def _neighbours(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("recipes")
    names = sorted(str(found) for found in folder.glob("*.yaml"))
    near = difflib.get_close_matches(str(path), names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(names)}" if names else ""


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(SERVICE_PREFIX):
            continue
        section, *rest = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if not rest and section not in _FIELDS_AT_THE_TOP:
            # A variable of a Makefile or a compose file.
            continue
        if section not in _SECTIONS:
            near = difflib.get_close_matches(section, _SECTIONS, n=1)
            hint = "__".join((near[0], *rest)).upper() if near else ""
            raise RecipeError(
                f"{variable} sets nothing: a recipe has no section {section!r}; "
                + (f"did you mean {ENVIRONMENT_PREFIX}{hint}?" if hint else "unset it")
            )
        if section == "services":
            # Variables of a shell have no hyphens, which names of roles have: TEACHER_MATH.
            rest[:1] = [name.replace("_", "-") for name in rest[:1]]
        where = (section, *rest)
        _put(tree, where, _parsed(text, variable), variable)
        origins[where] = variable
    return tree, origins


def _from_overrides(overrides: Iterable[str]) -> _Layer:
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        where = tuple(dotted.strip().split("."))
        if not equals or not all(where):
            raise RecipeError(f"--set {text}: give a field and a value, e.g. --set run.seed=7")
        source = f"--set {masked_url(text)}"
        if _PASSWORD_IN_URL.search(value):
            raise RecipeError(
                f"{source}: every user of this machine can read a password on the command line: "
                "write the field into a file, and give that as well"
            )
        _put(tree, where, _parsed(value, source), source)
        origins[where] = source
    return tree, origins


def _parsed(text: str, source: str, *, has_lines: bool = False) -> Any:
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{source}: has {len(text)} characters: give {MAX_BYTES} at most")
    try:
        # A subclass of SafeLoader: plain data, no objects.
        return yaml.load(text, _RecipeYaml)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark and has_lines else source
        raise RecipeError(f"{where}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not valid YAML: {error}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # What PyYAML raises for a value that does not fit its tag, e.g. !!timestamp word.
        raise RecipeError(
            f"{source}: not valid YAML: a value is not what it says ({error})"
        ) from None


def _put(tree: dict[str, Any], where: tuple[str, ...], value: Any, source: str) -> None:
    node = tree
    for depth, key in enumerate(where[:-1], start=1):
        inner = node.setdefault(key, {})
        if not isinstance(inner, dict):
            raise RecipeError(
                f"{source}: {'.'.join(where[:depth])} is already set to {inner!r}, which has no "
                "fields: give one or the other"
            )
        node = inner
    last = where[-1]
    if isinstance(value, dict) and isinstance(node.get(last), dict):
        value = _merged(node[last], value)
    node[last] = value


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    if "type" in above and "type" in below and above["type"] != below["type"]:
        return above
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(value, dict) and isinstance(inner, dict):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return merged


def leaves(tree: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in a tree that have no fields of their own, each with its path."""
    if not isinstance(tree, dict) or not tree:
        yield where, tree
        return
    for key, value in tree.items():
        yield from leaves(value, (*where, str(key)))


def _kind(value: Any) -> str:
    match value:
        case None:
            return "empty"
        case list():
            return "a list"
        case _:
            return repr(value)
