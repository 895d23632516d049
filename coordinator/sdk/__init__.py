"""The Python SDK: runs of a coordinator, and the services of a run, without torch.

`Client` and `AsyncClient` talk to a coordinator; `Mesh` and `AsyncMesh` to services, so that
another system writes a loop of its own. Everything raises a RolemeshError, whose subclasses are in
rolemesh.rpc.errors. See docs/sdk.md.
"""

from __future__ import annotations

from rolemesh.coordinator.sdk.async_client import AsyncClient
from rolemesh.coordinator.sdk.async_mesh import AsyncMesh
from rolemesh.coordinator.sdk.async_role import AsyncRole
from rolemesh.coordinator.sdk.client import Client
from rolemesh.coordinator.sdk.mesh import Mesh
from rolemesh.coordinator.sdk.retrying import RetryPolicy
from rolemesh.coordinator.sdk.role import Role
from rolemesh.coordinator.sdk.values.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Noted,
    Recovered,
    Resumed,
    StateChanged,
    StepMade,
)
from rolemesh.coordinator.sdk.values.experience import (
    Auxiliary,
    Experience,
    Gradient,
    Prompt,
    PromptSlice,
    Report,
    Rewards,
    Selection,
    Trajectory,
    Update,
)
from rolemesh.coordinator.sdk.values.experts import ExpertLoads, LayerLoads
from rolemesh.coordinator.sdk.values.runs import (
    Alert,
    AlertLevel,
    Dataflow,
    DeviceUse,
    LogPiece,
    MetricTable,
    PlannedPool,
    PlannedTask,
    RegisteredService,
    Run,
    RunList,
    RunPlan,
    RunState,
)
from rolemesh.coordinator.sdk.values.samples import (
    Sample,
    SampledCall,
    SampledImage,
    SampledSession,
    Samples,
)
from rolemesh.coordinator.sdk.values.services import Capabilities, Initialized, Status, WorkerState
from rolemesh.coordinator.sdk.values.weights import (
    Checkpoint,
    Checksums,
    Cut,
    Manifest,
    Parameter,
    Weights,
)
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.experience.columns import ColumnData, ColumnKind, Columns
from rolemesh.rpc.members.identity import Identity

__all__ = [
    "Alert",
    "AlertLevel",
    "AsyncClient",
    "AsyncMesh",
    "AsyncRole",
    "Auxiliary",
    "Capabilities",
    "Checkpoint",
    "CheckpointSaved",
    "Checksums",
    "Client",
    "ColumnData",
    "ColumnKind",
    "Columns",
    "Cut",
    "Dataflow",
    "DeviceUse",
    "Evaluated",
    "Event",
    "Experience",
    "ExpertLoads",
    "Gradient",
    "Identity",
    "Initialized",
    "LayerLoads",
    "LogPiece",
    "Manifest",
    "Mesh",
    "MetricTable",
    "Noted",
    "Parameter",
    "PlannedPool",
    "PlannedTask",
    "Prompt",
    "PromptSlice",
    "Recovered",
    "RegisteredService",
    "Report",
    "Resumed",
    "RetryPolicy",
    "Rewards",
    "Role",
    "RolemeshError",
    "Run",
    "RunList",
    "RunPlan",
    "RunState",
    "Sample",
    "SampledCall",
    "SampledImage",
    "SampledSession",
    "Samples",
    "Selection",
    "StateChanged",
    "Status",
    "StepMade",
    "Trajectory",
    "Update",
    "Weights",
    "WorkerState",
]
