"""A trainer of two ranks, slices or FSDP, and its weights on their way to a sampler. Not run yet.

On one GPU both ranks share it; with more, each takes its own.
"""

# What the machine lacks is a reason to skip, and that must be known before the imports.

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic>=2.12'")
pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.parallel_training import Job, Trained, joined, near_policy, part_of
from support.planned_bytes import planned_received
from support.rank_processes import RankContext, run_ranks
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole
from support.weight_ranks import assert_equal, cut

from rolemesh.engine.hardware.devices import give_back_memory, use_device
from rolemesh.engine.layout.boxes import generate_layout
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.resharding import Resharder

pytestmark = pytest.mark.gpu

MEAN_TOLERANCE = 2e-5
"""Of a weight after a step of 1e-3. AdamW divides by the gradient's own size, so that where it is
tiny the order of sums decides its sign; on average it must not."""
TIMEOUT_S = 300.0
SLICES = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=1))
LAYOUTS = {"slices": SLICES, "fsdp": HybridLayout(TrainLayout(dp=2, fsdp=2), GenerateLayout(tp=1))}
BACKENDS = ["gloo", "cpu:gloo,cuda:nccl"]
"""Gloo takes tensors of a GPU through host memory; NCCL takes the ranks for two hosts, since it
refuses two of them on one device."""


@dataclass
class Result:
    """What a rank has after one update."""

    trained: Trained
    held_bytes: int
    """Device memory of weights, gradients and moments."""
    delivered: dict[str, torch.Tensor]
    """The sampler's tensors; empty without cupy."""


def update(at: RankContext, job: Job, layout: HybridLayout, backend: str, reshard: bool) -> Result:
    os.environ["NCCL_HOSTID"] = f"rolemesh-rank-{at.rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", at.rank % torch.cuda.device_count())
    use_device(device)
    with at.connect(layout, backend=backend, timeout_s=TIMEOUT_S) as mesh:
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated(device)
        trainer = Trainer.policy(
            ModelSpec(path=job.folder, compute_dtype="float32", micro_batch_tokens=24),
            OptimizerSpec(learning_rate=1e-3, eps=1e-6),
            device=device,
            mesh=mesh,
        )
        metrics = update_whole(trainer, job.batch, job.loss, epochs=1, mini_batch_rows=3, seed=5)
        held = torch.cuda.memory_allocated(device) - before
        assert {weight.device for _, weight in trainer.named_weights()} == {device}
        asleep = trainer.move_to(torch.device("cpu"))
        give_back_memory(device)
        assert torch.cuda.memory_allocated(device) - before < held - 0.9 * asleep
        assert trainer.move_to(device) == asleep
        delivered = {}
        if reshard:
            assert isinstance(trainer.model, CausalLm)
            with Resharder(trainer.model, "float32") as resharder:
                weights = dict(trainer.named_weights())
                for name, tensor in resharder.run(weights, policy_version=1):
                    delivered[name] = tensor.cpu()
                assert resharder.received_bytes == planned_received(resharder.plan, at.rank)
        trained = part_of(trainer, metrics, [])
        for tensors in (trained.weights, *trained.moments.values()):
            tensors.update({name: tensor.cpu() for name, tensor in tensors.items()})
        return Result(trained, held, delivered)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = write_tiny_llama(tmp_path_factory.mktemp("gpu") / "llama", hidden_size=256)
    batch = token_batch()
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), PpoPolicyLossSpec(), layout=SLICES.train)


@pytest.fixture(scope="module")
def alone(job: Job) -> Result:
    layout = HybridLayout(TrainLayout())
    (result,) = run_ranks(update, 1, job, layout, "gloo", False, timeout_s=TIMEOUT_S)
    return result


@pytest.mark.parametrize(
    ("backend", "cut"),
    # What FSDP2 gathers lies on the device, which gloo does not take for all of its operations.
    [*((backend, "slices") for backend in BACKENDS), (BACKENDS[1], "fsdp")],
)
def test_two_ranks_train_as_one_in_half_the_memory(
    job: Job, alone: Result, backend: str, cut: str
) -> None:
    layout = LAYOUTS[cut]
    results = run_ranks(update, 2, job, layout, backend, False, timeout_s=TIMEOUT_S)
    both = joined([result.trained for result in results], layout.train)
    for name, weight in both.weights.items():
        difference = (weight - alone.trained.weights[name]).abs().mean()
        assert float(difference) < MEAN_TOLERANCE, name
    for result in results:
        # Norms and what libraries keep are whole on both.
        assert result.held_bytes < 0.65 * alone.held_bytes


def test_the_sampler_is_given_the_trained_weights_bit_by_bit(job: Job) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed: transports between GPUs need it")
    results = run_ranks(update, 2, job, SLICES, "gloo", True, timeout_s=TIMEOUT_S)
    both = joined([result.trained for result in results], SLICES.train)
    target = generate_layout(both.shape, SLICES, "float32")
    for rank, result in enumerate(results):
        assert_equal(result.delivered, cut(target, rank, both.weights))
