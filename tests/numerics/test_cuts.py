"""Cuts of trainers: the same bits in the same or a new process, on one rank or many, or none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cut_ranks import (
    Held,
    held,
    refused_restore,
    refused_save,
    restore_and_go_on,
    save_and_go_on,
    silent,
    slots_of,
    train,
)
from support.parallel_training import Job, near_policy
from support.rank_processes import RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import (
    AnyOptimizerSpec,
    ModelSpec,
    MuonSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.train.cuts.format import CutMismatchError
from rolemesh.engine.train.cuts.slots import (
    CutNotFoundError,
    CutSlots,
    whole_cuts,
)
from rolemesh.engine.train.model_in_training import GradientPendingError
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.transport.slots import slot_files
from rolemesh.engine.transport.slots.slot_files import SlotHeldError, SlotOwner, SlotRoomError

TP2, FSDP2 = TrainLayout(tp=2), TrainLayout(dp=2, fsdp=2)
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, warmup_steps=4)
MUON = MuonSpec(learning_rate=1e-3, warmup_steps=4)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """A tied policy, by AdamW and by Muon, a critic, and the policy of another model."""
    batch, folders = token_batch(), tmp_path_factory.mktemp("models")
    tied = write_tiny_llama(folders / "tied", seed=4)
    other = write_tiny_llama(folders / "other", seed=4, num_layers=3)
    untied = write_tiny_llama(folders / "untied", seed=5, tied=False)
    scored = near_policy(
        batch, new_policy(tied).compute_logprobs(batch, temperature=1.0)["logprobs"]
    )
    policy = Job(tied, scored, PpoPolicyLossSpec())
    return {
        "policy": policy,
        "muon": replace(policy, optimizer={"type": "muon"}),
        "critic": Job(untied, batch, PpoValueLossSpec(), kind="critic"),
        "other": Job(other, scored, PpoPolicyLossSpec()),
    }


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder in shared memory, as that of services, but of this test alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cuts-") as folder:
        yield Path(folder)


def new_policy(folder: Path, optimizer: AnyOptimizerSpec = OPTIMIZER) -> Trainer:
    return Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), optimizer)


@pytest.fixture
def job(jobs: dict[str, Job]) -> Job:
    return jobs["policy"]


@pytest.fixture
def trainer(job: Job) -> Trainer:
    return new_policy(job.folder)


@pytest.fixture
def slots(trainer: Trainer, directory: Path) -> Iterator[CutSlots]:
    made = slots_of(trainer, directory)
    yield made
    made.close()


def draws() -> tuple[object, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), float(np.random.normal())


# --- one rank -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [OPTIMIZER, MUON], ids=["adamw", "muon"])
def test_a_run_that_returns_to_a_cut_makes_the_same_bits_again(
    jobs: dict[str, Job], directory: Path, optimizer: AnyOptimizerSpec
) -> None:
    job = jobs["policy"]
    trainer = new_policy(job.folder, optimizer)
    slots = slots_of(trainer, directory)
    train(trainer, job, 1)
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    random.gauss(0, 1)
    np.random.normal()
    extra = {"kl_coefficient": 0.1 + 0.2, "spread": float("inf")}
    num_bytes = trainer.save_cut(slots, 7, extra, silent)
    # Of a matrix that Muon steps, one moment; of all else two, and a count.
    has_one = {
        name
        for name, _ in trainer.named_weights()
        if optimizer is MUON and name.endswith("_proj.weight")
    }
    assert num_bytes == sum(
        2 * weight.nbytes if name in has_one else 3 * weight.nbytes + 4
        for name, weight in trainer.named_weights()
    )
    drawn = draws()
    saved = held(trainer, slots, {})
    expected = held(trainer, slots, train(trainer, job, 2))
    assert expected.weights != saved.weights

    restored = trainer.restore_cut(slots, 7)
    assert (restored.extra, restored.policy_version) == (extra, 3)
    assert draws() == drawn
    assert held(trainer, slots, {}) == saved
    assert held(trainer, slots, train(trainer, job, 2)) == expected
    slots.close()

    other = new_policy(job.folder, optimizer)
    slots = slots_of(other, directory)
    assert other.restore_cut(slots, 7).num_bytes == num_bytes
    assert held(other, slots, {}) == saved
    assert held(other, slots, train(other, job, 2)) == expected
    slots.close()


def test_a_cut_before_the_first_step_brings_back_an_optimizer_without_state(
    job: Job, trainer: Trainer, slots: CutSlots
) -> None:
    trainer.save_cut(slots, 0, {}, silent)
    first = held(trainer, slots, train(trainer, job, 1))
    trainer.restore_cut(slots, 0)
    assert trainer.policy_version == 0
    assert trainer.optimizer_state("exp_avg") == {}
    assert held(trainer, slots, train(trainer, job, 1)) == first


def test_a_cut_whose_random_state_is_damaged_is_refused_before_anything_changes(
    job: Job, trainer: Trainer, slots: CutSlots
) -> None:
    trainer.save_cut(slots, 0, {}, silent)
    _, slot, _ = slots.find(0)
    header = json.loads(slot.header() or b"")
    header["random_tensors"] = dict.fromkeys(header["random_tensors"], "no hex")
    slot.finish(json.dumps(header).encode())
    changed = held(trainer, slots, train(trainer, job, 1))
    with pytest.raises(CutNotFoundError, match="no whole cut of step 0"):
        trainer.restore_cut(slots, 0)
    assert held(trainer, slots, {}).weights == changed.weights


def test_two_cuts_are_kept_and_those_of_a_lineage_that_ended_are_not(
    job: Job, trainer: Trainer, slots: CutSlots, directory: Path
) -> None:
    for step in range(3):
        train(trainer, job, step)
        trainer.save_cut(slots, step, {}, silent)
    assert [cut.step for cut in whole_cuts(slots.owner, slots.layout)] == [1, 2]
    with pytest.raises(CutNotFoundError, match=r"step 0 of run .* those of steps \[1, 2\]"):
        trainer.restore_cut(slots, 0)
    inodes = {path.stat().st_ino for path in directory.iterdir()}
    trainer.restore_cut(slots, 1)
    assert [cut.step for cut in whole_cuts(slots.owner, slots.layout)] == [1]
    trainer.save_cut(slots, 2, {}, silent)
    assert [cut.step for cut in whole_cuts(slots.owner, slots.layout)] == [1, 2]
    assert {path.stat().st_ino for path in directory.iterdir()} == inodes, "warm pages stay"


def test_gradients_that_wait_are_in_no_cut_and_dropped_by_a_restoration(
    job: Job, trainer: Trainer, slots: CutSlots
) -> None:
    trainer.save_cut(slots, 0, {}, silent)
    first = held(trainer, slots, train(trainer, job, 1))
    trainer.restore_cut(slots, 0)
    forward_backward(trainer, job.batch, job.loss)
    with pytest.raises(GradientPendingError):
        trainer.save_cut(slots, 1, {}, silent)
    trainer.restore_cut(slots, 0)
    assert held(trainer, slots, train(trainer, job, 1)) == first


def test_work_that_is_given_up_leaves_the_older_cut_and_no_torn_one(
    trainer: Trainer, slots: CutSlots
) -> None:
    for step in range(2):
        trainer.save_cut(slots, step, {}, silent)

    def give_up(stage: str, done: int, total: int) -> None:
        if done > total / 2:
            raise InterruptedError("given up")

    with pytest.raises(InterruptedError):
        trainer.save_cut(slots, 2, {}, give_up)
    assert [cut.step for cut in whole_cuts(slots.owner, slots.layout)] == [1]
    trainer.restore_cut(slots, 1)


def test_too_much_extra_state_is_refused_by_its_size(trainer: Trainer, slots: CutSlots) -> None:
    with pytest.raises(ValueError, match="keep less in the role's extra state"):
        trainer.save_cut(slots, 0, {"text": "x" * (1 << 21)}, silent)
    assert whole_cuts(slots.owner, slots.layout) == []


# --- refusals -----------------------------------------------------------------------------


def test_cuts_of_another_model_kind_or_layout_are_refused_by_name(
    jobs: dict[str, Job], directory: Path
) -> None:
    trainer = new_policy(jobs["policy"].folder)
    slots = slots_of(trainer, directory)
    trainer.save_cut(slots, 5, {}, silent)
    slots.close()

    model = ModelSpec(path=jobs["policy"].folder, compute_dtype="float32")
    for other, layout, says in (
        (new_policy(jobs["other"].folder), slots.layout, r"layers\.2.* of 'weights' is absent"),
        (Trainer.critic(model, OPTIMIZER), slots.layout, "kind 'policy', .* is 'critic'"),
        (new_policy(jobs["policy"].folder, MUON), slots.layout, "the type of optimizer that saved"),
        (new_policy(jobs["policy"].folder), "tp=9", r"layout 'pp=1,.*', .* is 'tp=9'"),
    ):
        theirs = CutSlots(slots.owner, layout)
        before = held(other, theirs, {})
        with pytest.raises(CutMismatchError, match=says):
            other.restore_cut(theirs, 5)
        assert held(other, theirs, {}) == before
        theirs.close()


def test_a_model_of_another_size_makes_slots_of_its_own_size(
    jobs: dict[str, Job], directory: Path
) -> None:
    first, second = new_policy(jobs["policy"].folder), new_policy(jobs["other"].folder)
    for trainer in (first, second):
        slots = slots_of(trainer, directory)
        trainer.save_cut(slots, 5, {}, silent)
        trainer.restore_cut(slots, 5)
        slots.close()
    assert len(list(directory.iterdir())) == 2


def test_a_process_that_still_lives_keeps_its_slots(
    jobs: dict[str, Job], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_files, "LOCK_WAIT_S", 0.1)
    trainer = new_policy(jobs["policy"].folder)
    slots, later = slots_of(trainer, directory), slots_of(trainer, directory)
    trainer.save_cut(slots, 5, {}, silent)
    for work in (
        lambda: trainer.restore_cut(later, 5),
        lambda: trainer.save_cut(later, 6, {}, silent),
    ):
        with pytest.raises(SlotHeldError, match="end the service"):
            work()
    slots.close()
    trainer.restore_cut(later, 5)
    later.close()


def test_slots_take_no_more_than_the_memory_that_the_host_has_left(
    trainer: Trainer, slots: CutSlots, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = SimpleNamespace(available=1 << 16)
    monkeypatch.setattr(slot_files.psutil, "virtual_memory", lambda: left)
    with pytest.raises(SlotRoomError, match=r"but 65536 are free \(Cannot allocate memory\)"):
        trainer.save_cut(slots, 1, {}, silent)
    assert list(directory.iterdir()) == []
    left.available = 1 << 40
    trainer.save_cut(slots, 1, {}, silent)


def test_without_room_for_a_second_slot_the_first_one_stays(
    jobs: dict[str, Job], tmp_path: Path
) -> None:
    trainer = new_policy(jobs["policy"].folder)
    slots = slots_of(trainer, tmp_path)
    num_bytes = slots.plan(trainer._trained_weights()).num_bytes
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes * 3}", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        trainer.save_cut(slots, 4, {}, silent)
        slots.owner.path(1).unlink()
        slots.close()
        slots = slots_of(trainer, tmp_path)
        (tmp_path / "of others").write_bytes(bytes(num_bytes * 3 // 2))
        with pytest.raises(SlotRoomError, match=rf"2 slots of {num_bytes} bytes .* are free"):
            trainer.save_cut(slots, 5, {}, silent)
        assert [cut.step for cut in whole_cuts(slots.owner, slots.layout)] == [4]
        trainer.restore_cut(slots, 4)
        slots.close()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


# --- kills --------------------------------------------------------------------------------

SAVER = """
import sys
from pathlib import Path
import torch
from support.cut_ranks import silent, slots_of
from rolemesh.engine.specs import ModelSpec, OptimizerSpec
from rolemesh.engine.train.trainer import Trainer

