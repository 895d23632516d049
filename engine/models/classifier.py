"""A Hugging Face sequence classifier as a scorer of token rows.

Decoder-only families with a plan can be spread over ranks; encoders stay on one.

Shape letters: B rows, T longest row, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rolemesh.engine.batching import PAD_TOKEN, PaddedRows, micro_batches
from rolemesh.engine.mesh import RankMesh
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.specs import ModelSpec


class Classifier:
    """Scores rows by one logit of a classifier's head. Frozen.

    Owned by the rank's compute thread.

    Example::

        classifier = Classifier(ModelSpec(path=folder), label=1)
        scores_B = classifier.score(classifier.encode(["good", "bad"]))
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        label: int = 0,
        device: torch.device | str = "cpu",
        mesh: RankMesh | None = None,
    ) -> None:
        """Loads model and tokenizer.

        Args:
            spec: which folder, and how to compute.
            label: index of the logit that is the score.
            device: where the weights live.
            mesh: the rank's place; None for a rank that is alone.

        Raises:
            ModelFolderError: the folder is missing or not whole.
            ValueError: the head has no such label.
            LayoutError: the model cannot be cut so.
            UnsupportedFamilyError: more than one rank, and the family has no plan.
        """
        self.spec = spec
        self.device = torch.device(device)
        config = read_config(spec)
        if not 0 <= label < config.num_labels:
            raise ValueError(
                f"label is {label}, but the classifier in {str(spec.path)!r} has "
                f"{config.num_labels} labels: give 0 to {config.num_labels - 1}"
            )
        self.label = label
        self.model = SequenceClassifier(spec, config=config, device=device, mesh=mesh)
        self._max_tokens: int | None = getattr(config, "max_position_embeddings", None)
        self._tokenizer = AutoTokenizer.from_pretrained(
            spec.path, local_files_only=True, trust_remote_code=False
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text under the classifier's own tokenizer."""
        if not texts:
            return []
        rows: list[list[int]] = self._tokenizer(list(texts))["input_ids"]
        return rows

    @torch.no_grad()
    def score(
        self,
        token_rows: Sequence[Sequence[int]],
        progress: Callable[[str, int, int], None] | None = None,
    ) -> torch.Tensor:
        """Scores rows of token ids.

        Args:
            token_rows: at least one token each.
            progress: called with ("score", rows done, rows).

        Returns:
            float32 [B], on the CPU.

        Raises:
            ValueError: a row is empty, or longer than the model can see.
        """
        lengths = [len(row) for row in token_rows]
        for index, length in enumerate(lengths):
            if length == 0:
                raise ValueError(f"row {index} has no tokens: give at least one token to score")
            if self._max_tokens is not None and length > self._max_tokens:
                raise ValueError(
                    f"row {index} has {length} tokens, but the classifier sees at most "
                    f"{self._max_tokens}: shorten prompts or completions"
                )
        scores_B = torch.empty(len(token_rows), dtype=torch.float32)
        done = 0
        for group in micro_batches(lengths, self.spec.micro_batch_tokens):
            rows = pad_token_rows([token_rows[row] for row in group], self.device)
            scores_B[group] = self.model(rows)[:, self.label].float().cpu()
            done += len(group)
            if progress is not None:
                progress("score", done, len(token_rows))
        return scores_B


class SequenceClassifier(Decoder):
    """Layers and head of a sequence classifier, frozen. Owned by the rank's compute thread.

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
    ) -> None:
        """Loads the rank's part; see `Classifier` for arguments and errors."""
        super().__init__(
            AutoModelForSequenceClassification,
            spec,
            config=config,
            device=device,
            mesh=mesh or RankMesh.single(),
        )
        self.lm.requires_grad_(False)

    def forward(self, rows: PaddedRows) -> torch.Tensor:
        """Logits, float [B, L]. For one stage; with more, `stage_forward` and `finish`."""
        if isinstance(getattr(self.lm, "score", None), nn.Linear):
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
