"""The reasons of errors, each with its meaning and its remedy, for the pages and for clients.

The message of an error is more precise: it names the field and the value. Tests hold this table to
the reasons that the code sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reason(NamedTuple):
    """Explanation of a reason."""

    meaning: str
    remedy: str


REASONS: Mapping[str, Reason] = {
    "ABORTED": Reason("The step has to start again, not the call.", "A run does so by itself."),
    "ALREADY_INITIALIZED": Reason(
        "Another run holds the service.",
        "End that run. If its coordinator is dead, try again after 30 s.",
    ),
    "ARITHMETIC_INVALID": Reason(
        "A formula for the calculator cannot be worked out.", "Correct the formula."
    ),
    "ASLEEP": Reason("The service has given its device away.", "Call Wake first."),
    "BODY_TOO_LARGE": Reason("The body of an HTTP request is too long.", "Send a smaller one."),
    "BOX_INVALID": Reason(
        "A part of a weight was asked for that does not exist.",
        "Ask for boxes that the manifest and the layout allow.",
    ),
    "BYTES_OUT_OF_RANGE": Reason(
        "A part of a payload was asked for that begins beyond its end.",
        "Ask for bytes that the payload's header announces.",
    ),
    "CALLER_DENIED": Reason(
        "This member of the mesh, or a token of this scope, may not call the method.",
        "Call with the identity or the token of one that may: the proto names them.",
    ),
    "CALL_IDLE": Reason(
        "A call has told of no progress for the idle time of its method. Its effect is not known.",
        "Read the log of the service: the message says at what it stopped.",
    ),
    "CANCELLED": Reason("One end of the call has cancelled it.", "Call again if you need it."),
    "CAPACITY_EXCEEDED": Reason("A bound on memory, size or number is reached.", "Ask for less."),
    "CHECKPOINT_CAPACITY": Reason(
        "The disk has no room for a checkpoint.",
        "Make room in the folder that the message names, or keep fewer (`run.checkpoint.keep`).",
    ),
    "CHECKPOINT_CORRUPT": Reason(
        "A checkpoint is damaged.",
        "`rolemesh checkpoints DIR --verify` says which are whole; resume from one of these.",
    ),
    "CHECKPOINT_MISMATCH": Reason(
        "A checkpoint is of another model or optimizer.",
        "Give the model that wrote it, or another checkpoint.",
    ),
    "CHECK_INPUT_INVALID": Reason(
        "`rolemesh reward check` cannot use the rows that it was given.",
        "Correct the rows as the message says.",
    ),
    "COLUMN_MISSING": Reason(
        "Rows lack a column that the call needs.",
        "Make the column first: the message names it and the call that gives it.",
    ),
    "COLUMN_NOT_FOUND": Reason(
        "The service holds the rows, but not this column.", "Ask for a column that it holds."
    ),
    "CONFIG_INVALID": Reason(
        "A setting of a service process is wrong.",
        "`rolemesh serve ROLE --help` lists the settings.",
    ),
    "CREATION_UNAVAILABLE": Reason(
        "This coordinator makes one run alone and takes no recipes.",
        "Start one that takes recipes: `rolemesh coordinator`.",
    ),
    "CUT_CAPACITY": Reason(
        "Shared memory has no room for the copy of the state.",
        "Enlarge /dev/shm (`ROLEMESH_SHM_SIZE` in containers), or set `run.recovery.cuts: false`.",
    ),
    "CUT_FAILED": Reason(
        "The device could not copy the state to shared memory.",
        "A run goes on from the copy before; look at the service's log.",
    ),
    "CUT_HELD": Reason("Another process writes or reads this copy of the state.", "Try again."),
    "CUT_MISMATCH": Reason(
        "The copy of the state is of another model or layout.",
        "Go on from a checkpoint, or with the old settings.",
    ),
    "CUT_NOT_FOUND": Reason(
        "There is no copy of the state of this step.", "Go on from a checkpoint."
    ),
    "DATA_EMPTY": Reason(
        "The data has no row, or no row is left after filtering.",
        "Look at the path and at `max_prompt_tokens` and `max_row_tokens`.",
    ),
    "DATA_INVALID": Reason(
        "A row of the data is wrong.", "Correct the row: the message names file, line and field."
    ),
    "DATA_LOSS": Reason("Stored or sent data is damaged.", "Send it or write it again."),
    "DEADLINE_EXCEEDED": Reason(
        "The call took longer than its deadline. Its effect is not known.",
        "Read the log of the service. Give a longer deadline if it only was slow.",
    ),
    "DEADLINE_MISSING": Reason("The call carries no deadline.", "Set a timeout of the call."),
    "DETERMINISM_DIFFERS": Reason(
        "A run that shares the service wants its GPU to sum in another way.",
        "Give `run.deterministic` as the other run has it, or another service.",
    ),
    "DEVICE_MISSING": Reason(
        "The recipe's pool names GPUs, and the service sees none.",
        "Give the service a GPU, as the message says, or name `devices: [cpu]` in the pool.",
    ),
    "ENVIRONMENT_FAILED": Reason(
        "An environment raised, or gave no observation.",
        "Correct the environment: the message names prompt, row and turn.",
    ),
    "EVENTS_EXPIRED": Reason(
        "Events after the given one are no longer kept.", "Read the run, and watch from now on."
    ),
    "EXPERIENCE_CAPACITY": Reason(
        "The service holds as much experience as it may.",
        "Release what is used up, or raise `services.<role>.experience_capacity_mib`.",
    ),
    "EXPERIENCE_NOT_FOUND": Reason(
        "The service does not hold these rows (any more).",
        "Make them again. Rows last until `release`, until the step's end, or a restart.",
    ),
    "FETCH_TOO_LARGE": Reason(
        "The columns are larger than the bound of the call.",
        "Fetch fewer rows or columns at once, or raise `max_bytes`.",
    ),
    "GRADIENT_PENDING": Reason(
        "There are gradients that no optimizer step has used.",
        "Call optim_step before this call.",
    ),
    "HOLDER_UNKNOWN": Reason(
        "The service does not hold such weights.", "Ask for the holder that the message names."
    ),
    "HOST_REFUSED": Reason(
        "A coordinator without a token answers to localhost alone.",
        "Ask http://localhost, or start it with a token.",
    ),
    "INPUT_MISSING": Reason("The request holds no trajectories.", "Set them, or a reference."),
    "INPUT_UNSUPPORTED": Reason(
        "The service does not take this form of input.", "Send the form that the message names."
    ),
    "INTERNAL": Reason(
        "The service failed unexpectedly.",
        "Read the cause in the message, and the traceback in the log of the service.",
    ),
    "KEY_INVALID": Reason(
        "The key of a call is incomplete.", "Give run, epoch, step, operation and number."
    ),
    "KEY_REUSED": Reason(
        "The key of a call was used for another request.",
        "Give every operation of a step its own name or number.",
    ),
    "KIND_INVALID": Reason("The kind of rows to read is not set.", "Set the kind."),
    "LAYOUT_MISMATCH": Reason(
        "The service was started with another layout than the recipe has.",
        "Start it with `--layout` as the message says, or change the recipe.",
    ),
    "LIMIT_EXCEEDED": Reason(
        "A request is larger than any that the mesh needs.",
        "Send less at once: the message names the field, its value and the limit.",
    ),
    "LOG_NOT_FOUND": Reason("The run has no such log.", "Take a name of the message's list."),
    "LOSS_NOT_FINITE": Reason(
        "The loss or the gradient is NaN or infinite. No weight has moved.",
        "Lower the learning rate, look at the rewards, or set `run.health.not_finite`.",
    ),
    "MANIFEST_MISMATCH": Reason(
        "Published weights are of another model than the rollout service has.",
        "Give actor and rollout the same model.",
    ),
    "MEETING_REFUSED": Reason(
        "A host does not fit to the service that it wants to join, or its number is taken.",
        "The message names field, value and remedy: see `--host-rank`, `--hosts` and `--meet`.",
    ),
    "MESSAGE_MALFORMED": Reason(
        "The bytes of a request are not the message that the method takes.",
        "Send what the proto says; both ends may have different versions.",
    ),
    "METHOD_NOT_ALLOWED": Reason(
        "The route exists, but not with this HTTP method.", "Use a method of `allow`."
    ),
    "METRIC_NOT_FINITE": Reason(
        "A metric is NaN or infinite.", "As LOSS_NOT_FINITE; the message names the metric."
    ),
    "NOT_FOUND": Reason("The service does not have what was named.", "Correct the name."),
    "NOT_GRANTED": Reason(
        "The request names code, a path, an address or a variable that the owner of the service, "
        "or of the coordinator that takes recipes, has not granted.",
        "As its owner, start it with the flag that the message gives; else name what is granted.",
    ),
    "NOT_INITIALIZED": Reason(
        "The service has no model or settings yet.", "Call Initialize; a run does so at its start."
    ),
    "NOT_TRAINABLE": Reason(
        "The reward of this run is not trained.",
        "Give it a source of type `classifier`, an optimizer and data.",
    ),
    "NOT_WHOLE": Reason(
        "An earlier failure may have left the service half changed.", "Call Initialize."
    ),
    "NO_GRADIENT": Reason(
        "optim_step was called, but no gradient is there.", "Call forward_backward first."
    ),
    "NO_SAMPLER": Reason(
        "The actor holds no sampler.", "Give `actor.rollout`, or a section `rollout`."
    ),
    "ORIGIN_REFUSED": Reason(
        "A web page of another origin wants to change something.",
        "Use the coordinator's own page, or a client that is no browser.",
    ),
    "OUT_OF_MEMORY": Reason(
        "The memory of a device or of the host is full.",
        "Lower `micro_batch_tokens` first; see docs/sizing.md.",
    ),
    "OUT_OF_RANGE": Reason(
        "A range reaches beyond the rows, steps or bytes that exist.", "Ask for a smaller range."
    ),
    "PAIR_INCOMPLETE": Reason(
        "A pair of completions lacks one of its rows.", "Keep both rows of each pair together."
    ),
    "PASS_AT_INVALID": Reason(
        "pass@k cannot be computed here.",
        "Take a reward with a full score, or leave `pass_at` out.",
    ),
    "PATH_INVALID": Reason(
        "A file or folder does not exist, exists already, or may not be used.",
        "Correct the path. It is one on the host of the service.",
    ),
    "PAYLOAD_MALFORMED": Reason(
        "Bytes that arrived are not what their header says.",
        "Send them as the comments of the protos say.",
    ),
    "PEER_UNREACHABLE": Reason(
        "The other process does not answer.",
        "See that it runs, and at this address. Its log says why it ended.",
    ),
    "PERMISSION_DENIED": Reason("The caller may not do this.", "Ask the owner of the service."),
    "PLACE_TAKEN": Reason(
        "Another service is registered under the role and number of this one.",
        "Give each service of a role a `--number` of its own.",
    ),
    "PRECONDITION_FAILED": Reason(
        "The service is not in the state that the call needs.", "Do first what the message says."
    ),
    "PROMPT_INVALID": Reason("A given prompt is wrong.", "Correct it as the message says."),
    "PROMPT_TOO_LONG": Reason(
        "A prompt leaves the sampler no room for a token.",
        "Raise `rollout.max_model_len`, or filter with `data.max_prompt_tokens`.",
    ),
    "RANKS_DIVERGED": Reason(
        "The ranks of a service no longer fit together, and it ends.",
        "A run goes back and makes the step again.",
    ),
    "RANKS_STARTING": Reason(
        "The ranks of a service have not met yet.",
        "Wait until the service is healthy, and see the logs of its ranks if it does not get so.",
    ),
    "RECIPE_INVALID": Reason("The recipe is wrong.", "Correct the keys that the message names."),
    "REFERENCE_INVALID": Reason(
        "A reference to rows or weights is wrong.", "Pass references on as they came."
    ),
    "REGISTRATION_REFUSED": Reason(
        "What a service says of itself when it registers is wrong, or its version is another one.",
        "Correct the field that the message names; install one version everywhere.",
    ),
    "REQUEST_INVALID": Reason("The request is wrong in itself.", "Correct the named fields."),
    "RESUME_UNAVAILABLE": Reason(
        "This coordinator cannot start the run again.",
        "`rolemesh train --resume DIR`, with the folder of the message.",
    ),
    "REWARD_ANSWER_INVALID": Reason(
        "A reward of yours gave a wrong answer: length, NaN, no number.",
        "`rolemesh reward check URL` shows what is wrong with it.",
    ),
    "REWARD_FAILED": Reason(
        "A reward of yours failed.", "The message has its traceback or its answer: correct it."
    ),
    "REWARD_INVALID": Reason(
        "A reward is not finite, or a row cannot be judged.",
        "Raise in the reward function instead of giving NaN; see `on_failure`.",
    ),
    "REWARD_REFUSED": Reason(
        "A reward server refused the request.", "Its status and answer are in the message."
    ),
    "REWARD_TIMEOUT": Reason(
        "A reward gave no answer in time, in all tries.",
        "Make it faster, or raise `timeout_s` and `deadline_s`.",
    ),
    "REWARD_UNAVAILABLE": Reason(
        "No reward server can be reached.", "Start it; look at the address in the recipe."
    ),
    "ROUTE_NOT_FOUND": Reason("There is no such URL.", "`/docs` of the coordinator lists all."),
    "ROWS_AMBIGUOUS": Reason(
        "Single rows and a range of rows were both given.", "Give one of them."
    ),
    "ROWS_OUT_OF_RANGE": Reason("Rows were named that do not exist.", "Name rows that do."),
    "RUN_ENDED": Reason("The run has ended.", "Resume it, or look at its files."),
    "RUN_EXISTS": Reason("A run of this id exists, with another recipe.", "Choose another id."),
    "RUN_EXTERNAL": Reason(
        "A client makes the steps of this run.", "Ask that client to stop or to save."
    ),
    "RUN_ID_INVALID": Reason(
        "The id of a run has characters that are not allowed.",
        "Give 1 to 128 letters, digits, dots, dashes and underscores; no dot in front.",
    ),
    "RUN_IS_ENDING": Reason("The run has ended, its process has not.", "Try again later."),
    "RUN_MISMATCH": Reason(
        "Another run holds the service.", "Drain the service first, or use another one."
    ),
    "RUN_NOT_ENDED": Reason(
        "The run goes on: its recipe cannot be changed.", "Stop it first, then resume it."
    ),
    "RUN_NOT_EXTERNAL": Reason(
        "The coordinator makes the steps of this run.",
        "Take a recipe with `algorithm: {type: external}` to make them yourself.",
    ),
    "RUN_NOT_FOUND": Reason("There is no such run.", "List the runs; look at the store's URL."),
    "RUN_NOT_READY": Reason(
        "The services of the run cannot be had yet, or no longer.", "Wait until it is running."
    ),
    "RUN_UNNAMED": Reason(
        "Several runs hold the service, and the request names none.", "Name the run."
    ),
    "SAMPLER_ANSWER_INVALID": Reason(
        "A server in `rollout.urls` answered with something else than was asked for.",
        "Look into its log; start it with a version of vLLM that rolemesh was tested with.",
    ),
    "SAMPLER_REFUSED": Reason(
        "A server in `rollout.urls` refused, or was started in a way that it cannot be used.",
        "Start it as the message says.",
    ),
    "SAMPLER_STALE": Reason(
        "The sampler computes with other weights than the trainer's, though it was given them.",
        "Take the other way of rollout.adapters, or rollout type hf, and report it with the log.",
    ),
    "SAMPLER_UNAVAILABLE": Reason(
        "No server in `rollout.urls` can be reached.",
        "Start them; look at the addresses in the recipe.",
    ),
    "SAMPLING_INVALID": Reason(
        "The settings of sampling are wrong.", "Correct them as the message says."
    ),
    "SERVICE_DRAINING": Reason("The service is about to end.", "Try again when it is back."),
    "SLICE_INVALID": Reason(
        "Positions or numbers of prompts are wrong.", "Ask for positions from 0 and for less."
    ),
    "SPEC_CHANGED": Reason(
        "The service holds the run with other settings.", "Call Initialize instead of Attach."
    ),
    "SPEC_INVALID": Reason(
        "The role's section of the recipe is wrong, or its model folder is.",
        "Correct what the message names; `rolemesh check RECIPE` finds most of it before a run.",
    ),
    "SPLIT_INVALID": Reason("The split is not set, or is not there.", "Set the split."),
    "STALE_EPOCH": Reason(
        "A newer coordinator or client has taken the run over.",
        "End the older one: it may not go on. A client that is to drive the run attaches anew.",
    ),
    "START_FAILED": Reason(
        "A service process could not start.", "Its log says why; often the port is in use."
    ),
    "STEP_LOGGED": Reason(
        "The client has logged this step or a later one.",
        "Log all metrics of a step in one call, and steps in order; attach anew to go back.",
    ),
    "STEP_NOT_FOUND": Reason("The step is not kept (any more).", "Take one that is."),
    "STORE_UNAVAILABLE": Reason(
        "The store does not answer.", "See that Redis or Valkey runs, at the URL of the recipe."
    ),
    "TEACHER_FAILED": Reason(
        "A server in `teacher.server.urls` refused a row, or was started in a way that it cannot "
        "be used.",
        "Start it as the message says; see `teacher.server.on_failure`.",
    ),
    "TEACHER_UNAVAILABLE": Reason(
        "No server in `teacher.server.urls` can be reached.",
        "Start them; look at the addresses in the recipe.",
    ),
    "TENSOR_MALFORMED": Reason(
        "A tensor's bytes do not fit its type and shape.", "Send what its header says."
    ),
    "TOKEN_INVALID": Reason(
        "The token is not one of the coordinator's.",
        "See ROLEMESH_API_TOKEN or its file, or `api-token` in the folder of the run.",
    ),
    "TOKEN_IN_QUERY": Reason(
        "A token stands in the query of a URL, which gets into logs.",
        "Send it as the header `authorization: Bearer TOKEN`.",
    ),
    "TOKEN_MISSING": Reason(
        "The coordinator asks for a token.",
        "Send `authorization: Bearer TOKEN`; in the SDK `Client(address, token=...)`.",
    ),
    "TOO_MANY_CALLS": Reason(
        "The service works on as many calls as it may.", "Wait until some have ended."
    ),
    "TOO_MANY_RUNS": Reason(
        "As many runs go on as the coordinator may have.",
        "Wait, stop one, or start it with a greater `--max-runs`.",
    ),
    "TOO_MANY_STREAMS": Reason("Too many event streams are open.", "Close one."),
    "TRACING_UNAVAILABLE": Reason(
        "Traces are asked for, but OpenTelemetry is not installed.",
        "`pip install 'rolemesh[otel]'`, or leave the section `tracing` out.",
    ),
    "TRANSFER_FAILED": Reason(
        "Weights were lost on their way.", "A run starts the step again by itself."
    ),
    "TRANSPORT_MISMATCH": Reason(
        "Two ranks offer each other different ways of transport.",
        "Start all ranks with the same version and the same settings.",
    ),
    "TRANSPORT_UNAVAILABLE": Reason(
        "No way of transport works between two ranks.",
        "The message says what each lacks, e.g. a shared /dev/shm.",
    ),
    "UNIMPLEMENTED": Reason(
        "The peer does not serve this method.", "It is another role or version: see the address."
    ),
    "USER_CODE_INVALID": Reason(
        "A Python file or function that the recipe names cannot be used.",
        "Correct the file; the path is one on the host of the service.",
    ),
    "VALUE_INVALID": Reason("A value makes no sense.", "Correct it as the message says."),
    "VERSION_MISMATCH": Reason("Another call has changed the weights.", "Start the step again."),
    "WEIGHTS_GONE": Reason(
        "This version of the weights is no longer published.",
        "Update to what the actor publishes now.",
    ),
    "WEIGHTS_MISMATCH": Reason(
        "Names or shapes of weights do not fit each other.", "Give both roles the same model."
    ),
    "WEIGHTS_NOT_FINITE": Reason(
        "The trainer's weights give log-probs that are NaN or infinite: nothing can be sampled.",
        "Go back to a checkpoint, and lower the learning rate.",
    ),
    "WEIGHTS_STALE": Reason(
        "The sampler could not take the new weights.", "A run starts the step again by itself."
    ),
}
"""Every reason of an error that leaves a service or a coordinator, in the order of the alphabet."""
