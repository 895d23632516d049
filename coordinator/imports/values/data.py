"""Values of data, rewards and outputs: what becomes of those of the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rolemesh.coordinator.imports.draft import Draft
from rolemesh.coordinator.imports.source import Source
from rolemesh.coordinator.imports.values.batch import batch
from rolemesh.coordinator.imports.values.choices import choice
from rolemesh.coordinator.imports.values.models import ROLLOUT, place

NO_DATA = {"type": "parquet", "path": "FILL-IN/train.parquet"}
NO_REWARD = "python:FILL-IN/rewards.py:reward"
_KEPT = 2
"""Fewest checkpoints that a run keeps."""

Data = tuple[dict[str, Any], str]
"""The section, and what is said of it."""


def _rows(path: str, columns: dict[str, str], kind: str = "hf_dataset") -> dict[str, Any]:
    """A source of rows, of a kind that the end of its name may tell."""
    if path.endswith((".jsonl", ".json")):
        kind = "jsonl"
    elif path.endswith(".parquet"):
        kind = "parquet"
    found: dict[str, Any] = {"type": kind, "path": place(path)}
    return {**found, "columns": columns} if columns else found


def _mixed(sources: list[dict[str, Any]], weights: list[float], bound: int) -> Data:
    if len(sources) == 1:
        return {**sources[0], "max_prompt_tokens": bound}, ""
    weighted = [
        {"data": one, "weight": weight} for one, weight in zip(sources, weights, strict=True)
    ]
    made = {"type": "mixture", "max_prompt_tokens": bound, "sources": weighted}
    return made, "weight is a source's share of the rows: give it by how many rows each one has."


def verl_data(source: Source) -> Data | None:
    """The data of verl: files, of which each has rows of its own."""
    files = source.texts("data.train_files") if source.given("data.train_files") else []
    held = source.texts("data.val_files") if source.given("data.val_files") else []
    prompt = source.text("data.prompt_key") or "prompt"
    columns = {"prompt": prompt, "answer": "reward_model.ground_truth"}
    if not files:
        return None
    sources = [_rows(path, columns, "parquet") for path in files]
    if held and len(held) == len(sources):
        for one, path in zip(sources, held, strict=True):
            one["held_out_path"] = place(path)
    elif held:
        # One file of several sources' rows is that of the first.
        sources[0]["held_out_path"] = place(held[0])
        if len(held) > 1:
            source.lose("data.val_files", "each file of training rows has one of held-out rows")
    return _mixed(sources, [1.0] * len(sources), batch(source).prompt_tokens)


def openrlhf_data(source: Source) -> Data | None:
    """The data of OpenRLHF: files, folders, or names at the hub."""
    given = source.texts("data.prompt_dataset")
    prompt, label = source.text("data.input_key") or "input", source.text("data.label_key")
    columns = {"prompt": prompt} | ({"answer": label} if label else {})
    split, held = source.text("data.prompt_split"), source.text("eval.dataset")
    weights = [float(one) for one in source.texts("data.prompt_probs")]
    if not given:
        return None
    # A name may have a loader before it: json@folder.
    sources = [_rows(path.rpartition("@")[2], columns) for path in given]
    for one in sources:
        if one["type"] == "hf_dataset" and split and split != "train":
            one["split"] = split
    if held and sources[0]["type"] != "hf_dataset":
        sources[0]["held_out_path"] = place(held)
    elif held:
        source.lose(
            "eval.dataset",
            "held-out rows of a data set are a split of it (held_out_split), or drawn from it "
            "(held_out_size)",
        )
    if len(weights) != len(sources):
        weights = [1.0] * len(sources)
    return _mixed(sources, weights, batch(source).prompt_tokens)


def trl_data(source: Source) -> Data | None:
    """The data of TRL's scripts: a data set of the hub, or a folder."""
    name, config = source.text("dataset_name"), source.text("dataset_config")
    split, held = source.text("dataset_train_split"), source.text("dataset_test_split")
    if not name:
        return None
    prompt = source.text("dataset_prompt_column")
    made = _rows(name, {"prompt": prompt} if prompt else {})
    if made["type"] == "hf_dataset":
        if config:
            is_hub = made["path"].startswith("hf:")
            made |= {"path": f"{made['path']}:{config}"} if is_hub else {"name": config}
        if split and split != "train":
            made["split"] = split
        if held and source.text("eval_strategy") not in (None, "no"):
            made["held_out_split"] = held
    return _mixed([made], [1.0], batch(source).prompt_tokens)


