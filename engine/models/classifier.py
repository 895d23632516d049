"""A Hugging Face sequence classifier as a scorer of token rows.

Decoder-only families with a plan can be spread over ranks; encoders stay on one.

Shape letters: B rows, T longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rolemesh.engine.devices import sent
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.rank_model import MicroBatch, RankModel, check_in_vocabulary
from rolemesh.engine.models.scoring import RowProgress
from rolemesh.engine.models.scoring_model import ScoreHead, ScoringModel
from rolemesh.engine.packing.batching import PAD_TOKEN, PaddedRows, micro_batches
from rolemesh.engine.parallel.agreement import prepare_together
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.pretrained import load_tokenizer
from rolemesh.engine.specs import ModelSpec


class Classifier:
    """Scores rows by one logit of a classifier's head.

    Owned by the rank's compute thread. Frozen, unless it scores with a model that is being trained:
    then with the weights of the moment.

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
        trained: RankModel | None = None,
    ) -> None:
        """Loads model and tokenizer; see `ScoringModel`, which has the errors.

        `label` is the index of the logit that is the score. `trained` is a reward model of the
        folder, with the same label, device and mesh, to score with; None loads the folder.
        """
        self.spec = spec
        self._rank_model: RankModel | None
        if trained is None:
            head = ScoreHead(per="row", label=label)
            self._model = ScoringModel(spec, head, device=device, trainable=False, mesh=mesh)
            self._rank_model = RankModel(self._model) if self._model.is_decoder else None
        else:
            model = trained.model
            if not isinstance(model, ScoringModel) or model.head_spec.per != "row":
                raise ValueError("trained holds no model that scores rows: give a reward model's")
            self._model, self._rank_model = model, trained
        self.max_tokens: int | None = getattr(self._model.config, "max_position_embeddings", None)
        """Longest row that the model sees; None where its config does not say."""
        self._tokenizer = load_tokenizer(spec.path)

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

        With many ranks all of them call it: those of a data-parallel replica with the same rows,
        replicas with rows of their own (there may be none).

        Args:
            token_rows: At least one token each.
            progress: Called with ("score", rows done, rows).

        Returns:
            float32 [B], on the CPU: on the last pipeline stage, equal on all its slices. Other
            stages return no scores.

        Raises:
            ValueError: A row is empty, longer than the model can see, or has a token that is not
                in its vocabulary.
        """
        mesh = self._model.mesh

        def prepare() -> tuple[list[list[int]], int]:
            groups = self._row_groups(token_rows)
            return groups, len(groups)

        groups, numbers = prepare_together(prepare, mesh.dp, self._model.device)
        found: list[torch.Tensor] = []

        def keep(number: int, outputs: torch.Tensor) -> None:
            if number < len(groups):
                found.append(outputs.float())

        passes = [self._micro_batch(token_rows, group) for group in groups]
        done = RowProgress(progress, "score", passes, len(token_rows))
        if self._rank_model is None:
            for number, micro_batch in enumerate(passes):
                keep(number, self._model(micro_batch.padded))
                done(number)
            return _in_order(found, groups)
        # Gathering weights that replicas cut among them takes all replicas, so all make as many
        # passes: those with fewer micro-batches run a token whose score is dropped.
        filler = replace(self._micro_batch([[0]], [0]), rows=torch.empty(0, dtype=torch.int64))
        passes += [filler] * (max(numbers) - len(passes))
        self._rank_model.run(passes, keep, trains=False, arguments={}, done=done)
        return _in_order(found, groups)

    def fault(self, row: Sequence[int]) -> str | None:
        """Why a row of token ids cannot be scored, and what to do; None where it can be."""
        if not row:
            return "has no tokens: give at least one token to score"
        if self.max_tokens is not None and len(row) > self.max_tokens:
            return (
                f"has {len(row)} tokens, but the classifier sees at most {self.max_tokens}: "
                "shorten prompts or completions"
            )
        return None

    def _row_groups(self, token_rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows of each micro-batch; raises ValueError for rows that cannot be scored."""
        lengths = [len(row) for row in token_rows]
        for index, row in enumerate(token_rows):
            fault = self.fault(row)
            if fault is not None:
                raise ValueError(f"row {index} {fault}")
        tokens = [token for row in token_rows for token in row]
        check_in_vocabulary(torch.tensor(tokens, dtype=torch.int64), self._model.config)
        return micro_batches(lengths, self.spec.micro_batch_tokens)

    def _micro_batch(self, token_rows: Sequence[Sequence[int]], group: list[int]) -> MicroBatch:
        rows = [token_rows[row] for row in group]
        padded = pad_token_rows(rows, self._model.device)
        lengths = Column(ColumnKind.ROW, torch.tensor([len(row) for row in rows]))
        return MicroBatch(torch.tensor(group), Experience({"lengths": lengths}), padded)


def _in_order(found: Sequence[torch.Tensor], groups: Sequence[list[int]]) -> torch.Tensor:
    """Scores of micro-batches, in the order of the rows, float32 [B] on the CPU, in one copy."""
    if not found:
        return torch.empty(0, dtype=torch.float32)
    scores_B = torch.cat(list(found)).cpu()
    rows_B = torch.tensor([row for group in groups for row in group])
    return torch.empty_like(scores_B).index_copy_(0, rows_B, scores_B)


def pad_token_rows(
    token_rows: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> PaddedRows:
    """Lays rows of token ids out for a forward pass in which no token is a completion's.

    Args:
        token_rows: B rows of at least one token each.
        device: Where the result lies.

    Returns:
        Rows with int64 [B, T] tokens, padded on the right.
    """
    lengths_B = torch.tensor([len(row) for row in token_rows])
    tokens_BT = torch.full((len(token_rows), int(lengths_B.max())), PAD_TOKEN)
    for index, row in enumerate(token_rows):
        tokens_BT[index, : len(row)] = torch.tensor(row)
    none_N = torch.empty(0, dtype=torch.int64, device=device)
    return PaddedRows(
        tokens_BT=sent(tokens_BT, device),
        lengths_B=sent(lengths_B, device),
        state_index_U=none_N,
        targets_U=none_N,
    )
