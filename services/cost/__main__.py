"""Serves the cost role: python -m rolemesh.services.cost."""

from rolemesh.services.cost.servicers import CostRole
from rolemesh.services.runtime.process import run_service

raise SystemExit(run_service(CostRole()))
