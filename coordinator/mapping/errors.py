"""What a plan cannot be made of."""

from __future__ import annotations


class PlanError(ValueError):
    """Devices, wishes or a model that no plan can be made of: names them, and what would do."""
