"""Scalars to MLflow. Needs the extra "mlflow"."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rolemesh.coordinator.recipe.sections.trackers import MlflowSpec
from rolemesh.coordinator.trackers.tracker import RunFacts

_NOT_ALLOWED = re.compile(r"[^\w\-. :/]", re.ASCII)
"""MLflow refuses metric names with other characters, e.g. the @ of pass@1."""

_PARAMETERS_A_CALL = 100
_METRICS_A_CALL = 1000
"""Bounds of MLflow's log-batch call."""

_STATUS = {"succeeded": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """One run of MLflow, through its client alone: nothing of the process is changed."""

    def __init__(self, spec: MlflowSpec) -> None:
        self._spec = spec
        self._client: Any = None
        self._entities: Any = None
        self._id = ""

    def start(self, run: RunFacts, config: Mapping[str, Any]) -> None:
        """Makes the run, and the experiment where there is none."""
        self._entities = importlib.import_module("mlflow.entities")
        tracking = importlib.import_module("mlflow.tracking")
        self._client = client = tracking.MlflowClient(tracking_uri=self._spec.tracking_uri)
        experiment = client.get_experiment_by_name(self._spec.experiment)
        experiment_id = (
            client.create_experiment(self._spec.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {"rolemesh.run_id": run.run_id, "rolemesh.directory": run.directory}
        made = client.create_run(experiment_id, run_name=run.run_id, tags=tags)
        self._id = made.info.run_id
        parameters = [self._entities.Param(name, value) for name, value in _flat(config)]
        for start in range(0, len(parameters), _PARAMETERS_A_CALL):
            part = parameters[start : start + _PARAMETERS_A_CALL]
            client.log_batch(self._id, params=part)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs a step; characters that MLflow refuses in names become "_"."""
        now = time.time_ns() // 1_000_000
        metrics = [
            self._entities.Metric(_NOT_ALLOWED.sub("_", name), value, now, step)
            for name, value in scalars.items()
        ]
        for start in range(0, len(metrics), _METRICS_A_CALL):
            self._client.log_batch(self._id, metrics=metrics[start : start + _METRICS_A_CALL])

    def finish(self, state: str) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id, _STATUS[state])


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves as "run.seed" and text; lists as JSON."""
    for key, value in config.items():
        name = _NOT_ALLOWED.sub("_", f"{prefix}{key}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value)
