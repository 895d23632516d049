"""Serves the actor role: python -m rolemesh.services.actor."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("actor", "rolemesh.services.actor.servicers:ActorRole"))
