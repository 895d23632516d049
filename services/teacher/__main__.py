"""Serves the teacher role: python -m rolemesh.services.teacher."""

from rolemesh.services.runtime.process import serve_role

raise SystemExit(serve_role("teacher", "rolemesh.services.teacher.servicers:TeacherRole"))
