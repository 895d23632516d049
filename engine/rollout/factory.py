"""Makes the rollout back end that a recipe names."""

from __future__ import annotations

from pathlib import Path

import torch

from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.specs import AdapterSpec, Numerics, RolloutSpec, VllmServerSpec, VllmSpec


def make_backend(
    spec: RolloutSpec,
    model_path: Path,
    mesh: RankMesh | None = None,
    *,
    device: torch.device | None = None,
    numerics: Numerics = "exact",
    updates_between_steps: bool = False,
    adapter: AdapterSpec | None = None,
    shares_engine: bool = False,
    has_endpoint: bool = False,
    folder_version: int | None = None,
) -> RolloutBackend:
    """Makes a back end without weights: send them before the first generation.

    Only the back end asked for is imported; vLLM's import takes many seconds. All ranks of a mesh
    call it together.

    Args:
        spec: Which back end, and its limits.
        model_path: Local Hugging Face folder of the policy; its weights are read for an adapter.
        mesh: Groups of this rank, whose generation layout the back end takes; None means that the
            rank is alone.
        device: This rank's, a GPU with its index; None takes the thread's current GPU if there is
            one.
        numerics: Whether vLLM may round activations on a CPU; hf computes in its dtype.
        updates_between_steps: Whether new weights may come between two tokens.
        adapter: What the trainer trains beside the folder's own weights; the back end then loads
            those, and updates bring the adapter's factors alone. None: updates bring all weights.
        shares_engine: Whether other back ends of the process, each with an adapter on the same
            base, are to use the same engine of vLLM. That of hf shares the base in any case.
        has_endpoint: Whether an endpoint gives it calls from outside.
        folder_version: Policy version of the folder's own weights, which vLLM then begins with;
            None: it begins without.

    Raises:
        LayoutError: The back end cannot generate in that layout.
        ValueError: The folder is missing or does not fit the spec.
    """
    if isinstance(spec, VllmSpec):
        from rolemesh.engine.rollout.vllm.sampler import VllmBackend

        return VllmBackend(
            spec,
            model_path,
            mesh,
            device=device,
            numerics=numerics,
            updates_between_steps=updates_between_steps,
            adapter=adapter,
            shares_engine=shares_engine,
            has_endpoint=has_endpoint,
            folder_version=folder_version,
        )
    if folder_version is not None:
        raise ValueError(f"folder_version is given, but rollout.type is {spec.type!r}, not 'vllm'")
    if has_endpoint:
        raise ValueError(
            f"endpoint is given, but rollout.type is {spec.type!r}: an endpoint is served by vLLM "
            "in the service's own process; give rollout.type vllm"
        )
    if isinstance(spec, VllmServerSpec):
        from rolemesh.engine.rollout.servers.sampler import VllmServerBackend

        return VllmServerBackend(
            spec,
            model_path,
            mesh,
            device=device,
            updates_between_steps=updates_between_steps,
            adapter=adapter,
        )
    from rolemesh.engine.rollout.hf.sampler import HfBackend

    return HfBackend(spec, model_path, mesh, device=device, adapter=adapter)
