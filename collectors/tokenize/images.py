"""Images of a conversation → places among its tokens: one placeholder of the template becomes a token for each part of
the image, as the target's own processor expands it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from collectors.conversations.images import read_images
from collectors.conversations.parse import Conversation
from collectors.conversations.rows import Problem
from collectors.targets.images import ImageError, TargetImages
from collectors.tokenize.template import Tokenised
from schemas.manifest import ImageEntry


@dataclass(frozen=True, eq=False)
class Picture:
    """An image file and the tokens that it takes."""

    data: bytes
    height: int
    width: int


def pictures_of(conversation: Conversation, folder: Path | None, images: TargetImages) -> list[Picture] | Problem:
    """The images of a conversation as the target reads them, or why it cannot be used. Raises ConfigError: the target
    lacks its processor, or this machine Pillow."""
    files = read_images(conversation, folder)
    if isinstance(files, Problem):
        return files
    pictures = []
    for number, data in enumerate(files, start=1):
        try:
            pixels = images.read(data)
        except ImageError as error:
            return Problem(conversation.location, "image-unreadable", f"image {number}: {error}")
        pictures.append(Picture(data, pixels.height, pixels.width))
    return pictures


def expanded(sample: Tokenised, pictures: Sequence[Picture], token_id: int) -> Tokenised | Problem:
    """A sample with every placeholder repeated for its image; none of them is supervised, as no target writes one."""
    places = np.flatnonzero(sample.input_ids == token_id)
    if len(places) != len(pictures):
        detail = f"{len(places)} placeholders of images in the rendered text, for {len(pictures)} images"
        return Problem(sample.location, "image-placeholders", detail)
    counts = np.ones(len(sample.input_ids), dtype=np.int64)
    counts[places] = [picture.height * picture.width for picture in pictures]
    starts = np.concatenate([[0], np.cumsum(counts)])
    mask, spans = sample.loss_mask.copy(), sample.spans.copy()
    mask[places] = 0
    spans[:, 1:] = starts[spans[:, 1:]]
    entries = [
        ImageEntry(
            sha256=hashlib.sha256(picture.data).hexdigest(),
            start=int(starts[place]),
            height=picture.height,
            width=picture.width,
        )
        for place, picture in zip(places, pictures, strict=True)
    ]
    return replace(
        sample,
        input_ids=np.repeat(sample.input_ids, counts),
        loss_mask=np.repeat(mask, counts),
        spans=spans,
        images=tuple(entries),
        image_files=tuple(picture.data for picture in pictures),
    )