def put_data(draft: Draft, made: Data) -> None:
    """Puts the section."""
    draft.put("actor.data", made[0], made[1] or None)


# Rewards


def _classifier(path: str) -> dict[str, Any]:
    return {"type": "classifier", "model": {"path": place(path)}}


def verl_reward(source: Source) -> Any:
    """A function of the user's, or a model; verl's own scorers are none that exist here."""
    function, name = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
    model, enabled = "reward.reward_model.model_path", source.flag("reward.reward_model.enable")
    path, called = source.text(function), source.text(name)
    if choice(source).estimator_type == "gdpo":
        source.lose(function, "its parts are sources of their own here")
        return _parts(source)
    judged = source.text(model) if source.given(model) else None
    if path:
        if enabled:
            source.lose(
                "reward.reward_model.enable",
                "verl's function asks the model itself: serve it apart, and ask it there",
            )
        return f"python:{path}:{called}"
    if not enabled:
        source.lose(model, "the model is not enabled")
        return None
    return {"source": _classifier(judged)} if judged else None


def _parts(source: Source) -> list[dict[str, Any]]:
    """A reward for each part that one function of verl's gives."""
    keys = source.texts("algorithm.gdpo_reward_keys") or ["one", "other"]
    weights = source.numbers("algorithm.gdpo_reward_weights")
    source.say(
        "gdpo: verl's function gives all parts of a reward in one mapping; here each is a source. "
        "verl divides by the deviation over tokens, here it is one over completions"
    )
    if len(weights) != len(keys):
        weights = [1.0] * len(keys)
    plain = [re.sub(r"\W", "_", key) for key in keys]
    return [
        {"source": f"python:FILL-IN/rewards.py:{name}", "weight": weight, "name": name.lower()}
        for name, weight in zip(plain, weights, strict=True)
    ]


def openrlhf_reward(source: Source) -> Any:
    """Servers, functions or models; several make a sum."""
    made: list[Any] = []
    for url in source.texts("reward.remote_url"):
        if url.startswith(("http://", "https://")):
            made.append(url)
        elif url.endswith(".py"):
            made.append(f"python:{url}:reward_func")
        else:
            source.lose("reward.remote_url", "neither a URL nor a file of Python")
    if not made:
        made = [_classifier(path) for path in source.texts("reward.model_name_or_path")]
    else:
        source.lose("reward.model_name_or_path", "reward.remote_url is given, and judges")
    if len(made) == 1:
        return {"source": made[0]} if isinstance(made[0], dict) else made[0]
    return [{"source": one} for one in made] or None


_TRL_OWN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def trl_reward(source: Source) -> Any:
    """Functions by their dotted names, those of TRL by its package, and a model."""
    functions, weights = source.texts("reward_funcs"), source.numbers("reward_weights")
    model = source.text("reward_model_name_or_path")
    made: list[Any] = [_classifier(model)] if model else []
    for name in functions:
        if name == "get_soft_overlong_punishment":
            source.lose(
                "reward_funcs", f"{name} is algorithm.advantages.overlong here: set it by hand"
            )
            continue
        module, _, last = name.rpartition(".")
        if name in _TRL_OWN:
            module = "trl.rewards"
            source.say(f"{name} is TRL's own: the reward service needs TRL installed")
        elif not module:
            module = "FILL-IN/rewards.py"
        made.append(f"python:{module}:{last}")
    if not made and choice(source).estimator_type == "gdpo":
        made = [f"python:FILL-IN/rewards.py:{name}" for name in ("one", "other")]
    if not made:
        return None
    if len(weights) == len(made):
        return [{"source": one, "weight": w} for one, w in zip(made, weights, strict=True)]
    if len(made) == 1:
        return made[0] if isinstance(made[0], str) else {"source": made[0]}
    return [{"source": one} for one in made]


# Outputs


