"""A language model with one scalar a token: the critic.

The format on disk is transformers' own ...ForTokenClassification with one label, so that other
programs load a critic with its head.

Shape letters: B rows, T longest row, N completion tokens, D width.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.packing.batching import PaddedRows
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec

HEAD = "score"
"""Name of the head in transformers' token classifiers."""


class ValueModel(Decoder):
    """A backbone and a float32 value head.

    A folder of a causal LM has no value head: it then starts at zero. Every first value is 0,
    so the first advantages are the plain returns, instead of returns minus the noise of a random
    projection. The head still learns from the first step (its gradient is the hidden state), and
    the backbone from the second.

    `values[t]` belongs to the state before completion token t: the hidden state of the token
    before it, which has not seen token t.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> None:
        """Loads backbone and, where the folder has one, head.

        Args:
            spec: which folder, and how to compute.
            device: where the weights live.
            mesh: the rank's place; None for a rank that is alone.

        Raises:
            ModelFolderError: the folder is missing or not whole.
            ValueError: transformers has no token classifier of this family.
            LayoutError: the model cannot be cut so.
            UnsupportedFamilyError: more than one rank, and the family has no plan.
        """
        config = read_config(spec)
        config.num_labels = 1
        super().__init__(
            AutoModelForTokenClassification,
            spec,
            config=config,
            device=device,
            mesh=mesh or RankMesh.single(),
            may_miss=(f"{HEAD}.",),
        )
        self.share_prefixes()
        if not self.mesh.pp.is_last:
            return
        if not isinstance(getattr(self.lm, HEAD, None), nn.Linear):
            raise ValueError(
                f"model.path {str(spec.path)!r}: {type(self.lm).__name__} has no linear head "
                f"named {HEAD!r}: give a decoder-only model"
            )
        for name in self.missing:
            nn.init.zeros_(self.lm.get_parameter(name))

    @property
    def head(self) -> nn.Linear:
        """The value head; on the last stage alone. Every tensor slice has all of it."""
        self._check_last_stage()
        head: nn.Linear = self.lm.get_submodule(HEAD)
        return head

    def forward(self, rows: PaddedRows) -> torch.Tensor:
        """Values, float32 [N], of the states before the completion tokens.

        For one stage; with more, `stage_forward` of each and `finish` on the last.
        """
        return self.finish(self.stage_forward(rows, None), rows)

    def finish(self, hidden_BTD: torch.Tensor, rows: PaddedRows) -> torch.Tensor:
        """Values, float32 [N], from the last stage's result; equal on all its slices.

        Args:
            hidden_BTD: from `stage_forward`, float [B, T, D].
            rows: the rows it was computed from.

        Raises:
            ValueError: this is not the last stage.
        """
        head = self.head
        hidden_ND = rows.states(hidden_BTD)
        # In the weights' float32: returns are regressed to small differences, and the product is
        # tiny.
        values_N: torch.Tensor = head(hidden_ND.to(head.weight.dtype)).squeeze(1)
        return values_N
