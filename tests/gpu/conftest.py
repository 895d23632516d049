"""A run of these tests in which nothing was tested is a failure, where there is a device."""

from __future__ import annotations

import pytest

NOTHING_TESTED = 1
"""Exit code where every test was skipped."""


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    import torch

    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly or not torch.cuda.is_available():
        return
    has_run = any(reporter.stats.get(kind) for kind in ("passed", "failed", "error", "xfailed"))
    if not has_run and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        reporter.write_line(
            "there is a device, but nothing was tested: install what the reasons above name"
        )
        session.exitstatus = NOTHING_TESTED
