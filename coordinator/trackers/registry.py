"""Registry of trackers: the class for each section of `trackers`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rolemesh.coordinator.recipe.sections.trackers import CustomTrackerSpec, TrackerSpec
from rolemesh.coordinator.trackers.to_mlflow import MlflowTracker
from rolemesh.coordinator.trackers.to_packages import (
    SwanlabTracker,
    TrackioTracker,
    WandbTracker,
)
from rolemesh.coordinator.trackers.tracker import Tracker
from rolemesh.engine.granted.user_code import load_offered

ENTRY_POINTS = "rolemesh.trackers"
"""Group of entry points under which other packages offer trackers."""

_TRACKERS: Mapping[str, Callable[[Any], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
}
"""By `type` of the section."""

_DISTRIBUTIONS = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "trackio": ("trackio",),
    "swanlab": ("swanlab",),
}
"""One of them has to be installed. Not looked for by module: wandb and mlflow leave folders of
their own name behind, which Python would import."""

_METHODS = ("start", "log", "finish")


def check_trackers(specs: Sequence[TrackerSpec]) -> None:
    """Imports nothing of a package; a user's own class is loaded.

    Raises:
        ValueError: A tracker's package is not installed, or there is no such class.
    """
    for number, spec in enumerate(specs):
        if isinstance(spec, CustomTrackerSpec):
            _custom_class(spec, f"trackers.{number}.tracker")
        elif not any(_is_installed(name) for name in _DISTRIBUTIONS[spec.type]):
            raise ValueError(
                f"trackers.{number}.type is {spec.type!r}, but the package is not installed: "
                f"pip install 'rolemesh[{spec.type}]'"
            )


def make_tracker(spec: TrackerSpec) -> Tracker:
    """The tracker of a section, not started yet.

    Raises:
        ValueError: There is no such class.
    """
    if isinstance(spec, CustomTrackerSpec):
        return cast(Tracker, _custom_class(spec, "tracker")(**spec.options))
    return _TRACKERS[spec.type](spec)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _custom_class(spec: CustomTrackerSpec, field: str) -> type:
    # The user's own file, named in the user's own recipe, or an entry point.
    found = load_offered(spec.tracker, field, ENTRY_POINTS)
    if not isinstance(found, type):
        raise ValueError(
            f"{field} is {spec.tracker!r}: there is no such class; give 'path/to/file.py:Class', "
            f"or the name of an entry point of the group {ENTRY_POINTS}"
        )
    lacking = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if lacking:
        raise ValueError(
            f"{field} is {spec.tracker!r}, which lacks {', '.join(lacking)}: a tracker has "
            f"{', '.join(_METHODS)}"
        )
    return found
