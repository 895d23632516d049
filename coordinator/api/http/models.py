"""JSON models of REST: the messages of coordinator.proto under the same names.

Three things differ from the protos: times are RFC 3339 text, states are lower-case words, and a
number that is NaN or infinite is null. A member of the proto that may be absent is null.
"""

from __future__ import annotations

from typing import Literal

from rolemesh.coordinator.api.http.bases import Answer, Int32, Int64, Number, Time

RunStateWord = Literal[
    "starting",
    "running",
    "stopping",
    "succeeded",
    "stopped",
    "failed",
    "pausing",
    "paused",
    "recovering",
]
AlertLevelWord = Literal["info", "warning", "critical"]
CallUseWord = Literal["trained", "shared", "untrained"]


class Run(Answer):
    """A training run."""

    run_id: str
    """Id of the run."""
    name: str
    """Name from the recipe."""
    state: RunStateWord
    """State of the run."""
    step: Int64
    """Steps finished."""
    num_steps: Int64
    """Steps planned."""
    created_at: Time
    """When it was created."""
    updated_at: Time
    """When it last changed."""
    directory: str
    """Folder of its files, on the coordinator's host."""
    failure: str
    """Why it failed, empty otherwise."""
    metrics: dict[str, Number]
    """Metrics of the newest step."""
    algorithm: str
    """Type of its algorithm, e.g. "ppo"; "external" when a client drives it."""
    activity: str
    """What it does right now, e.g. "step 3"; of a run that early stopping ended, why."""
    recoveries: Int64
    """How often it had to recover from a failure."""
    endpoints: dict[str, str]
    """Base URLs where programs ask its policy, by service, while the run goes on."""


class RunList(Answer):
    """Runs."""

    runs: list[Run]
    """Newest first."""


class RunStateChange(Answer):
    """A new state of a run."""

    state: RunStateWord
    """The state."""
    failure: str
    """Why it failed, or what it recovers from; empty otherwise."""


class StepMade(Answer):
    """A step that was made."""

    metrics: dict[str, Number]
    """Its metrics."""


class Evaluated(Answer):
    """What held-out prompts or rows say of the weights."""

    metrics: dict[str, Number]
    """Its metrics."""


class CheckpointSaved(Answer):
    """A checkpoint of all roles."""

    directory: str
    """Its folder, on the coordinator's host."""


class Note(Answer):
    """A line for people."""

    text: str
    """The line."""


class Recovered(Answer):
    """A failure of a process or a connection that the run has survived."""

    step: Int64
    """Steps that were kept: the next one is made, or made again."""
    cause: str
    """What had failed."""
    seconds: Number
    """From the failure until steps are made again."""
    restarted: list[str]
    """Services whose models were loaded anew; the others kept theirs."""
    lost_steps: Int64
    """Steps that had been made before the failure and are made again."""


class Resumed(Answer):
    """A run that goes on in another process than before."""

    step: Int64
    """Steps that it has made."""
    where: str
    """Where they were read, e.g. "its journal"."""


class RunEvent(Answer):
    """Something that happened in a run: `data` of an event of the stream.

    One of `state`, `step_made`, `evaluated`, `checkpoint_saved`, `note`, `recovered` and `resumed`
    is there; the stream's `event` field says which.
    """

    event_id: str
    """Id, opaque: of Last-Event-ID and `after`."""
    time: Time
    """When."""
    step: Int64
    """Steps finished by then."""
    state: RunStateChange | None = None
    """The run is in another state."""
    step_made: StepMade | None = None
    """A step was made."""
    evaluated: Evaluated | None = None
    """The policy was evaluated."""
    checkpoint_saved: CheckpointSaved | None = None
    """A checkpoint was saved."""
    note: Note | None = None
    """Something worth a line."""
    recovered: Recovered | None = None
    """The run goes on after a failure."""
    resumed: Resumed | None = None
    """The run goes on in another process."""


class Metrics(Answer):
    """Metrics of steps, in columns."""

    steps: list[Int64]
    """Steps, ascending."""
    series: dict[str, list[Number]]
    """By name: one value a step, null where a step has none."""
    next_step: Int64 | None
    """First step that was not sent; null when all were."""


