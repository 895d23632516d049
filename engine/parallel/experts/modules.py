"""Which modules of a transformers model hold stacks of experts. Imports no transformers."""

from __future__ import annotations

from torch import nn


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold stacks of experts: those that transformers lets be computed so."""
    return [one for one in model.modules() if hasattr(one, "_is_expert_parallel")]
