"""Weights on their way into a vLLM engine of this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rolemesh.engine.layout.boxes import generate_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import RankShard
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.rollout.model_folder import WeightsStaleError


def load_whole(engine: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replaces every weight through vLLM's own loaders, which cut and fuse them for this rank.

    Args:
        engine: VLLM's LLMEngine.
        weights: (Hugging Face name, floating [global shape]), tied ones once. Read once.

    Raises:
        WeightsStaleError: VLLM left a parameter as it was.
    """
    from rolemesh.engine.rollout.vllm.weights.weights import parameter_names

    loaded: set[str] = set()
    _transfer(engine, {"weights": weights, "loaded": loaded})
    (names,) = engine.apply_model(parameter_names)
    if missing := sorted(names - loaded):
        raise WeightsStaleError(
            f"vLLM took every weight but left {', '.join(map(repr, missing[:3]))} as it was "
            f"({len(missing)} parameters): its model class and transformers' do not agree"
        )


def place_parts(engine: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replaces every weight by this rank's own parts; see `shards.place_shards`.

    Args:
        engine: VLLM's LLMEngine.
        tensors: (name of vLLM's parameter, floating [shape on this rank]). Read once.

    Raises:
        WeightsStaleError: The set is not whole or does not fit.
    """
    _transfer(engine, {"weights": tensors, "are_shards": True})


def whole_shard(shape: DecoderShape | None) -> RankShard | None:
    """What a lone rank holds; None for a family without a record.

    Raises:
        UnsupportedFamilyError: vLLM has no such model.
    """
    if shape is None:
        return None
    return generate_layout(shape, HybridLayout(TrainLayout()), "float32").shard(0)


def takes_whole(engine: Any, shard: RankShard) -> bool:
    """Whether `place_whole` can write a shard; else vLLM's loaders have to; see `whole.holds_as`.

    Args:
        engine: VLLM's LLMEngine, of one slice.
        shard: From `whole_shard`.
    """
    from rolemesh.engine.rollout.vllm.weights.whole import holds_as

    (holds,) = engine.apply_model(lambda model: holds_as(model, shard))
    return bool(holds)


def place_whole(engine: Any, shard: RankShard, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replaces every weight of a lone rank on a CPU; see `whole.place_whole`.

    Args:
        engine: VLLM's LLMEngine.
        shard: From `whole_shard`, which the engine `takes_whole`.
        weights: (Hugging Face name, floating [global shape]), each of the shard's once.
    """
    _transfer(engine, {"weights": weights, "shard": shard})


def _transfer(engine: Any, update_info: dict[str, Any]) -> None:
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=(update_info,))
    engine.collective_rpc("finish_weight_update")
