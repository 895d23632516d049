"""An algorithm is a page: short, and free of everything but the dataflow."""

from __future__ import annotations

import ast
import inspect
import re
import sys

import pytest

from rolemesh.coordinator.algorithms.registry import ALGORITHMS, Roles, roles_of
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS

# What an algorithm must not know. Whole words, so that "prompts" may hold "rompt".
FOREIGN_WORDS = (
    r"devices?|cuda|gpus?|cpu|ranks?|world_size|grpc|channel|address|stub|proto|retry|retries|"
    r"deadline|timeout|store|redis|journal|epochs?|key|async|await|pools?|lease|schedule|version|"
    r"block_rows|shards?|transport"
)
PLAIN = (ast.Assign, ast.AugAssign, ast.Expr)


def page_of(name: str) -> str:
    return inspect.getsource(sys.modules[ALGORITHMS[name].__module__])


def body_of(name: str) -> list[ast.stmt]:
    (definition,) = ast.parse(inspect.getsource(ALGORITHMS[name])).body
    assert isinstance(definition, ast.FunctionDef)
    return [
        statement
        for statement in definition.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def num_statements(name: str) -> int:
    """All of them, also those within others."""
    return sum(
        isinstance(node, ast.stmt) for statement in body_of(name) for node in ast.walk(statement)
    )


def calls_of(name: str, method: str) -> int:
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        for statement in body_of(name)
        for node in ast.walk(statement)
    )


def test_ppo_has_at_most_eight_statements() -> None:
    assert num_statements("ppo") <= 8
    assert all(isinstance(statement, PLAIN) for statement in body_of("ppo"))


def test_safe_rlhf_is_ppo_and_at_most_five_statements() -> None:
    ours = [ast.dump(statement) for statement in body_of("safe_rlhf")]
    theirs = [ast.dump(statement) for statement in body_of("ppo")]
    assert num_statements("safe_rlhf") <= num_statements("ppo") + 5
    assert len([statement for statement in ours if statement not in theirs]) <= 5


def test_remax_adds_one_generation_and_has_no_critic() -> None:
    assert calls_of("remax", "generate") == calls_of("ppo", "generate") + 1
    wanted = roles_of(ALGORITHMS["remax"])
    assert "critic" not in (*wanted.required, *wanted.optional)
    assert "critic" not in re.findall(
        r"\w+", inspect.getsource(ALGORITHMS["remax"]).split('"""')[2]
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_is_short(name: str) -> None:
    # A branch for a role that need not be there, and nothing deeper.
    assert num_statements(name) <= 10
    for statement in body_of(name):
        inner = statement.body if isinstance(statement, ast.If) else [statement]
        assert all(isinstance(plain, PLAIN) for plain in inner)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_names_no_device_rank_transport_retry_or_store(name: str) -> None:
    found = re.findall(rf"\b(?:{FOREIGN_WORDS})\b", page_of(name), re.IGNORECASE)
    assert found == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_imports_role_handles_alone(name: str) -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(page_of(name)))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert [node.module for node in imports if isinstance(node, ast.ImportFrom)] == [
        "rolemesh.coordinator.dataflow.roles"
    ]
    assert len(imports) == 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_says_where_the_algorithm_is_from(name: str) -> None:
    row = POLICY_GRADIENTS.get(name)
    text = page_of(name) if row is None else row.paper
    # Supervised fine-tuning is nobody's, and REINFORCE older than arXiv.
    assert name == "sft" or re.search(r"arXiv \d{4}\.\d{5}|Williams, 1992", text)


def test_roles_are_read_from_the_signature() -> None:
    assert roles_of(ALGORITHMS["ppo"]) == Roles(("actor", "critic", "reference", "reward"), ())
    assert roles_of(ALGORITHMS["grpo"]) == Roles(("actor", "reward"), ("reference",))
    assert roles_of(ALGORITHMS["reward_model"]) == Roles(("reward",), ())


def test_a_parameter_that_is_no_role_is_named() -> None:
    def odd(prompts: object, tutor: object) -> None: ...

    with pytest.raises(ValueError, match="odd: 'tutor' is no role"):
        roles_of(odd)


def test_a_function_without_prompts_is_refused() -> None:
    def empty() -> None: ...
    def odd(actor: object) -> None: ...

    with pytest.raises(ValueError, match="empty: the first parameter is missing, not 'prompts'"):
        roles_of(empty)
    with pytest.raises(ValueError, match="odd: the first parameter is 'actor', not 'prompts'"):
        roles_of(odd)
