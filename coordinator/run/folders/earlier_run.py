"""What happens to the run that a folder holds: put back as it was, or moved aside."""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rolemesh.coordinator.run.folders.ownership import held
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.results.expert_loads import EXPERTS_FILE
from rolemesh.coordinator.run.results.metrics import GRAPHS_FILE
from rolemesh.coordinator.run.results.samples_file import SAMPLES_FILE
from rolemesh.coordinator.run.saving.checkpoints import NoWholeCheckpointError
from rolemesh.coordinator.run.saving.resume import CHECKPOINTS_FOLDER, CONFIG_FILE, RUN_FILE
from rolemesh.coordinator.run.saving.turns import TURNS_FILE
from rolemesh.coordinator.state.files import sync_folder
from rolemesh.coordinator.trackers.files import METRICS_FILE

_OF_A_RUN = (
    CHECKPOINTS_FOLDER,
    "model",
    "logs",
    "store",
    "tensorboard",
    METRICS_FILE,
    GRAPHS_FILE,
    SAMPLES_FILE,
    EXPERTS_FILE,
    TURNS_FILE,
    SUMMARY_FILE,
    CONFIG_FILE,
    RUN_FILE,
)
"""What a run writes into its folder and leaves there. A lock and a token are of the folder."""


@contextlib.contextmanager
def put_back_where_refused(directory: Path, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Puts back what says how the run ended if it turns out that it cannot go on.

    What is damaged may be repaired: until then the folder is that of the run as it ended.

    Args:
        directory: Of a run that is to go on.
        has_begun: Whether it does.
    """
    files = [directory / name for name in (SUMMARY_FILE, CONFIG_FILE)]
    before = {file: (file.stat().st_mode, file.read_bytes()) for file in files if file.is_file()}
    try:
        yield
    except NoWholeCheckpointError:
        if not has_begun():
            for file in files:
                file.unlink(missing_ok=True)
                if file in before:
                    mode, content = before[file]
                    file.touch(stat.S_IMODE(mode))
                    file.write_bytes(content)
        raise


def move_aside(directory: Path) -> Path | None:
    """Moves a run into a folder within its own, where it can be read, and resumed, as before.

    Returns:
        That folder; None where there was no run.

    Raises:
        ValueError: A run is being made here, or the folder cannot be written.
    """
    there = [directory / name for name in _OF_A_RUN if (directory / name).exists()]
    if not there:
        return None
    aside = directory / time.strftime("before-%Y%m%d-%H%M%S")
    try:
        with held(directory):
            aside.mkdir()
            for path in there:
                path.rename(aside / path.name)
            sync_folder(directory)
    except OSError as error:
        raise ValueError(
            f"run.directory: the run in {directory} cannot be moved to {aside} "
            f"({error.strerror}): choose another folder with --out"
        ) from error
    return aside