def _in_steps(source: Source, value: float | None, optimizer_steps: bool) -> int:
    """An interval in steps of the run; 0 for none."""
    if value is None or value <= 0:
        return 0
    if not optimizer_steps:
        return max(1, int(value))
    numbers = batch(source)
    if value < 1:
        return max(1, round(value * numbers.steps))
    return max(1, int(value) // numbers.updates)


def every(name: str, kind: str = "") -> Callable[[Source], int | None]:
    """Takes an interval; of TRL one in optimizer steps, where `kind` says that there is one."""

    def take(source: Source) -> int | None:
        value = source.number(name)
        if source.system != "trl":
            return _in_steps(source, value, False)
        strategy, passes = source.text(kind), source.number("num_train_epochs") or 1
        if strategy in ("no", "steps"):
            return 0 if strategy == "no" else _in_steps(source, value, True)
        if strategy == "epoch" and not batch(source).unknown and not source.whole("max_steps"):
            return max(1, round(batch(source).steps / passes))
        source.lose(kind, "intervals are steps here")
        return None

    return take


def evaluated(source: Source) -> int | None:
    """How many held-out prompts are answered; None: as many as by default."""
    if source.system == "verl":
        most = source.whole("data.val_max_samples")
        has_rows = source.given("data.val_files")
        return 0 if not has_rows else most if most and most > 0 else None
    if source.system == "openrlhf":
        return None if source.given("eval.dataset") else 0
    return None if source.text("eval_strategy") not in (None, "no") else 0


def put_evaluated(draft: Draft, number: int) -> None:
    """Puts the number; with none, nothing is evaluated."""
    draft.put("run.evaluation.num_prompts", number)
    if number == 0:
        draft.put("run.evaluation.every_steps", 0)


def drawn(source: Source) -> int | None:
    """Completions of a held-out prompt."""
    name = {
        "verl": f"{ROLLOUT}val_kwargs.n",
        "openrlhf": "eval.n_samples_per_prompt",
        "trl": "num_generations_eval",
    }[source.system]
    number = source.whole(name) if source.given(name) else None
    return number if number and number > 1 else None


def kept(name: str) -> Callable[[Source], int | None]:
    """Takes how many checkpoints stay."""

    def take(source: Source) -> int | None:
        number = source.whole(name)
        if number is not None and number < _KEPT:
            source.lose(name, f"{_KEPT} stay at least, so that one is left if one is damaged")
        return None if number is None else max(_KEPT, number)

    return take


def run_name(source: Source) -> str:
    """A short name of the run, in the letters that one may have."""
    names = {
        "verl": "trainer.experiment_name",
        "openrlhf": "logger.wandb.run_name",
        "trl": "run_name",
    }
    name = names[source.system]
    given = source.known_part(name) if source.given(name) else ""
    plain = re.sub(r"[^a-z0-9]+", "-", given.lower()).strip("-")[:60].strip("-")
    return plain or f"from-{source.system}"


_ALWAYS = ("console", "tensorboard", "none", "file")


def trackers(source: Source) -> list[dict[str, Any]] | None:
    """Trackers; the terminal, TensorBoard's files and metrics.jsonl are always there."""
    named = {"verl": "trainer.logger", "trl": "report_to"}
    projects = {
        "verl": "trainer.project_name",
        "openrlhf": "logger.wandb.project",
        "trl": "project",
    }
    project_name = projects[source.system]
    project = source.known_part(project_name) if source.given(project_name) else None
    found: list[dict[str, Any]] = []
    if source.system == "openrlhf":
        kinds = ["wandb"] if source.given("logger.wandb.key") else []
        if kinds:
            source.lose("logger.wandb.key", "give it as the variable WANDB_API_KEY")
    else:
        # Another system's tracker is none that was asked for by leaving it out.
        is_given = source.given(named[source.system])
        kinds = source.texts(named[source.system]) if is_given else []
    if kinds and all(kind in _ALWAYS for kind in kinds):
        source.lose(
            named[source.system],
            "the terminal, metrics.jsonl and TensorBoard's files are always there",
        )
    for kind in kinds:
        if kind in ("wandb", "swanlab", "trackio"):
            found.append({"type": kind} | ({"project": project} if project else {}))
        elif kind == "mlflow":
            source.lose(named[source.system], "mlflow needs the address of its server: add it")
        elif kind not in _ALWAYS:
            source.lose(named[source.system], f"{kind} is a tracker of your own here, if at all")
    if found and found[0]["type"] == "wandb" and source.system == "openrlhf":
        for key, name in (("entity", "logger.wandb.org"), ("group", "logger.wandb.group")):
            value = source.text(name)
            if value:
                found[0][key] = value
    return found or None
