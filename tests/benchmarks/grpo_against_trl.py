"""A GRPO step of ours against one of TRL's, on the same model, prompts and settings, on a CPU.

    make bench-peers                                             # makes .venv-peers, runs all
    python tests/benchmarks/grpo_against_trl.py [--model FOLDER] [--rounds 1] [--adapter RANK]

Ours is a real run of the command line (services of actor and reward, vLLM as sampler); TRL's is
GRPOTrainer with transformers as sampler, its own way without a GPU. Both sample the same prompts as
often, have the same reward function, and make one optimizer step of all rows; neither has a
reference model, unless --kl asks both for one. With --adapter both train LoRA of that rank beside
all matrices of the layers. Prints one JSON line; peers/README.md says what it holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from peers.side_by_side import FOLDER, Peer, Recipe, measure, our_recipe, parsed

TRL = Peer("trl", FOLDER / "trl_grpo.py")


def recipe(options: argparse.Namespace, questions: Path) -> Recipe:
    """GRPO as TRL's loss_type "grpo": token means of rows, groups scaled by their deviation."""
    loss: Recipe = {"aggregation": "seq_mean_token_mean", "kl_in_loss": options.kl}
    algorithm: Recipe = {
        "type": "grpo",
        "policy_loss": loss,
        "epochs": 1,
        "mini_batch_rows": options.prompts * options.samples,
    }
    sections = our_recipe(options, questions, algorithm)
    return {**sections, "reference": {}} if options.kl > 0 else sections


def main() -> None:
    options = parsed((__doc__ or "").splitlines()[0], kl=0.0, peer_rows=0, may_adapt=True)
    print(json.dumps(measure("grpo_against_trl", options, TRL, recipe)))


if __name__ == "__main__":
    main()
