"""Serves the reward role: python -m rolemesh.services.reward."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("reward", "rolemesh.services.reward.servicers:RewardRole"))
