"""Stock servers as samplers, held against the rest of a recipe."""

from __future__ import annotations

from typing import Any

from rolemesh.engine.specs import VllmServerSpec


def check_server_samplers(recipe: Any) -> None:
    """Refuses a recipe whose weights have no way to the servers that are to sample with them.

    Args:
        recipe: A Recipe, whose parts are valid.

    Raises:
        ValueError: There is none; says what to give.
    """
    if recipe.actor is None:
        return
    for role in ("actor", "rollout"):
        section = getattr(recipe, role)
        sampler = None if section is None else section.rollout
        if not isinstance(sampler, VllmServerSpec):
            continue
        field, generate = f"{role}.rollout", section.rank_layout().generate
        if generate.tp * generate.pp > 1:
            raise ValueError(
                f"{field}.type is 'vllm_server', and its layout cuts generation in tp "
                f"{generate.tp} and pp {generate.pp}: the servers do that (vllm serve "
                "--tensor-parallel-size); give 1 for both"
            )
        if recipe.actor.model.adapter is not None:
            if recipe.actor.model.adapter.adapts_experts:
                raise ValueError(
                    f"{field}.type is 'vllm_server', and actor.model.adapter.targets has experts: "
                    "vLLM 0.32 reads the rows of gate and up in turns from such a folder, which "
                    "has them one after the other; name targets without experts, or take rollout "
                    "type vllm or hf"
                )
            if sampler.shared_folder is None:
                raise ValueError(
                    f"{field}.shared_folder is not given, though the actor trains an adapter: name "
                    "a folder that the service may write to and the servers may read"
                )
            continue
        pool = next((one for one in recipe.pools.values() if role in one.roles), None)
        if pool is not None and not pool.has_gpus:
            raise ValueError(
                f"{field}.type is 'vllm_server', and the actor trains its whole model on a CPU: "
                "whole weights go to servers by NCCL, from a GPU alone; give actor.model.adapter, "
                "or take rollout type vllm or hf"
            )
