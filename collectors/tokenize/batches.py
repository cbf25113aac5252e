"""Batches of rows → batches of samples, in this process or in worker processes, always in the order of the rows.

A batch is a pure function of its rows, their images and the ``SampleRules``, so the number of workers changes nothing
but the time. One placeholder of an image in the template becomes a token for each part of the image, as the target's
own processor expands it.
"""

import base64
import errno
import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np
import pyarrow as pa

from collectors.targets.images import ImageError, TargetImages
from collectors.tokenize.template import ChatTemplate, Tokenised
from hiddenstore.conversation import NO_ANSWER, Conversation, Problem, Row, parse_row
from hiddenstore.conversation.messages import shortened
from hiddenstore.errors import InterruptError, Kind, StorageError
from hiddenstore.fs.seam import storage_error
from hiddenstore.inputs import PREPARED
from hiddenstore.records import cut_spans, final_row_positions, sample_id
from hiddenstore.threads import usable_cores
from schemas.manifest import ImageEntry
from schemas.prepared import Overlong

BATCH_ROWS, IMAGE_BATCH_ROWS = 64, 4
"""The fewer where rows may hold images, whose files a batch carries whole."""
BATCH_BYTES = 1 << 20
WORTH_WORKERS_BYTES = 8 << 20
MOST_WORKERS = 32

FACTS = np.dtype(
    [
        *(("tokens", "i8"), ("supervised", "i8"), ("final_rows", "i8"), ("validation", "?")),
        *(("cut", "?"), ("reasoning_lost", "?"), ("end_unlearned", "?"), ("words_lost", "?"), ("images", "?")),
    ],
)
"""What is counted of a sample: its length, its supervised tokens and the final rows of these, its split, what it lost,
and whether it holds images."""
MAX_IMAGE_BYTES = 64 << 20
_NO_FILE = "there is no such file"

Picture = tuple[bytes, int, int]
"""An image file, and the height and width of what it takes in tokens."""


@dataclass(frozen=True, eq=False)
class SampleRules:
    """Everything a row's sample depends on besides the row. ``max_tokens`` None means no limit, ``images`` None that
    the target's text alone is read."""

    template: ChatTemplate
    max_tokens: int | None
    overlong: Overlong
    validation: float
    images: TargetImages | None = None


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """What one batch of rows became.

    samples has the columns of ``PREPARED`` and n rows, facts ``FACTS`` [n], places int64 [n] the row of the batch that
    each was; images holds rows of ``IMAGES`` for every sample; ``size`` is the bytes of the rows in their source,
    ``highest_id`` the largest token id, -1 when n = 0.
    """

    samples: pa.RecordBatch
    images: list[list[dict[str, Any]]]
    facts: np.ndarray
    places: np.ndarray
    problems: list[Problem]
    rows: int
    size: int
    highest_id: int


def batches_of(rows: Iterable[Row], takes_images: bool = False) -> Iterator[list[Row]]:
    """Consecutive rows, at most ``BATCH_ROWS`` (``IMAGE_BATCH_ROWS``) and about ``BATCH_BYTES`` in all."""
    most = IMAGE_BATCH_ROWS if takes_images else BATCH_ROWS
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.text_size or row.size
        if len(batch) == most or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def make_batch(rules: SampleRules, rows: Sequence[Row]) -> SampleBatch:
    """Parse, render, tokenise, mask and cut a batch of rows."""
    results = [item if isinstance(item, Problem) else _limited(item, rules) for item in _tokenised(rules, rows)]
    samples = [item for item in results if not isinstance(item, Problem)]
    ids = [sample_id(sample.input_ids, sample.loss_mask, sample.images) for sample in samples]
    facts = [
        (
            len(sample.input_ids),
            int(sample.loss_mask.sum()),
            len(final_row_positions(sample.loss_mask, "supervised")),
            is_validation(name, rules.validation),
            sample.is_cut,
            sample.is_reasoning_lost,
            sample.is_end_unlearned and not sample.is_cut,
            sample.are_words_lost,
            bool(sample.images),
        )
        for name, sample in zip(ids, samples, strict=True)
    ]
    return SampleBatch(
        samples=_record_batch(samples, ids, rules.validation),
        images=[
            [
                {"sample_id": name, **entry.model_dump(), "data": data}
                for entry, data in zip(sample.images, sample.image_files, strict=True)
            ]
            for name, sample in zip(ids, samples, strict=True)
        ],
        facts=np.array(facts, dtype=FACTS),
        places=np.flatnonzero([not isinstance(item, Problem) for item in results]),
        problems=[item for item in results if isinstance(item, Problem)],
        rows=len(rows),
        size=sum(row.size for row in rows),
        highest_id=max((int(sample.input_ids.max()) for sample in samples), default=-1),
    )


