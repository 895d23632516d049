"""Serves the reward role: python -m rolemesh.services.reward."""

from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.process import run_service


def make_role() -> Role:
    """Imported when it is made: an agent of several ranks runs no model."""
    from rolemesh.services.reward.servicers import RewardRole

    return RewardRole()


raise SystemExit(run_service("reward", make_role))
