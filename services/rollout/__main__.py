"""Serves the rollout role: python -m rolemesh.services.rollout."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("rollout", "rolemesh.services.rollout.servicers:RolloutRole"))
