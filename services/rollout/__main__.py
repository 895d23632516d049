"""Serves the rollout role: python -m rolemesh.services.rollout."""

from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.process import run_service


def make_role() -> Role:
    """Imported when it is made: an agent of several ranks runs no model."""
    from rolemesh.services.rollout.servicers import RolloutRole

    return RolloutRole()


raise SystemExit(run_service("rollout", make_role))
