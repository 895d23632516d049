"""Recovery of a run: which failures it survives, and how its trained roles go back."""

from __future__ import annotations

from collections import Counter

from rolemesh.coordinator.dataflow.errors import (
    NodeFailedError,
    RunAbortedError,
    RunError,
    ServiceLostError,
)
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.run_section import RecoverySpec
from rolemesh.coordinator.run.saving.checkpoints import Checkpoints
from rolemesh.coordinator.run.saving.cuts import Cuts
from rolemesh.coordinator.run.saving.progress import RunProgress
from rolemesh.coordinator.run.services.launch import LOG_LINE, LaunchError
from rolemesh.engine.messages import on_one_line
from rolemesh.rpc.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineError,
    InternalError,
    RolemeshError,
    UnavailableError,
)
from rolemesh.rpc.limits import HIGHEST_EPOCH, MAX_EPOCH

_LARGEST_PAUSE_S = 30.0

_TRANSIENT = (
    ServiceLostError,
    LaunchError,
    UnavailableError,
    DeadlineError,
    CallCancelledError,
    AbortedError,
    InternalError,
)
"""Errors of a process or a connection, not of what it was asked for."""

FENCED = "STALE_EPOCH"
"""Reason that a service gives to an older epoch than it knows. The run asks the store first whether
another coordinator leads it; where none does, some caller has made an epoch up, and the run takes
one that is newer."""

_OTHER_PROCESS = ("NOT_INITIALIZED", "RUN_MISMATCH", "EXPERIENCE_NOT_FOUND", "WEIGHTS_GONE")
"""Reasons that a service gives when its process was replaced in the middle of a step."""


def cause_of(error: BaseException) -> BaseException:
    """What went wrong, without the words of the run about it."""
    if isinstance(error, NodeFailedError):
        return error.cause
    if isinstance(error, RunError) and isinstance(error.__cause__, RolemeshError):
        return error.__cause__
    return error


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed: a process or a connection failed."""
    cause = cause_of(error)
    if isinstance(error, RunAbortedError):
        return False
    return isinstance(cause, _TRANSIENT) or getattr(cause, "reason", "") in (
        *_OTHER_PROCESS,
        FENCED,
    )


def told_epoch(error: BaseException) -> int:
    """The epoch by which a service says that it was fenced; 0 where it says none."""
    cause = cause_of(error)
    if not isinstance(cause, RolemeshError) or cause.reason != FENCED:
        return 0
    told = cause.metadata.get(HIGHEST_EPOCH, "")
    return int(told) if told.isdecimal() and len(told) <= len(str(MAX_EPOCH)) else 0


class RecoveryBudget:
    """Decides after each failure whether a run makes another attempt. Owner: the run's loop.

    Invariant: a run makes at most `attempts` attempts that bring it no step further, and an error
    inside a service that comes again in the same step, word for word, ends it. Services that are
    replaced while the step goes on count each by itself: of a thousand, ten may be lost in a step.

    Example: with attempts = 2, the third failure in step 5 ends the run; had step 5 been made
    after the second one, that would count anew.
    """

    def __init__(self, spec: RecoverySpec) -> None:
        self._spec = spec
        self._ended = 0
        """Attempts that failures of the step have ended."""
        self._replaced: Counter[str] = Counter()
        """Replacements in the step, by service."""
        self._step = -1
        self._last = ""

    def pause_s(
        self, error: BaseException, step: int, *, is_return: bool = False, replaced: str = ""
    ) -> float | None:
        """Seconds to wait before the next attempt; None where the run is to end.

        Args:
            error: What ended the attempt, or the loss of a service that is to be replaced.
            step: Steps made before.
            is_return: Whether services were to load again what they had loaded in this run. A
                refusal is then about the moment, e.g. the memory that a dead process has not given
                back yet.
            replaced: The service that is to be replaced; empty where the attempt has ended.
        """
        is_of_the_moment = is_return and isinstance(cause_of(error), RolemeshError)
        if not is_of_the_moment and not is_transient(error):
            return None
        if step != self._step:
            self._step, self._ended, self._last = step, 0, ""
            self._replaced.clear()
        is_repeat = isinstance(cause_of(error), InternalError) and str(error) == self._last
        self._last = str(error)
        if replaced:
            self._replaced[replaced] += 1
            failures = self._ended + self._replaced[replaced]
        else:
            self._ended += 1
            failures = self._ended + max(self._replaced.values(), default=0)
        if is_repeat or failures > self._spec.attempts:
            return None
        # The first attempt follows at once: most failures are of one process, once.
        backoff = self._spec.pause_s * float(2 ** (failures - 2))
        return 0.0 if failures == 1 else min(_LARGEST_PAUSE_S, backoff)


async def go_back(
    recipe: Recipe,
    mesh: RunMesh,
    progress: RunProgress,
    cuts: Cuts,
    checkpoints: Checkpoints,
    observer: RunObserver,
) -> int:
    """Brings all trained roles to the newest state that every one of them still has.

    That is the newest cut in memory, or a checkpoint that is newer and can be used; without a cut,
    the newest checkpoint that can be used. Where none was saved, it is the models that the recipe
    names.

    Args:
        recipe: Of the run.
        mesh: Its services, each of which holds the run.
        progress: What the run has reached.
        cuts: In the services' memory.
        checkpoints: On disk.
        observer: Is told of what is damaged or missing.

    Returns:
        The step whose state they have now; the caller brings everything else there, too.

    Raises:
        NoWholeCheckpointError: Checkpoints are there, but none can be used.
        RolemeshError: A role failed.
    """
    trained = {known.service for known in mesh.trained}
    if progress.step == 0 and trained <= mesh.fresh:
        return 0
    # Later ones are of a step that was not committed.
    left = max((cut for cut in await cuts.known() if cut <= progress.step), default=None)
    step = None
    if left is None or any(left < one <= progress.step for one in checkpoints.committed()):
        step = await checkpoints.load_newest(progress.step, observer.on_event, after=left)
    if step is None and left is not None:
        await cuts.restore(left)
        return left
    if step is None:
        if progress.step:
            observer.on_event(
                f"no checkpoint is there, and no cut of step {progress.step} is in memory: the run "
                "begins again with the models of its recipe"
            )
        step = 0
        await mesh.initialize_again(recipe, trained - mesh.fresh)
    # What the services keep belongs to steps that will be made again. Where the run cannot go
    # back, it stays.
    await cuts.drop()
    return step


def told_of(error: BaseException) -> str:
    """An error on one line, without the end of a lost service's log, which stands below."""
    return on_one_line(str(error).partition(LOG_LINE)[0]) or type(error).__name__
