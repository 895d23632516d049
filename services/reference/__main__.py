"""Serves the reference role: python -m rolemesh.services.reference."""

from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.runtime.process import run_service


def make_role() -> Role:
    """Imported when it is made: an agent of several ranks runs no model."""
    from rolemesh.services.reference.servicers import ReferenceRole

    return ReferenceRole()


raise SystemExit(run_service("reference", make_role))