class DataflowNode(Answer):
    """One call of a step."""

    name: str
    """Name, e.g. "critic.update"."""
    service: str
    """Service that is called, e.g. "critic" or "rollout-1"."""
    kind: str
    """What it does to the mesh: "sample", "infer", "update" or "eval"."""
    pool: str
    """Pool whose lease it takes."""
    state: str
    """State: "waiting", "queued", "running", "done" or "failed"."""
    ready_s: Number
    """When its inputs existed, in seconds since the step began; null before."""
    started_s: Number
    """When it started; null before."""
    ended_s: Number
    """When it ended; null before."""
    is_critical: bool
    """Whether the step waited for it: the critical path."""
    num_tokens: Int64
    """Tokens that it worked on."""
    num_bytes: Int64
    """Bytes of experience that it pulled."""
    phases: dict[str, Number]
    """Seconds by phase within the call."""
    after: list[str]
    """Names of the calls whose results it needs."""
    policy_version: Int64 | None
    """Version of the weights after it; null where it has none."""
    pulled_bytes: dict[str, Int64]
    """Its num_bytes by the way that they took, e.g. "shm", "grpc", or "grpc_4" over four
    connections."""


class Dataflow(Answer):
    """The graph of a step."""

    step: Int64
    """The step."""
    is_made: bool
    """Whether the step was made; otherwise calls may have no end yet."""
    nodes: list[DataflowNode]
    """Its calls, in the order in which they were asked for."""


class PlannedTask(Answer):
    """The calls of one role and method in a step."""

    name: str
    """Role and method, e.g. "actor.update"."""
    pool: str
    """Pool that they were planned for; empty where they need no device."""
    is_ahead: bool
    """Whether they sample for a later step."""
    start_s: Number
    """When the first starts, as predicted, in seconds since the step began; null where the plan has
    no such call."""
    predicted_s: Number
    """Seconds as predicted; null where the plan has no such call."""
    measured_s: Number
    """Seconds in which any of them was at work; null where none was measured."""


class PlannedPool(Answer):
    """A pool of the plan, of the recipe, or of both."""

    name: str
    """Its name."""
    planned_devices: str
    """Number and kind of its devices as planned; empty where the plan has no such pool."""
    planned_roles: list[str]
    """Its roles as planned, each with its layout p-t-d, e.g. "actor 1-2-2"."""
    devices: list[str]
    """Its devices in the recipe of the run; none where that has no such pool."""
    roles: list[str]
    """Its roles in the recipe of the run, each with its layout."""


class RunPlan(Answer):
    """A predicted step beside the measured one.

    Measured are medians over the newest steps, without the first two of the run.
    """

    step_s: Number
    """Seconds of a step, as predicted."""
    measured_step_s: Number
    """Seconds of a step, as measured; null before the third step."""
    num_steps: Int64
    """Steps that were measured."""
    tokens: Number
    """Tokens of a step, prompts included, that the prediction is for."""
    measured_tokens: Number
    """Tokens of a step, as measured; null before the third step."""
    rows: str
    """Rows that the prediction is for, in words."""
    basis: str
    """What the prediction stands on, in words."""
    tasks: list[PlannedTask]
    """Calls of the step, in the order of the plan; those that were not planned come last."""
    pools: list[PlannedPool]
    """Pools of the plan and of the recipe."""


class Plan(Answer):
    """The plan of a run."""

    plan: RunPlan | None
    """The plan; null where the recipe of the run has none."""


class SampledCall(Answer):
    """One call of a session."""

    number: Int32
    """Of the session, from 0, in the order in which calls ended."""
    num_added_tokens: Int32
    """Tokens of its prompt behind the call that it continues; of the first, its whole prompt."""
    num_sampled_tokens: Int32
    """Tokens that it sampled."""
    use: CallUseWord
    """What training does with them."""


class SampledSession(Answer):
    """What people are told of an agent's session beside one of its rows."""

    prompt_id: Int64
    """Prompt that it answers; with sample_index it tells sessions of a step apart."""
    sample_index: Int64
    """Which of the prompt's trajectories it is."""
    branch: Int32
    """Number of the row's branch in its session, from 0."""
    num_branches: Int32
    """Branches of the session that are rows."""
    attempts: Int32
    """How often the trajectory was begun: the attempts before the last one failed."""
    calls: list[SampledCall]
    """Calls of the branch in order."""
    left_out: list[SampledCall]
    """Calls of the session that are in no row. Of branch 0 alone."""
    log: str
    """Last of what the agent wrote, at most 16 KiB. Of branch 0 alone."""


