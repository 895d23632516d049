"""An algorithm is a page: short, and free of everything but the dataflow."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from rolemesh.coordinator.algorithms import ppo as ppo_page
from rolemesh.coordinator.algorithms.ppo import ppo
from rolemesh.coordinator.algorithms.registry import ALGORITHMS, roles_of

# What an algorithm must not know. Whole words, so that "prompts" may hold "rompt".
FOREIGN_WORDS = (
    r"device|cuda|gpu|cpu|rank|world_size|grpc|channel|address|stub|proto|retry|deadline|timeout|"
    r"store|redis|journal|epoch|key|async|await"
)


def body_of(function: object) -> list[ast.stmt]:
    (definition,) = ast.parse(inspect.getsource(function)).body  # type: ignore[arg-type]
    assert isinstance(definition, ast.FunctionDef)
    return [
        statement
        for statement in definition.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def test_ppo_has_at_most_eight_statements() -> None:
    body = body_of(ppo)
    assert len(body) <= 8
    # Plain statements, so that none hides others.
    assert all(isinstance(s, ast.Assign | ast.AugAssign | ast.Expr) for s in body)


def test_ppo_names_no_device_rank_transport_retry_or_store() -> None:
    found = re.findall(rf"\b(?:{FOREIGN_WORDS})\b", inspect.getsource(ppo_page), re.IGNORECASE)
    assert found == []


def test_ppo_imports_role_handles_alone() -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(ppo_page)))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert [node.module for node in imports if isinstance(node, ast.ImportFrom)] == [
        "rolemesh.coordinator.roles"
    ]


def test_roles_are_read_from_the_signature() -> None:
    assert roles_of(ALGORITHMS["ppo"]).required == ("actor", "critic", "reference", "reward")


def test_a_parameter_that_is_no_role_is_named() -> None:
    def odd(prompts: object, teacher: object) -> None: ...

    with pytest.raises(ValueError, match="odd: 'teacher' is no role"):
        roles_of(odd)
