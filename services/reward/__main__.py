"""Serves the reward role: python -m rolemesh.services.reward."""

from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.process import run_service

raise SystemExit(run_service(RewardRole()))