class SampledImage(Answer):
    """An image of a prompt."""

    sha256: str
    """SHA-256 of the file, as hex digits."""
    num_bytes: Int64
    """Bytes of the file."""
    url: str
    """The file as a data URL; empty where an earlier sample of the step has it, or the file is only
    named: the fifth of a prompt, one of more than 256 KiB, what exceeds 1 MiB a step."""


class Sample(Answer):
    """One trajectory for people."""

    row: Int64
    """Row of the batch."""
    prompt: str
    """The prompt as text."""
    completion: str
    """The completion as text."""
    answer: str
    """The expected answer, when the data has one."""
    reward: Number
    """Its reward."""
    policy_version: Int64
    """Version of the weights that sampled its first token."""
    token_ids: list[Int64]
    """Ids of the completion's tokens."""
    logprobs: list[Number]
    """Natural log-prob of each token under the weights that sampled it."""
    loss_mask: list[bool]
    """Whether each token is the policy's own; tool output is not."""
    advantages: list[Number]
    """Advantage of each token; empty where the algorithm has none."""
    reward_parts: dict[str, Number]
    """Parts of its reward by "<source>/<part>"."""
    session: SampledSession | None
    """Session of the agent that made it; null where no agent did."""
    images: list[SampledImage]
    """Images of the prompt in its order, at most 64."""
    has_large_images: bool
    """Whether the prompt has images that are not told of: together they have more than 16 MiB."""


class SampleList(Answer):
    """Trajectories of a step."""

    step: Int64
    """The step; 0 when there is none."""
    samples: list[Sample]
    """Some of its trajectories."""
    steps: list[Int64]
    """Steps of which samples are kept, ascending."""


class LayerLoads(Answer):
    """Loads of the experts of one layer."""

    layer: Int32
    """Number of the layer in the model, from 0."""
    choices: list[Int64]
    """How often each expert was chosen for a completion token."""


class RoleLoads(Answer):
    """Loads of the experts of one role's model."""

    role: str
    """The role, e.g. "actor"."""
    layers: list[LayerLoads]
    """One entry for each layer with experts, ascending; all have equally many experts."""


class ExpertLoads(Answer):
    """Loads of experts in a step."""

    step: Int64
    """The step; 0 when there is none."""
    roles: list[RoleLoads]
    """Each trained role whose model is a mixture, by name."""
    steps: list[Int64]
    """Steps of which loads are kept, ascending."""


class DeviceUseSeries(Answer):
    """One device over time."""

    service: str
    """Service that uses it."""
    rank: Int32
    """Rank within the service."""
    device: str
    """Device, e.g. "cpu" or "cuda:0"."""
    times: list[Time]
    """When it was looked at."""
    busy: list[Number]
    """Share of time that it computed since the look before, 0 to 1."""
    memory_bytes: list[Int64]
    """Bytes in use: of the GPU by all processes, of a CPU by the process."""
    memory_total_bytes: Int64
    """Bytes that there are."""


class DeviceUse(Answer):
    """How busy devices were."""

    devices: list[DeviceUseSeries]
    """By device."""


class Alert(Answer):
    """Something that deserves attention."""

    level: AlertLevelWord
    """How pressing it is."""
    rule: str
    """Stable name of the rule, e.g. "ROLE_WAITS"."""
    text: str
    """What is the matter, in plain words."""
    remedy: str
    """What to do about it."""


class AlertList(Answer):
    """What deserves attention."""

    alerts: list[Alert]
    """The most pressing first."""


class LogPiece(Answer):
    """A piece of a log."""

    text: str
    """Text from `offset`; bytes that are no UTF-8 are replaced."""
    offset: Int64
    """Offset of the first byte."""
    next_offset: Int64
    """Offset after the last byte: where to go on."""
    logs: list[str]
    """Names of all logs of the run."""


class RegisteredService(Answer):
    """A service that the coordinator knows."""

    role: str
    """Role, e.g. "actor"."""
    address: str
    """Address, "host:port"."""
    pid: Int64
    """Process id on its host, 0 when not known."""
    lease_until: Time
    """Until when its lease holds."""
    status: str
    """What it last said of itself, in plain words."""
    run_id: str
    """Run that it takes part in."""
    name: str
    """Its name in that run, e.g. "actor" or "rollout-1"."""


class ServiceList(Answer):
    """Services."""

    services: list[RegisteredService]
    """By role."""
