"""Mapping: which roles share which devices, and how each model is cut, found before a run.

The data's way: recipe + cluster -> tasks of a step -> placements x layouts -> seconds and bytes ->
the cheapest plan -> settings of a recipe. Arithmetic alone: no torch, no device, no service.
docs/mapping.md says what each room and file does.
"""
