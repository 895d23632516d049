"""Starts the ranks of a service with torch's elastic launcher, and ends with them.

The agent computes nothing: it starts one process for each rank, all from the same command line, and
waits. When a rank ends by itself, the agent ends the others and reports which one it was. A rank is
not started again, since it could not join the others in the middle of a step.

Of a service on several hosts each has such an agent. They meet before they start ranks, and end
together (`hosts/link.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rolemesh.services.runtime.hosts.link import HostLink, HostsError
from rolemesh.services.runtime.ranks.one_agent import ONE_AGENT
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.parent import follow_parent

logger = logging.getLogger(__name__)

MONITOR_INTERVAL_S = 0.1
"""How often the launcher checks that its ranks live."""

LAST_GRACE_S = 1
"""Time that the other ranks have to end before SIGKILL when one has failed."""

_SIGNAL_EXIT = 128
"""The exit code is this plus the signal that killed a rank."""

EARLY_END = "the agent was told to end before its ranks could drain"
"""What other hosts hear of such an end."""

STORE_FILE = "ranks"
"""File in the agent's private folder through which its ranks meet."""


def as_rank(config: ServiceConfig, environment: Mapping[str, str]) -> ServiceConfig:
    """The settings of the rank that this process is.

    All ranks get one command line. Rank 0 is the service's face: it uses the port and the announce
    file, and registers. The other ranks take a free port, and only rank 0 learns it.
    """
    # The launcher knows the ranks of this host alone.
    rank = config.host_rank * config.ranks_per_host + int(environment["RANK"])
    own: dict[str, Any] = {"rank": rank}
    if rank > 0:
        own |= {"port": 0, "announce": None, "register_at": None, "number": 0}
        if config.metrics_port:
            own["metrics_port"] = config.metrics_port + rank
    return ServiceConfig.model_validate(config.model_dump() | own)


def run_ranks(config: ServiceConfig) -> int:
    """Starts the service's ranks of this host and waits for their end.

    Args:
        config: Settings of the service; world_size is the number of ranks, on all hosts.

    Returns:
        0 when all ranks ended well; 1 when one failed, which is logged with rank, pid and cause, or
        when the hosts of the service do not come together. On one host 128 and the number of the
        signal, as of a shell, when one was killed.
    """
    # Messages of elastic are about its configuration. Our own name the rank and the cause.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    if config.parent_pid is not None:
        follow_parent(config.parent_pid, config.drain_timeout_s + 3 * LAST_GRACE_S, lambda: None)
    end = _End()
    if config.hosts == 1:
        return end.exit_code if _failure_of_ranks(config, end) else 0
    link = HostLink(config, on_failure=end.lose_hosts, on_wants_end=end.drain)
    failure = EARLY_END
    try:
        link.open()
        if config.host_rank > 0:
            end.tell = link.ask_end
        failure = _failure_of_ranks(config, end)
        if end.is_early:
            # Ranks of other hosts would wait for these.
            failure = EARLY_END
    except HostsError as error:
        logger.error("the %s does not start: %s", config.role, error)
        end.lost = str(error)
    finally:
        # That others are lost is no news to those that are left.
        link.close("" if end.lost else failure)
    if end.lost:
        # Others may have gone first where all were told to.
        return 0 if end.is_asked else 1
    return 1 if failure and not end.is_early else 0


