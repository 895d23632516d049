"""Makes a judge of form: a small reward model, trained here in minutes, without a model hub.

It scores a bare number near 1, and any other completion near 0. It cannot tell whether the number
is right. It knows only the prompts of the quickstart::

    python -m rolemesh.quickstart.form_judge \
        --model .models/SmolLM2-135M-Instruct --out .models/form-judge
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from rolemesh.engine.data.prompts import PromptSet, load_rows
from rolemesh.engine.model_folders.model_files import WEIGHTS_FILE
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring_model import ScoreHead, ScoringModel
from rolemesh.engine.packing.packed_rows import pack_rows, whole_rows
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, ReasoningGymSpec
from rolemesh.engine.train.optimizers.gradients import Gradients
from rolemesh.engine.train.optimizers.optimizer import Optimizer, warmed_up
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError, whole_folder
from rolemesh.quickstart.form_examples import KINDS, NUMBER_KINDS, Kind, completion

PROMPTS = ReasoningGymSpec(
    task="basic_arithmetic",
    config={
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    train_size=512,
    held_out_size=64,
    system_prompt="Answer with only the number.",
    question_template="{expression} = ?",
    assistant_prefix="{expression} =",
)
"""Fewer of the prompts of recipes/classifier-reward-ppo.yaml."""
THRESHOLD = 0.5
"""A higher score means "a bare number": the targets are 1 and 0."""
REPORT_FILE = "judge.json"
"""File in the judge's folder that says how it was made, and how accurate it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTraining:
    """Settings of the judge's training."""

    num_layers: int = 3
    """Layers of the language model that the judge keeps, from the first; form needs few."""
    steps: int = 200
    """Optimizer steps."""
    rows_per_step: int = 32
    """Completions a step, half of them bare numbers."""
    learning_rate: float = 5e-4
    """Peak after a warm-up; then it falls linearly to 0."""
    draws_per_kind: int = 100
    """Held-out completions of each kind on which the judge is examined."""
    min_accuracy: float = 0.9
    """Least accuracy on held-out completions of every kind; a weaker judge is not written."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ValueError(f"{field.name} is {value}: give a number greater than 0")


_WARMUP_STEPS = 10
"""Adam's first steps are as large as its rate, whatever the gradient."""


