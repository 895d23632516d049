"""The trainer on a CUDA device does what it does on a CPU. Plain pytest: no plugins there."""

# What the machine lacks is a reason to skip, and that must be known before the imports.

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic>=2.12'")
pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.algorithms.ragged import decayed_sums
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.hardware.devices import free_bytes, give_back_memory
from rolemesh.engine.models.vocabulary.logprobs import token_logprobs
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

pytestmark = pytest.mark.gpu

FLOAT32_TOLERANCE = 2e-4
"""TF32 is off, but sums run in another order, and six layers of them follow each other."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    return write_tiny_llama(tmp_path_factory.mktemp("gpu") / "tiny")


def ppo_batch():
    batch = token_batch(prompt_lengths=(3, 5, 2, 4), completion_lengths=(4, 1, 6, 3), seed=0)
    offsets = batch["tokens"].offsets
    lengths = batch["tokens"].lengths() - batch["prompt_lengths"].values
    completion = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=completion[1:])
    count = int(completion[-1])
    generator = torch.Generator().manual_seed(1)
    assert offsets is not None

    def column(values):
        return Column(ColumnKind.COMPLETION, values, completion)

    return batch | Experience(
        {
            "logprobs": column(-torch.rand(count, generator=generator) * 6),
            "advantages": column(torch.randn(count, generator=generator)),
            "loss_mask": column(torch.ones(count, dtype=torch.bool)),
        }
    )


def spec(model, dtype="float32"):
    return ModelSpec(path=model, compute_dtype=dtype, micro_batch_tokens=32)


def test_logprobs_on_cuda_equal_those_on_the_cpu(model):
    batch = ppo_batch()
    scored = [
        Trainer.policy(spec(model), OptimizerSpec(), device=device).compute_logprobs(
            batch, temperature=0.7, with_entropy=True
        )
        for device in ("cpu", "cuda")
    ]
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(
            scored[0][name].values,
            scored[1][name].values,
            rtol=FLOAT32_TOLERANCE,
            atol=FLOAT32_TOLERANCE,
        )


def test_an_update_on_cuda_equals_one_on_the_cpu(model):
    weights = []
    for device in ("cpu", "cuda"):
        trainer = Trainer.policy(spec(model), OptimizerSpec(learning_rate=1e-3), device=device)
        update_whole(trainer, ppo_batch(), PpoPolicyLossSpec(), epochs=2, mini_batch_rows=2, seed=5)
        assert trainer.policy_version == 4
        weights.append({name: weight.cpu() for name, weight in trainer.named_weights()})
    for name, weight in weights[0].items():
        # AdamW divides by the gradient's own size: where it is tiny its sign decides, so a step
        # of 1e-3 may differ in single elements; on average it must not.
        assert float((weight - weights[1][name]).abs().mean()) < 2e-5, name


def test_bfloat16_logits_are_float32_on_cuda_too():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 64, generator=generator).cuda()
    vocabulary = torch.randn(512, 64, generator=generator).cuda()
    targets = torch.randint(0, 512, (70,), generator=generator).cuda()
    got, entropy = token_logprobs(
        hidden,
        vocabulary,
        targets,
        chunk_tokens=16,
        compute_dtype=torch.bfloat16,
        with_entropy=True,
    )
    rounded = hidden.bfloat16().double() @ vocabulary.bfloat16().double().T
    expected = rounded.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    # Factors are rounded on both sides: what is left is float32 accumulation.
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    assert entropy is not None
    assert bool(entropy.isfinite().all())


def test_sleep_frees_the_device_and_wake_brings_the_same_weights_back(tmp_path):
    # 0.4 GB of weights, and twice as much for the moments: cuBLAS's workspace is small beside it.
    large = write_tiny_llama(tmp_path / "large", hidden_size=2048, num_layers=4)
    device = torch.device("cuda", 0)
    trainer = Trainer.policy(spec(large), OptimizerSpec(), device=device)
    update_whole(trainer, ppo_batch(), PpoPolicyLossSpec(), epochs=1, mini_batch_rows=4, seed=5)
    before = {name: weight.cpu().clone() for name, weight in trainer.named_weights()}
    give_back_memory(device)
    free = free_bytes(device)
    moved = trainer.move_to(torch.device("cpu"))
    give_back_memory(device)
    # By what the driver gives to other processes, and not by what torch says it has in use.
    assert free_bytes(device) - free >= 0.95 * moved > 1e9
    asleep = {name: weight.data_ptr() for name, weight in trainer.named_weights()}
    assert all(weight.is_pinned() for _, weight in trainer.named_weights())
    assert trainer.move_to(device) == moved
    for name, weight in trainer.named_weights():
        assert weight.device == device
        assert torch.equal(weight.cpu(), before[name])
    assert trainer.move_to(torch.device("cpu")) == moved
    assert {name: weight.data_ptr() for name, weight in trainer.named_weights()} == asleep
    for name, weight in trainer.named_weights():
        assert torch.equal(weight, before[name])


def test_the_scan_of_gae_agrees_across_devices():
    lengths = torch.tensor([300, 1, 77])
    values = torch.randn(378, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    on_cpu = decayed_sums(values, lengths, 0.95)
    on_gpu = decayed_sums(values.cuda(), lengths, 0.95).cpu()
    torch.testing.assert_close(on_cpu, on_gpu, rtol=1e-12, atol=1e-12)


def test_moments_in_host_memory_change_no_bit_and_leave_the_device(model):
    def trained(offload):
        trainer = Trainer.policy(
            spec(model), OptimizerSpec(learning_rate=1e-3, offload=offload), device="cuda"
        )
        update_whole(trainer, ppo_batch(), PpoPolicyLossSpec(), epochs=3, mini_batch_rows=2, seed=0)
        return trainer

    here, there = trained(False), trained(True)
    for moment in ("exp_avg", "exp_avg_sq"):
        expected, found = here.optimizer_state(moment), there.optimizer_state(moment)
        for name, tensor in found.items():
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned()
            assert torch.equal(tensor, expected[name].cpu()), name
    for (name, left), (_, right) in zip(here.named_weights(), there.named_weights(), strict=True):
        assert torch.equal(left, right), name
