"""Loads a data section: all its rows, less those that are too long.

Large data is read and measured once; the next start finds what was kept of it (`index`), and has
the same rows in the same order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.engine.data.files.jsonl import Lines
from rolemesh.engine.data.image_rows import DataImages
from rolemesh.engine.data.orders.curriculum import sorting_values
from rolemesh.engine.data.reading import index
from rolemesh.engine.data.reading.filtering import Bounds
from rolemesh.engine.data.reading.parts import PartSpec, read_in_parts
from rolemesh.engine.data.rendering.rendering import ChatTokenizer, Renderer
from rolemesh.engine.data.row_store import (
    ROWS_AT_ONCE,
    ROWS_WITH_IMAGES_AT_ONCE,
    Rows,
    RowStore,
)
from rolemesh.engine.data.rows import EmptyDataError
from rolemesh.engine.data.sources import (
    Intake,
    Source,
    compares_prompts,
    files_of,
    load_sources,
    sources_of,
)
from rolemesh.engine.specs import (
    DataSpec,
    JsonlSpec,
    MixtureSpec,
    SourceSpec,
    images_of_data,
    images_of_source,
)

logger = logging.getLogger(__name__)

LARGE_BYTES = 8 << 20
"""Data of fewer bytes stays in memory, and is read anew at every start: in a second."""

Progress = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The rows of a section that are left."""

    sources: Sequence[Source]
    left_out: Mapping[str, int]
    """Rows of "train" and "held_out" that were too long."""


