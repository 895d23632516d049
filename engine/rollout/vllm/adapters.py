"""Two ways in which a vLLM engine serves a policy whose trainer trains a LoRA adapter.

"slots": the engine holds the base, and adds the adapter in layers of its own. "merged": the engine
knows of no adapter; an update gives it the sums of the two. Imports no vLLM, which is imported
late.

Shape letters: I inputs, O outputs, R rank.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rolemesh.engine.layout.adapters import adapted_parameter, factors_beside, split_factor
from rolemesh.engine.models.parameter_files import ParameterFiles, named_as_in_files
from rolemesh.engine.rollout.model_folder import ExpectedWeights, ModelFolder, expected_weights
from rolemesh.engine.rollout.vllm.engine.held_engine import HeldEngine
from rolemesh.engine.rollout.vllm.engine.settings import FirstWeights
from rolemesh.engine.rollout.vllm.weights.updates import load_whole
from rolemesh.engine.specs import AdapterSpec, VllmSpec

if TYPE_CHECKING:
    from rolemesh.engine.rollout.vllm.weights.merging import WrittenMatrix

logger = logging.getLogger(__name__)

AdapterWay = Literal["slots", "merged"]

_numbers = itertools.count(1)
"""Ids of adapters; none is used twice in a process."""


class ServedAdapter(ABC):
    """How an engine serves the adapter of a policy.

    Owned by the compute thread, like the engine.
    """

    first_weights: FirstWeights
    """What the engine begins with."""
    sleep_level: int
    """VLLM's: 1 keeps a copy of the weights on the host, 2 drops them."""
    request: Any = None
    """What requests name to have the adapter (vLLM's LoRARequest); None: nothing."""

    def engine_arguments(self) -> Mapping[str, Any]:
        """What vLLM's EngineArgs need more."""
        return {}

    @abstractmethod
    def check(self, engine: Any) -> None:
        """Raises ValueError where a new engine cannot serve the adapter."""

    @abstractmethod
    def load(self, held: HeldEngine, factors: Mapping[str, torch.Tensor]) -> None:
        """Gives the engine another version of the adapter, whatever it had before.

        Args:
            held: VLLM's engine.
            factors: From `own_copies`.
        """

    @abstractmethod
    def redirect(self, engine: Any) -> None:
        """Lets requests that were put back to the queue go on with what was loaded last."""


class SlottedAdapter(ServedAdapter):
    """In vLLM's LoRA slots: one is all that is needed, for all requests have the same version.

    The base stays as it was loaded, so that sleep has to keep a copy of it on the host; the slots
    and what vLLM notes of them lie in the same memory and come back with it. That is not verified
    on a GPU. On a CPU the products are ours (`weights/one_slot.py`).
    """

    first_weights = "rounded"
    sleep_level = 1

    def __init__(self, spec: AdapterSpec, expected: ExpectedWeights) -> None:
        self._spec = spec
        self._modules = _modules(expected.shapes)

    def engine_arguments(self) -> Mapping[str, Any]:
        """Slots beside the matrices that have an adapter, of the model's type.

        Raises:
            ValueError: VLLM has no slots for such a rank.
        """
        from rolemesh.engine.rollout.vllm.weights.slots import slot_rank

        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": slot_rank(self._spec.rank),
            # That of the activations; "float32" has no name of its own there.
            "lora_dtype": "auto",
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self._modules}),
        }

    def check(self, engine: Any) -> None:
        """Raises ValueError where vLLM's model has no layer for a factor: it would drop it."""
        from rolemesh.engine.rollout.vllm.weights.slots import check_slots

        engine.apply_model(lambda model: check_slots(model, self._modules))

    def load(self, held: HeldEngine, factors: Mapping[str, torch.Tensor]) -> None:
        """Fills the slot under a new id."""
        from rolemesh.engine.rollout.vllm.weights.slots import fill_slot, slot_request

        request = slot_request(next(_numbers))
        held.engine.apply_model(lambda model: fill_slot(model, factors, request, self._spec.scale))
        self.request = request

    def redirect(self, engine: Any) -> None:
        """Gives them the new id."""
        from rolemesh.engine.rollout.vllm.weights.slots import redirect_requests

        redirect_requests(engine, self.request)


