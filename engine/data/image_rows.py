"""Images of rows for a model: their bytes, within bounds, and their places among tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.engine.data.rows import DataInvalidError, PromptRow
from rolemesh.engine.images.decoding import ImageReader
from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.images.prompt_images import ImageInvalidError, PromptImage
from rolemesh.engine.images.references import data_of, shown
from rolemesh.engine.specs import DataSpec, ImagesSpec, images_of_data


@dataclass(frozen=True, slots=True, kw_only=True)
class DataImages:
    """Finds the images of rows. Owned with the process that reads their headers.

    Example: of a row with one image of 112 x 84 pixels and the tokens [1, 99, 2], where 99 is the
    model's placeholder, `expanded` makes 1, twelve times 99, and 2.
    """

    processor: ImageProcessor
    """Of the policy's folder."""
    reader: ImageReader
    """Of images' sizes."""
    bounds: ImagesSpec
    """Most bytes and pixels."""

    @classmethod
    def of_data(cls, data: DataSpec, model: Path | None) -> DataImages | None:
        """For the data of a run; None where it has no images.

        Args:
            data: Training and held-out rows. Of a mixture the widest bounds count here; each
                source's own are checked when it is read, see `within`.
            model: Folder of the policy.

        Raises:
            DataInvalidError: There is no folder.
            ModelFolderError: The model takes no images.
        """
        found = images_of_data(data)
        if not found:
            return None
        if model is None:
            raise DataInvalidError(
                "data.images is given, but there is no model folder whose processor cuts images: "
                "name the model, or take images out"
            )
        widest = ImagesSpec(
            max_pixels=max(one.max_pixels for one in found),
            max_bytes=max(one.max_bytes for one in found),
        )
        reader = ImageReader(max_pixels=widest.max_pixels)
        return cls(processor=ImageProcessor(model), reader=reader, bounds=widest)

    def within(self, bounds: ImagesSpec) -> DataImages:
        """The same with the bounds of one source."""
        return DataImages(processor=self.processor, reader=self.reader, bounds=bounds)

    def of(self, row: PromptRow) -> tuple[PromptImage, ...]:
        """The images of a row, each with its grid.

        Raises:
            DataInvalidError: One cannot be read, or is beyond a bound.
        """
        try:
            return tuple(
                self._image(reference, row, f"images[{number}] {shown(reference)}")
                for number, reference in enumerate(row.images)
            )
        except ImageInvalidError as error:
            raise DataInvalidError(f"{row.where}: {error}") from error

    def _image(self, reference: str, row: PromptRow, name: str) -> PromptImage:
        folder = Path(row.image_folder) if row.image_folder else None
        data = data_of(reference, folder, self.bounds.max_bytes)
        width, height = self.reader.size(data, name)
        if width * height > self.bounds.max_pixels:
            raise ImageInvalidError(
                f"{name} has {width} x {height} pixels, more than {self.bounds.max_pixels}: make "
                "it smaller, or raise data.images.max_pixels"
            )
        grid = self.processor.grid(width=width, height=height)
        return PromptImage.of(data, grid, self.processor.fingerprint)

    def expanded(
        self, tokens: Sequence[int], images: Sequence[PromptImage], row: PromptRow
    ) -> list[int]:
        """Tokens of a rendered prompt in which each image has all of its places.

        Raises:
            DataInvalidError: The template has more or fewer places than the row has images, or a
                text of the row holds the placeholder itself.
        """
        try:
            return self.processor.tokens.expanded(tokens, [image.grid for image in images])
        except ImageInvalidError as error:
            raise DataInvalidError(f"{row.where}: {error}") from error

    def check_answer(self, tokens: Sequence[int], row: PromptRow) -> None:
        """Raises DataInvalidError where a given answer holds a place of an image."""
        if self.processor.tokens.placeholder in tokens:
            raise DataInvalidError(
                f"{row.where}: its completion holds the token in whose places images stand "
                f"({self.processor.tokens.placeholder}): take it out of the text"
            )
