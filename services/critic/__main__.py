"""Serves the critic role: python -m rolemesh.services.critic."""

from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.process import run_service


def make_role() -> Role:
    """Imported when it is made: an agent of several ranks runs no model."""
    from rolemesh.services.critic.servicers import CriticRole

    return CriticRole()


raise SystemExit(run_service("critic", make_role))
