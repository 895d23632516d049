"""Serves the actor role: python -m rolemesh.services.actor."""

from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.runtime.process import run_service

raise SystemExit(run_service(ActorRole()))