folder, directory, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
slots = slots_of(trainer, directory)
step = first
while True:
    for _, weight in trainer.named_weights():
        weight.fill_(float(step))
    trainer.policy_version = step
    trainer.save_cut(slots, step, {"step": step}, silent)
    print(step, flush=True)
    step += 1
"""


@pytest.mark.slow
def test_whenever_a_saver_is_killed_what_is_listed_is_whole(
    jobs: dict[str, Job], directory: Path
) -> None:
    folder = jobs["policy"].folder
    trainer = new_policy(folder)
    layout = trainer.mesh.layout.train.flag()
    owner = SlotOwner("cut-ranks", "actor", 0, 1, directory)
    draw = random.Random(5)
    torn = 0
    first = 0
    for _ in range(12):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(folder), str(directory), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
            },
        )
        assert saver.stdout is not None
        for _ in range(3):
            told = int(saver.stdout.readline())
        time.sleep(draw.random() * 0.02)
        saver.send_signal(signal.SIGKILL)
        rest = saver.stdout.read().split()
        saver.wait()
        told = int(rest[-1]) if rest else told
        listed = [cut.step for cut in whole_cuts(owner, layout)]
        assert set(listed) <= {told - 1, told, told + 1}
        # What the saver told is whole: the step after it goes into the other slot.
        assert told in listed
        torn += listed == [told]
        for step in reversed(listed):
            slots = CutSlots(owner, layout)
            restored = trainer.restore_cut(slots, step)
            assert (restored.policy_version, restored.extra) == (step, {"step": step})
            for name, weight in trainer.named_weights():
                assert bool((weight == float(step)).all()), name
            slots.close()
        first = listed[0] + 1
    assert torn, "no kill came in the middle of a copy: the test proves nothing"


# --- many ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"), [("policy", TP2), ("critic", FSDP2), ("muon", FSDP2)], ids=str
)
def test_ranks_return_to_a_cut_bit_for_bit(
    rank_pool: RankPool, jobs: dict[str, Job], directory: Path, kind: str, layout: TrainLayout
) -> None:
    job = replace(jobs[kind], layout=layout)
    saved = rank_pool.run(save_and_go_on, 2, job, directory)
    again = rank_pool.run(restore_and_go_on, 2, job, directory)
    for rank, ((there, expected), (here, found)) in enumerate(zip(saved, again, strict=True)):
        assert here.extra == {"rank": rank, "kl": 0.1 + 0.2}
        assert bits(here) == bits(there)
        assert bits(found) == bits(expected)
        assert found.metrics == expected.metrics
        assert here.cuts == [4, 5]
    of_all = {there.num_bytes for there, _ in saved} | {here.num_bytes for here, _ in again}
    own = [size(there) for there, _ in saved]
    assert of_all == {sum(own)}


def bits(one: Held) -> tuple[object, ...]:
    return one.weights, one.optimizer, one.policy_version


def size(one: Held) -> int:
    """Bytes of the tensors of a rank."""
    groups = [one.weights, *one.optimizer.values()]
    return sum(len(content) for group in groups for content in group.values())


def test_all_ranks_refuse_a_cut_that_one_of_them_lacks_or_that_has_another_layout(
    rank_pool: RankPool, jobs: dict[str, Job], directory: Path
) -> None:
    job = replace(jobs["policy"], layout=TP2)
    rank_pool.run(save_and_go_on, 2, job, directory)
    other = replace(job, layout=FSDP2)
    for name, message, is_same in rank_pool.run(refused_restore, 2, other, directory):
        assert (name, is_same) == ("CutMismatchError", True)
        assert "layout 'pp=1,tp=2," in message
    SlotOwner("cut-ranks", "actor", 1, 2, directory).path(1).unlink()
    for name, message, is_same in rank_pool.run(refused_restore, 2, job, directory):
        assert (name, is_same) == ("CutNotFoundError", True)
        assert message.startswith("rank 1 has no whole cut of step 5")


def test_all_ranks_keep_their_cuts_when_one_has_no_room(
    rank_pool: RankPool, jobs: dict[str, Job], directory: Path
) -> None:
    job = replace(jobs["policy"], layout=TP2)
    rank_pool.run(save_and_go_on, 2, job, directory)
    refused = rank_pool.run(refused_save, 2, job, directory, 1)
    for name, message, _ in refused:
        assert name == "SlotRoomError"
        assert "a cut of rank 1 takes 2 slots" in message
    assert [after.cuts for _, _, after in refused] == [[4, 5], [5]]
