"""Logs of a service process: time, role and rank on every line."""

from __future__ import annotations

import datetime
import faulthandler
import json
import logging
import sys
import threading
import types
from pathlib import Path

from rolemesh.rpc.channel import current_call
from rolemesh.services.runtime.server.config import ServiceConfig

AGENT = "agent"
"""Word for the rank in log lines of the process that starts the ranks."""


class _TextFormatter(logging.Formatter):
    """`2026-11-21T03:45:33.123Z INFO actor[0] rolemesh.x: message (request 1f..)`."""

    def __init__(self, role: str, rank: int | str) -> None:
        super().__init__()
        self._who = f"{role}[{rank}]"

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{_timestamp(record)} {record.levelname} {self._who} "
            f"{record.name}: {record.getMessage()}"
        )
        request_id = _request_id(record)
        if request_id is not None:
            line += f" (request {request_id})"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, role: str, rank: int | str) -> None:
        super().__init__()
        self._role = role
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "role": self._role,
            "rank": self._rank,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _request_id(record)
        if request_id is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _request_id(record: logging.LogRecord) -> str | None:
    given = getattr(record, "request_id", None)
    if isinstance(given, str):
        return given
    call = current_call()
    return None if call is None else call.request_id


def log_path(config: ServiceConfig) -> Path | None:
    """Log file of the process; None when it logs to standard error only."""
    if config.log_directory is None:
        return None
    suffix = "" if config.rank_store is None else f"-{config.rank}"
    return config.log_directory / f"{config.role}{suffix}.log"


def set_up_logging(config: ServiceConfig) -> None:
    """Sends all logs of the process to standard error and, when set, to its log file.

    Uncaught exceptions of any thread are logged too, and a crash in native code leaves a traceback
    of every thread in the file.
    """
    is_agent = config.world_size > 1 and config.rank_store is None
    writer: int | str = AGENT if is_agent else config.rank
    formatter: logging.Formatter = (
        _JsonFormatter(config.role, writer)
        if config.log_format == "json"
        else _TextFormatter(config.role, writer)
    )
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    path = log_path(config)
    if path is None:
        faulthandler.enable()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8")
        handlers.append(logging.StreamHandler(stream))
        faulthandler.enable(stream)
    for handler in handlers:
        handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(config.log_level.upper())
    # httpx: a line for each request to a server that samples or judges.
    for chatty in ("uvicorn.access", "asyncio", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    logging.getLogger(__name__).critical(
        "the process fails: %s: %s", kind.__name__, error, exc_info=(kind, error, trace)
    )


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None:
        name = arguments.thread.name if arguments.thread is not None else "?"
        logging.getLogger(__name__).critical(
            "thread %s fails: %s", name, arguments.exc_value, exc_info=arguments.exc_value
        )
