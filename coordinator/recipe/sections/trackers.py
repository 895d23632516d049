"""The recipe's section `trackers`: where scalars go beside the run's own files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from rolemesh.engine.specs import Names, Spec


class WandbSpec(Spec):
    """Weights & Biases. Its own variables count too, e.g. WANDB_API_KEY and WANDB_BASE_URL."""

    type: Literal["wandb"] = "wandb"
    project: str = "rolemesh"
    """Name of the project."""
    entity: str | None = None
    """User or team; None: the account's own."""
    group: str | None = None
    """Runs that belong together."""
    mode: Literal["online", "offline"] = "online"
    """Offline writes <run>/wandb, for `wandb sync`."""


class MlflowSpec(Spec):
    """MLflow. Its own variables count too, e.g. MLFLOW_TRACKING_TOKEN."""

    type: Literal["mlflow"] = "mlflow"
    tracking_uri: Annotated[str, Names("url", gets_secret=True)] = Field(min_length=1)
    """A server, e.g. http://127.0.0.1:5000, or a database, e.g. sqlite:////data/mlflow.db (which
    needs sqlalchemy and alembic beside mlflow-skinny)."""
    experiment: str = "rolemesh"
    """Name of the experiment; made where there is none."""


class TrackioSpec(Spec):
    """Trackio. Local unless a Space or a server is named; TRACKIO_DIR says where."""

    type: Literal["trackio"] = "trackio"
    project: str = "rolemesh"
    """Name of the project."""
    space_id: str | None = None
    """Hugging Face Space to send to, e.g. "me/curves"."""


class SwanlabSpec(Spec):
    """SwanLab. Its own variables count too, e.g. SWANLAB_API_KEY and SWANLAB_API_HOST."""

    type: Literal["swanlab"] = "swanlab"
    project: str = "rolemesh"
    """Name of the project."""
    workspace: str | None = None
    """Owner; None: the account's own."""
    mode: Literal["online", "offline"] = "online"
    """Offline writes <run>/swanlab, for `swanlab sync`."""


class CustomTrackerSpec(Spec):
    """A tracker of your own: a class with the methods of `Tracker`."""

    type: Literal["custom"] = "custom"
    tracker: Annotated[str, Names("code")] = Field(min_length=1)
    """'path/to/file.py:Class' or 'module:Class', or the name of an entry point of the group
    rolemesh.trackers."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class."""


TrackerSpec = Annotated[
    WandbSpec | MlflowSpec | TrackioSpec | SwanlabSpec | CustomTrackerSpec,
    Field(discriminator="type"),
]
