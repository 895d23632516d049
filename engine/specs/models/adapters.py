"""Adapters: small trained tensors over a frozen base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from rolemesh.engine.layout.adapters import EXPERTS
from rolemesh.engine.specs.base import Spec


class AdapterSpec(Spec):
    """Low-rank adaptation (LoRA, arXiv 2106.09685): W x becomes W x + scale * B (A x), W frozen."""

    # "from" is no name for an attribute in Python, so it has another one there.
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    type: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B; at most the smaller side of each matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """Numerator of the scale."""
    targets: Literal["all_linear"] | tuple[str, ...] = "all_linear"
    """Which matrices of each layer have an adapter: all linear layers, or those with these names,
    e.g. [q_proj, v_proj]. A mixture's experts have one where "experts" is among them, e.g.
    [all_linear, experts]. The head of a critic or reward model is trained whole, beside them."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of inputs of A that are left out in training. Only 0 is served: with dropout the policy
    that is trained is not the one that sampled."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Scale of what an adapter adds. standard: alpha / rank. rslora: alpha / sqrt(rank), with which
    larger ranks learn as fast (arXiv 2312.03732)."""
    seed: int = Field(default=0, ge=0)
    """Of the first values of A. B begins at zero, so that the adapter changes nothing at first."""
    start: Path | None = Field(default=None, alias="from")
    """Folder of an adapter to begin with, in PEFT's format (adapter_config.json and
    adapter_model.safetensors), of the same base, rank and targets. None: a new one."""

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, given: object) -> object:
        if given != "lora":
            raise ValueError(f"type is {given!r}: only 'lora' is served (no DoRA, IA3, prompts)")
        return given

    @field_validator("dropout")
    @classmethod
    def _check_dropout(cls, given: float) -> float:
        if given:
            raise ValueError(
                f"dropout is {given:g}, but with dropout the policy that is trained is not the one "
                "that sampled: give 0"
            )
        return given

    @field_validator("targets")
    @classmethod
    def _check_targets(
        cls, given: Literal["all_linear"] | Sequence[str]
    ) -> Literal["all_linear"] | Sequence[str]:
        if not given:
            raise ValueError("targets is empty, so nothing would be trained: name some matrices")
        return given

    @property
    def adapts_experts(self) -> bool:
        """Whether the experts of a mixture are to have an adapter each."""
        return EXPERTS in self.targets

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.scaling == "rslora" else self.rank)
