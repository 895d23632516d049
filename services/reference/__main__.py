"""Serves the reference role: python -m rolemesh.services.reference."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("reference", "rolemesh.services.reference.servicers:ReferenceRole"))
