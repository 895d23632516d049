"""Rollout with vLLM in the rank's own process.

vLLM is imported when a back end is made, not before: it takes many seconds, and its environment
must be set first. With what settings it is made, what it changes in the process, and how it starts
as one of several ranks stand in `engine/`; how weights reach it in `weights/`, how adapters do in
`adapters.py`; what it is asked for in `requests/`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rolemesh.engine.hardware.devices import current_device, device_of, free_bytes, give_back_memory
from rolemesh.engine.layout.manifest import RankShard
from rolemesh.engine.model_folders.model_files import check_sampled
from rolemesh.engine.models.parameter_files import named_as_in_files
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.endpoint.calls import EndpointCalls
from rolemesh.engine.rollout.routes import EngineRoutes, check_routes
from rolemesh.engine.rollout.vllm.adapters import ServedAdapter, own_copies, served_adapter
from rolemesh.engine.rollout.vllm.engine.held_engine import HeldEngine, joined, settings_of, share
from rolemesh.engine.rollout.vllm.engine.process import (
    leave_uncompiled,
    prepare_environment,
    untouched_process,
)
from rolemesh.engine.rollout.vllm.engine.ranks import (
    check_allocator,
    check_generate_layout,
    check_groups,
    engine_start,
    leave_groups,
)
from rolemesh.engine.rollout.vllm.engine.settings import FirstWeights, make_engine
from rolemesh.engine.rollout.vllm.requests.image_prompts import ImagePrompts
from rolemesh.engine.rollout.vllm.requests.returned_routes import ENGINE_ARGUMENTS, ReturnedRoutes
from rolemesh.engine.rollout.vllm.requests.sampling import VllmSampling
from rolemesh.engine.rollout.vllm.weights.updates import (
    load_whole,
    place_parts,
    place_whole,
    takes_whole,
    whole_shard,
)
from rolemesh.engine.specs import AdapterSpec, Numerics, VllmSpec
from rolemesh.engine.specs.by_device import Choices, described, sampler_choices

logger = logging.getLogger(__name__)

_MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this one."""


