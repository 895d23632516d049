"""A transformers model whose linear head gives scores: the critic, the reward model, a judge.

The formats on disk are transformers' own (...ForTokenClassification with one label for a critic,
...ForSequenceClassification otherwise), so that other programs load what was trained here.

Shape letters: B rows, T longest row, N completion tokens, U distinct ones, D width, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.folder import maker_without_values, read_config
from rolemesh.engine.models.images.whole_models import has_tower
from rolemesh.engine.models.parameter_files import FolderTensors
from rolemesh.engine.packing.packed_rows import PackedRows
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ClassifierRewardSpec, ModelSpec, Numerics

HEAD = "score"
"""Name of the head in transformers' decoder-only classifiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreHead:
    """What a model scores, and where its head comes from."""

    per: Literal["token", "row"]
    """"token": a value of the state before each completion token. "row": a score of the row, read
    at its last token."""
    origin: Literal["folder", "new", "folder or new"] = "folder"
    """"folder": the folder has a head. "new": it must have none, and one of a single label is put
    on. "folder or new": one of a single label, new where the folder has none."""
    label: int = 0
    """Which logit is the score."""
    starts_at_zero: bool = True
    """Whether a new head is zero. Otherwise it is random, as transformers draws it."""

    @classmethod
    def of_reward(cls, source: ClassifierRewardSpec) -> ScoreHead:
        """The head of a reward model that is trained."""
        return cls(per="row", origin="new" if source.new_head else "folder", label=source.label)


def _whole_has_head(spec: ModelSpec) -> bool:
    """Whether a model of images and text has a head beside it, which its architecture is silent of.

    transformers has no class for such a whole.
    """
    if maker_without_values() is not None or not has_tower(spec.path):
        return False
    with FolderTensors(spec.path) as files:
        return any(name.startswith(f"{HEAD}.") for name in files.names())


VALUE_HEAD = ScoreHead(per="token", origin="folder or new")
"""The head of a critic."""


class ScoringModel(Decoder):
    """Layers and a float32 head that gives scores. Owned by the rank's compute thread.

    A new head that starts at zero makes all scores equal at first. A critic's first advantages are
    then the plain returns, and the first gradient of a reward model's head is the difference of the
    hidden states of a pair, both without the noise of a random projection. The head learns from the
    first step, the backbone from the second.

    A critic's `values[t]` belongs to the state before completion token t: the hidden state of the
    token before it, which has not seen token t.

    Decoder-only families call their head `score`; encoders have heads of other kinds, need an
    attention mask, and only score whole rows, frozen and on one rank.

    Example::

        critic = ScoringModel(ModelSpec(path=folder), VALUE_HEAD)
        values_N = critic(pack_rows(batch, critic.device))
    """

    def __init__(
        self,
        spec: ModelSpec,
        head: ScoreHead,
        *,
        device: torch.device | str = "cpu",
        trainable: bool = True,
        mesh: RankMesh | None = None,
        numerics: Numerics = "exact",
    ) -> None:
        """Loads backbone and head, or a backbone to put a new head on; see `Decoder`.

        Without a mesh the rank is alone. A judge that is not trainable may be an encoder.

        Raises:
            ModelFolderError: The folder has a head already where a new one is asked for.
            ValueError: The head has no such label, transformers has no such classifier of this
                family, or a model to train is no decoder.
            Exception: As `Decoder`.
        """
        config = read_config(spec)
        if head.origin == "new":
            architectures = config.architectures or []
            named = any(name.endswith("ForSequenceClassification") for name in architectures)
            if named or _whole_has_head(spec):
                of = architectures[0] if named else "model of images and text"
                raise ModelFolderError(
                    f"model.path {str(spec.path)!r} is a {of}, which has a "
                    "head: leave new_head out, or give the folder of a causal LM"
                )
        if head.origin != "folder":
            config.num_labels = 1
        if not 0 <= head.label < config.num_labels:
            raise ValueError(
                f"label is {head.label}, but the classifier in {str(spec.path)!r} has "
                f"{config.num_labels} labels: give 0 to {config.num_labels - 1}"
            )
        super().__init__(
            AutoModelForTokenClassification
            if head.per == "token"
            else AutoModelForSequenceClassification,
            spec,
            config=config,
            device=device,
            mesh=mesh or RankMesh.single(),
            may_miss=() if head.origin == "folder" else (f"{HEAD}.",),
            numerics=numerics,
            trainable=trainable,
        )
        self.head_spec = head
        self.settle(trainable=trainable)
        if not self.mesh.pp.is_last:
            return
        if trainable and not isinstance(getattr(self.lm, HEAD, None), nn.Linear):
            raise ValueError(
                f"model.path {str(spec.path)!r}: {type(self.lm).__name__} has no linear head "
                f"named {HEAD!r} and cannot be trained here: give a decoder-only model"
            )
        for name in self.missing if head.starts_at_zero else ():
            nn.init.zeros_(self.lm.get_parameter(name))

    @property
    def is_decoder(self) -> bool:
        """Whether it is a decoder, which may be spread over ranks, and not an encoder."""
        return self.shape is not None or isinstance(getattr(self.lm, HEAD, None), nn.Linear)

    @property
    def head(self) -> nn.Linear:
        """The head; on the last stage alone. Every tensor slice has all of it."""
        self._check_last_stage()
        head: nn.Linear = self.lm.get_submodule(HEAD)
        return head

    def forward(self, rows: PackedRows) -> torch.Tensor:
        """Scores as `finish` gives them. For one stage; with more, `stage_forward` and `finish`."""
        if self.is_decoder:
            return self.finish(self.stage_forward(rows, None), rows)
        rectangle = rows.rectangle()
        with torch.autocast(
            rows.tokens_1S.device.type,
            torch.bfloat16,
            enabled=self.spec.compute_dtype == "bfloat16" and not self.multiplies_in_float32,
        ):
            logits_BL: torch.Tensor = self.lm(
                input_ids=rectangle.tokens_BT, attention_mask=rectangle.is_token_BT.long()
            ).logits
        return logits_BL[:, self.head_spec.label]

    def finish(self, hidden_1SD: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """Scores from the last stage's result; equal on all its slices.

        A row's score is not left to the model's own pooling, which looks for the last token that is
        not the pad id: chat models end their text with exactly that id.

        Args:
            hidden_1SD: From `stage_forward`, float [1, S, D].
            rows: The rows it was computed from.

        Returns:
            float32 [N], values of the states before the completion tokens, or float32 [B], scores
            of the rows.

        Raises:
            ValueError: This is not the last stage.
        """
        head = self.head
        # In the weights' float32: scores are compared by small differences, and the product is
        # tiny.
        if self.head_spec.per == "token":
            hidden_UD = rows.states(hidden_1SD)
            values_U: torch.Tensor = head(hidden_UD.to(head.weight.dtype)).squeeze(1)
            return rows.of_rows(values_U)
        logits_BL: torch.Tensor = head(rows.at_ends(hidden_1SD).to(head.weight.dtype))
        return rows.all_ends(logits_BL[:, self.head_spec.label])
