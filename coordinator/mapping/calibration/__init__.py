"""Calibration: the cost model fitted to a machine by what was measured there."""
