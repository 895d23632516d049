"""Which trainer of TRL some settings are for: their defaults, and what they mean, differ."""

from __future__ import annotations

from collections.abc import Mapping

from rolemesh.coordinator.imports.source import ImportedError, Source

TRAINERS = ("grpo", "rloo", "gmpo", "distillation", "server_distillation", "gkd", "gold")
DISTILLING = ("distillation", "server_distillation", "gkd", "gold")
"""Those with a teacher in the place of a reward."""
_ONLY: Mapping[str, tuple[str, ...]] = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "gold": ("use_uld_loss", "teacher_tokenizer_name_or_path"),
    "gkd": ("lmbda", "seq_kd"),
    "server_distillation": ("teacher_model_server_url",),
    "distillation": ("teacher_model_name_or_path",),
}
"""Fields of one trainer alone, or of it and of those before it here."""


def trl_trainer(source: Source) -> str:
    """The trainer: the one that is named, else the one whose fields are given, else grpo.

    Example: "RLOOTrainer", "rloo" and "RLOOConfig" are "rloo".

    Raises:
        ImportedError: The named one is none of `TRAINERS`.
    """
    named = (source.text("trainer") or "").lower()
    for ending in ("trainer", "config"):
        named = named.removesuffix(ending)
    if not named:
        given = (name for name, only in _ONLY.items() if any(source.given(field) for field in only))
        return next(given, "grpo")
    found = next((name for name in TRAINERS if name.replace("_", "") == _plain(named)), None)
    if found is None:
        raise ImportedError(
            f"{source.name_of('trainer')} is {source.text('trainer')!r}, and no algorithm here "
            f"does what it does: give settings of one of {', '.join(TRAINERS)}"
        )
    return found


def _plain(named: str) -> str:
    return named.rpartition(".")[2].replace("_", "").replace("-", "")


def is_rloo(source: Source) -> bool:
    """Whether settings of TRL are those of its RLOOTrainer."""
    return trl_trainer(source) == "rloo"
