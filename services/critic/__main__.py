"""Serves the critic role: python -m rolemesh.services.critic."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("critic", "rolemesh.services.critic.servicers:CriticRole"))
