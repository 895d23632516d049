"""Cuts: the trained roles' state after each step, in the host memory of their services.

A service keeps the newest two in shared memory, where they outlive its process. A cut counts once
the step's commit is in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rolemesh.coordinator.dataflow.calls.connection import RoleConnection
from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.dataflow.mesh import RunMesh
from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.dataflow.pools import Pools
from rolemesh.rpc.calls.result_call import ProgressCallback, ResultCall
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.errors import CapacityError
from rolemesh.rpc.together import together
from rolemesh.v1 import cuts_pb2, operation_pb2

CUT_SERVICE = "rolemesh.v1.CutService"
"""Full name of the family of calls; a service of another make may lack it."""

_Result = cuts_pb2.CutResult


class Cuts:
    """Saves and restores the cuts of one run. Owner: the coordinator's loop."""

    def __init__(
        self,
        mesh: RunMesh,
        journal: Journal,
        pools: Pools,
        observer: RunObserver,
        *,
        is_wanted: bool,
    ) -> None:
        """Prepares.

        Args:
            mesh: Services of the run.
            journal: Names what is asked of them.
            pools: Where they compute.
            observer: Is told when there can be no cuts.
            is_wanted: Whether the recipe asks for cuts.
        """
        self._mesh = mesh
        self._journal = journal
        self._pools = pools
        self._observer = observer
        self._is_wanted = is_wanted
        self.newest: int | None = None
        """Step of the newest cut that this attempt has saved or restored. The next one takes the
        place of the one before it."""

    @property
    def is_on(self) -> bool:
        """Whether cuts are saved: the recipe wants them, and every trained role can."""
        trained = self._mesh.trained
        return self._is_wanted and bool(trained) and all(c.serves(CUT_SERVICE) for c in trained)

    async def save(self, step: int) -> float:
        """Has every trained role copy its state after a step.

        Where shared memory has no room for it the observer is told, and the run goes on without.

        Returns:
            Seconds for which a role has waited for the copies of the cut before, the most of all.

        Raises:
            RolemeshError: A role failed.
        """
        if not self.is_on:
            return 0.0
        try:
            results = await self._each("save_cut", step, lambda client, key: client.save_cut(key))
        except CapacityError as error:
            self._is_wanted = False
            self._observer.on_event(
                f"no more cuts are kept in memory, so that a failure costs the steps since the "
                f"last checkpoint: {error.message}"
            )
            await self.drop()
            return 0.0
        self.newest = step
        return max(result.waited_seconds for result in results)

    async def known(self) -> set[int]:
        """Steps whose cut every trained role has."""
        if not self.is_on:
            return set()
        answers = await together(
            known.client.list_cuts(self._journal.run_id) for known in self._mesh.trained
        )
        return set.intersection(*({cut.step for cut in cuts} for cuts in answers))

    async def restore(
        self, step: int, roles: Sequence[str] | None = None, *, keeps_later: bool = False
    ) -> None:
        """Brings trained roles back to their state after a step.

        Args:
            step: One of `known`.
            roles: Those roles; None: all.
            keeps_later: Whether cuts of later steps stay, for a caller that will return.

        Raises:
            RolemeshError: A role failed.
        """
        await self._each(
            "restore_cut",
            step,
            lambda client, key: client.restore_cut(key, step, keeps_later=keeps_later),
            roles,
        )
        if roles is None:
            self.newest = step

    async def drop(self) -> None:
        """Removes the run's cuts, wherever they are kept."""
        self.newest = None
        await self._drop(self._mesh.trained)

    async def drop_all(self) -> None:
        """Removes the cuts, and what judges answered besides: no step will be made again."""
        self.newest = None
        await self._drop(self._mesh.connections.values())

    async def _drop(self, connections: Iterable[RoleConnection]) -> None:
        run_id, epoch = self._journal.run_id, self._journal.epoch
        await self._mesh.unless_lost(
            lambda client: client.drop_cuts(run_id, epoch),
            (known for known in connections if known.serves(CUT_SERVICE)),
        )

    async def _each(
        self,
        name: str,
        step: int,
        begin: Callable[[ServiceClient, operation_pb2.OperationKey], ResultCall[_Result]],
        roles: Sequence[str] | None = None,
    ) -> Sequence[_Result]:
        async def one(connection: RoleConnection) -> _Result:
            key = self._journal.next_key(step, f"{connection.role}.{name}")

            async def call(on_progress: ProgressCallback) -> _Result:
                return await begin(connection.client, key).result(on_progress)

            def note(result: _Result) -> dict[str, int]:
                connection.policy_version = result.policy_version
                return {"policy_version": result.policy_version}

            async with self._pools.awake(connection.service, step):
                return await connection.make(
                    key,
                    name.replace("_", " "),
                    call,
                    note,
                    journal=self._journal,
                    on_phase=self._observer.on_phase,
                )

        return await together(
            one(known) for known in self._mesh.trained if roles is None or known.role in roles
        )
