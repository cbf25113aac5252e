"""Where images stand in a sample, and the positions that Qwen2.5-VL's rope gives its tokens.

Shapes: T tokens of a sample.
"""

from collections.abc import Sequence

import numpy as np

from schemas.manifest import ImageEntry

WITHOUT_IMAGES = "prepare and collect the conversations without images into a store of their own"
"""What to do where images have no place."""


def image_positions(tokens: int, images: Sequence[ImageEntry]) -> np.ndarray:
    """int64 [3, T] of (time, row, column): text counts on along all three, the tokens of an image stand at its rows and
    columns and at one time, and text goes on behind the largest. What ``get_rope_index`` of transformers gives."""
    positions = np.empty((3, tokens), dtype=np.int64)
    done = place = 0
    for image in images:
        # A view may end before it.
        start, end = min(image.start, tokens), min(image.start + image.tokens, tokens)
        positions[:, done:start] = place + np.arange(start - done)
        place += start - done
        cell = np.arange(end - start)
        positions[:, start:end] = place + np.stack([np.zeros_like(cell), cell // image.width, cell % image.width])
        place += max(image.height, image.width)
        done = end
    positions[:, done:] = place + np.arange(tokens - done)
    return positions


def drafter_positions(tokens: int, images: Sequence[ImageEntry]) -> np.ndarray:
    """What the rope of a drafter turns by, int64 [T]: places in time, as engines serve it (docs/design/020)."""
    return image_positions(tokens, images)[0] if images else np.arange(tokens)


def is_text(tokens: int, images: Sequence[ImageEntry]) -> np.ndarray:
    """Which tokens of a sample stand for no image: bool [T]."""
    text = np.ones(tokens, dtype=bool)
    for image in images:
        text[image.start : image.start + image.tokens] = False
    return text


def images_fault(input_ids: np.ndarray, images: Sequence[ImageEntry], token_id: int | None) -> str | None:
    """What is wrong with the images of a sample, or None: every one lies on tokens ``token_id``, and no such token
    elsewhere. A sample without images may hold that token as text."""
    if not images:
        return None
    places = np.concatenate([np.arange(image.start, image.start + image.tokens) for image in images])
    if np.array_equal(places, np.flatnonzero(input_ids == token_id)):
        return None
    return f"its {len(images)} images do not lie on its tokens {token_id}"
