"""Scores of an evaluated task: what each prompt got, and what that says of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rolemesh.engine.statistics import (
    Difference,
    Estimate,
    difference,
    estimate,
    pass_chance,
)

NAMED_ROWS = 20
"""Most rows without a score that are named."""


@dataclass(kw_only=True, slots=True)
class TaskScores:
    """Scores of one task, prompt by prompt.

    A completion without a score is never counted as 0: it is left out, counted and named. Example:
    a prompt with scores (1.0, None) counts with 1.0, one with (None, None) does not count.
    """

    name: str
    num_prompts: int
    """That were to be asked."""
    samples: int
    """Completions a prompt."""
    full_score: float | None = None
    """Score from which a completion passes; None: there is no such, and no pass@k."""
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    """By key of the prompt, one for each sample; None: it could not be scored."""
    unscored: int = 0
    unscored_rows: list[str] = field(default_factory=list)
    """The first NAMED_ROWS of them, each with the reason."""
    truncated: int = 0
    """Completions that were cut at their greatest length."""
    num_tokens: int = 0
    """Of all completions, where the endpoint told them."""

    @property
    def num_completions(self) -> int:
        """That have come, with a score or without."""
        return sum(map(len, self.scores.values()))

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a "row" of the process that asks and scores."""
        of_prompt = self.scores.setdefault(line["key"], [None] * self.samples)
        of_prompt[line["sample"]] = line["score"]
        if line["score"] is None:
            self.unscored += 1
            if len(self.unscored_rows) < NAMED_ROWS:
                where = f"row {line['row']}, sample {line['sample']}"
                self.unscored_rows.append(f"{where}: {line['why']}")
        self.truncated += line.get("finish_reason") == "length"
        self.num_tokens += line.get("num_tokens") or 0

    def by_prompt(self) -> dict[str, float]:
        """The mean score of each prompt that has one."""
        given = {
            key: [score for score in scores if score is not None]
            for key, scores in self.scores.items()
        }
        # In the order of keys: rows come in that of their ends.
        return {key: sum(some) / len(some) for key, some in sorted(given.items()) if some}

    def score(self) -> Estimate | None:
        """The mean over prompts; None where nothing has a score."""
        values = list(self.by_prompt().values())
        return estimate(values) if values else None

    def pass_by_prompt(self, k: int) -> dict[str, float]:
        """The chance of each prompt that one of k completions passes; raises ValueError.

        A prompt with fewer than k scored completions has none.
        """
        if self.full_score is None:
            raise ValueError(
                f"task {self.name} has no score that means right, so that nothing passes: give "
                "--pass-score the score from which a completion passes, or leave --pass-at out"
            )
        found = {}
        for key, scores in sorted(self.scores.items()):
            given = [score for score in scores if score is not None]
            if len(given) >= k:
                passed = sum(score >= self.full_score for score in given)
                found[key] = pass_chance(len(given), passed, k)
        return found

    def pass_at(self, k: int) -> Estimate | None:
        """The mean over prompts of `pass_by_prompt`; None where no prompt has k scores."""
        values = list(self.pass_by_prompt(k).values())
        return estimate(values) if values else None

    def metrics(self, ks: Sequence[int]) -> dict[str, float]:
        """Scalars for curves: "evaluated/<task>/score", its standard error, and pass@k."""
        found: dict[str, float] = {}
        score = self.score()
        if score is not None:
            found[f"evaluated/{self.name}/score"] = score.mean
            if score.standard_error is not None:
                found[f"evaluated/{self.name}/standard_error"] = score.standard_error
        for k in ks:
            passing = self.pass_at(k)
            if passing is not None:
                found[f"evaluated/{self.name}/pass@{k}"] = passing.mean
        return found

    def to_dict(self, ks: Sequence[int]) -> dict[str, Any]:
        """As plain JSON values, with what they say."""
        score = self.score()
        passing = {str(k): self.pass_at(k) for k in ks}
        return {
            "num_prompts": self.num_prompts,
            "samples": self.samples,
            "full_score": self.full_score,
            "score": None if score is None else score.to_dict(),
            "pass_at": {k: None if one is None else one.to_dict() for k, one in passing.items()},
            "unscored": self.unscored,
            "unscored_rows": self.unscored_rows,
            "truncated": self.truncated,
            "num_tokens": self.num_tokens,
            "scores": dict(sorted(self.scores.items())),
        }

    @classmethod
    def of_dict(cls, name: str, values: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` wrote; raises KeyError or TypeError for anything else."""
        fields = (
            *("num_prompts", "samples", "full_score", "scores", "unscored", "unscored_rows"),
            *("truncated", "num_tokens"),
        )
        return cls(name=name, **{field: values[field] for field in fields})


def compared(one: TaskScores, other: TaskScores) -> Difference | None:
    """By how much the second policy scores above the first over the prompts that both have."""
    return difference(one.by_prompt(), other.by_prompt())