class VllmBackend(VllmSampling):
    """A vLLM engine that takes its weights from the trainer beside it.

    Invariant: `policy_version` is that of the last whole update, or -1 while the engine holds no
    whole set of weights (at the start, after a failed update, asleep). At most one generation
    runs at a time, and no update during it but from `between_steps`. Owned by the rank's compute
    thread.

    Where the trainer trains an adapter, updates bring its factors alone, whole on every rank, and
    `sampler_choices` says in which of two ways they are added (`adapters.py`).

    One engine lives in a process at a time; `close` makes room for the next. With `shares_engine`
    several back ends of the process have the same one, each with an adapter of its own.

    With several ranks every rank has an engine. Those of all ranks are made together, and closed
    before the mesh. The ranks of one generation replica (`mesh.generate_tp`) are one sampler:
    they call `generate` with the same requests in the same order, take the same number of
    trajectories, and update, sleep and wake together, `between_steps` before the same step; each
    gets all trajectories, and the same ones. Replicas do not depend on each other: one may finish
    or begin while another works. A rank that dies leaves the others of its replica waiting in vLLM
    for ever: their launcher ends them.
    """

    _served: ServedAdapter | None = None
    """How the adapter is served; None where there is none."""
    _factors: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Of the adapter, as they came last."""
    _shard: RankShard | None = None
    """Where a whole weight goes, if it is written in place."""

    def __init__(
        self,
        spec: VllmSpec,
        model_path: Path,
        mesh: RankMesh | None = None,
        *,
        device: torch.device | None = None,
        folder_version: int | None = None,
        numerics: Numerics = "exact",
        updates_between_steps: bool = False,
        adapter: AdapterSpec | None = None,
        shares_engine: bool = False,
        has_endpoint: bool = False,
    ) -> None:
        """Loads the engine, or joins that of the process; see `factory.make_backend`.

        With a `folder_version`, which is the policy_version of the folder's own weights, vLLM loads
        them in its own way (on a CPU without rounding them); None starts without weights. With an
        adapter there is none: the folder is the base alone, rounded to the spec's type.

        Raises:
            LayoutError: Generation has pipeline stages.
            ValueError: The folder is missing or does not fit the spec or vLLM, a lone rank has
                another GPU than the first, or vLLM cannot serve the adapter.
            RuntimeError: An engine of this process could not be closed whole.
            UnsupportedFamilyError: vLLM's model of the family lacks a parameter of this one.
        """
        mesh = mesh or RankMesh.single()
        check_generate_layout(mesh)
        check_allocator()
        device = device or current_device()
        choices = sampler_choices(
            spec,
            device_of(device.type),
            numerics=numerics,
            # Calls of an endpoint stay in the engine while new weights come.
            updates_between_steps=updates_between_steps or has_endpoint,
            num_slices=mesh.generate_tp.size,
            has_adapter=adapter is not None,
            adapts_experts=adapter is not None and adapter.adapts_experts,
        )
        if adapter is not None and folder_version is not None:
            raise ValueError("folder_version is given with an adapter, which the folder lacks")
        if shares_engine and adapter is None:
            raise ValueError(
                "rollout.type is 'vllm' without model.adapter, but several runs share this "
                "service, and an engine has one set of weights: train adapters, give rollout type "
                "hf, or a service of its own"
            )
        if has_endpoint:
            self._check_endpoint(mesh, shares_engine=shares_engine)
            self.endpoint_calls = EndpointCalls(mesh.generate_tp)
        check_sampled(model_path, spec.type)
        super().__init__(spec, model_path, adapter)
        self._device = device
        self._num_slices = mesh.generate_tp.size
        is_whole = adapter is None and self._num_slices == 1
        shard = whole_shard(self._folder.shape) if is_whole else None
        self.yields_to_training = self._device.type == "cuda"
        if self._device.type == "cpu" and choices["activations"].value == "float32":
            self.rounds_to = spec.dtype
        self._request_numbers = itertools.count()
        self._prompts = ImagePrompts(self._folder.path, device)
        first_weights: FirstWeights = "none" if folder_version is None else "folder"
        slots: Mapping[str, Any] = {}
        prepare_environment(spec.kv_cache_gib)
        leave_uncompiled()
        if adapter is not None:
            way = choices["adapters"].value
            self._served = served_adapter(way, adapter, spec, self._folder, self._expected)
            first_weights, slots = self._served.first_weights, self._served.engine_arguments()
        settings = settings_of(
            spec,
            self._folder.path,
            **{f"rollout.{name}": choice.value for name, choice in choices.items()},
            device=str(device),
            adapter_slots=sorted(slots.items()),
            adapter_matrices=sorted(self._expected.shapes),
        )
        if spec.replay_routes:
            self._check_routes(shares_engine=shares_engine)
        held = joined(settings) if shares_engine else None
        if held is None:
            held = self._made(spec, mesh, choices, slots, first_weights, settings)
            if shares_engine:
                share(held)
        self._held = held
        if shard is not None and takes_whole(self.engine, shard):
            self._shard = shard
        if spec.replay_routes:
            self._routes = self._engine_routes()
        if self._served is not None:
            try:
                self._served.check(self.engine)
            except ValueError:
                self.close()
                raise
        if folder_version is not None:
            self.policy_version = folder_version
            self._held.user = self
        for line in described(choices):
            logger.info("rollout.%s", line)

    def _check_routes(self, *, shares_engine: bool) -> None:
        shape = check_routes(self._folder.shape)
        if shares_engine or self.endpoint_calls is not None:
            raise ValueError(
                "rollout.replay_routes is true, but other calls than a generation's use this "
                "engine (an endpoint, or other runs): leave it out"
            )
        assert shape.experts is not None  # as `check_routes` has seen
        self.route_width = len(shape.experts.layers) * self._folder.config.num_experts_per_tok

    def _engine_routes(self) -> EngineRoutes:
        if self._device.type != "cpu":
            shape = check_routes(self._folder.shape)
            assert shape.experts is not None  # as `check_routes` has seen
            chosen = self._folder.config.num_experts_per_tok
            return ReturnedRoutes(self.engine, sorted(shape.experts.layers), chosen)
        from rolemesh.engine.rollout.vllm.requests.routes import ListenedRoutes

        return ListenedRoutes(self.engine, self.route_width)

    @staticmethod
    def _check_endpoint(mesh: RankMesh, *, shares_engine: bool) -> None:
        if shares_engine:
            raise ValueError(
                "endpoint is given, but several runs share this service's engine, which serves one "
                "adapter at a time: give the run a service of its own"
            )

    def _made(
        self,
        spec: VllmSpec,
        mesh: RankMesh,
        choices: Choices,
        slots: Mapping[str, Any],
        weights: FirstWeights,
        settings: Mapping[str, str],
    ) -> HeldEngine:
        world_is_ours = not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        try:
            with untouched_process(), engine_start(mesh, self._device) as rank_arguments:
                returns_routes = spec.replay_routes and self._device.type != "cpu"
                routes = ENGINE_ARGUMENTS if returns_routes else {}
                arguments = {**rank_arguments, **slots, **routes}
                engine = make_engine(
                    spec,
                    choices,
                    self._folder,
                    arguments,
                    weights=weights,
                    # Texts and tools are an endpoint's alone.
                    has_tokenizer=self.endpoint_calls is not None,
                )
            check_groups(mesh)
        except BaseException:
            leave_groups(world_is_ours=world_is_ours)
            raise
        return HeldEngine(engine, world_is_ours=world_is_ours, settings=settings)

    @property
    def engine(self) -> Any:
        """VLLM's LLMEngine."""
        return self._held.engine

    def _take_engine(self) -> None:
        """Gives the engine this back end's weights where another one has used it since."""
        held = self._held
        if held.user is self:
            return
        if self._served is None:
            raise RuntimeError("another back end uses the engine of a whole model")
        held.user = None
        self._served.load(held, self._factors)
        self._begin_anew()
        held.user = self

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replaces every weight: in place on one slice on a CPU, else through vLLM's own loaders.

        With an adapter, its factors instead: whole, by Hugging Face name, float32 [R, I] of A and
        [O, R] of B.
        """
        with self._update(policy_version):
            checked = self._expected.checked(weights)
            if self._served is None and self._shard is not None:
                place_whole(self.engine, self._shard, map(self._rounded, checked))
            elif self._served is None:
                # Its loaders know the names of files: of experts, those of each.
                named = named_as_in_files(self._folder.shape, map(self._rounded, checked))
                load_whole(self.engine, named)
            else:
                self._factors = own_copies(checked)
                self._held.user = None
                self._served.load(self._held, self._factors)
            self._begin_anew()
            self._held.user = self

    def update_shard(
        self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """Replaces every weight by this rank's own parts, in place, nothing cut or gathered.

        Each rank is given its own tensors, those that `layout.boxes.generate_layout`
        names; no rank waits for another. One tensor is held at a time. Written in place on a GPU,
        where this is not verified. With an adapter each rank is given the same as by
        `update_weights`. A generator is closed at once after a failure: behind it may be a transfer
        whose other ranks wait for this one.
        """
        try:
            if self._served is not None:
                self.update_weights(tensors, policy_version)
                return
            with self._update(policy_version):
                place_parts(self.engine, map(self._rounded, tensors))
                self._begin_anew()
                self._held.user = self
        finally:
            if isinstance(tensors, Generator):
                tensors.close()

    def _begin_anew(self) -> None:
        """Lets no keys and values of old weights outlive them."""
        self._held.wake_cache()
        # Requests that run are put back to the queue, which frees theirs: they begin again from all
        # their tokens so far.
        self._forget_keys("of the old weights")
        if self._served is not None:
            self._served.redirect(self.engine)

    def _forget_keys(self, whose: str) -> None:
        """Empties the cache of keys and values, of requests that run, too."""
        puts_back = self._is_generating or self._has_calls
        if not self.engine.reset_prefix_cache(reset_running_requests=puts_back):
            raise RuntimeError(f"vLLM kept keys and values {whose}: its cache is in use")
        if self._routes is not None:
            self._routes.forget_cached()

    def weight_checksums(self) -> Mapping[str, str]:
        """SHA-256 (hex) of each weight as the kernels read it, by Hugging Face name.

        With several slices, of this rank's part of it. With an adapter, of each factor as it was
        sent, float32 and whole, whichever way it is served: what the trainer has. The kernels read
        it multiplied by the scale and maybe rounded, or merged with the base.

        Raises:
            WeightsStaleError: An adapter is served and none is held whole, or the engine sleeps.
        """
        from rolemesh.engine.rollout.vllm.weights.weights import model_checksums

        if self._served is not None:
            self._check_whole()
            return {name: tensor_checksum(factor) for name, factor in self._factors.items()}
        if self._held.are_weights_asleep:
            self._check_whole()
        checksums: dict[str, str]
        (checksums,) = self.engine.apply_model(model_checksums)
        shape = self._folder.shape
        own = "mlp" if shape is None else shape.record.vllm_mlp
        return {name.replace(f".{own}.", ".mlp."): value for name, value in checksums.items()}

    def sleep(self) -> int:
        """Drops weights and KV cache from a device; on a CPU there is nothing to free.

        The engine holds no weights afterwards: wake it, then send them. With an adapter in slots
        the base is copied to the host, and waking brings it back; the adapter is to be sent all the
        same. All ranks of a replica call it. Not verified on a GPU.
        """
        if not self.yields_to_training or self._held.are_weights_asleep:
            return 0
        if self._is_generating:
            raise RuntimeError("sleep came during a generation: finish or close it first")
        # vLLM empties torch's cache: what others had left there is not of its own freeing.
        give_back_memory(self._device)
        if self._has_calls:
            # Calls of an endpoint begin again from all their tokens so far.
            self._forget_keys("of an engine that falls asleep")
        before = free_bytes(self._device)
        # Level 2 keeps no host copy: weights come whole again, from the trainer or the folder.
        self._held.sleep(2 if self._served is None else self._served.sleep_level)
        self._hold_nothing("the engine slept and was sent no weights since")
        return max(0, free_bytes(self._device) - before)

    def wake(self) -> int:
        """Takes memory for the weights again; the KV cache follows with the next update.

        Both at once would stand beside the trainer's copies at the peak. All ranks of a replica
        call it. Not verified on a GPU.
        """
        if not self._held.are_weights_asleep:
            return 0
        before = free_bytes(self._device)
        self._held.wake_weights()
        return max(0, before - free_bytes(self._device))

    def close(self) -> None:
        """Ends the engine and the process groups that vLLM made, unless others use them.

        Every rank calls it.
        """
        self._held.let_go(self)
        del self._held
