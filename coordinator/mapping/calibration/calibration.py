"""Calibration: coefficients fitted to a machine, with what was measured and how far off they are.

`rolemesh calibrate` writes the record, and `rolemesh plan` reads it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rolemesh.coordinator.mapping.calibration.fitting import FITTABLE, Observation, fitted
from rolemesh.coordinator.mapping.calibration.primitives import Primitive, measured_peaks
from rolemesh.coordinator.mapping.calibration.recorded import RecordedRun
from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.machines.coefficients import RATES, Coefficients
from rolemesh.coordinator.mapping.machines.devices import Device, device_of

FORMAT = 1

NOT_MEASURED_HERE = frozenset({"network", "network_latency_s", "hidden"})
"""Coefficients of what one machine does not show."""

_PEAKS = ("flops", "memory_bandwidth", "link_bandwidth", "host_bandwidth")

_MOVED = 1e-3
"""Share by which a coefficient is changed to see whether any prediction depends on it."""


class CalibrationError(PlanError):
    """A record that is none, or nothing to make one of: names the field and what would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """How far predictions are from what was measured, as shares of the latter."""

    number: int
    median: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors | None:
        """Of errors with their signs; None where there are none."""
        sizes = [abs(error) for error in errors]
        if not sizes:
            return None
        return cls(number=len(sizes), median=statistics.median(sizes), worst=max(sizes))

    def described(self) -> str:
        """E.g. "6 % in the median, 30 % at most"."""
        return f"{100 * self.median:.0f} % in the median, {100 * self.worst:.0f} % at most"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A thing that was measured, and what the fitted coefficients make of it."""

    name: str
    seconds: float
    predicted: float
    is_fitted: bool
    """False: it was kept out of the fit, and is predicted alone."""
    is_of_run: bool
    """Whether it is a call of a run; else a primitive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where and when it was measured."""

    name: str
    """Of the processor or GPU."""
    threads: int
    """Of a rank on a CPU."""
    versions: Mapping[str, str]
    date: str
    """ISO 8601, e.g. "2026-11-23"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Coefficients of one kind of device, and what they stand on."""

    device: str
    """Name of the device, as in `devices.DEVICES`."""
    peaks: Mapping[str, float]
    """What takes the place of the device's own numbers: of a CPU, whose peaks are assumed."""
    coefficients: Coefficients
    measured: tuple[str, ...]
    """Names of the coefficients that something measured depends on; the others are assumed."""
    machine: Machine
    primitives: tuple[Primitive, ...]
    rows: tuple[Row, ...]
    residual: Errors
    """Of the rows that were fitted."""
    fitted_steps: Errors | None
    """Of the steps of runs whose calls were fitted."""
    held_out_steps: Errors | None
    """Of the steps of runs that were kept out."""

    @property
    def described_device(self) -> Device:
        """The device, with the peaks that were measured."""
        return with_peaks(device_of(self.device), self.peaks)

    def basis(self) -> str:
        """What predictions stand on and how far off they are, in a line."""
        number = sum(row.is_fitted and not row.is_of_run for row in self.rows)
        calls = sum(row.is_fitted and row.is_of_run for row in self.rows)
        steps = 0 if self.fitted_steps is None else self.fitted_steps.number
        text = (
            f"measured on {self.machine.name} ({self.device}) on {self.machine.date}: "
            f"{number} primitives"
        )
        text += f" and {calls} calls of {steps} runs" if steps else ""
        text += f", off by {self.residual.described()}"
        if self.held_out_steps is not None:
            kept = self.held_out_steps
            text += f"; steps of {kept.number} runs that were kept out by {kept.described()}"
        elif self.fitted_steps is not None:
            text += f"; their steps by {self.fitted_steps.described()}, none kept out"
        else:
            text += "; no step of a run is among them"
        assumed = [f.name for f in fields(Coefficients) if f.name not in self.measured]
        return f"{text}; assumed still: {', '.join(assumed) or 'nothing'}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "rolemesh_calibration": FORMAT,
            "device": self.device,
            "peaks": dict(self.peaks),
            "coefficients": self.coefficients.to_dict(),
            "measured": list(self.measured),
            "machine": {**asdict(self.machine), "versions": dict(self.machine.versions)},
            "residual": asdict(self.residual),
            "fitted_steps": None if self.fitted_steps is None else asdict(self.fitted_steps),
            "held_out_steps": None if self.held_out_steps is None else asdict(self.held_out_steps),
            "rows": [asdict(row) for row in self.rows],
            "primitives": [one.to_dict() for one in self.primitives],
        }


def with_peaks(device: Device, peaks: Mapping[str, float]) -> Device:
    """A device with other peaks."""
    changes: dict[str, Any] = dict(peaks)
    return replace(device, **changes)


