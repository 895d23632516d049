"""A PPO step of ours against one of TRL's, on the same model, prompts and settings, on a CPU.

    make bench-peers                                             # makes .venv-peers, runs all
    python tests/benchmarks/ppo_against_trl.py [--model FOLDER] [--rounds 1] [--steps 5]

Ours is a real run of the command line (four services, vLLM as sampler); TRL's is the experimental
PPOTrainer of its release 1.12.0, the last that has one. Both sample the same prompts as often, have
actor, critic and reference of the same size, the same reward function, a KL in the reward, and make
one optimizer step of all rows. Prints one JSON line; peers/README.md says what it holds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from peers.side_by_side import ENVIRONMENT, FOLDER, Peer, Recipe, measure, our_recipe, parsed

TRL = Peer("trl", FOLDER / "trl_ppo.py", extra_path=ENVIRONMENT / "ppo")


def recipe(options: argparse.Namespace, questions: Path) -> Recipe:
    """PPO as TRL makes it: one epoch, all rows in one mini-batch."""
    algorithm: Recipe = {
        "type": "ppo",
        "advantages": {"lam": 0.95, "kl_in_reward": {"type": "fixed", "coefficient": options.kl}},
        "epochs": 1,
        "mini_batch_rows": options.prompts * options.samples,
    }
    sections = our_recipe(options, questions, algorithm)
    critic: Recipe = {"optimizer": dict(sections["actor"]["optimizer"])}
    return {**sections, "critic": critic, "reference": {}}


def main() -> None:
    options = parsed((__doc__ or "").splitlines()[0], kl=0.05, peer_rows=12)
    print(json.dumps(measure("ppo_against_trl", options, TRL, recipe)))


if __name__ == "__main__":
    main()
