"""The services of one run for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import SupportsFloat

from rolemesh.coordinator.sdk.async_mesh import AsyncMesh
from rolemesh.coordinator.sdk.retrying import RetryPolicy
from rolemesh.coordinator.sdk.role import Role
from rolemesh.coordinator.sdk.values.experience import Experience
from rolemesh.coordinator.sdk.values.samples import Sample
from rolemesh.rpc.experience.column_fetch import MAX_FETCH_BYTES
from rolemesh.rpc.experience.columns import Columns
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.rpc.members.identity import Identity


class Mesh(Mapping[str, Role]):
    """AsyncMesh without await: the same methods with the same arguments.

    Example::

        with Mesh({"actor": "127.0.0.1:50051"}, run_id="mine") as mesh:
            batch = mesh["actor"].sample(["What is 2 + 3?"], samples_per_prompt=4)
            print(mesh.fetch(batch)["completion_text"].strings())
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        run_id: str,
        epoch: int | None = None,
        step: int = 0,
        policy_versions: Mapping[str, int] | None = None,
        deadline_s: float | None = None,
        retry: RetryPolicy | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Prepares; arguments as of AsyncMesh."""
        loop = LoopThread("rolemesh-sdk", "mesh")

        async def make() -> AsyncMesh:
            return AsyncMesh(
                addresses,
                run_id=run_id,
                epoch=epoch,
                step=step,
                policy_versions=policy_versions,
                deadline_s=deadline_s,
                retry=retry,
                identity=identity,
            )

        try:
            self._take(loop.run(make()), loop, owns_loop=True)
        except BaseException:
            loop.close()
            raise

    @classmethod
    def over(cls, mesh: AsyncMesh, loop: LoopThread) -> Mesh:
        """A mesh that lives on the loop of a client."""
        made = cls.__new__(cls)
        made._take(mesh, loop, owns_loop=False)
        return made

    def _take(self, mesh: AsyncMesh, loop: LoopThread, *, owns_loop: bool) -> None:
        self._mesh = mesh
        self._loop = loop
        self._owns_loop = owns_loop
        self._roles = {name: Role(role, loop) for name, role in mesh.items()}

    def __enter__(self) -> Mesh:
        """Returns the mesh."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes the mesh."""
        self.close()

    def close(self) -> None:
        """Closes all connections; services keep what they hold."""
        if self._loop.is_running:
            self._loop.run(self._mesh.close())
            if self._owns_loop:
                self._loop.close()

    def __getitem__(self, name: str) -> Role:
        """The service of that name."""
        return self._roles[name]

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(self._roles)

    def __len__(self) -> int:
        """How many services there are."""
        return len(self._roles)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id!r}, step={self.step}, {list(self)})"

    @property
    def run_id(self) -> str:
        """The run."""
        return self._mesh.run_id

    @property
    def epoch(self) -> int:
        """Services refuse a client that speaks for the run with a lower one."""
        return self._mesh.epoch

    @property
    def step(self) -> int:
        """The step that calls belong to."""
        return self._mesh.step

    def begin_step(self, step: int | None = None) -> int:
        """From now on calls belong to this step; None: to the next one. Returns it."""
        return self._mesh.begin_step(step)

    # --- written by `make sdk` from the asynchronous class ---

    def fetch(
        self,
        experience: Experience,
        columns: Sequence[str] = (),
        rows: Iterable[int] | None = None,
        *,
        max_bytes: int = MAX_FETCH_BYTES,
    ) -> Columns:
        """Columns of a batch as arrays, in the batch's order of rows.

        Args:
            experience: The batch.
            columns: Names wanted; empty: all.
            rows: Rows wanted, in this order; None: all.
            max_bytes: Most bytes to allocate.
        """
        return self._loop.run(self._mesh.fetch(experience, columns, rows, max_bytes=max_bytes))

    def log(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat],
        batch: Experience | Sequence[Sample] | None = None,
        *,
        num_samples: int = 4,
    ) -> None:
        """Tells the coordinator of a step that was made, as it tells of the steps of its own runs.

        Metrics come to the dashboard, metrics.jsonl, TensorBoard, the trackers of the recipe and
        the events of the run; samples to the dashboard and samples.jsonl. One call a step; the
        steps of a mesh ascend, and some may be left out. A loop that goes back attaches anew: the
        first step that it logs then takes the place of what was logged from there on.

        Args:
            step: The step, from 1.
            metrics: 1 to 256 finite numbers by name, e.g. {"reward/mean": 0.25}. Those of the
                coordinator's own runs have their places on the dashboard.
            batch: What the step trained on, while services still hold it, at least with the
                columns tokens and prompt_lengths; or samples that the caller has.
            num_samples: Most rows of an Experience that are kept for people, 1 to 64, spread
                evenly over it.

        Raises:
            ValueError: A metric is no number, a number is out of range, or the mesh was not
                made by `attach`: there is no coordinator to tell.
            InvalidRequestError: A name, value or size is out of range; the message names it.
            PreconditionError: STEP_LOGGED: this or a later step was logged; STALE_EPOCH: another
                client has attached since, or the run's process was started again: attach anew.
        """
        self._loop.run(self._mesh.log(step, metrics, batch, num_samples=num_samples))

    def release(
        self, experiences: Iterable[Experience] | None = None, *, through_step: int | None = None
    ) -> int:
        """Has all services drop experience; returns the bytes freed.

        Args:
            experiences: What is dropped; None: all of the run up to `through_step`.
            through_step: The last step that is dropped; None: the current one.
        """
        return self._loop.run(self._mesh.release(experiences, through_step=through_step))
