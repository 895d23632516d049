"""The services of one run, for a client that drives it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, SupportsFloat, TypeAlias

from rolemesh.coordinator.sdk.async_role import AsyncRole
from rolemesh.coordinator.sdk.retrying import RetryPolicy
from rolemesh.coordinator.sdk.service_calls import RunCalls
from rolemesh.coordinator.sdk.values.experience import Experience
from rolemesh.coordinator.sdk.values.samples import Sample
from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.errors import UnsupportedError
from rolemesh.rpc.experience.column_fetch import MAX_FETCH_BYTES, fetch_columns
from rolemesh.rpc.experience.columns import Columns
from rolemesh.rpc.members.identity import Identity
from rolemesh.rpc.samples.rows import fetch_samples
from rolemesh.v1 import coordinator_pb2

LogStep: TypeAlias = Callable[[coordinator_pb2.LogStepRequest], Awaitable[object]]

MAX_LOGGED_SAMPLES: Final = 64
"""As LogStepRequest says."""


class AsyncMesh(RunCalls, Mapping[str, AsyncRole]):
    """Services by name, called directly. Owner: the loop on which it is used.

    Invariant: every call that changes something has a key of its own: run, epoch, step, operation
    and a number that is never used twice.

    Example::

        async with AsyncMesh({"actor": "127.0.0.1:50051"}, run_id="mine") as mesh:
            await mesh["actor"].initialize(spec)
            batch = await mesh["actor"].sample(["What is 2 + 3?"], samples_per_prompt=4)
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
        """Prepares; connections are made by the first calls.

        Args:
            addresses: "host:port" by name, e.g. {"actor": "127.0.0.1:50051"}.
            run_id: The run, 1 to 128 characters.
            epoch: Services refuse a client that speaks for the run with a lower one; None: the time
                in milliseconds, so that the client that connects later takes over. Never the same
                one twice.
            step: The step that is made.
            policy_versions: Versions of weights by name, where they are known.
            deadline_s: Longest time of one call; None: that of its method (10 s to an hour).
            retry: How calls are repeated; None: within 60 s.
            identity: Of this client, e.g. `Identity.read(Path("certs/client-drive.pem"))`, where
                services have certificates; None: they speak in clear.

        Raises:
            ValueError: An address is not "host:port", or a number is out of range.
        """
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}: give seconds > 0")
        epoch = time.time_ns() // 1_000_000 if epoch is None else epoch
        super().__init__(run_id, epoch, step, deadline_s, retry or RetryPolicy())
        self._identity = identity
        self._log_step: LogStep | None = None
        self._channels: dict[str, MeshChannel] = {}
        versions = policy_versions or {}
        self._roles = {
            name: AsyncRole(self, name, self._channel(address), versions.get(name))
            for name, address in addresses.items()
        }

    async def __aenter__(self) -> AsyncMesh:
        """Returns the mesh."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the mesh."""
        await self.close()

    async def close(self) -> None:
        """Closes all connections; services keep what they hold."""
        self._is_closed = True
        for channel in self._channels.values():
            await channel.close()

    def __getitem__(self, name: str) -> AsyncRole:
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

    def begin_step(self, step: int | None = None) -> int:
        """From now on calls belong to this step; None: to the next one. Returns it."""
        self.step = self.step + 1 if step is None else step
        return self.step

    async def fetch(
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
        return await self.call(
            fetch_columns,
            self._channel,
            experience.reference,
            columns,
            None if rows is None else list(rows),
            max_bytes=max_bytes,
            timeout_s=self.deadline_s,
        )

    async def log(
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
        if self._log_step is None:
            raise ValueError(
                "this mesh has no coordinator to tell of its steps: log through one that "
                "`Client.attach` gives"
            )
        if not 1 <= num_samples <= MAX_LOGGED_SAMPLES:
            raise ValueError(f"num_samples is {num_samples}: give 1 to {MAX_LOGGED_SAMPLES}")
        request = coordinator_pb2.LogStepRequest(
            run_id=self.run_id, fencing_epoch=self.epoch, step=step
        )
        for name, value in metrics.items():
            try:
                request.metrics[name] = float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"metrics[{name!r}] is {value!r}: give one number by name"
                ) from error
        if isinstance(batch, Experience):
            request.samples.extend(
                await self.call(
                    fetch_samples,
                    self._channel,
                    batch.reference,
                    num_samples,
                    timeout_s=self.deadline_s,
                    # What a client logs of a step is small.
                    with_images=False,
                )
            )
        elif batch is not None:
            request.samples.extend(sample.to_message() for sample in batch)
        await self._log_step(request)

    def logs_through(self, log_step: LogStep) -> None:
        """Has `log` send its requests so; for the client that makes this mesh."""
        self._log_step = log_step

    async def release(
        self, experiences: Iterable[Experience] | None = None, *, through_step: int | None = None
    ) -> int:
        """Has all services drop experience; returns the bytes freed.

        Args:
            experiences: What is dropped; None: all of the run up to `through_step`.
            through_step: The last step that is dropped; None: the current one.
        """
        ids = (
            None
            if experiences is None
            else [
                shard.experience_id
                for experience in experiences
                for group in experience.reference.groups
                for shard in group.shards
            ]
        )

        async def release(role: AsyncRole) -> int:
            try:
                return await role.release(ids, through_step=through_step)
            except UnsupportedError:
                return 0  # it holds no experience

        return sum(await asyncio.gather(*(release(role) for role in self._roles.values())))

    def _channel(self, address: str) -> MeshChannel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(
                address, retries=False, identity=self._identity
            )
        return channel
