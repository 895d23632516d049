"""Where calibrations of this user's machines are, and which one a plan takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rolemesh.coordinator.mapping.calibration.calibration import (
    Calibration,
    CalibrationError,
    read_calibration,
)


def default_place(device: str) -> Path:
    """The file of a kind of device by its name, which `calibrate` writes and `plan` looks for."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "rolemesh" / f"calibration-{device}.json"


def calibrations_for(devices: Sequence[str], files: Sequence[Path]) -> dict[str, Calibration]:
    """The calibration of each kind of device, by name; kinds without one are left out.

    Args:
        devices: Names of the kinds of a plan.
        files: That are given; the others are looked for in their default places.

    Raises:
        CalibrationError: A file cannot be read, or is of a device that the plan does not have, or
            there are two of one device.
    """
    found: dict[str, Calibration] = {}
    for file in files:
        one = read_calibration(file)
        if one.device not in devices:
            raise CalibrationError(
                f"{file} is a calibration of {one.device}, but the plan has {', '.join(devices)}: "
                "leave it out, or plan for that device"
            )
        if one.device in found:
            raise CalibrationError(f"{file} is a second calibration of {one.device}: give one")
        found[one.device] = one
    for device in devices:
        place = default_place(device)
        if device not in found and place.is_file():
            found[device] = read_calibration(place)
    return found
