"""Serves the actor role: python -m rolemesh.services.actor."""

from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.process import run_service


def make_role() -> Role:
    """Imported when it is made: an agent of several ranks runs no model."""
    from rolemesh.services.actor.servicers import ActorRole

    return ActorRole()


raise SystemExit(run_service("actor", make_role))
