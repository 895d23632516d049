"""Completions that are programs: rewards and environments of ours run nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.audit import CODE, recording

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.environments.calculator import CalculatorEnvironment
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.rewards.sources import ArithmeticReward
from rolemesh.engine.specs import ArithmeticRewardSpec, CalculatorEnvironmentSpec

PROGRAMS = (
    "__import__('os').mkdir({mark!r})",
    "open({mark!r}, 'w')",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "(lambda: open({mark!r}, 'w'))()",
    "{{open({mark!r}, 'w'): 1}}",
    "f'{{open({mark!r}, \"w\")}}'",
    "exec(\"open({mark!r}, 'w')\")",
    "1 if open({mark!r}, 'w') else 2",
    "12 == (x := open({mark!r}, 'w'))",
    "$(touch {mark})",
    "`touch {mark}`",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_that_a_policy_writes_is_run(program: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = program.format(mark=str(mark))
    environment = CalculatorEnvironment(CalculatorEnvironmentSpec())
    environment.reset(Prompt(prompt_id=0, text="Q:", tokens=[1], answer="12", metadata="{}"))
    batch = Experience(
        {"completion_text": Column.text([text, "12"]), "answer": Column.text(["12", "12"])}
    )
    with recording("open", *CODE) as events:
        told = environment.step(f"<calc>{text}</calc>").text
        rewards = ArithmeticReward(ArithmeticRewardSpec()).score(batch, lambda *_: None)
    assert "error" in told
    assert rewards.tolist()[1] == 1.0
    # Python's parser makes a tree of the expression, in which only arithmetic is accepted.
    assert [event for event in events if (event.name, event.caller) != ("compile", "ast")] == []
    assert not mark.exists()
