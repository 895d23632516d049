"""Every loss that a recipe can name, told apart by `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rolemesh.engine.specs.losses.policy_losses import (
    ClipCovPolicyLossSpec,
    DppoPolicyLossSpec,
    GmpoPolicyLossSpec,
    KlCovPolicyLossSpec,
    SapoPolicyLossSpec,
    ToprPolicyLossSpec,
    VespoPolicyLossSpec,
)
from rolemesh.engine.specs.losses.preferences import (
    BradleyTerryLossSpec,
    DpoLossSpec,
    KtoLossSpec,
    SftLossSpec,
)
from rolemesh.engine.specs.losses.sampled import (
    CispoPolicyLossSpec,
    DistillationLossSpec,
    GspoPolicyLossSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    PythonPolicyLossSpec,
    ReinforcePolicyLossSpec,
)
from rolemesh.engine.specs.losses.token_sums import TokenSumLossSpec
from rolemesh.engine.specs.losses.traced_losses import TracedLossSpec

LossSpec = Annotated[
    PpoPolicyLossSpec
    | GspoPolicyLossSpec
    | CispoPolicyLossSpec
    | ReinforcePolicyLossSpec
    | DppoPolicyLossSpec
    | SapoPolicyLossSpec
    | GmpoPolicyLossSpec
    | VespoPolicyLossSpec
    | ToprPolicyLossSpec
    | ClipCovPolicyLossSpec
    | KlCovPolicyLossSpec
    | PythonPolicyLossSpec
    | DistillationLossSpec
    | TokenSumLossSpec
    | TracedLossSpec
    | PpoValueLossSpec
    | SftLossSpec
    | DpoLossSpec
    | KtoLossSpec
    | BradleyTerryLossSpec,
    Field(discriminator="type"),
]
"""Losses that train policy and values from sampled experience, and those on given data."""
