"""A forward of a target over a sample with images.

Shapes: T tokens of the sample, D target width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collectors.targets.images import ImageError, TargetImages
from collectors.targets.load import LoadedTarget
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.images import image_positions
from schemas.manifest import ImageEntry

Images = Sequence[tuple[ImageEntry, bytes]]
"""The images of a sample in order, each with its file."""


def forward_with_images(target: LoadedTarget, input_ids: np.ndarray, images: Images) -> Tensor:
    """Post-norm last hidden [1, T, D] of one sample int32 [T] with its images; hooks on the target's parts fire inside.
    Raises CaptureError: ``engine-request``, an image is not what ``prepare`` made of it."""
    reader, entries, made = TargetImages(target.folder), [entry for entry, _ in images], []
    for entry, data in images:
        try:
            pixels = reader.read(data)
        except ImageError as error:
            raise _changed(entry, str(error)) from error
        if (pixels.height, pixels.width) != (entry.height, entry.width):
            found = f"it takes {pixels.height} x {pixels.width} tokens here, not {entry.height} x {entry.width}"
            raise _changed(entry, found)
        made.append(pixels)
    # Not the backbone: the whole model below the head puts the images where their tokens are.
    states: Tensor = target.model.model(
        input_ids=torch.from_numpy(input_ids.astype(np.int64))[None].to(target.device),
        pixel_values=torch.from_numpy(np.concatenate([pixels.values for pixels in made])).to(target.device),
        image_grid_thw=torch.from_numpy(np.concatenate([pixels.grid for pixels in made])).to(target.device),
        position_ids=torch.from_numpy(image_positions(len(input_ids), entries))[:, None].to(target.device),
        use_cache=False,
    ).last_hidden_state
    return states


def _changed(entry: ImageEntry, reason: str) -> CaptureError:
    return CaptureError(
        f"image {entry.sha256[:12]} is not what prepare made of it: {reason}",
        kind=Kind.ENGINE_REQUEST,
        hint="the versions of Pillow and transformers that prepare ran with; or prepare INPUT again",
    )
