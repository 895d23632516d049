"""Checkpoints written in one layout and read in another, with plain tensors and threads as ranks.

The oracle cuts each rank's tensors straight from whole parameters in which every element is another
number.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.thread_peers import run_peers
from support.weight_shards import PADDING, numbered, shards

from rolemesh.engine.layout.boxes import train_layout, whole_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import (
    Box,
    ManifestError,
    Parameter,
    Piece,
    RankShard,
    WeightLayout,
    num_elements,
)
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.parallel.agreement import Peers
from rolemesh.engine.weights.checkpoints import checkpoint as checkpoint_module
from rolemesh.engine.weights.checkpoints import writing as checkpoint_writing
from rolemesh.engine.weights.checkpoints.checkpoint import (
    CheckpointCorruptError,
    CheckpointReader,
    open_checkpoint,
)
from rolemesh.engine.weights.checkpoints.disk_layout import (
    scalar_layout,
    tensor_parameters,
    written_files,
)
from rolemesh.engine.weights.checkpoints.writing import write_checkpoint
from rolemesh.engine.weights.sharded_tensors import ShardedTensors

Tensors = dict[str, torch.Tensor]


def decoder(**changes: Any) -> DecoderShape:
    sizes = {
        "model_type": "qwen3",
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 70,
        "tie_word_embeddings": True,
    }
    return DecoderShape.from_config({**sizes, **changes})


def tensors_of(layout: WeightLayout) -> list[Tensors]:
    """What each rank holds."""
    return [
        {name: torch.from_numpy(tensor).to(torch.float32) for name, tensor in rank.items()}
        for rank in shards(layout, numbered(layout.manifest))
    ]


def write(directory: Path, layout: WeightLayout) -> None:
    held = tensors_of(layout)

    def work(peers: Peers) -> None:
        groups = {"weights": ShardedTensors(layout, held[peers.rank])}
        write_checkpoint(directory, groups, {"step": 3}, peers=peers)

    for outcome in run_peers(len(layout.ranks), work):
        assert outcome is None, outcome


def read(reader: CheckpointReader, layout: WeightLayout, rank: int) -> Tensors:
    shard = layout.ranks[rank]
    tensors = {name: torch.full(shape, float(PADDING)) for name, shape in shard.shapes.items()}
    copies = reader.copies("weights", shard)
    reader.verify(reader.files_of("weights", copies))
    reader.read("weights", copies, tensors)
    return tensors


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def stored_elements(directory: Path) -> dict[str, list[float]]:
    """Every number in the files, by parameter."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    found: dict[str, list[float]] = {}
    for file, pieces in manifest["groups"]["weights"]["files"].items():
        with safe_open(directory / file, framework="pt") as content:
            assert sorted(content.keys()) == sorted(piece["key"] for piece in pieces)
            for piece in pieces:
                numbers = content.get_tensor(piece["key"]).flatten().tolist()
                found.setdefault(piece["parameter"], []).extend(numbers)
    return found


@st.composite
def train_layouts(draw: st.DrawFn) -> TrainLayout:
    dp = draw(st.sampled_from([1, 2, 3]))
    return TrainLayout(
        pp=draw(st.sampled_from([1, 2, 3])),
        tp=draw(st.sampled_from([1, 2, 4])),
        dp=dp,
        fsdp=draw(st.sampled_from([1, dp])),
        order=draw(st.sampled_from(["tp-pp-dp", "tp-dp-pp"])),
    )


@settings(max_examples=12, deadline=None)
@given(
    train_layouts(),
    train_layouts(),
    st.sampled_from(
        [
            {"tie_word_embeddings": True},
            {"tie_word_embeddings": False},
            {"model_type": "phi3", "num_key_value_heads": 4},
        ]
    ),
    st.sampled_from([64, 300, 2**20]),
)
def test_any_layout_reads_what_any_other_wrote(
    before: TrainLayout, after: TrainLayout, changes: dict[str, Any], file_bytes: int
) -> None:
    shape = decoder(**changes)
    source, target = train_layout(shape, before), train_layout(shape, after)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writing, "SHARD_BYTES", file_bytes)
        directory = Path(folder) / "checkpoint"
        write(directory, source)
        numbers = numbered(source.manifest)
        assert {name: Counter(found) for name, found in stored_elements(directory).items()} == {
            name: Counter(array.astype(float).flatten().tolist()) for name, array in numbers.items()
        }
        reader = open_checkpoint(directory)
        assert reader.state == {"step": 3}
        assert reader.num_ranks == before.world_size
        for rank, expected in enumerate(tensors_of(target)):
            assert_same(read(reader, target, rank), expected)


