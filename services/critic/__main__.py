"""Serves the critic role: python -m rolemesh.services.critic."""

from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.runtime.process import run_service

raise SystemExit(run_service(CriticRole()))
