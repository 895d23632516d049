"""Tests that recipes take what docs/rewards.md shows."""

import re
from pathlib import Path

import pytest
import yaml

from rolemesh.engine.specs import OutsideRewardSpec, RewardSpec, named_sources

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"```yaml\n(reward:.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_recipe_on_the_page_is_one(block):
    spec = RewardSpec.model_validate(yaml.safe_load(block)["reward"])
    assert any(
        isinstance(reward.source, OutsideRewardSpec) for reward in named_sources(spec.source)
    )


def test_the_page_shows_every_source_from_outside():
    shown = {
        reward.source.type
        for block in BLOCKS
        for reward in named_sources(
            RewardSpec.model_validate(yaml.safe_load(block)["reward"]).source
        )
    }
    assert shown >= {
        kind.model_fields["type"].default
        for base in OutsideRewardSpec.__subclasses__()
        for kind in (base, *base.__subclasses__())
        if "type" in kind.model_fields
    }
