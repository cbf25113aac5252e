"""Batches of rows → batches of samples, in this process or in worker processes, always in the order of the rows.

A batch is a pure function of its rows and the ``Recipe``, so the number of workers changes nothing but the time.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from collectors.conversations import Conversation, parse_row
from collectors.rows import NO_ANSWER, Problem, Row
from collectors.template import ChatTemplate, Tokenised
from hiddenstore.errors import InterruptError, StorageError
from hiddenstore.records import sample_id
from schemas.prepared import Overlong

BATCH_ROWS = 64
BATCH_BYTES = 1 << 20
WORTH_WORKERS_BYTES = 8 << 20
MOST_WORKERS = 32

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("spans", pa.list_(pa.struct([("role", pa.int32()), ("start", pa.int32()), ("end", pa.int32())]))),
        ("split", pa.string()),
        ("source", pa.string()),
    ]
)


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything a row's sample depends on besides the row. ``max_tokens`` None means no limit."""

    template: ChatTemplate
    max_tokens: int | None
    overlong: Overlong
    validation: float


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """What one batch of rows became.

    samples has the columns of ``SCHEMA`` and n rows; tokens and supervised int64 [n]; cut, validation and
    reasoning_lost bool [n]; ``size`` is the bytes of the rows in their source, ``highest_id`` the largest token id,
    -1 when n = 0.
    """

    samples: pa.RecordBatch
    tokens: np.ndarray
    supervised: np.ndarray
    cut: np.ndarray
    validation: np.ndarray
    problems: list[Problem]
    rows: int
    size: int
    highest_id: int
    reasoning_lost: np.ndarray


