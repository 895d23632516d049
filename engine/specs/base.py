"""Base of every spec: frozen, and strict about its keys."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A frozen section of a recipe that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        # A URL may have a password. Our own messages show what was given, masked.
        hide_input_in_errors=True,
    )


class PartSpec(Spec):
    """A numeric part of an algorithm: an estimator or a loss, with the columns that it reads.

    Coordinator and services ask the spec, so that what a part reads stands in one place.
    """

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads, besides tokens and prompt_lengths."""

    def optional_columns(self) -> tuple[str, ...]:
        """Columns that it also reads where the batch has all of them, e.g. for metrics."""
        return ()

    @property
    def logprob_temperature(self) -> float:
        """Softmax temperature at which the log-probs that it reads are taken."""
        return 1.0


class EstimatorPartSpec(PartSpec):
    """A part that makes new columns of a batch from those that it has; no model takes part."""

    @abstractmethod
    def makes(self) -> tuple[str, ...]:
        """Columns that it gives."""

    def used_columns(self) -> tuple[str, ...]:
        """Columns that change what it gives; each is read where the batch has it."""
        return ()

    def baseline_columns(self) -> tuple[str, ...]:
        """Columns that it reads of a second experience, with which it compares; none: no such."""
        return ()
