"""Starts the ranks of a service with torch's elastic launcher, and ends with them.

The agent computes nothing: it starts one process for each rank, all from the same command line, and
waits. When a rank ends by itself, the agent ends the others and reports which one it was. A rank is
not started again, since it could not join the others in the middle of a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.server.parent import follow_parent

logger = logging.getLogger(__name__)

MONITOR_INTERVAL_S = 0.1
"""How often the launcher checks that its ranks live."""

LAST_GRACE_S = 1
"""Time that the other ranks have to end before SIGKILL when one has failed."""

STORE_FILE = "ranks"
"""File in the agent's private folder through which its ranks meet."""


def as_rank(config: ServiceConfig, environment: Mapping[str, str]) -> ServiceConfig:
    """The settings of the rank that this process is.

    All ranks get one command line. Rank 0 is the service's face and uses its port and its announce
    file. The other ranks take a free port, and only rank 0 learns it.
    """
    rank = int(environment["RANK"])
    own: dict[str, Any] = {"rank": rank}
    if rank > 0:
        own |= {"port": 0, "announce": None}
        if config.metrics_port:
            own["metrics_port"] = config.metrics_port + rank
    return ServiceConfig.model_validate(config.model_dump() | own)


def run_ranks(config: ServiceConfig) -> int:
    """Starts the service's ranks and waits for their end.

    Args:
        config: Settings of the service; world_size is the number of ranks.

    Returns:
        0 when all ranks ended well; 1 when one failed, which is logged with rank, pid and cause.
    """
    # Messages of elastic are about its configuration. Our own name the rank and the cause.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    if config.parent_pid is not None:
        follow_parent(config.parent_pid, config.drain_timeout_s + 3 * LAST_GRACE_S, lambda: None)
    with tempfile.TemporaryDirectory(prefix=f"rolemesh-{config.role}-") as folder:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.world_size,
            run_id=f"{config.role}-{os.getpid()}",
            role=config.role,
            # Ranks meet through files of this host: torch's TCP store listens on all interfaces
            # and knows no authentication.
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
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
        # two equal flags counts. Ranks get the pid of their parent: after minutes of importing,
        # a rank that looks for its parent might find another process.
        command = [*sys.orig_argv[1:], "--rank-store", str(Path(folder) / STORE_FILE)]
        command += ["--parent-pid", str(os.getpid())]
        end = _End()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end.ask)
        logger.info("starting %d ranks of the %s", config.world_size, config.role)
        try:
            elastic_launch(launch, sys.executable)(*command)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if end.is_asked and failure.exitcode == -signal.SIGTERM:
                logger.info("ended while the ranks were starting")
                return 0
            how = (
                f"was killed by signal {-failure.exitcode} "
                f"({signal.Signals(-failure.exitcode).name})"
                if failure.exitcode < 0
                else f"ended with exit code {failure.exitcode}"
            )
            logger.error(
                "%s rank %d (pid %d) %s; the other %d ranks were ended",
                *(config.role, rank, failure.pid, how, config.world_size - 1),
            )
            return 1
    logger.info("all ranks have ended")
    return 0


class _End:
    """Handler of the signals that end the agent: rank 0 drains, and then ends the others.

    The others are needed until then, since work in progress takes all ranks. At the second signal
    all ranks end at once.
    """

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self, number: int, frame: object) -> None:
        """Handles SIGTERM and SIGINT."""
        ranks = psutil.Process().children()
        if not ranks:
            raise SystemExit(0)
        first = [] if self.is_asked else [rank for rank in ranks if _is_rank_0(rank)]
        self.is_asked = True
        for rank in first or ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()


def _is_rank_0(process: psutil.Process) -> bool:
    try:
        return process.environ().get("RANK") == "0"
    except psutil.Error:
        return False