def random_layout(draw: random.Random, num_ranks: int) -> WeightLayout:
    """Ranks that hold overlapping boxes at odd places of padded tensors, some in two tensors."""
    manifest = {
        name: Parameter(shape, "float32") for name, shape in {"a": (9, 7), "b": (11,)}.items()
    }
    ranks = []
    for rank in range(num_ranks):
        pieces: list[Piece] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in manifest.items():
            for twin in range(draw.randint(1, 2)):
                box: Box = tuple(
                    (start := draw.randrange(size), draw.randint(start + 1, size))
                    for size in parameter.shape
                )
                if rank == num_ranks - 1 and twin == 0:
                    box = parameter.box
                origin = tuple(draw.randint(0, 2) for _ in box)
                tensor = f"{name}.{twin}"
                pieces.append(Piece(name, box, tensor, origin))
                shapes[tensor] = tuple(
                    at + stop - start + 1 for at, (start, stop) in zip(origin, box, strict=True)
                )
        ranks.append(RankShard(tuple(pieces), shapes))
    return WeightLayout(manifest, tuple(ranks), "float32")


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_boxes_are_written_once_and_read_whole(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    source, target = random_layout(draw, 3), random_layout(draw, 2)
    write(tmp_path / "checkpoint", source)
    stored = stored_elements(tmp_path / "checkpoint")
    assert {name: len(numbers) for name, numbers in stored.items()} == {"a": 63, "b": 11}
    assert {name: len(set(numbers)) for name, numbers in stored.items()} == {"a": 63, "b": 11}
    reader = open_checkpoint(tmp_path / "checkpoint")
    for rank, expected in enumerate(tensors_of(target)):
        assert_same(read(reader, target, rank), expected)


def test_the_lowest_rank_that_holds_an_element_writes_it() -> None:
    layout = train_layout(decoder(), TrainLayout(pp=2, tp=2, dp=2, fsdp=1))
    written = {
        rank: [
            (copy.parameter, copy.box)
            for copies in written_files(layout, rank, layout.ranks[rank].shapes, 10**6)
            for copy in copies
        ]
        for rank in range(8)
    }
    for rank, boxes in written.items():
        for parameter, box in boxes:
            holders = [
                other
                for other, shard in enumerate(layout.ranks)
                if any((piece.parameter, piece.box) == (parameter, box) for piece in shard.pieces)
            ]
            assert rank == min(holders)
    assert not any(written[rank] for rank in range(4, 8)), "replicas write nothing"
    names = [name for boxes in written.values() for name, _ in boxes]
    assert names.count("model.norm.weight") == 1


def test_a_rank_reads_its_own_part_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = decoder(hidden_size=64, intermediate_size=128)
    write(tmp_path / "checkpoint", train_layout(shape, TrainLayout(pp=2, tp=2)))
    target = train_layout(shape, TrainLayout(tp=2, dp=2, fsdp=2))
    sizes: list[int] = []

    class CountedSlice:
        def __init__(self, stored: Any) -> None:
            self._stored = stored

        def __getitem__(self, where: Any) -> torch.Tensor:
            # A view of the mapped file: only what is copied from it is read.
            part: torch.Tensor = self._stored[where]
            sizes.append(part.nbytes)
            return part

    class CountedFile:
        def __init__(self, path: Path, framework: str) -> None:
            self._file = safe_open(path, framework=framework)

        def __enter__(self) -> CountedFile:
            self._open = self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, key: str) -> CountedSlice:
            return CountedSlice(self._open.get_slice(key))

    monkeypatch.setattr(checkpoint_module, "safe_open", CountedFile)
    reader = open_checkpoint(tmp_path / "checkpoint")
    whole = sum(parameter.num_bytes for parameter in target.manifest.values())
    for rank, expected in enumerate(tensors_of(target)):
        sizes.clear()
        assert_same(read(reader, target, rank), expected)
        own = sum(tensor.nbytes for tensor in expected.values())
        assert sum(sizes) == own < 0.3 * whole
        assert max(sizes) <= max(tensor.nbytes for tensor in expected.values())


