"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.rank_processes import RankPool

# A machine with a GPU and the environment of the trackers have no hypothesis, and need none.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # By default an example that takes 200 ms fails, as any may on a busy machine. All else stays:
    # where CI is set, hypothesis draws the same examples each time.
    settings.register_profile("without deadline", parent=settings.default, deadline=None)
    settings.load_profile("without deadline")


# Services that tests start by hand may use every file and folder here. Those of a run, and those of
# the tests of grants, get what they may use by flags.
os.environ |= {"ROLEMESH_SERVICE__FOLDERS": "/", "ROLEMESH_SERVICE__CODE_ROOTS": "/"}


LOAD_VLLM = [
    f"tests/numerics/test_{name}.py"
    for name in (
        *("rollout_vllm", "rollout_vllm_bfloat16", "rollout_vllm_fast", "rollout_vllm_one_rank"),
        *("rollout_vllm_adapters", "rollout_vllm_merging", "rollout_vllm_shared"),
        *("rollout_vllm_images", "rollout_vllm_image_engines"),
        *("expert_adapters", "sampler_sleep"),
    )
]
"""Loading it takes ten seconds of computing. So do those of one folder, which share an engine."""
LOADS_VLLM = "tests/numerics/test_routing.py::test_the_sampler_vllm_keeps_routes"
"""One of a file whose others do not."""
ENDPOINT = (
    "tests/integration/endpoint/",
    "tests/integration/test_agents.py",
    "tests/integration/test_endpoint_images.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # The process that deals tests out to others, if there is one.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        from support import warm_processes

        warm_processes.share()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file to one process, as `--dist loadfile`; what loads vLLM, all to one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            loads = file in LOAD_VLLM or file.startswith(ENDPOINT) or nodeid.startswith(LOADS_VLLM)
            return "vllm" if loads else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


# What collecting imports and makes, two million objects, is looked at by no collection of garbage:
# neither while it grows, nor in each test that frees a model, where it would take a second. It
# stays so: vLLM freezes what an engine has made, and thaws everything with the engine's end.


def _leave_frozen() -> None:
    """In the place of gc.freeze and gc.unfreeze."""


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = _leave_frozen
    gc.enable()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to eight processes that play ranks; each starts when a test first needs it."""
    # Brings torch along, which most tests can do without.
    from support.rank_processes import RankPool

    with RankPool(8) as pool:
        yield pool
