"""Serves the cost role: python -m rolemesh.services.cost."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("cost", "rolemesh.services.cost.servicers:CostRole"))