def test_a_rank_verifies_only_files_that_it_reads(tmp_path: Path) -> None:
    layout = train_layout(decoder(), TrainLayout(pp=3))
    write(tmp_path / "checkpoint", layout)
    reader = open_checkpoint(tmp_path / "checkpoint")
    damaged = tmp_path / "checkpoint" / "weights-rank00001-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    read(reader, layout, 0)
    with pytest.raises(CheckpointCorruptError, match="weights-rank00001-00001"):
        read(reader, layout, 1)
    with pytest.raises(CheckpointCorruptError, match="weights-rank00001-00001"):
        read(reader, whole_layout(decoder().manifest("float32")), 0)


def test_a_layout_without_an_element_is_not_saved(tmp_path: Path) -> None:
    layout = train_layout(decoder(), TrainLayout(tp=2))
    held = tensors_of(layout)
    del held[1]["model.layers.0.mlp.up_proj.weight"]

    def work(peers: Peers) -> None:
        groups = {"weights": ShardedTensors(layout, held[peers.rank])}
        write_checkpoint(tmp_path / "checkpoint", groups, {}, peers=peers)

    for error in run_peers(2, work):
        assert isinstance(error, ManifestError)
        assert "24 elements of 'model.layers.0.mlp.up_proj.weight' were written" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_tensors_of_another_layout_are_refused_by_all_ranks(tmp_path: Path, change: str) -> None:
    layout = train_layout(decoder(), TrainLayout(tp=2))
    held = tensors_of(layout)
    name = "model.norm.weight"
    held[1][name] = held[1][name][1:] if change == "shape" else held[1][name].bfloat16()

    def work(peers: Peers) -> None:
        groups = {"weights": ShardedTensors(layout, held[peers.rank])}
        write_checkpoint(tmp_path / "checkpoint", groups, {}, peers=peers)

    for error in run_peers(2, work):
        assert isinstance(error, ManifestError)
        assert "rank 1 has 'model.norm.weight'" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_every_element_type_comes_back(tmp_path: Path) -> None:
    tensors = {
        dtype: torch.arange(6).view(2, 3).to(getattr(torch, dtype))
        for dtype in ("float64", "float32", "bfloat16", "float16")
    }
    write_checkpoint(tmp_path / "c", {"all": ShardedTensors.whole(tensors)}, {})
    reader = open_checkpoint(tmp_path / "c")
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    copies = reader.copies("all", ShardedTensors.whole(found).layout.ranks[0])
    reader.read("all", copies, found)
    assert_same(found, tensors)
    with pytest.raises(ManifestError, match="element type is int64"):
        ShardedTensors.whole({"counts": torch.zeros(2, dtype=torch.int64)})


def test_counts_lie_where_elements_do() -> None:
    """With fsdp 4 some ranks have no row of a short vector, and no count of it to save."""
    layout = train_layout(decoder(), TrainLayout(dp=4, fsdp=4))
    counts = scalar_layout(layout)
    name = "model.layers.0.self_attn.q_norm.weight"  # 2 elements
    held = [name in shard.shapes for shard in counts.ranks]
    assert held == [True, True, False, False]
    assert all(name in shard.shapes for shard in layout.ranks)
    for rank, shard in enumerate(layout.ranks):
        parameters = tensor_parameters(layout, rank)
        assert parameters.keys() == shard.shapes.keys()
        assert parameters[name] == name


def test_an_empty_copy_of_a_tied_embedding_is_known_as_such() -> None:
    layout = train_layout(decoder(vocab_size=10), TrainLayout(pp=2, tp=2))
    empty = [
        rank
        for rank, shard in enumerate(layout.ranks)
        if shard.shapes.get("lm_head.weight", (1,))[0] == 0
    ]
    assert empty == [3]
    assert tensor_parameters(layout, 3)["lm_head.weight"] == "model.embed_tokens.weight"


def test_no_file_is_larger_than_the_bound() -> None:
    shape = decoder(hidden_size=64, intermediate_size=128)
    layout = whole_layout(shape.manifest("float32"))
    for bound in (100, 1000, 20_000):
        files = written_files(layout, 0, layout.ranks[0].shapes, bound)
        sizes = [sum(4 * num_elements(copy.box) for copy in copies) for copies in files]
        assert max(sizes) <= bound
        assert sum(sizes) == sum(parameter.num_bytes for parameter in layout.manifest.values())
        keys = list(itertools.chain(*([copy.target_tensor for copy in file] for file in files)))
        assert len(keys) == len(set(keys))
