"""A Hugging Face sequence classifier as a scorer of token rows.

Decoder-only families with a plan can be spread over ranks; encoders stay on one.

Shape letters: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.images.prompt_images import ImageInvalidError, images_of
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.models.rank_model import (
    MicroBatch,
    RankModel,
    micro_batches,
    with_fillers,
)
from rolemesh.engine.models.scoring import RowProgress
from rolemesh.engine.models.scoring_model import ScoreHead, ScoringModel
from rolemesh.engine.packing.packed_rows import whole_rows
from rolemesh.engine.parallel.agreement import prepare_together
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec
from rolemesh.engine.specs.columns import IMAGES


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

    def placed(self, rows: Sequence[list[int]], images: Sequence[str]) -> list[list[int]]:
        """Rows in which each image of the prompt has all of its places.

        Args:
            rows: Of `encode`, with one placeholder for each image, as a chat template has it.
            images: Rows of the column `images`.

        Raises:
            ImageInvalidError: This classifier takes no images, or a row's do not fit its text.
        """
        tokens = self._model.image_tokens
        # Samples of one prompt have one text.
        read = {text: images_of(text) for text in dict.fromkeys(images)}
        found = []
        for number, (row, text) in enumerate(zip(rows, images, strict=True)):
            grids = [image.grid for image in read[text]]
            if not grids:
                found.append(row)
                continue
            if tokens is None:
                raise ImageInvalidError(
                    f"row {number} has images, but the classifier in {str(self.spec.path)!r} takes "
                    "none and would judge without seeing them: give source.model the folder of a "
                    "classifier of images and text, or take another reward"
                )
            # A placeholder that a completion writes is text: it stands behind the prompt's.
            places = [at for at, token in enumerate(row) if token == tokens.placeholder]
            end = places[len(grids) - 1] + 1 if len(places) >= len(grids) else len(row)
            try:
                found.append(tokens.expanded(row[:end], grids) + row[end:])
            except ImageInvalidError as error:
                raise ImageInvalidError(f"row {number}: {error}") from error
        return found

    @torch.no_grad()
    def score(
        self,
        token_rows: Sequence[Sequence[int]],
        progress: Callable[[str, int, int], None] | None = None,
        images: Sequence[str] = (),
    ) -> torch.Tensor:
        """Scores rows of token ids.

        With many ranks all of them call it: those of a data-parallel replica with the same rows,
        replicas with rows of their own (there may be none).

        Args:
            token_rows: At least one token each.
            progress: Called with ("score", rows done, rows).
            images: Rows of the column `images`; rows are then as `placed` takes them. Empty: none.

        Returns:
            float32 [B], on the CPU: on the last pipeline stage, equal on all its slices. Other
            stages return no scores.

        Raises:
            ValueError: A row is empty, longer than the model can see, or has a token that is not
                in its vocabulary.
            ImageInvalidError: As `placed`, or an image cannot be read.
        """
        mesh = self._model.mesh
        plain = whole_rows(token_rows)

        def prepare() -> tuple[list[MicroBatch], int]:
            # Here, so that all ranks hear of images that do not fit.
            batch = plain
            if any(images):
                rows = self.placed([list(row) for row in token_rows], images)
                shown = Experience({IMAGES: Column.text(list(images))})
                batch = whole_rows(rows) | shown
            for index, row in enumerate(batch["tokens"].rows()):
                if (fault := self.fault(row)) is not None:
                    raise ValueError(f"row {index} {fault}")
            passes = micro_batches(self._model, batch)
            return passes, len(passes)

        passes, numbers = prepare_together(prepare, mesh.parts, self._model.device)
        groups = [one.rows for one in passes]
        found: list[torch.Tensor] = []

        def keep(number: int, outputs: torch.Tensor) -> None:
            if number < len(groups):
                found.append(outputs.float())

        passes = with_fillers(passes, plain, max(numbers), self._model)
        done = RowProgress(progress, "score", passes, len(token_rows))
        if self._rank_model is None:
            for number, micro_batch in enumerate(passes):
                keep(number, self._model(micro_batch.packed))
                done(number)
        else:
            self._rank_model.run(passes, keep, trains=False, arguments=lambda _: {}, done=done)
        return _in_order(found, groups)

    def fault(self, row: Sequence[int] | torch.Tensor) -> str | None:
        """Why a row of token ids cannot be scored, and what to do; None where it can be."""
        if not len(row):
            return "has no tokens: give at least one token to score"
        if self.max_tokens is not None and len(row) > self.max_tokens:
            return (
                f"has {len(row)} tokens, but the classifier sees at most {self.max_tokens}: "
                "shorten prompts or completions"
            )
        return None


def _in_order(found: Sequence[torch.Tensor], groups: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scores of micro-batches, in the order of the rows, float32 [B] on the CPU, in one copy."""
    if not found:
        return torch.empty(0, dtype=torch.float32)
    scores_B = torch.cat(list(found)).cpu()
    return torch.empty_like(scores_B).index_copy_(0, torch.cat(list(groups)), scores_B)
