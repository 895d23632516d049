"""Serves the cost role: python -m rolemesh.services.cost."""

from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.process import run_service


def make_role() -> Role:
    """Imported when it is made: an agent of several ranks runs no model."""
    from rolemesh.services.cost.servicers import CostRole

    return CostRole()


raise SystemExit(run_service("cost", make_role))
