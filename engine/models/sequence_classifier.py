"""Layers and head of a sequence classifier, whole or one rank's part.

Shape letters: B rows, T longest row, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.packing.batching import PAD_TOKEN, PaddedRows
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec


class SequenceClassifier(Decoder):
    """Layers and head of a sequence classifier. Owned by the rank's compute thread.

    Frozen, unless it is a `RewardModel`.

    Decoder-only families call their head `score` and read it at the last token; encoders read a
    marker token and need an attention mask.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        config: Any,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
        may_miss: tuple[str, ...] = (),
    ) -> None:
        """Loads the rank's part; see `Decoder` for arguments and errors."""
        super().__init__(
            AutoModelForSequenceClassification,
            spec,
            config=config,
            device=device,
            mesh=mesh or RankMesh.single(),
            may_miss=may_miss,
        )
        self.lm.requires_grad_(False)

    @property
    def is_decoder(self) -> bool:
        """Whether it is a decoder, which may be spread over ranks, and not an encoder."""
        return self.shape is not None or isinstance(getattr(self.lm, "score", None), nn.Linear)

    def forward(self, rows: PaddedRows) -> torch.Tensor:
        """Logits, float [B, L]. For one stage; with more, `stage_forward` and `finish`."""
        if self.is_decoder:
            return self.finish(self.stage_forward(rows, None), rows)
        positions_T = torch.arange(rows.tokens_BT.shape[1], device=rows.tokens_BT.device)
        is_token_BT = (positions_T < rows.lengths_B[:, None]).long()
        with torch.autocast(
            rows.tokens_BT.device.type,
            torch.bfloat16,
            enabled=self.spec.compute_dtype == "bfloat16",
        ):
            logits_BL: torch.Tensor = self.lm(
                input_ids=rows.tokens_BT, attention_mask=is_token_BT
            ).logits
        return logits_BL

    def finish(self, hidden_BTD: torch.Tensor, rows: PaddedRows) -> torch.Tensor:
        """Logits, float32 [B, L], from the last stage's result; equal on all its slices.

        Not the model's own pooling: it looks for the last token that is not the pad id, and chat
        models end their text with exactly that id.

        Args:
            hidden_BTD: from `stage_forward`, float [B, T, D].
            rows: the rows it was computed from.

        Raises:
            ValueError: this is not the last stage.
        """
        self._check_last_stage()
        row_B = torch.arange(len(rows.lengths_B), device=hidden_BTD.device)
        logits_BL: torch.Tensor = self.lm.score(hidden_BTD[row_B, rows.lengths_B - 1].float())
        return logits_BL


def check_label(label: int, config: Any, folder: Path) -> None:
    """Raises ValueError unless a head with the config's labels has this one."""
    if not 0 <= label < config.num_labels:
        raise ValueError(
            f"label is {label}, but the classifier in {str(folder)!r} has {config.num_labels} "
            f"labels: give 0 to {config.num_labels - 1}"
        )


def pad_token_rows(
    token_rows: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> PaddedRows:
    """Lays rows of token ids, at least one each, out for a forward pass; none is a completion."""
    lengths_B = torch.tensor([len(row) for row in token_rows])
    tokens_BT = torch.full((len(token_rows), int(lengths_B.max())), PAD_TOKEN)
    for index, row in enumerate(token_rows):
        tokens_BT[index, : len(row)] = torch.tensor(row)
    none_N = torch.empty(0, dtype=torch.int64, device=device)
    return PaddedRows(
        tokens_BT=tokens_BT.to(device),
        lengths_B=lengths_B.to(device),
        state_index_N=none_N,
        targets_N=none_N,
    )