def _failure_of_ranks(config: ServiceConfig, end: _End) -> str:
    """Starts the ranks of this host, waits for their end, and says why they failed, if they did."""
    number = config.ranks_per_host
    with tempfile.TemporaryDirectory(prefix=f"rolemesh-{config.role}-") as folder:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=number,
            run_id=f"{config.role}-{os.getpid()}",
            role=config.role,
            rdzv_backend=ONE_AGENT,
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # Our own handlers let ranks drain. The launcher ends ranks only when one has failed.
            # The work of the others is then useless, and they may hang while they wait for it.
            signals_to_handle="SIGQUIT",
            shutdown_timeout=LAST_GRACE_S,
        )
        # The command of this process, so that a user's own role needs no name here. The last of
        # two equal flags counts. Ranks meet through a file of this host, or through the first
        # host's agent: torch's TCP store listens on all interfaces and knows no authentication.
        command = [*sys.orig_argv[1:], "--rank-store", str(Path(folder) / STORE_FILE)]
        # After minutes of importing, a rank that looks for its parent might find another process.
        command += ["--parent-pid", str(os.getpid())]
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, end.ask)
        where = "" if config.hosts == 1 else f" on host {config.host_rank} of {config.hosts}"
        logger.info("starting %d ranks of the %s%s", number, config.role, where)
        try:
            elastic_launch(launch, sys.executable)(*command)
        except ChildFailedError as error:
            local_rank, failure = error.get_first_failure()
            if end.lost:
                logger.error("the ranks were ended: %s", end.lost)
                return end.lost
            if end.is_asked and failure.exitcode == -signal.SIGTERM:
                logger.info("ended while the ranks were starting")
                end.is_early = True
                return ""
            how = (
                f"was killed by signal {-failure.exitcode} "
                f"({signal.Signals(-failure.exitcode).name})"
                if failure.exitcode < 0
                else f"ended with exit code {failure.exitcode}"
            )
            if failure.exitcode < 0:
                end.exit_code = _SIGNAL_EXIT - failure.exitcode
            rank = config.host_rank * number + local_rank
            who = f"{config.role} rank {rank} (pid {failure.pid}) {how}"
            logger.error("%s; the other %d ranks were ended", who, config.world_size - 1)
            return who
        finally:
            end.is_over.set()
    logger.info("all ranks%s have ended", where)
    return ""


class _End:
    """End of the ranks of this host: asked for by a signal, or since other hosts are lost.

    Asked for, rank 0 drains, and then ends the others, which are needed until then, since work in
    progress takes all ranks. At the second signal all ranks of this host end at once.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.is_early = False
        """Whether ranks ended when they were asked to, but before they could drain."""
        self.exit_code = 1
        """Of the agent, where a rank has failed."""
        self.lost = ""
        """Why the ranks are of no use without those of other hosts."""
        self.is_over = threading.Event()
        """Set once the launcher has seen the end of all ranks."""
        self.tell: Callable[[], None] | None = None
        """Where rank 0 is on another host: has it drain."""

    def ask(self, number: int, frame: object) -> None:
        """Handles SIGTERM and SIGINT."""
        if not self.is_asked and self.tell is not None:
            self.is_asked = True
            self.tell()
            return
        ranks = psutil.Process().children()
        if not ranks:
            raise SystemExit(0)
        first = [] if self.is_asked else [rank for rank in ranks if _is_rank_0(rank)]
        self.is_asked = True
        _signal(first or ranks, signal.SIGTERM)

    def drain(self) -> None:
        """Has rank 0, which is on this host, drain and end the others. From any thread."""
        rank_0 = [rank for rank in psutil.Process().children() if _is_rank_0(rank)]
        # An engine tells all hosts at once, and a second time is an end without a drain.
        if rank_0 and not self.is_asked:
            self.is_asked = True
            _signal(rank_0, signal.SIGTERM)

    def lose_hosts(self, why: str) -> None:
        """Ends the ranks: others are gone for which they may wait without end. From any thread."""
        self.lost = why
        logger.error("the ranks of this host end: %s", why)

        def end() -> None:
            _signal(psutil.Process().children(), signal.SIGTERM)
            # Again: one may just be starting.
            while not self.is_over.wait(LAST_GRACE_S):
                _signal(psutil.Process().children(), signal.SIGKILL)

        threading.Thread(target=end, name="end of the ranks", daemon=True).start()


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_rank_0(process: psutil.Process) -> bool:
    try:
        return process.environ().get("RANK") == "0"
    except psutil.Error:
        return False
