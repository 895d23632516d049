"""Serves the rollout role: python -m rolemesh.services.rollout."""

from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.services.runtime.process import run_service

raise SystemExit(run_service(RolloutRole()))
