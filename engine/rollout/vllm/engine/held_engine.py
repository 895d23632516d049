"""A vLLM engine of this process, held by one back end or by several in turn.

One engine lives in a process at a time. Several back ends share it where each serves an adapter on
the same base (`rolemesh serve --runs`): the one whose turn it is gives the engine its own adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolemesh.engine.rollout.vllm.engine.ranks import end_engine, wake_to_end
from rolemesh.engine.specs import VllmSpec


class HeldEngine:
    """An engine, whose weights it has, and what of its memory is given back.

    Owned by the compute thread. `user` is the back end whose weights the engine has; None where it
    has nobody's.
    """

    def __init__(self, engine: Any, *, world_is_ours: bool, settings: Mapping[str, str]) -> None:
        """Takes a new engine.

        Args:
            engine: VLLM's LLMEngine.
            world_is_ours: As `ranks.end_engine` says.
            settings: What it was made of, from `settings_of`.
        """
        self.engine = engine
        self.user: object | None = None
        self.holds_base = False
        """Whether the weights that have no adapter are those of the base."""
        self.are_weights_asleep = False
        self.is_cache_asleep = False
        """Whether the keys and values have no memory; they wake after the weights."""
        self.settings = settings
        self.num_backends = 1
        self._world_is_ours = world_is_ours

    def sleep(self, level: int) -> None:
        """Gives memory back; 1 keeps a copy of the weights on the host, 2 drops them."""
        self.engine.sleep(level=level)
        self.are_weights_asleep = self.is_cache_asleep = True
        self.user = None
        if level == 2:
            self.holds_base = False

    def wake_weights(self) -> None:
        """Takes memory for the weights again."""
        self.engine.wake_up(["weights"])
        self.are_weights_asleep = False

    def wake_cache(self) -> None:
        """Takes memory for keys and values again, where it was given back."""
        if self.is_cache_asleep:
            self.engine.wake_up(["kv_cache"])
            self.is_cache_asleep = False

    def let_go(self, backend: object) -> None:
        """Ends the engine with its last back end.

        A sleeping one wakes for it, which takes its memory once more: vLLM 0.32 gives memory back
        to the driver when it falls asleep and again when it is freed, and the second time leaves an
        error behind that the next engine's first allocation would report.
        """
        global _shared
        self.num_backends -= 1
        if self.user is backend:
            self.user = None
        if self.num_backends:
            return
        if _shared is self:
            _shared = None
        if self.is_cache_asleep:
            wake_to_end(self.engine)
        end_engine(self.engine, world_is_ours=self._world_is_ours)
        del self.engine


_shared: HeldEngine | None = None
"""The one that other back ends of the process may join."""


def settings_of(spec: VllmSpec, folder: Path, **more: object) -> dict[str, str]:
    """What an engine is made of, by name of the setting, to compare it with another's.

    Args:
        spec: Limits of the engine.
        folder: Of the model.
        more: What else counts.
    """
    settings = {f"rollout.{name}": repr(value) for name, value in spec.model_dump().items()}
    return {
        **settings,
        "model.path": repr(str(folder.resolve())),
        **{name: repr(value) for name, value in more.items()},
    }


def share(held: HeldEngine) -> None:
    """Lets other back ends of the process join a new engine."""
    global _shared
    _shared = held


def joined(settings: Mapping[str, str]) -> HeldEngine | None:
    """The engine that back ends share, with one more of them; None where there is none yet.

    Raises:
        ValueError: It was made of other settings.
    """
    if _shared is None:
        return None
    for name, value in settings.items():
        if _shared.settings.get(name) != value:
            raise ValueError(
                f"{name} is {value}, but the vLLM engine that the runs of this service share was "
                f"made with {_shared.settings.get(name)}: give the same, rollout type hf, or "
                "another service"
            )
    _shared.num_backends += 1
    return _shared
