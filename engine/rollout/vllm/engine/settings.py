"""Settings with which a vLLM engine is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from rolemesh.engine.layout.family_records import vllm_fields
from rolemesh.engine.rollout.model_folder import ModelFolder
from rolemesh.engine.rollout.vllm.engine.process import (
    WEIGHT_TRANSFER_BACKEND,
    has_expandable_segments,
    prepare_vllm,
)
from rolemesh.engine.rollout.vllm.engine.ranks import spare_the_world
from rolemesh.engine.specs import VllmSpec
from rolemesh.engine.specs.by_device import Choices

_CPU_BLOCK_TOKENS = 32
"""Tokens of a block of keys where prompts are shared on a CPU: vLLM's kernel wants multiples of 32.
"""

FirstWeights = Literal["none", "folder", "rounded"]
"""What an engine begins with: nothing; the folder's weights, loaded in vLLM's own way; or those
rounded to the spec's type."""


def make_engine(
    spec: VllmSpec,
    choices: Choices,
    folder: ModelFolder,
    more_arguments: Mapping[str, Any],
    *,
    weights: FirstWeights,
    has_tokenizer: bool = False,
) -> Any:
    """An engine in this process, without weights unless it has those of its folder.

    Args:
        spec: Limits of the engine.
        choices: What is chosen by device.
        folder: The model.
        more_arguments: Of one of several ranks, by `engine_start`, and of an adapter, by
            `ServedAdapter.engine_arguments`.
        weights: Those that it loads.
        has_tokenizer: Whether it also takes and gives texts. Otherwise: tokens in, tokens out.
    """
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from rolemesh.engine.rollout.vllm.engine.loader import ROUNDED, ROUNDED_TO

    prepare_vllm()
    # None: they come from the trainer before the first generation.
    formats = {"none": "dummy", "folder": "safetensors", "rounded": ROUNDED}
    shares_on_cpu = current_platform.is_cpu() and spec.prefix_caching
    overrides: dict[str, Any] = vllm_fields(folder.config.to_dict())
    if not current_platform.is_cpu():
        overrides["head_dtype"] = "float32"
    if folder.image_tokens is not None:
        from rolemesh.engine.rollout.vllm.engine import image_model as vllm_image_model

        vllm_image_model.register_image_model()
        overrides |= vllm_image_model.config_overrides(folder.config)
        more_arguments = {**more_arguments, **vllm_image_model.ENGINE_ARGUMENTS}
    if current_platform.is_cpu():
        from rolemesh.engine.rollout.vllm.engine.norms_on_cpu import norm_priorities

        more_arguments = {**more_arguments, "ir_op_priority": norm_priorities()}
    if shares_on_cpu and not spec.replay_routes:
        from rolemesh.engine.rollout.vllm.engine.shared_prompts import transfer_config

        more_arguments = {**more_arguments, "kv_transfer_config": transfer_config()}
    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder.path),
            # With exact numerics activations on a CPU are float32 whatever the weights are rounded
            # to, as the trainer's are: bfloat16 ones would leave the two 0.02 apart.
            dtype=choices["activations"].value,
            load_format=formats[weights],
            model_loader_extra_config={ROUNDED_TO: spec.dtype} if weights == "rounded" else {},
            weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND),
            trust_remote_code=False,
            skip_tokenizer_init=not has_tokenizer,
            generation_config="vllm",
            max_model_len=spec.max_model_len,
            max_num_seqs=choices["max_num_seqs"].value,
            gpu_memory_utilization=spec.gpu_memory_utilization,
            enforce_eager=choices["enforce_eager"].value,
            enable_sleep_mode=not current_platform.is_cpu(),
            disable_custom_all_reduce=has_expandable_segments(os.environ),
            # Log-probs of the distribution that tokens are drawn from: after temperature, top-k
            # and top-p. vLLM's default is before.
            logprobs_mode="processed_logprobs",
            # A prompt that is prefilled in pieces draws a token for each piece and takes it back
            # by moving the generator's offset, which generators on a CPU do not have.
            enable_chunked_prefill=not current_platform.is_cpu(),
            # No keys of old weights: an update empties the cache.
            enable_prefix_caching=spec.prefix_caching,
            # On a CPU vLLM takes blocks of 128 tokens, and only whole blocks are shared.
            block_size=_CPU_BLOCK_TOKENS if shares_on_cpu else None,
            async_scheduling=choices["async_scheduling"].value,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            hf_overrides=overrides,
            **more_arguments,
        )
    )
    if "distributed_executor_backend" in more_arguments:
        spare_the_world(engine)
    if weights != "none":
        from rolemesh.engine.rollout.vllm.weights.weights import finish_heads

        engine.apply_model(finish_heads)
    return engine
