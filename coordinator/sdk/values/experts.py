"""Loads of the experts of mixtures, as immutable values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from rolemesh.coordinator.sdk.values.html import table
from rolemesh.rpc.calls.expert_loads import checked_loads
from rolemesh.rpc.errors import InternalError
from rolemesh.v1 import coordinator_pb2, experience_pb2


@dataclass(frozen=True, slots=True, eq=False)
class LayerLoads:
    """How often each expert of each layer of one model was chosen for completion tokens.

    Shape letters: L layers with experts, E experts of a layer.
    """

    layers: npt.NDArray[np.int64]
    """Numbers of the layers in the model, from 0, ascending, [L]."""
    choices: npt.NDArray[np.int64]
    """How often each expert was chosen, [L, E]."""

    @property
    def load(self) -> npt.NDArray[np.float64]:
        """Choices of each expert over the mean of its layer, [L, E]; 1: even.

        NaN in a layer in which nothing was chosen.

        Example: choices [[6, 2, 4]] are loads [[1.5, 0.5, 1.0]].
        """
        load = np.full(self.choices.shape, np.nan)
        totals = self.choices.sum(axis=1, keepdims=True)
        # In floating numbers, since the product of large counts is beyond 64 bits.
        scaled = self.choices.astype(np.float64) * self.choices.shape[1]
        np.divide(scaled, totals, out=load, where=totals > 0)
        return load

    @staticmethod
    def of(told: Iterable[experience_pb2.LayerLoads]) -> LayerLoads:
        """From its messages; without any, L and E are 0.

        Raises:
            InternalError: They are not what trainer.proto says.
        """
        try:
            loads = checked_loads(told)
        except ValueError as error:
            raise InternalError(
                f"the answer breaks the contract of trainer.proto: {error}"
            ) from error
        choices = np.array(list(loads.values()), dtype=np.int64)
        return LayerLoads(
            np.array(list(loads), dtype=np.int64), choices.reshape(len(loads), -1 if loads else 0)
        )

    def _repr_html_(self) -> str:
        rows = (
            (
                int(layer),
                float(load.max()),
                int(load.argmax()),
                float(load.min()),
                int(load.argmin()),
            )
            for layer, load in zip(self.layers, self.load, strict=True)
        )
        return table(("layer", "most", "its expert", "least", "its expert"), rows)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoads:
    """Loads of experts in a step."""

    step: int
    """0 when there is none."""
    roles: Mapping[str, LayerLoads]
    """By the name of each trained role whose model is a mixture."""
    kept_steps: tuple[int, ...]
    """Steps of which loads are kept."""

    @staticmethod
    def of(answer: coordinator_pb2.GetExpertLoadsResponse) -> ExpertLoads:
        """From its message."""
        roles = {one.role: LayerLoads.of(one.layers) for one in answer.roles}
        return ExpertLoads(answer.step, MappingProxyType(roles), tuple(answer.steps))

    def _repr_html_(self) -> str:
        return "".join(
            f"<p>step {self.step}, {role}</p>{loads._repr_html_()}"
            for role, loads in self.roles.items()
        )
