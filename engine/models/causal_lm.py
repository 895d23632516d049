"""A causal language model on Hugging Face transformers that scores completions.

Shape letters: B rows, T longest row, N completion tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rolemesh.engine.batching import PaddedRows
from rolemesh.engine.models.folder import load_model, read_config
from rolemesh.engine.models.logprobs import token_logprobs
from rolemesh.engine.models.recompute import apply_recompute
from rolemesh.engine.specs import ModelSpec

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CausalLm(nn.Module):
    """A policy or reference: float32 weights, forward passes in the spec's compute type.

    Owned by the rank's compute thread.

    Example::

        model = CausalLm(ModelSpec(path=folder), device="cpu")
        rows = pad_rows(batch, model.device)
        logprobs_N, entropy_N = model.score(rows, temperature=1.0, with_entropy=True)
    """

    def __init__(
        self, spec: ModelSpec, *, device: torch.device | str = "cpu", trainable: bool = True
    ) -> None:
        """Loads the model.

        Args:
            spec: which folder, and how to compute.
            device: where the weights live.
            trainable: False for a frozen reference.

        Raises:
            ModelFolderError: the folder is missing or not whole.
            ValueError: the model needs something that the scoring here does not do.
        """
        super().__init__()
        self.spec = spec
        self.device = torch.device(device)
        config = read_config(spec)
        self.lm, _ = load_model(AutoModelForCausalLM, spec, config=config)
        _check_head(self.lm)
        apply_recompute(self.lm, spec.recompute)
        self.lm.requires_grad_(trainable)
        self.to(self.device)

    @property
    def vocabulary_VD(self) -> torch.Tensor:
        """float32 [V, D], the output embedding (the input embedding too, where tied)."""
        weight_VD: torch.Tensor = self.lm.get_output_embeddings().weight
        return weight_VD

    def forward(self, rows: PaddedRows) -> torch.Tensor:
        """Hidden states of the last layer, float [B, T, D]; the logits are never computed."""
        return backbone_states(self.lm, rows.tokens_BT, self.spec)

    def score(
        self, rows: PaddedRows, *, temperature: float, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs, float32 [N], of the completion tokens; entropy, float32 [N], on request."""
        hidden_ND = self(rows).flatten(0, 1).index_select(0, rows.state_index_N)
        return token_logprobs(
            hidden_ND.to(self.vocabulary_VD.dtype),
            self.vocabulary_VD,
            rows.targets_N,
            temperature=temperature,
            chunk_tokens=self.spec.logprob_chunk_tokens,
            compute_dtype=COMPUTE_DTYPES[self.spec.compute_dtype],
            with_entropy=with_entropy,
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by Hugging Face name; a tied one comes once, under its first name."""
        yield from self.lm.named_parameters()


def backbone_states(model: Any, tokens_BT: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Runs the layers of a right-padded batch, without a head.

    No attention mask is needed: attention is causal, so a pad can only influence later pads.

    Args:
        model: a transformers model with a decoder-only backbone.
        tokens_BT: int64 [B, T], right-padded.
        spec: its compute type.

    Returns:
        Hidden states, float [B, T, D].
    """
    # A context of its own for each pass: autocast keeps the bfloat16 copy of a weight until the
    # context ends, so each weight is cast once a pass and never stale after an optimizer step.
    with torch.autocast(
        tokens_BT.device.type, torch.bfloat16, enabled=spec.compute_dtype == "bfloat16"
    ):
        hidden_BTD: torch.Tensor = model.base_model(
            input_ids=tokens_BT, use_cache=False
        ).last_hidden_state
    return hidden_BTD


def _check_head(lm: Any) -> None:
    """Refuses heads that are more than a product with the output embedding."""
    config = lm.config.get_text_config()
    extras = {
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) is not None,
        "logits_scaling": getattr(config, "logits_scaling", 1.0) not in (None, 1.0),
        "logit_scale": getattr(config, "logit_scale", 1.0) not in (None, 1.0),
        "a bias": getattr(lm.get_output_embeddings(), "bias", None) is not None,
    }
    for extra, is_present in extras.items():
        if is_present:
            raise ValueError(
                f"model.path {lm.name_or_path!r}: the output layer of {type(lm).__name__} has "
                f"{extra}, which log-probs here leave out: give another model"
            )