def batches_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Consecutive rows, at most ``BATCH_ROWS`` and about ``BATCH_BYTES`` together."""
    waiting: list[Row] = []
    held = 0
    for row in rows:
        waiting.append(row)
        held += row.size
        if len(waiting) == BATCH_ROWS or held >= BATCH_BYTES:
            yield waiting
            waiting, held = [], 0
    if waiting:
        yield waiting


def make_batch(recipe: Recipe, rows: Sequence[Row]) -> SampleBatch:
    """Parse, render, tokenise, mask and cut a batch of rows."""
    results = _tokenised(recipe, rows)
    problems: list[Problem] = []
    kept: list[tuple[Tokenised, bool]] = []
    for result in results:
        fitted = result if isinstance(result, Problem) else _fitted(result, recipe)
        if isinstance(fitted, Problem):
            problems.append(fitted)
        else:
            kept.append((fitted, fitted is not result))
    samples = [sample for sample, _ in kept]
    names = [sample_id(sample.input_ids, sample.loss_mask) for sample in samples]
    validation = np.array([is_validation(name, recipe.validation) for name in names], dtype=bool)
    return SampleBatch(
        samples=_record_batch(samples, names, validation),
        tokens=np.array([len(sample.input_ids) for sample in samples], dtype=np.int64),
        supervised=np.array([int(sample.loss_mask.sum()) for sample in samples], dtype=np.int64),
        cut=np.array([was_cut for _, was_cut in kept], dtype=bool),
        validation=validation,
        problems=problems,
        rows=len(rows),
        size=sum(row.size for row in rows),
        highest_id=max((int(sample.input_ids.max()) for sample in samples), default=-1),
        reasoning_lost=np.array([sample.is_reasoning_lost for sample in samples], dtype=bool),
    )


def is_validation(name: str, share: float) -> bool:
    """Whether a sample id falls into the validation split: its first 64 bits as a fraction lie below ``share``."""
    return int(name[:16], 16) < share * 2.0**64


def ordered_batches(
    recipe: Recipe, batches: Iterator[list[Row]], workers: int | None, stopping: Callable[[], bool]
) -> Iterator[SampleBatch]:
    """``make_batch`` of every batch, in order.

    ``workers`` None means every core this process may use, up to ``MOST_WORKERS``, once there are
    ``WORTH_WORKERS_BYTES`` of rows: starting a worker costs seconds.

    Raises:
        InterruptError: ``interrupted`` as soon as ``stopping()``.
        StorageError: ``worker-died``.
    """
    first: list[list[Row]] = []
    if workers is None:
        held = 0
        for batch in batches:
            first.append(batch)
            held += sum(row.size for row in batch)
            if held >= WORTH_WORKERS_BYTES:
                break
        workers = min(_cores(), MOST_WORKERS) if held >= WORTH_WORKERS_BYTES else 1
    everything = chain(first, batches)
    if workers > 1:
        yield from _pooled(recipe, everything, workers, stopping)
        return
    for batch in everything:
        _stop_if(stopping())
        yield make_batch(recipe, batch)


def _cores() -> int:
    """Cores this process may use; macOS knows no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pooled(
    recipe: Recipe, batches: Iterable[list[Row]], workers: int, stopping: Callable[[], bool]
) -> Iterator[SampleBatch]:
    # Forking a process that holds threads (rayon, progress) can deadlock the child; spawn costs seconds, never hangs.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (recipe,))
    ahead: deque[Future[SampleBatch]] = deque()
    try:
        started = [pool.submit(_is_started) for _ in range(workers)]
        for batch in batches:
            _stop_if(stopping())
            # Until a worker has imported what it needs, this process does the work.
            if not any(future.done() for future in started):
                yield make_batch(recipe, batch)
                continue
            ahead.append(pool.submit(_work, batch))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            _stop_if(stopping())
            yield ahead.popleft().result()
    except BrokenProcessPool as error:
        _stop_if(stopping())
        raise StorageError(
            "a worker process died: out of memory, killed, or prepare was called from a script outside "
            "`if __name__ == '__main__':`",
            kind="worker-died",
            hint="run the same command with --workers 1",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _stop_if(asked: bool) -> None:
    if asked:
        raise InterruptError(
            "stopped as asked; nothing was written", kind="interrupted", hint="run the same command again"
        )


_recipe: Recipe | None = None


def _start_worker(recipe: Recipe) -> None:
    global _recipe
    _recipe = recipe
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for rows on a pipe whose other end it holds too: it would outlive a killed parent for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with suppress(OSError):
            parent.join()
        os._exit(1)


def _is_started() -> bool:
    return _recipe is not None


def _work(rows: list[Row]) -> SampleBatch:
    assert _recipe is not None
    return make_batch(_recipe, rows)


def _tokenised(recipe: Recipe, rows: Sequence[Row]) -> list[Tokenised | Problem]:
    parsed: list[Conversation | Problem] = []
    for row in rows:
        conversation = parse_row(row)
        if isinstance(conversation, Conversation) and recipe.template.loss_on != "all" and not conversation.has_answer:
            conversation = Problem(row.place, NO_ANSWER, "no message of the assistant to learn from")
        parsed.append(conversation)
    tokenised = iter(recipe.template.tokenise([item for item in parsed if isinstance(item, Conversation)]))
    return [item if isinstance(item, Problem) else next(tokenised) for item in parsed]


def _fitted(sample: Tokenised, recipe: Recipe) -> Tokenised | Problem:
    limit, length = recipe.max_tokens, len(sample.input_ids)
    if limit is None or length <= limit:
        return sample
    if recipe.overlong == "drop":
        return Problem(sample.place, "overlong", f"{length:,} tokens, at most {limit:,} are kept")
    mask = sample.loss_mask[:limit]
    if not mask.any():
        detail = f"of {length:,} tokens none of the first {limit:,} is supervised"
        return Problem(sample.place, "nothing-supervised-after-cut", detail)
    spans = sample.spans[sample.spans[:, 1] < limit]
    spans = np.concatenate([spans[:, :2], np.minimum(spans[:, 2:], limit)], axis=1)
    return Tokenised(sample.place, sample.input_ids[:limit], mask, spans, sample.is_reasoning_lost)


def _record_batch(samples: Sequence[Tokenised], names: list[str], validation: np.ndarray) -> pa.RecordBatch:
    lengths = [len(sample.input_ids) for sample in samples]
    spans = np.concatenate([np.zeros((0, 3), np.int32), *(sample.spans for sample in samples)])
    turns = pa.StructArray.from_arrays(
        [pa.array(spans[:, column], pa.int32()) for column in range(3)], names=["role", "start", "end"]
    )
    columns = [
        pa.array(names, pa.string()),
        _lists([sample.input_ids for sample in samples], lengths, np.int32),
        _lists([sample.loss_mask for sample in samples], lengths, np.uint8),
        pa.ListArray.from_arrays(_offsets([len(sample.spans) for sample in samples]), turns),
        pa.array(np.where(validation, "validation", "train").tolist(), pa.string()),
        pa.array([sample.place for sample in samples], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _lists(values: list[np.ndarray], lengths: list[int], dtype: type) -> pa.ListArray:
    flat = np.concatenate([np.zeros(0, dtype), *values])
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(flat))


def _offsets(lengths: list[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