def load_section(
    data: DataSpec,
    field: str,
    tokenizer: ChatTokenizer,
    *,
    measured_from: int | None = None,
    with_identities: bool = False,
    progress: Progress | None = None,
    images: DataImages | None = None,
) -> Section:
    """Loads a section.

    Args:
        data: The section.
        field: Its field in the recipe, e.g. "data".
        tokenizer: Tokenizer of the policy, with its chat template.
        measured_from: Prompts of more tokens than this are looked for later; None: none are.
        with_identities: Whether prompts are compared later, even if none is held out.
        progress: Called from time to time while rows are read.
        images: Finds the images of rows, where the section has any.

    Raises:
        EmptyDataError: A source has no training row, or all of them are too long.
        DataInvalidError: A file cannot be read, or a row is invalid.
    """
    reading = _Reading(
        data=data,
        field=field,
        tokenizer=tokenizer,
        measured_from=measured_from,
        with_identities=with_identities or compares_prompts(data),
        progress=progress,
        images=images,
    )
    folder = index.cache_folder()
    if any(one.folder is not None for one in images_of_data(data)):
        # What is known of a row depends on files that no key names; the rows hold paths alone.
        folder = None
    try:
        files = files_of(data)
        if folder is None or sum(file.stat().st_size for file in files) < LARGE_BYTES:
            return reading.read(RowStore())
        stamps = _stamps(files)
        key = index.key_of(reading.depends_on(), tokenizer, files)
    except OSError:
        # A file is missing, or cannot be read: whoever reads it names it.
        return reading.read(RowStore())
    if key is None:
        return reading.read(RowStore())
    kept = reading.found(folder, key)
    if kept is not None:
        return kept
    try:
        with index.alone(folder, key, progress):
            kept = reading.found(folder, key)
            if kept is None:
                kept = reading.read_and_keep(folder, key, lambda: _stamps(files) == stamps)
            return kept
    except OSError as error:
        logger.warning(
            "rows cannot be kept in %s (%s): they stay in memory, and every start reads them anew; "
            "make room there, or set XDG_CACHE_HOME",
            folder,
            error.strerror,
        )
    return reading.read(RowStore())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """How a section is read."""

    data: DataSpec
    field: str
    tokenizer: ChatTokenizer
    measured_from: int | None
    with_identities: bool
    progress: Progress | None
    images: DataImages | None

    def depends_on(self) -> dict[str, Any]:
        """All but files and tokenizer that decides the rows, and what is known of them."""
        return {
            "data": self.data.model_dump(mode="json"),
            "field": self.field,
            "with_identities": self.with_identities,
            # From which length on does not matter: what lacks is measured when it is asked for.
            "is_measured": self.measured_from is not None,
            "images": None if self.images is None else self.images.processor.fingerprint,
        }

    def read(self, store: RowStore, folder: Path | None = None) -> Section:
        """Reads all rows into a store, and chooses those that are left.

        Args:
            store: Where the rows go.
            folder: Where other processes may help with large files; None: none does.
        """
        kept, left_out = [], {"train": 0, "held_out": 0}
        for source in load_sources(
            self.data, self.field, lambda spec: self._intake(store, spec, folder)
        ):
            check_not_empty(source)
            train = source.train.where(source.train.are_short())
            held_out = source.held_out.where(source.held_out.are_short())
            if not train:
                self._refuse_all(source)
            left_out["train"] += len(source.train) - len(train)
            left_out["held_out"] += len(source.held_out) - len(held_out)
            values = sorting_values(source.spec.curriculum, train, source.field)
            kept.append(
                dataclasses.replace(source, train=train, held_out=held_out, sorting_values=values)
            )
        return Section(sources=kept, left_out=left_out)

    def found(self, folder: Path, key: str) -> Section | None:
        """What an earlier start kept."""
        found = index.found(folder, key)
        if found is None:
            return None
        file, details, arrays = found
        store = RowStore.opened(file, arrays)
        sources = []
        for number, (spec, field, weight) in enumerate(sources_of(self.data, self.field)):
            one = details["sources"][number]
            sources.append(
                Source(
                    spec=spec,
                    field=field,
                    weight=weight,
                    train=Rows(store, arrays[f"train {number}"]),
                    held_out=Rows(store, arrays[f"held_out {number}"]),
                    num_repeated=one["num_repeated"],
                    sorting_values=one["sorting_values"],
                )
            )
        return Section(sources=sources, left_out=details["left_out"])

    def read_and_keep(self, folder: Path, key: str, is_unchanged: Callable[[], bool]) -> Section:
        """Reads all rows into a file for the next start, unless the data changes meanwhile.

        Raises:
            OSError: The file cannot be written.
        """
        file = index.draft(folder)
        try:
            store = RowStore(file)
            section = self.read(store, folder)
            if not is_unchanged():
                logger.warning("%s: files changed while they were read", self.field)
                return section
            arrays = store.facts()
            for number, source in enumerate(section.sources):
                arrays[f"train {number}"] = source.train.numbers
                arrays[f"held_out {number}"] = source.held_out.numbers
            details = {
                "left_out": dict(section.left_out),
                "sources": [
                    {"num_repeated": one.num_repeated, "sorting_values": one.sorting_values}
                    for one in section.sources
                ],
            }
            index.keep(folder, key, file, details, arrays)
            return section
        finally:
            # Kept, it has another name by now. Otherwise its rows are read without one.
            Path(file.name).unlink(missing_ok=True)

    def _intake(self, store: RowStore, spec: SourceSpec, folder: Path | None) -> Intake:
        bounds = bounds_of(spec, self.data)
        of_source = images_of_source(spec)
        images = None
        if self.images is not None and of_source is not None:
            images = self.images.within(of_source)

        def in_parts(
            source: JsonlSpec,
            field: str,
            path: Path,
            path_field: str,
            take: Callable[[Lines], Rows],
        ) -> Rows:
            assert folder is not None
            part = PartSpec(
                **bounds,
                spec=source,
                field=field,
                path=path,
                path_field=path_field,
                start=0,
                end=0,
                first_line=1,
                model=Path(str(getattr(self.tokenizer, "name_or_path", ""))),
                tokenizer=index.hash_of_tokenizer(self.tokenizer) or "",
                measured_from=self.measured_from,
                with_identities=self.with_identities,
                out=folder,
            )
            return read_in_parts(store, part, take, self.progress)

        return Intake(
            store=store,
            with_identities=self.with_identities,
            max_row_tokens=bounds["max_row_tokens"],
            measure=Bounds(
                Renderer(self.tokenizer, images=images),
                **bounds,
                measured_from=self.measured_from,
            ),
            progress=self.progress,
            # Other processes would each need one that decodes.
            in_parts=None if folder is None or of_source is not None else in_parts,
            rows_at_once=ROWS_AT_ONCE if of_source is None else ROWS_WITH_IMAGES_AT_ONCE,
        )

    def _refuse_all(self, source: Source) -> None:
        bounds = bounds_of(source.spec, self.data)
        limits = ", ".join(f"{name} {value}" for name, value in bounds.items() if value is not None)
        tokens = source.train.tokens("row")
        raise EmptyDataError(
            f"{source.field}: every one of {len(tokens)} training rows is too long for {limits}: "
            f"they have {tokens.min()} to {tokens.max()} tokens; raise the bound"
        )


def bounds_of(spec: SourceSpec, data: DataSpec) -> dict[str, int | None]:
    """The bounds on the rows of a source: the tighter ones of its own and its section's."""
    specs = [spec, data] if isinstance(data, MixtureSpec) else [spec]
    found = {
        "max_prompt_tokens": [one.max_prompt_tokens for one in specs],
        "max_row_tokens": [one.max_row_tokens for one in specs],
    }
    return {
        name: min((bound for bound in bounds if bound is not None), default=None)
        for name, bounds in found.items()
    }


def check_not_empty(source: Source) -> None:
    """Raises EmptyDataError if a source has no training row."""
    if source.train:
        return
    path = getattr(source.spec, "path", None)
    if path is None:
        raise EmptyDataError(f"{source.field} makes no training prompt: raise train_size")
    raise EmptyDataError(
        f"{source.field}.path is {str(path)!r}, which holds no training prompt: give data with at "
        "least one row"
    )


def _stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """What shows that files have changed while they were read."""
    found = [file.stat() for file in files]
    return [(one.st_mtime_ns, one.st_size) for one in found]
