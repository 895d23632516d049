"""A sequence classifier that is trained to score trajectories: the reward model.

The format on disk is transformers' own ...ForSequenceClassification, so that what was trained is
a reward source like any other.

Shape letters: B rows, T longest row, D width.
"""

from __future__ import annotations

import torch
from torch import nn

from rolemesh.engine.models.folder import ModelFolderError, read_config
from rolemesh.engine.models.sequence_classifier import SequenceClassifier, check_label
from rolemesh.engine.packing.batching import PaddedRows
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ClassifierRewardSpec

HEAD = "score"
"""Name of the head in transformers' decoder-only sequence classifiers."""


class RewardModel(SequenceClassifier):
    """A decoder with a float32 head, of which one logit at the last token is the score.

    A new head starts at zero: all scores are equal then, and its first gradient is the difference
    of the hidden states of a pair, without the noise of a random projection. The backbone learns
    from the second step.
    """

    def __init__(
        self,
        spec: ClassifierRewardSpec,
        *,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> None:
        """Loads backbone and head, or a backbone to put a new head on.

        Args:
            spec: which folder, which label, and whether the head is new.
            device: where the weights live.
            mesh: the rank's place; None for a rank that is alone.

        Raises:
            ModelFolderError: the folder is missing or not whole, or has a head already where a
                new one is asked for.
            ValueError: the head has no such label, or the model is no decoder.
            LayoutError: the model cannot be cut so.
            UnsupportedFamilyError: more than one rank, and the family has no plan.
        """
        config = read_config(spec.model)
        if spec.new_head:
            architectures = config.architectures or []
            if any(name.endswith("ForSequenceClassification") for name in architectures):
                raise ModelFolderError(
                    f"model.path {str(spec.model.path)!r} is a {architectures[0]}, which has a "
                    "head: leave new_head out, or give the folder of a causal LM"
                )
            config.num_labels = 1
        check_label(spec.label, config, spec.model.path)
        super().__init__(
            spec.model,
            config=config,
            device=device,
            mesh=mesh,
            may_miss=(f"{HEAD}.",) if spec.new_head else (),
        )
        self.label = spec.label
        self.lm.requires_grad_(True)
        if not self.mesh.pp.is_last:
            return
        if not isinstance(getattr(self.lm, HEAD, None), nn.Linear):
            raise ValueError(
                f"model.path {str(spec.model.path)!r}: {type(self.lm).__name__} has no linear head "
                f"named {HEAD!r} and cannot be trained here: give a decoder-only model"
            )
        for name in self.missing:
            nn.init.zeros_(self.lm.get_parameter(name))

    def forward(self, rows: PaddedRows) -> torch.Tensor:
        """Scores, float32 [B]. For one stage; with more, `stage_forward` and `finish`."""
        return self.finish(self.stage_forward(rows, None), rows)

    def finish(self, hidden_BTD: torch.Tensor, rows: PaddedRows) -> torch.Tensor:
        """Scores, float32 [B], from the last stage's result; equal on all its slices.

        Args:
            hidden_BTD: from `stage_forward`, float [B, T, D].
            rows: the rows it was computed from.

        Raises:
            ValueError: this is not the last stage.
        """
        return super().finish(hidden_BTD, rows)[:, self.label]