def is_validation(name: str, share: float) -> bool:
    """Whether a sample id falls into the validation split: its first 64 bits as a fraction lie below ``share``."""
    return int(name[:16], 16) < share * 2.0**64


def ordered_batches(
    rules: SampleRules,
    batches: Iterator[list[Row]],
    workers: int | None,
    stopping: Callable[[], bool],
    expected_bytes: int = 0,
) -> Iterator[SampleBatch]:
    """``make_batch`` of every batch, in order.

    ``workers`` None means one for every ``WORTH_WORKERS_BYTES`` of rows (as many as are allowed, where
    ``expected_bytes`` is 0), up to the cores this process may use and ``MOST_WORKERS``: starting one costs what making
    so many into samples does. Raises InterruptError: ``interrupted`` as soon as
    ``stopping()``; StorageError: ``worker-died``."""
    if workers is None:
        ahead: list[list[Row]] = []
        size = 0
        while size < WORTH_WORKERS_BYTES and (batch := next(batches, None)):
            ahead.append(batch)
            size += sum(row.text_size or row.size for row in batch)
        # macOS knows no affinity.
        cores = usable_cores()
        worth = max(expected_bytes, size) // WORTH_WORKERS_BYTES if expected_bytes else MOST_WORKERS
        workers = min(cores, MOST_WORKERS, max(2, worth)) if size >= WORTH_WORKERS_BYTES else 1
        batches = chain(ahead, batches)
    if workers > 1:
        yield from _pooled(rules, batches, workers, stopping)
        return
    for batch in batches:
        _check_stop(stopping)
        yield make_batch(rules, batch)


