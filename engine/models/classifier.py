"""A Hugging Face sequence classifier as a scorer of token rows.

Shape letters: B rows, T longest row, D width, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rolemesh.engine.batching import PAD_TOKEN, micro_batches
from rolemesh.engine.models.causal_lm import backbone_states
from rolemesh.engine.models.folder import load_model, read_config
from rolemesh.engine.specs import ModelSpec


class Classifier:
    """Scores rows by one logit of a classifier's head. Frozen.

    Owned by the rank's compute thread.

    Example::

        classifier = Classifier(ModelSpec(path=folder), label=1)
        scores_B = classifier.score(classifier.encode(["good", "bad"]))
    """

    def __init__(
        self, spec: ModelSpec, *, label: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        """Loads model and tokenizer.

        Args:
            spec: which folder, and how to compute.
            label: index of the logit that is the score.
            device: where the weights live.

        Raises:
            ModelFolderError: the folder is missing or not whole.
            ValueError: the head has no such label.
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
        model, _ = load_model(AutoModelForSequenceClassification, spec, config=config)
        self._model = model.requires_grad_(False).to(self.device)
        # Decoder-only families call their head `score` and read it at the last token; encoders
        # read a marker token and need an attention mask.
        self._is_decoder = isinstance(getattr(self._model, "score", None), torch.nn.Linear)
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
            logits_BL = self._logits([token_rows[row] for row in group])
            scores_B[group] = logits_BL[:, self.label].float().cpu()
            done += len(group)
            if progress is not None:
                progress("score", done, len(token_rows))
        return scores_B

    def _logits(self, token_rows: list[Sequence[int]]) -> torch.Tensor:
        lengths_B = torch.tensor([len(row) for row in token_rows], device=self.device)
        tokens_BT = torch.full((len(token_rows), int(lengths_B.max())), PAD_TOKEN)
        for index, row in enumerate(token_rows):
            tokens_BT[index, : len(row)] = torch.tensor(row)
        tokens_BT = tokens_BT.to(self.device)
        if self._is_decoder:
            # Not the model's own pooling: it looks for the last token that is not the pad id,
            # and chat models end their text with exactly that id.
            hidden_BTD = backbone_states(self._model, tokens_BT, self.spec)
            rows = torch.arange(len(token_rows), device=self.device)
            logits_BL: torch.Tensor = self._model.score(hidden_BTD[rows, lengths_B - 1].float())
            return logits_BL
        positions_T = torch.arange(tokens_BT.shape[1], device=self.device)
        is_token_BT = (positions_T < lengths_B[:, None]).long()
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.spec.compute_dtype == "bfloat16"
        ):
            logits_BL = self._model(input_ids=tokens_BT, attention_mask=is_token_BT).logits
        return logits_BL
