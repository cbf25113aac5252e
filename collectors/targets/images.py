"""Images as a target reads them: its own image processor.

Shapes: P patches of an image, C numbers of a patch.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.folder import TargetFolder, first_line
from schemas.capture import ImageSpec

FAMILIES = ("qwen2_5_vl",)
"""Model types whose images are read; of all others the text."""
_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, eq=False)
class Pixels:
    """An image for the vision tower: values fp32 [P, C], grid int64 [1, 3] of (time, rows, columns) in patches; and
    ``height`` x ``width``, the tokens that it takes."""

    values: np.ndarray
    grid: np.ndarray
    height: int
    width: int


class ImageError(Exception):
    """Bytes that are no image, or one that the processor refuses; its text says why."""


@dataclass(frozen=True, eq=False)
class TargetImages:
    """The image processor of a target; nothing is read before the first image. Pickled to worker processes."""

    folder: TargetFolder

    @property
    def token_id(self) -> int:
        """What stands at every place of an image."""
        return int(self.folder.whole.image_token_id)

    @cached_property
    def spec(self) -> ImageSpec:
        """The token and the digest of the processor's settings. Raises ConfigError: ``target-incomplete``."""
        path = next((path for name in _FILES if (path := self.folder.file(name)) is not None), None)
        if path is None:
            raise ConfigError(
                f"target {self.folder.label} has neither {' nor '.join(_FILES)}, and the conversations hold images",
                kind=Kind.TARGET_INCOMPLETE,
                hint="AutoProcessor.from_pretrained(ORIGINAL).save_pretrained(TARGET)",
            )
        settings = json.dumps(json.loads(path.read_bytes()), sort_keys=True).encode()
        return ImageSpec(token_id=self.token_id, processor_sha256=hashlib.sha256(settings).hexdigest())

    @cached_property
    def _processor(self) -> Any:
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            problem = "conversations with images need Pillow"
            raise ConfigError(problem, kind=Kind.NOT_INSTALLED, hint="pip install 'hiddenstore[images]'") from error
        import transformers

        # One resampling everywhere: that of torchvision, where it is installed, rounds otherwise.
        backend = {"use_fast": False} if transformers.__version__.startswith("4.") else {"backend": "pil"}
        self.spec  # noqa: B018  # names what is missing better
        try:
            return transformers.AutoImageProcessor.from_pretrained(
                self.folder.name, revision=self.folder.revision, **backend
            )
        except Exception as error:  # its file may hold anything
            raise ConfigError(
                f"cannot read the image processor of target {self.folder.label}: {first_line(error)}",
                kind=Kind.TARGET_UNREADABLE,
            ) from error

    def read(self, data: bytes) -> Pixels:
        """What the processor makes of the bytes of an image file. Raises ImageError."""
        processor = self._processor
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(data)) as image:
                # As transformers and vLLM load one.
                upright = ImageOps.exif_transpose(image).convert("RGB")
            made = processor(images=[upright], return_tensors="np")
        except (OSError, ValueError, SyntaxError, ArithmeticError, Image.DecompressionBombError) as error:
            raise ImageError(first_line(error)) from error
        merge, (_time, rows, columns) = self.folder.whole.vision_config.spatial_merge_size, made["image_grid_thw"][0]
        return Pixels(made["pixel_values"], made["image_grid_thw"], int(rows) // merge, int(columns) // merge)


def open_images(folder: TargetFolder) -> TargetImages | None:
    """How a target reads images; None for one whose text alone is captured."""
    return TargetImages(folder) if folder.whole.model_type in FAMILIES else None