def _pooled(
    rules: SampleRules, batches: Iterable[list[Row]], workers: int, stopping: Callable[[], bool]
) -> Iterator[SampleBatch]:
    # Forking a process that holds threads (rayon, progress) can deadlock the child; spawn costs seconds, never hangs.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (rules,))
    ahead: deque[Future[SampleBatch]] = deque()
    try:
        started = [pool.submit(_is_started) for _ in range(workers)]
        for batch in batches:
            _check_stop(stopping)
            # Until a worker has imported what it needs, this process does the work.
            if not any(future.done() for future in started):
                yield make_batch(rules, batch)
                continue
            ahead.append(pool.submit(_work, batch))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            _check_stop(stopping)
            yield ahead.popleft().result()
    except BrokenProcessPool as error:
        _check_stop(stopping)
        raise StorageError(
            "a worker process died: out of memory, killed, or prepare was called from a script outside "
            "`if __name__ == '__main__':`",
            kind=Kind.WORKER_DIED,
            hint="run the same command with --workers 1",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_stop(stopping: Callable[[], bool]) -> None:
    if stopping():
        raise InterruptError(
            "stopped as asked; nothing was written", kind=Kind.INTERRUPTED, hint="run the same command again"
        )


_rules: SampleRules | None = None


def _start_worker(rules: SampleRules) -> None:
    global _rules
    _rules = rules
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """A worker waits for work on a pipe whose other end it holds too: it would outlive a killed parent for ever."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            with suppress(OSError):
                parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _is_started() -> bool:
    return _rules is not None


def _work(rows: list[Row]) -> SampleBatch:
    assert _rules is not None
    return make_batch(_rules, rows)


def _tokenised(rules: SampleRules, rows: Sequence[Row]) -> list[Tokenised | Problem]:
    images = rules.images
    parsed = [parse_row(row, images is not None) for row in rows]
    if rules.template.loss_on != "all":
        parsed = [
            Problem(item.location, NO_ANSWER, "no message of the assistant to learn from")
            if isinstance(item, Conversation) and not item.has_answer
            else item
            for item in parsed
        ]
    pictures: dict[int, list[Picture]] = {}
    for number, item in enumerate(parsed):
        if images is not None and isinstance(item, Conversation) and item.images:
            made = pictures_of(item, rows[number].folder, images)
            if isinstance(made, Problem):
                parsed[number] = made
            else:
                pictures[number] = made
    tokenised = iter(rules.template.tokenise([item for item in parsed if isinstance(item, Conversation)]))
    results = [item if isinstance(item, Problem) else next(tokenised) for item in parsed]
    for number, made in pictures.items():
        if images is not None and isinstance(sample := results[number], Tokenised):
            results[number] = expanded(sample, made, images.token_id)
    return results


def _limited(sample: Tokenised, rules: SampleRules) -> Tokenised | Problem:
    limit, length = rules.max_tokens, len(sample.input_ids)
    if limit is None or length <= limit:
        return sample
    if rules.overlong == "drop":
        return Problem(sample.location, "overlong", f"{length:,} tokens, at most {limit:,} are kept")
    images = tuple(image for image in sample.images if image.start < limit)
    if images and images[-1].start + images[-1].tokens > limit:
        return Problem(sample.location, "image-cut", f"image {len(images)} ends behind the first {limit:,} tokens")
    mask = sample.loss_mask[:limit]
    if not mask.any():
        detail = f"of {length:,} tokens none of the first {limit:,} is supervised"
        return Problem(sample.location, "nothing-supervised-after-cut", detail)
    spans = cut_spans(sample.spans, limit)
    sample = replace(sample, images=images, image_files=sample.image_files[: len(images)])
    return replace(sample, input_ids=sample.input_ids[:limit], loss_mask=mask, spans=spans, is_cut=True)


def _record_batch(samples: Sequence[Tokenised], ids: list[str], validation: float) -> pa.RecordBatch:
    columns = [
        ids,
        [sample.input_ids for sample in samples],
        [sample.loss_mask for sample in samples],
        [[tuple(span) for span in sample.spans.tolist()] for sample in samples],
        ["validation" if is_validation(name, validation) else "train" for name in ids],
        [sample.location for sample in samples],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, PREPARED, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=PREPARED)


def pictures_of(conversation: Conversation, folder: Path | None, images: TargetImages) -> list[Picture] | Problem:
    """The images of a conversation as the target reads them, or why it cannot be used; paths begin at ``folder``.
    Raises ConfigError: the target lacks its processor, or this machine Pillow; StorageError: the disk refused."""
    pictures = []
    for number, named in enumerate(conversation.images, start=1):
        shown = "bytes" if isinstance(named, bytes) else repr(shortened(named))
        try:
            data = named if isinstance(named, bytes) else _image_bytes(named, folder)
            pixels = images.read(data)
        except ImageError as error:
            return Problem(conversation.location, error.reason, f"image {number}, {shown}: {error}")
        pictures.append((data, pixels.height, pixels.width))
    return pictures


def _image_bytes(named: str, folder: Path | None) -> bytes:
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
            raise ImageError(_NO_FILE, "image-missing")
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise ImageError(f"it has more than {MAX_IMAGE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        # An image that is written out where a path belongs makes a name that no file has.
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            raise ImageError(_NO_FILE, "image-missing") from error
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
