"""A training loop of one's own: services sample and train, prompts and rewards are this program's.

Usage, with a run whose recipe has the algorithm {type: external}, like own.yaml of docs/sdk.md:

    rolemesh train own.yaml --run-id my-run --set api.grpc_port=50055   # in another terminal
    python examples/own_loop.py 127.0.0.1:50055 my-run                  # once "actor is ready"

The policy learns to write letters of the first half of the alphabet. Needs no torch here.
"""

from __future__ import annotations

import sys

import numpy as np

from rolemesh.coordinator.sdk import Client, ColumnData, Columns, Mesh

PROMPTS = list("abcdefgh")
SAMPLES_PER_PROMPT = 8
LENGTH = 6


def reward_of(completion: str) -> float:
    """The share of a full word that is letters from A to M."""
    return sum("A" <= letter <= "M" for letter in completion) / LENGTH


def train(mesh: Mesh, num_steps: int) -> list[float]:
    """Makes steps of GRPO (arXiv 2402.03300); returns the mean reward of each."""
    actor = mesh["actor"]
    curve = []
    for _ in range(num_steps):
        batch = actor.sample(PROMPTS, samples_per_prompt=SAMPLES_PER_PROMPT, max_new_tokens=LENGTH)
        completions = mesh.fetch(batch, ["completion_text"])["completion_text"].strings()
        rewards = np.array([reward_of(text) for text in completions], np.float32)

        batch |= actor.put(Columns({"rewards": ColumnData.row(rewards)}))
        batch |= actor.compute_advantages(batch, "grpo")
        actor.forward_backward(batch, "ppo_policy")
        update = actor.optim_step()

        curve.append(float(rewards.mean()))
        # Shown on the dashboard, and kept in the run's folder like the steps of any run.
        mesh.log(mesh.step, {"reward/mean": curve[-1], **update.report.metrics}, batch)
        norm = update.report.metrics["grad_norm"]
        print(f"step {mesh.step}: reward {curve[-1]:.3f}, gradient {norm:.3f}")
        mesh.release()  # services hold experience until this call
        mesh.begin_step()
    return curve


def main(arguments: list[str]) -> None:
    """Takes over a run and drives it."""
    coordinator, run_id = arguments
    with Client(coordinator) as client, client.attach(run_id) as mesh:
        train(mesh, num_steps=40)
        client.stop_run(run_id)


if __name__ == "__main__":
    main(sys.argv[1:])