class MergedAdapter(ServedAdapter):
    """Summed up with the base, W + scale * B A in float32.

    The first update, and one after a failure, loads every weight through vLLM's own loaders. Later
    ones write the matrices that have an adapter, to the same bits, where the engine holds them as
    `weights/merging.py` can write them: on one slice on a CPU. With several slices each update
    loads every weight: each rank sums up whole matrices, and vLLM's loaders cut them.

    The base is read from the folder again each time, so that no error adds up and no copy is kept.
    """

    first_weights = "none"
    sleep_level = 2

    def __init__(
        self, spec: AdapterSpec, rollout: VllmSpec, folder: ModelFolder, expected: ExpectedWeights
    ) -> None:
        """Reads which tensors the folder has.

        Raises:
            ValueError: It lacks one, or stores it under another name than the model's.
        """
        self._scale = spec.scale
        self._dtype: torch.dtype = getattr(torch, rollout.dtype)
        self._path: Path = folder.path
        self._shape = folder.shape
        self._shapes = expected_weights(folder).shapes
        self._adapted = list(map(adapted_parameter, _modules(expected.shapes)))
        self._matrices: list[WrittenMatrix] | None = None
        with ParameterFiles(self._path, self._shape) as tensors:
            missing = [name for name in self._shapes if tensors.stored_name(name) is None]
        if missing:
            raise ValueError(
                f"model path {str(self._path)!r} stores no {', '.join(map(repr, missing[:3]))} "
                f"({len(missing)} parameters), so that nothing can be merged with them: give "
                "rollout.adapters slots"
            )

    def check(self, engine: Any) -> None:
        """Finds out what later updates write; raises nothing: the first reaches all or fails."""
        from rolemesh.engine.rollout.vllm.weights.merging import written_matrices

        (self._matrices,) = engine.apply_model(
            lambda model: written_matrices(model, self._shapes, self._adapted)
        )
        if self._matrices is None:
            logger.info("each update of the adapter loads every weight of the engine")

    def load(self, held: HeldEngine, factors: Mapping[str, torch.Tensor]) -> None:
        """Writes the sums, and the base where the engine does not hold it."""
        holds_base, held.holds_base = held.holds_base, False
        if holds_base and self._matrices is not None:
            self._write(held.engine, self._matrices, factors)
        else:
            load_whole(held.engine, named_as_in_files(self._shape, self.weights(factors)))
        # Not after a failure, which leaves some of this version and some of another.
        held.holds_base = True

    def redirect(self, engine: Any) -> None:
        """Does nothing: requests know of no adapter."""

    def _write(
        self, engine: Any, matrices: list[WrittenMatrix], factors: Mapping[str, torch.Tensor]
    ) -> None:
        from rolemesh.engine.rollout.vllm.weights.merging import write_matrices

        with ParameterFiles(self._path, self._shape) as tensors:

            def fill(name: str, matrix_OI: torch.Tensor) -> None:
                matrix_OI.copy_(self._rounded(self._stored(tensors, name)))
                self._add(matrix_OI, name, factors)

            engine.apply_model(lambda model: write_matrices(model, matrices, fill))

    @torch.no_grad()
    def weights(self, factors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives every weight of the merged model, one at a time.

        Args:
            factors: By Hugging Face name, float32 [R, I] of A, [O, R] of B.

        Returns:
            (Hugging Face name, [global shape]): float32 where there is an adapter, otherwise of the
            spec's type or, where that is float32, of the folder's.
        """
        adapted = set(self._adapted)
        with ParameterFiles(self._path, self._shape) as tensors:
            for name in self._shapes:
                base = self._rounded(self._stored(tensors, name))
                if name in adapted:
                    base = base.to(torch.float32, copy=True)
                    self._add(base, name, factors)
                yield name, base

    def _stored(self, tensors: ParameterFiles, name: str) -> torch.Tensor:
        """A parameter of the base as the folder has it, [global shape]; it may be mapped."""
        key = tensors.stored_name(name)
        assert key is not None  # as __init__ has seen
        return tensors.stored(key, tuple((0, size) for size in self._shapes[name]))

    def _rounded(self, stored: torch.Tensor) -> torch.Tensor:
        """With the spec's values; not widened, since what reads it is float32."""
        return stored if self._dtype == torch.float32 else stored.to(self._dtype)

    def _add(self, weight: torch.Tensor, name: str, factors: Mapping[str, torch.Tensor]) -> None:
        """Adds scale * B A in place, of each expert by itself, if the weight has an adapter.

        Float32 [O, I], or [E, O, I].
        """
        a_name, b_name = factors_beside(name)
        a = factors.get(a_name)
        if a is not None:
            add = weight.addmm_ if weight.ndim == 2 else weight.baddbmm_
            add(factors[b_name], a, alpha=self._scale)


def served_adapter(
    way: AdapterWay,
    spec: AdapterSpec,
    rollout: VllmSpec,
    folder: ModelFolder,
    expected: ExpectedWeights,
) -> ServedAdapter:
    """The way that was chosen.

    Args:
        way: See this module.
        spec: The adapter.
        rollout: The sampler.
        folder: Of the base.
        expected: The factors that come in updates.

    Raises:
        ValueError: The folder does not serve that way.
    """
    if way == "slots":
        return SlottedAdapter(spec, expected)
    return MergedAdapter(spec, rollout, folder, expected)


def own_copies(factors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of an adapter's factors by name, float32 on the host."""
    return {
        name: tensor.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in factors
    }


def _modules(factors: Iterable[str]) -> list[str]:
    """Names of the matrices beside which factors stand, each once."""
    splits = filter(None, map(split_factor, factors))
    return list(dict.fromkeys(module for module, _ in splits))
