"""Images as a target reads them: its own image processor.

Shapes: P patches of an image, C numbers of a patch.
"""

import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import canonical, sha256_hex
from hiddenstore.targets.checkpoint import read_object
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
    """An image that cannot be read, or that the processor refuses; ``reason``: what counts such rows."""

    def __init__(self, detail: str, reason: str = "image-unreadable") -> None:
        super().__init__(detail)
        self.reason = reason


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
        """The token and the digest of the processor's settings. Raises ConfigError: ``target-incomplete``,
        ``target-unreadable``."""
        paths = [path for name in _FILES if (path := self.folder.file(name)) is not None]
        if not paths:
            raise ConfigError(
                f"target {self.folder.label} has neither {' nor '.join(_FILES)}, and the conversations hold images",
                kind=Kind.TARGET_INCOMPLETE,
                hint="AutoProcessor.from_pretrained(ORIGINAL).save_pretrained(TARGET)",
            )
        settings = [read_object(path) for path in paths]
        if None in settings:
            raise self._unreadable("its settings are no JSON object")
        return ImageSpec(token_id=self.token_id, processor_sha256=sha256_hex(canonical(settings)))

    @cached_property
    def _processor(self) -> Any:
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            problem = "conversations with images need Pillow"
            raise ConfigError(problem, kind=Kind.NOT_INSTALLED, hint="pip install 'hiddenstore[images]'") from error
        import transformers
        from transformers.models.auto import image_processing_auto

        # One resampling everywhere: that of torchvision, where it is installed, rounds otherwise.
        has_backends = hasattr(image_processing_auto, "_resolve_backend")
        backend = {"backend": "pil"} if has_backends else {"use_fast": False}
        # What it says of a target without settings is clearer than what transformers does.
        _ = self.spec
        name, revision = self.folder.name, self.folder.revision
        try:
            return transformers.AutoImageProcessor.from_pretrained(name, revision=revision, **backend)
        except Exception as error:  # its file may hold anything
            raise_refusal(error, name)
            raise self._unreadable(first_line(error)) from error

    def _unreadable(self, reason: str) -> ConfigError:
        problem = f"cannot read the image processor of target {self.folder.label}: {reason}"
        return ConfigError(problem, kind=Kind.TARGET_UNREADABLE)

    def read(self, data: bytes) -> Pixels:
        """What the processor makes of the bytes of an image file. Raises ImageError; ConfigError:
        ``target-unreadable``, the processor fails on what is an image, as its settings make it; as ``spec``."""
        processor = self._processor
        image = _upright(data)
        try:
            made = processor(images=[image], return_tensors="np")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if "aspect ratio" in str(error):
                raise ImageError(first_line(error)) from error
            raise self._unreadable(f"it fails on an image: {first_line(error)}") from error
        merge, (_time, rows, columns) = self.folder.whole.vision_config.spatial_merge_size, made["image_grid_thw"][0]
        return Pixels(made["pixel_values"], made["image_grid_thw"], int(rows) // merge, int(columns) // merge)


# vLLM takes more; what is left out is no picture of the web, or is handed to another program (EPS to Ghostscript).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


def _upright(data: bytes) -> Any:
    """The picture of an image file in RGB, as vLLM loads one: upright, transparency on white. Raises ImageError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        Image.init()
        with Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN]) as file:
            image = ImageOps.exif_transpose(file)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            clear = image.convert("RGBA")
            image = Image.new("RGB", clear.size, "white")
            image.paste(clear, mask=clear.getchannel("A"))
        return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise ImageError(f"it is none of {', '.join(FORMATS)}") from error
    except MemoryError:
        raise
    except Exception as error:  # its decoders raise what they like, AVIF's a RuntimeError
        raise ImageError(first_line(error)) from error


def open_images(folder: TargetFolder) -> TargetImages | None:
    """How a target reads images; None for one whose text alone is captured."""
    return TargetImages(folder) if folder.whole.model_type in FAMILIES else None
