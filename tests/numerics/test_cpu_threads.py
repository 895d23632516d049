"""Small passes take one thread: counted products against the formula, and threads as passes see."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rollout_checks import load_trainer_model, make_requests
from support.services import serving
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rolemesh.engine.hardware import cpu_threads
from rolemesh.engine.hardware.cpu_threads import largest_product, threads_worth
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.specs import (
    HfSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    SftLossSpec,
)
from rolemesh.engine.train.cuts.slots import CutSlots
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import remove_slots

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("threads") / "model")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Products(TorchDispatchMode):
    """Notes the multiply-adds of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.found.append(result.numel() * args[0].shape[-1])
        return result


@pytest.mark.parametrize(
    ("rows", "length", "predicted"),
    [
        pytest.param(4, 8, 1, id="the inner width is the largest"),
        pytest.param(2, 200, 1, id="the rows are longer than the inner width"),
        pytest.param(2, 8, 8, id="the vocabulary is the largest"),
    ],
)
def test_the_largest_product_is_the_largest_that_a_model_makes(
    folder: Path, rows: int, length: int, predicted: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.randint(3, 100, (rows, length))
    with Products() as products, torch.no_grad():
        model(input_ids=tokens, logits_to_keep=predicted)
    expected = largest_product(
        model.config, num_tokens=rows * length, longest=length, num_predicted=rows * predicted
    )
    assert max(products.found) == expected


def test_a_small_product_is_computed_by_one_thread_of_the_caller_alone() -> None:
    least = cpu_threads.LEAST_SHARED_PRODUCT
    elsewhere: list[int] = []
    with threads_worth(least - 1, CPU):
        assert torch.get_num_threads() == 1
        torch.set_num_threads(1)
        other = threading.Thread(
            target=lambda: (torch.set_num_threads(2), elsewhere.append(torch.get_num_threads()))
        )
        other.start()
        other.join()
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), elsewhere) == (2, [2])
    with threads_worth(least, CPU):
        assert torch.get_num_threads() == 2
    with threads_worth(0, torch.device("cuda", 0)):
        assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), threads_worth(0, CPU):
        _ = 1 // 0
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("least", "expected"), [(2**40, 1), (1, 2)])
def test_a_trainers_passes_take_the_threads_that_they_are_worth(
    folder: Path, monkeypatch: pytest.MonkeyPatch, least: int, expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "LEAST_SHARED_PRODUCT", least)
    trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec())
    batch = token_batch(prompt_lengths=[3, 4], completion_lengths=[5, 6], vocab_size=512)
    forward: list[int] = []
    backward: list[int] = []
    trainer.rank_model.register_forward_pre_hook(lambda *_: forward.append(torch.get_num_threads()))
    for weight in trainer.rank_model.parameters():
        weight.register_hook(lambda _: backward.append(torch.get_num_threads()))
    logprobs = trainer.compute_logprobs(batch, temperature=1.0)
    forward_backward(trainer, batch | logprobs, PpoPolicyLossSpec())
    assert set(forward) == set(backward) == {expected}
    assert torch.get_num_threads() == 2


def test_a_pass_that_fails_gives_its_threads_back(folder: Path) -> None:
    trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec())

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    trainer.rank_model.register_forward_pre_hook(fail)
    batch = token_batch(prompt_lengths=[3], completion_lengths=[5], vocab_size=512)
    with pytest.raises(ZeroDivisionError):
        trainer.compute_logprobs(batch, temperature=1.0)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("least", "expected"), [(2**40, 1), (1, 2)])
def test_steps_and_cuts_of_small_weights_take_one_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, least: int, expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "LEAST_SHARED_TENSOR", least)
    trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec())
    batch = token_batch(prompt_lengths=[3, 4], completion_lengths=[5, 6], vocab_size=512)
    forward_backward(trainer, batch, SftLossSpec())
    stepping: list[int] = []
    for adamw in trainer._optimizer._adamws:
        adamw.register_step_pre_hook(lambda *_: stepping.append(torch.get_num_threads()))
    trainer.optim_step()
    copying: list[int] = []
    slots = CutSlots(SlotOwner(f"threads-{os.getpid()}", "actor", 0, 1), layout="one rank")
    try:
        trainer.save_cut(
            slots, 1, extra={}, progress=lambda *_: copying.append(torch.get_num_threads())
        )
    finally:
        slots.close()
        remove_slots(slots.owner.run_id, slots.owner.role)
    assert set(stepping) == set(copying) == {expected}
    assert torch.get_num_threads() == 2


def test_a_sampler_computes_prompts_with_more_threads_than_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = HfBackend(HfSpec(max_model_len=64, max_num_seqs=4), folder)
    backend.update_weights(load_trainer_model(folder).named_parameters(), 0)
    seen: list[tuple[int, int]] = []
    backend._model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(
            (kwargs["input_ids"].numel(), torch.get_num_threads())
        ),
        with_kwargs=True,
    )
    requests = make_requests(4)
    # Between the product of a token for each row, whose vocabulary is the largest factor, and that
    # of the prompts.
    config = backend._folder.config
    longest = max(len(request.prompt_tokens) for request in requests)
    monkeypatch.setattr(
        cpu_threads,
        "LEAST_SHARED_PRODUCT",
        largest_product(config, num_tokens=4 * longest, longest=longest, num_predicted=4),
    )
    list(backend.generate(requests, SamplingSpec(max_new_tokens=3)))
    (num_prompt_tokens, at_first), *later = seen
    assert num_prompt_tokens == 4 * longest
    assert at_first == 2
    assert later
    assert set(later) <= {(number, 1) for number in range(1, 5)}
    backend.close()


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (3, 3)])
async def test_the_loop_of_a_service_computes_alone(asked: int | None, expected: int) -> None:
    async with serving(threads=asked) as server:
        assert torch.get_num_threads() == 1
        assert await server.runtime.compute.run(torch.get_num_threads) == expected
