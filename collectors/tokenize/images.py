"""Images of a conversation → places among its tokens: one placeholder of the template becomes a token for each part of
the image, as the target's own processor expands it."""

import base64
import errno
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np

from collectors.conversations.parse import Conversation, shortened
from collectors.conversations.rows import Problem
from collectors.targets.images import ImageError, TargetImages
from collectors.tokenize.template import Tokenised
from hiddenstore.fs.seam import storage_error
from schemas.manifest import ImageEntry

MAX_IMAGE_BYTES = 64 << 20
_ABSENT = "there is no such file"

Picture = tuple[bytes, int, int]
"""An image file, and the height and width of what it takes in tokens."""


def pictures_of(conversation: Conversation, folder: Path | None, images: TargetImages) -> list[Picture] | Problem:
    """The images of a conversation as the target reads them, or why it cannot be used; paths begin at ``folder``.
    Raises ConfigError: the target lacks its processor, or this machine Pillow; StorageError: the disk refused."""
    pictures = []
    for number, named in enumerate(conversation.images, start=1):
        shown = "bytes" if isinstance(named, bytes) else repr(shortened(named))
        try:
            data = named if isinstance(named, bytes) else _file(named, folder)
            pixels = images.read(data)
        except ImageError as error:
            return Problem(conversation.location, error.reason, f"image {number}, {shown}: {error}")
        pictures.append((data, pixels.height, pixels.width))
    return pictures


def _file(named: str, folder: Path | None) -> bytes:
    """The bytes behind a path or URI. Raises ImageError; StorageError: the disk refused to read them."""
    if named.startswith(("http://", "https://")):
        raise ImageError("it is not fetched; download it, and name the file", "image-remote")
    try:
        if named.startswith("data:"):
            head, _, body = named.partition(",")
            return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        path = Path(url2pathname(urlsplit(named).path) if named.startswith("file://") else named)
    except ValueError as error:
        raise ImageError(str(error)) from error
    if not path.is_absolute() and folder is None:
        raise ImageError("it begins at no folder; name an absolute path", "image-missing")
    path = (folder or path) / path
    try:
        if not path.is_file():
            raise ImageError(_ABSENT, "image-missing")
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"it has more than {MAX_IMAGE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        # An image that is written out where a path belongs makes a name that no file has.
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            raise ImageError(_ABSENT, "image-missing") from error
        raise storage_error(error, str(path)) from error


def expanded(sample: Tokenised, pictures: Sequence[Picture], token_id: int) -> Tokenised | Problem:
    """A sample with every placeholder repeated for its image; none of them is supervised, as no target writes one."""
    places = np.flatnonzero(sample.input_ids == token_id)
    if len(places) != len(pictures):
        detail = f"{len(places)} placeholders of images in the rendered text, for {len(pictures)} images"
        return Problem(sample.location, "image-placeholders", detail)
    counts = np.ones(len(sample.input_ids), dtype=np.int64)
    counts[places] = [height * width for _, height, width in pictures]
    starts = np.concatenate([[0], np.cumsum(counts)])
    mask, spans = sample.loss_mask.copy(), sample.spans.copy()
    mask[places] = 0
    spans[:, 1:] = starts[spans[:, 1:]]
    entries = [
        ImageEntry(sha256=hashlib.sha256(data).hexdigest(), start=start, height=height, width=width)
        for start, (data, height, width) in zip(starts[places].tolist(), pictures, strict=True)
    ]
    return replace(
        sample,
        input_ids=np.repeat(sample.input_ids, counts),
        loss_mask=np.repeat(mask, counts),
        spans=spans,
        images=tuple(entries),
        image_files=tuple(data for data, _, _ in pictures),
    )
