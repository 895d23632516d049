"""What the model of a config.json can do here: be sampled, trained on a rank or several, adapted.

No torch. `rolemesh check MODEL-FOLDER` prints it of a folder, and docs/model.md has it of all
families.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rolemesh.engine.layout.families import DecoderShape, RefusedSettingError
from rolemesh.engine.layout.family_records import RECORDS, FamilyRecord
from rolemesh.engine.model_folders.model_files import NOT_UPDATED_IN_VLLM

HEADINGS = ("family", "sampled by", "trained on one rank", "trained over ranks", "adapters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """A line of the table; a text is what a cell says, in the order of HEADINGS."""

    family: str
    sampled_by: str
    on_one_rank: str
    over_ranks: str
    adapters: str
    can_train: bool = True
    """Whether the model can be trained at all."""

    @property
    def cells(self) -> tuple[str, ...]:
        """All of them."""
        return (
            self.family,
            self.sampled_by,
            self.on_one_rank,
            self.over_ranks,
            self.adapters,
        )


def abilities_of(config: Mapping[str, Any]) -> Abilities:
    """What a model can do.

    Args:
        config: config.json as a dict, with its model_type.

    Raises:
        ValueError: The family is known, and a size is missing or impossible.
    """
    family = str(config["model_type"])
    record = RECORDS.get(family)
    if record is None or config.get("quantization_config") is not None:
        return _without_record(family)
    try:
        shape = DecoderShape.from_config(config)
    except RefusedSettingError as error:
        return _refused(family, str(error))
    lacks = [what for name, what in record.not_in_vllm.items() if name in shape.switched_on]
    return Abilities(
        family=_shown(family, record),
        sampled_by=f"hf (vllm's model has no {lacks[0]})" if lacks else "vllm, hf",
        on_one_rank="yes",
        over_ranks=_axes(record, f"up to {shape.num_kv_heads}"),
        adapters=_adapters(record),
    )


def known_abilities() -> list[Abilities]:
    """Of every family that is known here, and of all others."""
    lines = [
        Abilities(
            family=_shown(family, record),
            sampled_by="vllm, hf",
            on_one_rank=_condition(record),
            over_ranks=_axes(record, "up to its key-value heads"),
            adapters=_adapters(record),
        )
        for family, record in RECORDS.items()
    ]
    for family in NOT_UPDATED_IN_VLLM:
        lines.append(_without_record(family))
    return [*lines, _without_record("others")]


def as_markdown(lines: Iterable[Abilities]) -> str:
    """A table of Markdown, a line a family, without an end of line at its end."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(one.cells for one in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _shown(family: str, record: FamilyRecord) -> str:
    """The model_type that a config.json has."""
    return f"{record.within}, with images" if record.within else family


def _condition(record: FamilyRecord) -> str:
    return f"yes, without {', '.join(record.refused)}" if record.refused else "yes"


def _is_bounded(record: FamilyRecord) -> bool:
    """Whether there must be no more slices than key-value heads."""
    return any(part.cut == "qkv" for part in record.parts)


def _axes(record: FamilyRecord, bound: str) -> str:
    """Axes of a layout; `bound`: how many slices there may be, where that is bounded."""
    slices = f"tp {bound}" if _is_bounded(record) else "tp"
    return f"{slices}, pp, fsdp{', ep' if record.experts else ''}, cp"


def _adapters(record: FamilyRecord) -> str:
    return "yes; on experts, vLLM by `merged` alone" if record.experts else "yes"


def _refused(family: str, why: str) -> Abilities:
    return Abilities(
        family=family,
        sampled_by="no",
        on_one_rank=f"no: {why}",
        over_ranks="no",
        adapters="no",
        can_train=False,
    )


def _without_record(family: str) -> Abilities:
    if family in NOT_UPDATED_IN_VLLM:
        return _refused(family, NOT_UPDATED_IN_VLLM[family])
    return Abilities(
        family=family,
        sampled_by="vllm and hf, where they know it; not tested",
        on_one_rank="where transformers knows it; not tested",
        over_ranks="no",
        adapters="on one rank; not tested",
    )
