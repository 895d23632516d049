"""Weights from the ranks of one service to those of another, box by box, without a wire."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from support.fake_streams import FakeStreams
from support.published_layouts import GENERATE, TRAIN, shape_of
from support.services import segments_of
from support.weight_shards import PADDING, numbered, shards

from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.manifest import ManifestError, WeightLayout, num_elements
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.transport.slots.shm import open_segment
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY
from rolemesh.engine.weights.exchanges import published
from rolemesh.engine.weights.exchanges.publication_memory import PublicationMemory
from rolemesh.engine.weights.exchanges.published import (
    Publication,
    places,
    plan_taking,
    source_layout,
)


def publications(
    layout: WeightLayout, memory: PublicationMemory | None = None
) -> list[Publication]:
    """Of all ranks; every element is another number, exact in float32."""
    parts = shards(layout, numbered(layout.manifest))
    return [
        Publication(
            layout,
            rank,
            {name: torch.from_numpy(array).float() for name, array in part.items()},
            policy_version=4,
            memory=memory,
        )
        for rank, part in enumerate(parts)
    ]


@pytest.mark.parametrize("generate", [*GENERATE, "whole"])
@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_rank_gets_its_tensors_and_each_byte_once(
    train: str, generate: str, is_tied: bool
) -> None:
    shape = shape_of(tie_word_embeddings=is_tied)
    source = source_layout(shape.manifest("float32"), TRAIN[train], "float32", shape)
    target = (
        whole_layout(source.manifest).in_dtype("float32")
        if generate == "whole"
        else generate_layout(shape, GENERATE[generate], "float32")
    )
    published = publications(source)
    expected = shards(target, numbered(target.manifest))
    for rank, tensors in enumerate(expected):
        taking = plan_taking(source, target, rank)
        boxes = {
            number: [published[number].view(copy.parameter, copy.box) for copy in copies]
            for number, copies in taking.copies.items()
        }
        found = dict(taking.tensors(boxes))
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            # vLLM keeps zeros where no parameter lies.
            assert np.array_equal(found[name].numpy(), np.where(tensor == PADDING, 0, tensor)), name
        # Elements of the rank, not counting what two of its tensors share.
        needed = {
            (piece.parameter, *index)
            for piece in target.ranks[rank].pieces
            for index in np.ndindex(*(stop - start for start, stop in piece.box))
            for index in [tuple(at + box[0] for at, box in zip(index, piece.box, strict=True))]
        }
        assert sum(box.nbytes for part in boxes.values() for box in part) == 4 * len(needed)


def test_replicas_share_the_work() -> None:
    shape = shape_of(num_hidden_layers=8)
    layout = TrainLayout(dp=4, fsdp=1)
    source = source_layout(shape.manifest("bfloat16"), layout, "bfloat16", shape)
    taking = plan_taking(source, whole_layout(source.manifest).in_dtype("bfloat16"), 0)
    given = [2 * sum(num_elements(copy.box) for copy in taking.copies[rank]) for rank in range(4)]
    largest = max(parameter.num_bytes for parameter in source.manifest.values())
    assert max(given) - min(given) <= largest


def test_a_taker_with_the_number_of_a_publisher_still_takes_everything() -> None:
    # Rank 0 here and rank 0 there are two processes.
    shape = shape_of()
    source = source_layout(shape.manifest("float32"), TRAIN["tp2"], "float32", shape)
    target = generate_layout(shape, GENERATE["tp2"], "float32")
    taking = plan_taking(source, target, 0)
    taken = sum(num_elements(copy.box) for part in taking.copies.values() for copy in part)
    assert taken == sum(num_elements(piece.box) for piece in target.ranks[0].pieces)


def test_publications_round_to_their_type_and_lie_in_shared_memory() -> None:
    shape = shape_of()
    layout = train_layout(shape, TRAIN["tp2"]).in_dtype("bfloat16")
    weights = {
        name: torch.randn(sizes, generator=torch.Generator().manual_seed(1))
        for name, sizes in layout.ranks[0].shapes.items()
    }
    memory = PublicationMemory()
    publication = Publication(layout, 0, weights, policy_version=0, memory=memory)
    assert publication.segment is not None
    path = SHM_DIRECTORY / publication.segment.name
    found, num_bytes = places(layout, 0)
    mapped = open_segment(path.name, num_bytes)
    for name, weight in weights.items():
        assert torch.equal(found[name].view(mapped), weight.bfloat16())
        assert found[name].offset % 64 == 0
    publication.close()
    publication.close()
    assert not path.exists()
    memory.close()
    # Whoever has it mapped keeps it.
    assert torch.equal(
        found["model.norm.weight"].view(mapped), weights["model.norm.weight"].bfloat16()
    )


def test_a_forgotten_publication_leaves_no_file() -> None:
    shape = shape_of()
    layout = train_layout(shape, TRAIN["one"]).in_dtype("float32")
    before, memory = segments_of(os.getpid()), PublicationMemory()
    (publication,) = publications(layout, memory)
    assert publication.segment is not None
    path = SHM_DIRECTORY / publication.segment.name
    assert path.exists()
    # Whether memory is let go before the publication, or after it.
    memory.close()
    assert path.exists()
    del publication
    assert segments_of(os.getpid()) == before
    (publication,) = publications(layout, memory)
    del publication
    assert len(segments_of(os.getpid())) == len(before) + 1
    memory.close()
    assert segments_of(os.getpid()) == before


def test_weights_that_do_not_fit_leave_no_file() -> None:
    layout = train_layout(shape_of(), TRAIN["tp2"]).in_dtype("float32")
    before, memory = segments_of(os.getpid()), PublicationMemory()
    with pytest.raises(ManifestError, match=r"embed_tokens.*its layout says"):
        Publication(layout, 0, {}, policy_version=0, memory=memory)
    memory.close()
    assert segments_of(os.getpid()) == before


@pytest.mark.parametrize(
    ("parameter", "box", "words"),
    [
        ("model.norm.weight", ((0, 9),), "does not hold"),
        ("model.norm.weight", ((3, 3),), "does not hold"),
        ("model.norm.weight", ((0, 4), (0, 4)), "2 dimensions"),
        ("model.norm.bias", ((0, 4),), "'model.norm.bias'"),
        ("model.layers.0.mlp.down_proj.weight", ((0, 8), (0, 6)), "does not hold"),
    ],
)
def test_boxes_that_a_rank_does_not_hold_are_refused(
    parameter: str, box: tuple[tuple[int, int], ...], words: str
) -> None:
    layout = train_layout(shape_of(), TRAIN["tp2"]).in_dtype("float32")
    with pytest.raises(ManifestError, match=words):
        publications(layout)[0].view(parameter, box)


def test_another_model_is_refused_by_the_parameter_that_differs() -> None:
    manifest = shape_of(intermediate_size=32).manifest("float32")
    with pytest.raises(ManifestError, match=r"layers\.0\.mlp\.gate_proj\.weight"):
        source_layout(manifest, TRAIN["tp2"], "float32", shape_of())
    with pytest.raises(ManifestError, match="no plan"):
        source_layout(manifest, TRAIN["tp2"], "float32", None)


@pytest.mark.parametrize("lock_error", [0, 2], ids=["locked", "not locked"])
@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_gpu_rounds_first_and_copies_into_memory_that_is_locked_meanwhile(
    monkeypatch: pytest.MonkeyPatch, shares_memory: bool, lock_error: int
) -> None:
    monkeypatch.setattr(published, "_device_of", lambda weights: torch.device("cuda", 0))
    monkeypatch.setattr(torch, "ones", lambda size, device: None)  # none on a fake GPU
    layout = train_layout(shape_of(), TrainLayout(), "bfloat16")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator)
        for name, shape in layout.ranks[0].shapes.items()
    }
    memory = PublicationMemory()
    with FakeStreams(monkeypatch) as cuda:
        cuda.lock_error = lock_error
        publication = Publication(
            layout, 0, weights, policy_version=1, memory=memory if shares_memory else None
        )
    assert cuda.log.count("copy") == len(weights)
    assert cuda.num_casts == 0
    assert (cuda.num_locks, cuda.num_unlocked) == ((1, 0) if not lock_error else (0, len(weights)))
    # Memory that is used again stays locked.
    assert bool(cuda.locked) == (shares_memory and not lock_error)
    # All of it is there, though nothing was waited for since.
    for name, weight in weights.items():
        box = tuple((0, size) for size in weight.shape)
        assert torch.equal(publication.view(name, box), weight.bfloat16()), name
    publication.close()
    del publication
    with cuda:
        memory.close()
    assert not cuda.locked


def test_a_gpu_has_let_go_of_memory_when_a_publication_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published, "_device_of", lambda weights: torch.device("cuda", 0))
    layout = train_layout(shape_of(), TrainLayout(), "bfloat16")
    weights = {name: torch.ones(shape) for name, shape in layout.ranks[0].shapes.items()}
    before, memory = segments_of(os.getpid()), PublicationMemory()
    *_, last = weights
    cuda = FakeStreams(monkeypatch)

    class Broken(torch.Tensor):
        def to(self, *args: object, **kwargs: object) -> torch.Tensor:
            raise RuntimeError("out of memory")

    weights[last] = weights[last].as_subclass(Broken)
    with cuda, pytest.raises(RuntimeError, match="out of memory"):
        Publication(layout, 0, weights, policy_version=1, memory=memory)
    with cuda:
        memory.close()
    assert (cuda.num_locks, cuda.locked) == (1, {})
    assert cuda.log.count("copy") == len(weights) - 1
    assert cuda.num_waiting == 0
    assert segments_of(os.getpid()) == before
