"""The tower of a model of images and text: frozen, and asked once for each image.

What it makes of an image does not depend on what else is asked, to the bit: each image is a pass of
its own. So a row is scored alike whichever rows stand beside it.

Some towers have further features of some of their layers (`engine/models/images/shown_images.py`).

Shape letters: F tokens of an image, P patches, W width of the text model times sets of features.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from rolemesh.engine.images.decoding import ImageReader
from rolemesh.engine.images.processing import PROCESSOR_FILE, ImageProcessor
from rolemesh.engine.images.prompt_images import Grid, ImageInvalidError, PromptImage
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.images.whole_models import has_tower, tower_tensors

logger = logging.getLogger(__name__)

_SHOWN_DIGITS = 12
"""Of a fingerprint."""

KEPT_BYTES = 2**30
"""Of features that are kept, at most; the images that were asked for longest ago give way."""

_towers: WeakValueDictionary[tuple[Path, str], Tower] = WeakValueDictionary()
_lock = threading.Lock()


def tower_of(folder: Path, device: torch.device) -> Tower:
    """The tower of a model folder on a device; one for all models of the process that ask."""
    key = (folder.resolve(), str(device))
    with _lock:
        tower = _towers.get(key)
        if tower is None:
            _towers[key] = tower = Tower(folder, device)
        return tower


def tower_bytes(folder: Path, kind: str) -> int:
    """Memory of a tower's weights on a device of a kind; 0 of a model that has none.

    Of the folder config.json alone is read.
    """
    if not has_tower(folder):
        return 0
    sizes: list[int] = [one.numel() for one in _valueless(folder).parameters()]
    return sum(sizes) * _type_on(kind).itemsize


def _type_on(kind: str) -> torch.dtype:
    return torch.float32 if kind == "cpu" else torch.bfloat16


def _valueless(folder: Path) -> Any:
    """The tower of a folder without values, but for the frequencies, which files do not have."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    vision = config.vision_config
    vision._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = AutoModel.from_config(vision, dtype=torch.float32, trust_remote_code=False)
    model.rotary_pos_emb = type(model.rotary_pos_emb)(vision)
    return model


class Tower:
    """What makes tokens of images. Owned by the rank's compute thread."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Loads the folder's tower: float32 on a CPU, bfloat16 on a GPU.

        Raises:
            ModelFolderError: The folder has no tower, or no processor that fits it.
        """
        self.processor = ImageProcessor(folder)
        self._device = device
        self._dtype = _type_on(device.type)
        model = _valueless(folder)
        if self.processor.patch_size != model.config.patch_size:
            raise ModelFolderError(
                f"model.path {str(folder)!r}: {PROCESSOR_FILE} has the patch_size "
                f"{self.processor.patch_size}, but the vision_config of its config.json "
                f"{model.config.patch_size}: copy the folder again"
            )
        self.width: int = model.config.out_hidden_size
        """Of a set of features."""
        model.load_state_dict(dict(tower_tensors(folder)), assign=True)
        self._model = model.requires_grad_(False).eval().to(device, self._dtype)
        # Frequencies stay float32, as transformers has them whatever the type of weights.
        model.rotary_pos_emb = type(model.rotary_pos_emb)(model.config).to(device)
        self._kept: OrderedDict[tuple[str, Grid], torch.Tensor] = OrderedDict()
        self._kept_bytes = 0
        self._reader = ImageReader()
        self.num_passes = 0
        """Images that the tower has looked at so far."""

    def features(self, images: Sequence[PromptImage]) -> list[torch.Tensor]:
        """What is shown of each image: float32 [F, W], where the tower is.

        In the first `width` columns what stands at the embedding, then what is added behind each of
        the first layers.

        Raises:
            ImageInvalidError: An image cannot be read, has another grid than was said, or was cut
                by another processor.
        """
        found = []
        for image in images:
            if image.processor not in ("", self.processor.fingerprint):
                raise ImageInvalidError(
                    f"an image was cut by another processor ({image.processor[:_SHOWN_DIGITS]}) "
                    f"than this model's ({self.processor.fingerprint[:_SHOWN_DIGITS]}): let all "
                    f"roles have one {PROCESSOR_FILE}, and the same versions of transformers and "
                    "Pillow"
                )
            # With the grid, so that a wrong one is refused whenever it comes.
            key = (image.sha256, image.grid)
            kept = self._kept.get(key)
            if kept is None:
                kept = self._looked_at(image)
                self._kept[key] = kept
                self._kept_bytes += kept.nbytes
            self._kept.move_to_end(key)
            found.append(kept)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return found

    @torch.no_grad()
    def _looked_at(self, image: PromptImage) -> torch.Tensor:
        patches_PC, grid = self.processor.patches(self._reader.pixels(image.data))
        if grid != image.grid:
            raise ImageInvalidError(
                f"an image is said to have the grid {list(image.grid)}, but the processor of this "
                f"model makes {list(grid)} of it: let all roles have one processor"
            )
        self.num_passes += 1
        given = torch.from_numpy(patches_PC).to(self._device, self._dtype)
        # Autocast of the pass that asks is not the tower's.
        with torch.autocast(self._device.type, enabled=False):
            made = self._model(given, grid_thw=torch.tensor([grid], device=self._device))
        deep = getattr(made, "deepstack_features", None) or ()
        return torch.cat([made.pooler_output, *deep], dim=1).float()
