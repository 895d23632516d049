"""Serves the reference role: python -m rolemesh.services.reference."""

from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.services.runtime.process import run_service

raise SystemExit(run_service(ReferenceRole()))
