"""A language model with one scalar a token: the critic.

The format on disk is transformers' own ...ForTokenClassification with one label, so that other
programs load a critic with its head.

Shape letters: B rows, T longest row, N completion tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from rolemesh.engine.batching import PaddedRows
from rolemesh.engine.models.causal_lm import backbone_states
from rolemesh.engine.models.folder import load_model, read_config
from rolemesh.engine.models.recompute import apply_recompute
from rolemesh.engine.specs import ModelSpec

HEAD = "score"
"""Name of the head in transformers' token classifiers."""


class ValueModel(nn.Module):
    """A backbone and a float32 value head.

    A folder of a causal LM has no value head: it then starts at zero. Every first value is 0,
    so the first advantages are the plain returns, instead of returns minus the noise of a random
    projection. The head still learns from the first step (its gradient is the hidden state), and
    the backbone from the second.

    `values[t]` belongs to the state before completion token t: the hidden state of the token
    before it, which has not seen token t.
    """

    def __init__(self, spec: ModelSpec, *, device: torch.device | str = "cpu") -> None:
        """Loads backbone and, where the folder has one, head.

        Args:
            spec: which folder, and how to compute.
            device: where the weights live.

        Raises:
            ModelFolderError: the folder is missing or not whole.
            ValueError: transformers has no token classifier of this family.
        """
        super().__init__()
        self.spec = spec
        self.device = torch.device(device)
        config = read_config(spec)
        config.num_labels = 1
        self.lm, missing = load_model(
            AutoModelForTokenClassification, spec, config=config, may_miss=(f"{HEAD}.",)
        )
        head = getattr(self.lm, HEAD, None)
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"model.path {str(spec.path)!r}: {type(self.lm).__name__} has no linear head "
                f"named {HEAD!r}: give a decoder-only model"
            )
        self.head: nn.Linear = head
        for name in missing:
            nn.init.zeros_(self.lm.get_parameter(name))
        apply_recompute(self.lm, spec.recompute)
        self.to(self.device)

    def forward(self, rows: PaddedRows) -> torch.Tensor:
        """Values, float32 [N], of the states before the completion tokens."""
        hidden_BTD = backbone_states(self.lm, rows.tokens_BT, self.spec)
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, rows.state_index_N)
        # In the weights' float32: returns are regressed to small differences, and the product is
        # tiny.
        values_N: torch.Tensor = self.head(hidden_ND.to(self.head.weight.dtype)).squeeze(1)
        return values_N

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by Hugging Face name, the head among them."""
        yield from self.lm.named_parameters()
