"""vLLM on a GPU beside a trainer: sleep of level 2, new weights, graphs, and a second engine.

Not run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

# Not imported to see: every run of the tests collects this file.
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: pip install rolemesh[gpu]", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.family_cases import case_config
from support.rollout_checks import load_trainer_model, make_requests
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from transformers import AutoModelForCausalLM

from rolemesh.engine.hardware.devices import free_bytes, give_back_memory
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SLACK = 1 << 30
"""Graphs, workspaces and kernels that stay."""
GREEDY = SamplingSpec(greedy=True, max_new_tokens=16)


def greedy_tokens(backend: VllmBackend) -> dict[int, Sequence[int]]:
    """Completions of a few prompts by row."""
    made = backend.generate(make_requests(6), GREEDY)
    return {trajectory.row: trajectory.completion_tokens for trajectory in made}


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_an_engine_sleeps_takes_weights_wakes_and_makes_room_for_the_next(
    tmp_path: Path, enforce_eager: bool
) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    folder = write_tiny_llama(tmp_path / "model", hidden_size=512)
    weights = list(load_trainer_model(folder).named_parameters())
    spec = VllmSpec(
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        enforce_eager=enforce_eager,
    )
    free: list[int] = []
    for _ in range(2):
        backend = VllmBackend(spec, folder, device=DEVICE)
        backend.update_weights(weights, 0)
        first = greedy_tokens(backend)
        awake = free_bytes(DEVICE)
        freed = backend.sleep()
        # Most of the share that the spec gave it.
        assert freed > 0.2 * torch.cuda.mem_get_info(DEVICE)[1]
        assert free_bytes(DEVICE) >= awake + freed - SLACK
        with pytest.raises(WeightsStaleError):
            list(backend.generate(make_requests(1), GREEDY))
        woken = backend.wake()
        assert woken < freed
        backend.update_weights(weights, 1)
        again = greedy_tokens(backend)
        assert again == first
        # Asleep, as a run leaves it whose actor trained last.
        backend.sleep()
        backend.close()
        give_back_memory(DEVICE)
        assert CuMemAllocator.get_instance().get_current_usage() == 0
        free.append(free_bytes(DEVICE))
    assert abs(free[1] - free[0]) < SLACK


def test_it_gives_out_the_routes_of_its_tokens(tmp_path: Path) -> None:
    config = {**case_config("qwen3_moe"), "vocab_size": 512, "hidden_size": 128, "head_dim": 32}
    folder = write_tiny_decoder(
        tmp_path / "model", "qwen3_moe", **config, max_position_embeddings=128, eos_token_id=2
    )
    spec = VllmSpec(
        dtype="float32",
        max_model_len=96,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        replay_routes=True,
    )
    backend = VllmBackend(spec, folder, device=DEVICE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    backend.update_weights(model.named_parameters(), 0)
    requests = make_requests(6)
    made = {one.row: one for one in backend.generate(requests, GREEDY)}
    backend.close()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(lambda _, args, out: seen.append(out[2]))
    same = total = 0
    for request in requests:
        tokens = [*request.prompt_tokens, *made[request.row].completion_tokens]
        seen.clear()
        with torch.no_grad():
            model(torch.tensor([tokens]))
        routes = made[request.row].routes
        assert routes is not None
        found = torch.from_numpy(routes)[:-1].view(len(tokens) - 1, len(seen), -1).long()
        expected = torch.stack(seen, dim=1)[:-1]
        equal = (found.sort(-1).values == expected.sort(-1).values).all(-1)
        same, total = same + int(equal.sum()), total + equal.numel()
    # A router whose two best scores are nearly equal may choose otherwise.
    assert same / total > 0.99
