"""Rendezvous of an agent that is alone: torch's elastic launcher starts ranks without a network.

The launcher's own rendezvous bring together the agents of several hosts, and ours does that
elsewhere (`hosts/link.py`). Even of one agent they look for a port of localhost, which a system
without /etc/hosts cannot look up, so that its services of several ranks would not start.
"""

from __future__ import annotations

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ONE_AGENT = "one-agent"
"""Name under which the launcher finds this rendezvous (`LaunchConfig.rdzv_backend`)."""


class OneAgentRendezvous(RendezvousHandler):
    """Rendezvous of one agent, which is there at once and closes with its process."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """Name of this rendezvous."""
        return ONE_AGENT

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent as the first of one; its store serves the launcher alone."""
        # Ranks find each other by a file (`meeting.py`), not at a port.
        meeting = RendezvousStoreInfo(master_addr="127.0.0.1", master_port=0)
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=meeting)

    def is_closed(self) -> bool:
        """Whether no agent may join, which none could."""
        return False

    def set_closed(self) -> None:
        """Does nothing: no other agent could join."""

    def num_nodes_waiting(self) -> int:
        """Number of agents that came late."""
        return 0

    def get_run_id(self) -> str:
        """Name of the launch, as its configuration has it."""
        return self._run_id

    def shutdown(self) -> bool:
        """Whether everything is freed, of which there is nothing."""
        return True


rendezvous_handler_registry.register(ONE_AGENT, OneAgentRendezvous)