def calibrated(
    device: Device,
    primitives: Sequence[Primitive],
    runs: Sequence[RecordedRun],
    kept_out: Sequence[RecordedRun],
    machine: Machine,
) -> Calibration:
    """Fits coefficients.

    Args:
        device: What was measured, as its data sheet has it.
        primitives: Of the machine.
        runs: Made on it, whose calls are fitted too.
        kept_out: Made on it, and only predicted.
        machine: For the record.

    Raises:
        CalibrationError: Nothing was measured.
    """
    if not primitives and not runs:
        raise CalibrationError("nothing was measured: measure primitives, or name runs with --run")
    peaked = measured_peaks(device, primitives)
    # In a loop of their own models are faster than in a mesh: where runs show the same work in its
    # place, that counts alone.
    used = [one for one in primitives if not (runs and one.is_of_models)]
    rows = [one.observation(peaked) for one in used]
    rows += [row for run in runs for row in run.observations(peaked)]
    start = Coefficients()
    moving = [name for name in sorted(FITTABLE - NOT_MEASURED_HERE) if _matters(rows, start, name)]
    coefficients = fitted(rows, start, moving)
    shown = [(row, True) for row in rows]
    shown += [(one.observation(peaked), False) for one in primitives if one not in used]
    shown += [(row, False) for run in kept_out for row in run.observations(peaked)]

    names = {one.name for one in primitives}

    def steps(of: Sequence[RecordedRun]) -> Errors | None:
        return Errors.of(
            [run.predicted(peaked, coefficients).period / run.step_s - 1 for run in of]
        )

    residual = Errors.of([row.error(coefficients) for row in rows])
    assert residual is not None  # there are rows
    return Calibration(
        device=device.name,
        peaks={n: getattr(peaked, n) for n in _PEAKS if getattr(peaked, n) != getattr(device, n)},
        coefficients=coefficients,
        measured=tuple(moving),
        machine=machine,
        primitives=tuple(primitives),
        rows=tuple(
            Row(
                name=row.name,
                seconds=row.seconds,
                predicted=row.predict(coefficients),
                is_fitted=is_fitted,
                is_of_run=row.name not in names,
            )
            for row, is_fitted in shown
        ),
        residual=residual,
        fitted_steps=steps(runs),
        held_out_steps=steps(kept_out),
    )


def _matters(rows: Sequence[Observation], start: Coefficients, name: str) -> bool:
    """Whether the prediction of some row depends on a coefficient."""
    value = getattr(start, name)
    changed = value * (1 - _MOVED) if name in RATES else value + _MOVED
    moved = replace(start, **{name: changed})
    return any(row.predict(moved) != row.predict(start) for row in rows)


def read_calibration(file: Path) -> Calibration:
    """Reads the record of a file.

    Raises:
        CalibrationError: It cannot be read, is no such record, or has a field that cannot be.
    """
    again = "write it anew with `rolemesh calibrate`"
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CalibrationError(f"calibration {file} cannot be read ({error}): {again}") from error
    if not isinstance(told, dict) or told.get("rolemesh_calibration") != FORMAT:
        found = told.get("rolemesh_calibration") if isinstance(told, dict) else None
        raise CalibrationError(
            f"{file}: rolemesh_calibration is {found!r}, but {FORMAT} is read here: {again}"
        )

    def part(name: str, make: Callable[[Any], Any]) -> Any:
        if name not in told:
            raise CalibrationError(f"{file}: the field {name} is missing: {again}")
        try:
            return make(told[name])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            shown = json.dumps(told[name])
            shown = shown if len(shown) < 200 else f"{shown[:200]}..."
            raise CalibrationError(
                f"{file}: {name} is {shown}, which cannot be ({error}): {again}"
            ) from error

    return Calibration(
        device=part("device", lambda name: device_of(name).name),
        peaks=part("peaks", _peaks),
        coefficients=part("coefficients", _coefficients),
        measured=part("measured", lambda names: tuple(_known(name) for name in names)),
        machine=part("machine", lambda one: Machine(**one)),
        primitives=part("primitives", lambda some: tuple(Primitive(**one) for one in some)),
        rows=part("rows", lambda some: tuple(Row(**one) for one in some)),
        residual=part("residual", lambda one: Errors(**one)),
        fitted_steps=part("fitted_steps", lambda one: None if one is None else Errors(**one)),
        held_out_steps=part("held_out_steps", lambda one: None if one is None else Errors(**one)),
    )


def _coefficients(values: Any) -> Coefficients:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}: give a number")
    return Coefficients.from_dict(values)


def _known(name: str) -> str:
    Coefficients.from_dict({name: 1.0})
    return name


def _peaks(values: Any) -> dict[str, float]:
    for name, value in values.items():
        if name not in _PEAKS:
            raise ValueError(f"{name!r} is no peak: give some of {', '.join(_PEAKS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name} is {value!r}: give a number above 0")
    return dict(values)
