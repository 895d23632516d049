"""Facts of a Hugging Face folder that a sampler needs before it has any weights.

Reads config files only. Weights come later, and from the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.images.processing import ImageTokens, image_tokens_of
from rolemesh.engine.layout.families import DecoderShape, known_shape
from rolemesh.engine.model_folders.pretrained import stop_tokens_of
from rolemesh.engine.models.adapters.adapters import adapted_parameters, factor_shapes
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.decoder_config import load_decoder_config
from rolemesh.engine.specs import AdapterSpec


class WeightsStaleError(RuntimeError):
    """The sampler does not hold the weights that it is asked to sample with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checked folder of a causal language model."""

    path: Path
    """The folder."""
    config: Any
    """The transformers config."""
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    stop_tokens: tuple[int, ...]
    """Token ids that end a completion, ascending."""
    image_tokens: ImageTokens | None
    """How images stand among tokens; None for a model that takes none."""

    @property
    def shape(self) -> DecoderShape | None:
        """Sizes of the model; None where it cannot be spread over ranks."""
        return known_shape(self.config.to_dict())


def read_model_folder(path: Path, max_model_len: int) -> ModelFolder:
    """Reads and checks a model folder.

    Args:
        path: Folder with config.json, and generation_config.json if the model has one.
        max_model_len: Longest prompt and completion together that will be asked for, in tokens.

    Raises:
        ModelFolderError: The folder is missing, or no model can be made of its config.json.
        ValueError: It names no stop token, or its model cannot see max_model_len tokens.
    """
    config = load_decoder_config(path)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ValueError(
            f"rollout.max_model_len is {max_model_len}, but the model in {str(path)!r} sees at "
            f"most {limit} tokens (max_position_embeddings): give at most {limit}"
        )
    return ModelFolder(
        path=path,
        config=config,
        vocab_size=int(config.vocab_size),
        stop_tokens=stop_tokens_of(path, config),
        image_tokens=image_tokens_of(path),
    )


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    """Name and global shape of each weight of a whole update, tied parameters once.

    Buffers that are in the model's files are among them.

    Made from the model class itself, not from a sampler, so that a sampler which fuses or drops
    a parameter cannot hide that one was forgotten.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shape by Hugging Face name."""
    tied: Mapping[str, str]
    """Name of a parameter that is another one under a second name -> the name that is sent."""
    buffers: frozenset[str] = frozenset()
    """Names among `shapes` that are buffers: float32, whatever the sampler rounds weights to."""

    def checked(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hands the weights on, one at a time and detached.

        Raises:
            WeightsStaleError: At a parameter that is unknown, repeated or of another shape, and
                at the end when one is missing.
        """
        missing = dict.fromkeys(self.shapes)
        for name, tensor in weights:
            if name not in missing:
                raise WeightsStaleError(f"weight update has {name!r}, {self._objection(name)}")
            del missing[name]
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightsStaleError(
                    f"weight update has {name!r} with shape {list(tensor.shape)}, but the "
                    f"sampler's is {list(self.shapes[name])}: train and sample from one folder"
                )
            yield name, tensor.detach()
        refuse_missing("weight update", list(missing), len(self.shapes))

    def _objection(self, name: str) -> str:
        if name in self.shapes:
            return "which came before: send each parameter once"
        if name in self.tied:
            return f"which is tied to {self.tied[name]!r}: send only that one"
        return "which the model does not have: train and sample from one folder"


def refuse_missing(update: str, missing: Sequence[str], num_parameters: int) -> None:
    """Raises WeightsStaleError when an update lacked a parameter."""
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WeightsStaleError(
            f"{update} lacks {', '.join(map(repr, missing[:3]))}{more} "
            f"({len(missing)} of {num_parameters} parameters): send every parameter"
        )


def expected_weights(folder: ModelFolder) -> ExpectedWeights:
    """Lists the parameters of the folder's model without allocating any."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(folder.config, trust_remote_code=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in shapes
    }
    buffers = {name: tuple(buffer.shape) for name, buffer in saved_buffers(model)}
    return ExpectedWeights({**shapes, **buffers}, tied, frozenset(buffers))


def expected_factors(folder: ModelFolder, adapter: AdapterSpec) -> ExpectedWeights:
    """Lists the factors of an adapter of the folder's model, which alone come in an update.

    Raises:
        ValueError: The model has no such matrix, or one that is too small for the rank.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(folder.config, trust_remote_code=False)
    shapes: dict[str, tuple[int, ...]] = {}
    for module, parameter in adapted_parameters(model, adapter).items():
        shapes.update(factor_shapes(module, parameter, adapter.rank))
    return ExpectedWeights(shapes, {})