def write_judge(
    directory: Path,
    *,
    model: Path,
    seed: int = 0,
    training: JudgeTraining | None = None,
    report: Callable[[str], None] = print,
) -> Mapping[Kind, float] | None:
    """Trains a judge and writes it as a Hugging Face sequence classifier with one label.

    The same arguments give the same weights on one machine, for one number of threads.

    Args:
        directory: Target; not changed if it holds a judge already.
        model: Folder of the language model whose first layers the judge starts from.
        seed: Seed of the head's first weights and of every draw.
        training: Settings; None takes the tested ones.
        report: Called with a line of text from time to time.

    Returns:
        Share of held-out completions judged right, by kind; None when the folder was there.

    Raises:
        ModelFolderError: The model's folder is missing or not whole.
        ValueError: The model has fewer layers, or some kind is judged worse than
            training.min_accuracy; nothing is written.
        FolderExistsError: The target exists and holds something else.
    """
    directory, model = Path(directory), Path(model)
    training = training or JudgeTraining()
    if all((directory / name).is_file() for name in (REPORT_FILE, "config.json", WEIGHTS_FILE)):
        return None
    if directory.exists():
        raise FolderExistsError(
            f"directory {str(directory)!r} holds something else than a judge: give another one, "
            "or remove it"
        )
    spec = ModelSpec(path=model, num_layers=training.num_layers)
    with torch.random.fork_rng(devices=[]):
        # The loader draws the head's weights from the global generator.
        torch.manual_seed(derive_seed("form_judge", seed))
        judge = ScoringModel(spec, ScoreHead(per="row", origin="new", starts_at_zero=False))
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    train_prompts, held_out_prompts = _prompts(tokenizer)
    # Entered before the training, so that a folder that cannot be written fails at once.
    with whole_folder(directory) as temporary:
        _train(
            judge,
            tokenizer,
            train_prompts,
            training=training,
            seed=seed,
            report=report,
        )
        judge.lm.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # Examined from the folder, as the reward service will load it.
        accuracy = accuracy_by_kind(
            Classifier(ModelSpec(path=temporary)),
            held_out_prompts,
            draws=training.draws_per_kind,
            seed=derive_seed("held_out", seed),
        )
        _refuse_weak(accuracy, training.min_accuracy)
        summary = {
            "held_out_accuracy": dict(accuracy),
            "model": model.name,
            "seed": seed,
            "training": dataclasses.asdict(training),
        }
        (temporary / REPORT_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    return accuracy


def _refuse_weak(accuracy: Mapping[Kind, float], least: float) -> None:
    weak = {kind: round(share, 3) for kind, share in accuracy.items() if share < least}
    if weak:
        raise ValueError(
            f"held-out accuracy is below {least} for {weak}: nothing was written; train longer "
            "(--steps), or give the judge more layers (--layers)"
        )


def _prompts(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Rendered prompts to train on, and held-out ones; both end with the equals sign."""
    rows = PromptSet(*load_rows(PROMPTS), tokenizer=tokenizer, seed=PROMPTS.seed)
    train = rows.slice("train", 0, PROMPTS.train_size)
    held_out = rows.slice("held_out", 0, PROMPTS.held_out_size)
    return [prompt.text for prompt in train], [prompt.text for prompt in held_out]


def _train(
    judge: ScoringModel,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    training: JudgeTraining,
    seed: int,
    report: Callable[[str], None],
) -> None:
    # The embeddings are trained already, and are most of the weights.
    judge.lm.get_input_embeddings().requires_grad_(False)
    peak = training.learning_rate
    optimizer = Optimizer(OptimizerSpec(learning_rate=peak), Gradients(RankModel(judge)))
    draw = random.Random(derive_seed("draws", seed))
    other_kinds = [kind for kind in KINDS if kind not in NUMBER_KINDS]
    for step in range(training.steps):
        kinds = [
            draw.choice(NUMBER_KINDS if row % 2 else other_kinds)
            for row in range(training.rows_per_step)
        ]
        texts = [draw.choice(prompts) + completion(kind, draw, held_out=False) for kind in kinds]
        # The same as Classifier computes, with gradients.
        scores_B = judge(pack_rows(whole_rows(tokenizer(texts)["input_ids"]), judge.device))
        target_B = torch.tensor([float(kind in NUMBER_KINDS) for kind in kinds])
        # Squared error on the logit itself: cross-entropy would move the two classes apart without
        # end, but the scale of a reward should not depend on the length of the training.
        loss = functional.mse_loss(scores_B, target_B)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(warmed_up(peak, step, _WARMUP_STEPS) * (1 - step / training.steps))
        if (step + 1) % 20 == 0 or step + 1 == training.steps:
            right = ((scores_B > THRESHOLD) == (target_B > THRESHOLD)).float().mean()
            report(f"step {step + 1}/{training.steps}: loss {loss.item():.4f}, {right:.2f} right")


def accuracy_by_kind(
    classifier: Classifier, prompts: Sequence[str], *, draws: int, seed: int
) -> Mapping[Kind, float]:
    """Examines a judge on completions with words and numbers that it was not trained on.

    Args:
        classifier: The judge.
        prompts: Rendered prompts to put before the completions.
        draws: Completions of each kind.
        seed: Seed of the draws.

    Returns:
        Share of completions on the right side of THRESHOLD, by kind.
    """
    draw = random.Random(seed)
    accuracy: dict[Kind, float] = {}
    for kind in KINDS:
        texts = [draw.choice(prompts) + completion(kind, draw, held_out=True) for _ in range(draws)]
        says_number_B = classifier.score(classifier.encode(texts)) > THRESHOLD
        accuracy[kind] = float((says_number_B == (kind in NUMBER_KINDS)).float().mean())
    return accuracy


def main(arguments: list[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    tested = JudgeTraining()
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.quickstart.form_judge", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="language model to start from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice")
    parser.add_argument("--layers", type=int, default=tested.num_layers, help="layers to keep")
    parser.add_argument("--steps", type=int, default=tested.steps, help="optimizer steps")
    options = parser.parse_args(arguments)
    # Otherwise its report would list every layer that is left out on purpose.
    transformers_logging.set_verbosity_error()
    try:
        accuracy = write_judge(
            options.out,
            model=options.model,
            seed=options.seed,
            training=JudgeTraining(num_layers=options.layers, steps=options.steps),
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for kind, share in (accuracy or {}).items():
        print(f"held-out accuracy, {kind:<18} {share:.3f}")
    print(f"{options.out}: {'there already' if accuracy is None else 'written'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
