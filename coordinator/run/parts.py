"""Parts of a run: what its attempts, their loops and its conclusion share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.algorithms.registry import Algorithm
from rolemesh.coordinator.dataflow.calls.connection import OpenChannel, open_watched
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.reporting.events import EventLog
from rolemesh.coordinator.run.reporting.wishes import Wishes
from rolemesh.coordinator.run.results.metrics import MetricsWriter
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.services.registered import RegisteredServices
from rolemesh.coordinator.run.services.watcher import WatchSettings
from rolemesh.coordinator.run.tuning.tuning import RunTuning
from rolemesh.coordinator.state.store import StateStore
from rolemesh.rpc.channel import ChannelTraffic
from rolemesh.rpc.members.identity import Identity


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What all attempts of a run share."""

    recipe: Recipe
    run_id: str
    directory: Path
    """Folder of the run's files."""
    store: StateStore
    """Keeps the run's record, journal and metrics."""
    observer: RunObserver
    """Is told of the run's progress, for people."""
    events: EventLog
    """Events of the run, for the page."""
    wishes: Wishes
    """Wishes of users for the run."""
    writer: MetricsWriter
    """Writes the run's files."""
    services: Sequence[str]
    """Names of those that take part."""
    algorithm: Algorithm | None
    """None where a client makes the steps."""
    progress: RunProgress
    """What the run has reached."""
    traffic: ChannelTraffic
    """Of the coordinator's channels."""
    identity: Identity | None
    """Of the coordinator; None where the services speak in clear."""
    watch: WatchSettings
    loss_grace_s: float
    """When a service does not answer a call, the launcher has this long to report the cause."""
    open_channel: OpenChannel = open_watched
    """Opens a channel to a service."""
    registered: RegisteredServices | None = None
    """Finds services that may join; None: none may."""
    tuning: RunTuning | None = None
    """Chooses the settings of each attempt; None: all have the recipe's."""
