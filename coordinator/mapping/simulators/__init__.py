"""Simulators: seconds and bytes of a role's tasks on a layout."""
