"""Numbers of a step in the units of a recipe: completions, steps of the run, tokens of a pass.

The others count otherwise: verl's mini-batches hold prompts, TRL counts batches of a device and
optimizer steps, OpenRLHF counts passes over the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rolemesh.coordinator.imports.source import ImportedError, Source
from rolemesh.coordinator.imports.values.trl_trainers import trl_trainer

SOME_STEPS = 100
"""In the place of a number of steps that depends on how much data there is."""
_SOME_PROMPT_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step is made of."""

    prompts: int
    group: int
    """Completions of a prompt."""
    mini_rows: int
    """Completions of an optimizer step."""
    epochs: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    """Of the run."""
    unknown: str = ""
    """Why `steps` is none that the source says; empty: it is."""

    @property
    def updates(self) -> int:
        """Optimizer steps of one step."""
        return self.epochs * -(-self.prompts * self.group // self.mini_rows)

    @property
    def whole_tokens(self) -> int:
        """Longest prompt and completion together."""
        return self.prompt_tokens + self.new_tokens

    def optimizer_steps(self) -> int:
        """Of the run."""
        return self.steps * self.updates


def batch(source: Source) -> Batch:
    """The numbers of what a source says."""
    makers = {"verl": _of_verl, "openrlhf": _of_openrlhf, "trl": _of_trl}
    return source.once(makers[source.system])


def _positive(source: Source, field: str) -> int:
    value = source.whole(field)
    if value is None or value < 1:
        raise ImportedError(f"{source.name_of(field)} is {value}: give at least 1")
    return value


def _of_verl(source: Source) -> Batch:
    actor = "actor_rollout_ref.actor"
    mini = _positive(source, f"{actor}.ppo_mini_batch_size")
    if source.whole("data.train_batch_size") == 0 and source.given("rollout.total_rollout_steps"):
        prompts, sampled = _asynchronous(source, mini)
    else:
        prompts, sampled = _positive(source, "data.train_batch_size"), None
    group = _positive(source, "actor_rollout_ref.rollout.n")
    if mini > prompts and source.given(f"{actor}.ppo_mini_batch_size"):
        source.lose(f"{actor}.ppo_mini_batch_size", f"a step has {prompts} prompts: that is taken")
        mini = prompts
    steps, unknown = source.whole("trainer.total_training_steps"), ""
    if steps is None and sampled is not None:
        steps = max(1, sampled // prompts)
    elif steps is None:
        passes = _positive(source, "trainer.total_epochs")
        steps, unknown = _steps_of_passes(source, passes, prompts, "trainer.total_epochs")
        warmup = source.whole(f"{actor}.optim.lr_warmup_steps") or 0
        steps = max(steps, 2 * warmup) if unknown else steps
    elif source.given("trainer.total_epochs"):
        source.lose("trainer.total_epochs", "trainer.total_training_steps is given, and decides")
    return Batch(
        prompts=prompts,
        group=group,
        mini_rows=mini * group,
        epochs=_positive(source, f"{actor}.ppo_epochs"),
        prompt_tokens=_positive(source, "data.max_prompt_length"),
        new_tokens=_positive(source, "data.max_response_length"),
        steps=steps,
        unknown=unknown,
    )


def _asynchronous(source: Source, mini: int) -> tuple[int, int]:
    """Prompts between two updates of the sampler's weights, and prompts of a whole run.

    verl's fully asynchronous trainer has no batch: it trains on mini-batches as they come.
    """
    rule = "async_training."
    batches = source.whole(f"{rule}require_batches") or 1
    updates = source.whole(f"{rule}trigger_parameter_sync_step") or 1
    return mini * batches * updates, _positive(source, "rollout.total_rollout_steps")


def _of_openrlhf(source: Source) -> Batch:
    prompts = _positive(source, "rollout.batch_size")
    group = _positive(source, "rollout.n_samples_per_prompt")
    passes = _positive(source, "train.num_episodes")
    rows = source.options.get("rows")
    most = source.whole("data.max_samples") if source.given("data.max_samples") else None
    if rows is None and most is not None:
        steps, unknown = passes * -(-most // prompts), ""
        source.say(
            f"run.steps counts {most} rows of data ({source.name_of('data.max_samples')}): where "
            "there are fewer, import with --rows"
        )
    else:
        if rows is not None and most is not None:
            source.options["rows"] = min(rows, most)
        steps, unknown = _steps_of_passes(source, passes, prompts, "train.num_episodes")
    whole = _positive(source, "data.max_len")
    new = source.whole("rollout.max_new_tokens")
    prompt = source.whole("data.prompt_max_len")
    if new is None:
        new = max(1, whole - (prompt or whole // 2))
        source.say(
            f"{source.name_of('rollout.max_new_tokens')} is not given: completions get {new} of "
            f"the {whole} tokens of {source.name_of('data.max_len')}, prompts the rest"
        )
    return Batch(
        prompts=prompts,
        group=group,
        mini_rows=min(_positive(source, "train.batch_size"), prompts * group),
        epochs=_positive(source, "train.max_epochs"),
        prompt_tokens=prompt or max(1, whole - new),
        new_tokens=new,
        steps=steps,
        unknown=unknown,
    )


def trl_processes(source: Source) -> int:
    """Processes that train: what the user says, else what a file for TRL's command says."""
    named = source.whole("num_processes")
    return source.options.get("gpus") or named or 1


def _of_trl(source: Source) -> Batch:
    processes = trl_processes(source)
    device = _positive(source, "per_device_train_batch_size")
    accumulated = _positive(source, "gradient_accumulation_steps")
    group = _positive(source, "num_generations")
    # That of GOLD counts prompts, by what the others here say, too.
    is_gold = trl_trainer(source) == "gold"
    rows = None if is_gold else source.whole("generation_batch_size")
    if rows is None:
        rows = device * processes * (source.whole("steps_per_generation") or accumulated)
    if rows % group:
        raise ImportedError(
            f"{source.name_of('num_generations')} is {group}, which does not divide the {rows} "
            f"completions of a generation (per_device_train_batch_size {device}, {processes} "
            "processes): say with --gpus how many processes train, or give another number"
        )
    mini = device * accumulated * processes
    if mini > rows:
        source.lose(
            "gradient_accumulation_steps",
            f"an optimizer step is one of at most the {rows} completions of a step here",
        )
    epochs = _positive(source, "num_iterations")
    mini = min(mini, rows)
    updates = epochs * -(-rows // mini)
    unknown = ""
    most = source.whole("max_steps")
    if most is not None and most > 0:
        steps = -(-most // updates)
        source.lose("num_train_epochs", "max_steps is given, and decides")
    else:
        passes = source.number("num_train_epochs") or 1
        steps, unknown = _steps_of_passes(source, passes, rows // group, "num_train_epochs")
    new = _positive(source, "max_completion_length")
    prompt, context = source.whole("max_prompt_length"), source.whole("vllm_max_model_length")
    if prompt is None:
        prompt = context - new if context and context > new else _SOME_PROMPT_TOKENS
        source.say(f"TRL sets no bound on prompts: those of more than {prompt} tokens are left out")
    return Batch(
        prompts=rows // group,
        group=group,
        mini_rows=mini,
        epochs=epochs,
        prompt_tokens=prompt,
        new_tokens=new,
        steps=steps,
        unknown=unknown,
    )


def _steps_of_passes(source: Source, passes: float, prompts: int, field: str) -> tuple[int, str]:
    """Steps that so many passes over the data make, and why they are not known if they are not."""
    rows = source.options.get("rows")
    if rows is not None:
        return max(1, math.floor(passes * max(1, rows // prompts))), ""
    return SOME_STEPS, (
        f"{source.title} makes {source.name_of(field)} = {passes:g} passes over the data: so many "
        f"times its rows / {prompts}; import with --rows N, the rows of the data, to have it here"
    )


def warmup_steps(source: Source, given: float | None, share: float | None, unit: int) -> int:
    """Optimizer steps of a warm-up.

    Args:
        source: Settings.
        given: Steps of the warm-up; None or negative: `share` says it.
        share: Share of all optimizer steps.
        unit: Optimizer steps that the source counts as one.
    """
    numbers = batch(source)
    if given is not None and given >= 0:
        return int(given) * unit
    steps = numbers.optimizer_steps() // unit
    if numbers.unknown and share:
        source.say("A warm-up that is a share counts run.steps: set warmup_steps again with it.")
    found = (
        int((share or 0) * steps)
        if unit > 1 or source.system == "verl"
        else math.ceil((share or 0) * steps)
    )
    return found * unit
