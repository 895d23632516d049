"""Code planted in a folder of data: modules that a config names, and pickles. None may be run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.audit import Event

PICKLES = (
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin", "model.pt"),
    *("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"),
    *("consolidated.00.pth", "data.pkl", ".metadata", "tokenizer.pkl"),
)
"""Names under which programs look for pickles, from transformers, torch and Lightning."""

_REMOTE = "evil_code"


class _Touches:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._path),)


@dataclass(frozen=True)
class Planted:
    """What lies in a folder now, and what its code would leave."""

    folder: Path
    mark: Path
    """Made by whatever of it is run."""

    def opened(self, events: list[Event]) -> list[str]:
        """Planted files among those that were opened."""
        names = {*PICKLES, f"{_REMOTE}.py"}
        return [event.detail for event in events if Path(event.detail).name in names]


def pickle_that_runs(path: Path) -> bytes:
    """A pickle that makes `path` when it is read."""
    import pickle  # noqa: TID251 - what attackers send

    return pickle.dumps(_Touches(path))


def plant(folder: Path, mark: Path, *, model_type: str = "") -> Planted:
    """Adds code to a model's or a checkpoint's folder.

    Args:
        folder: Of safetensors and JSON.
        mark: A path that is not there.
        model_type: Written into config.json; transformers knows none of this name, so that only
            the planted code could make the model. Empty leaves the one that is there.
    """
    content = pickle_that_runs(mark)
    for name in PICKLES:
        (folder / name).write_bytes(content)
    (folder / f"{_REMOTE}.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    named = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), f"{_REMOTE}.Evil")
    _merge(folder / "config.json", {"auto_map": named, **_given(model_type)})
    _merge(
        folder / "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": [f"{_REMOTE}.Evil", None]}},
    )
    return Planted(folder, mark)


def _given(model_type: str) -> dict[str, str]:
    return {"model_type": model_type} if model_type else {}


def _merge(path: Path, more: dict[str, Any]) -> None:
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
