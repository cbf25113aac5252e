"""Processes that each hold the target and share batches of prompts. They end with the process that started them."""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from queue import Empty
from typing import Any

import torch

from collectors.regenerate.generate import Answer, Sampling, Task, generate_batch
from collectors.regenerate.rewrite import Beat
from collectors.targets.load import LoadedTarget, load_target
from hiddenstore.errors import Kind, StorageError
from hiddenstore.targets.folder import open_target

_POLL_S = 0.5

Opening = tuple[str, str | None, str | None, bool, str | None]
"""Arguments of ``open_target``."""
Load = tuple[Opening, str | None, str]
"""``Opening``, dtype and device."""


class WorkerPool:
    """``workers`` processes of ``threads`` threads. Leaving it stops them at their next token."""

    def __init__(self, workers: int, load: Load, threads: int) -> None:
        # spawn, not fork: a forked child would inherit torch's thread pools in an undefined state.
        context = get_context("spawn")
        self._messages: Queue[Any] = context.Queue()
        self._stop = context.Event()
        start = (load, threads, self._messages, self._stop)
        self._pool = ProcessPoolExecutor(workers, context, _start_worker, start)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._messages.close()

    def answer(self, sampling: Sampling, tasks: Sequence[Task], beat: Beat) -> Iterator[tuple[str, int, Answer]]:
        """Name of the batch, row and answer, as each ends. Raises StorageError: ``worker-died``."""
        futures = [self._pool.submit(_answer, sampling, prompts, name) for prompts, name in tasks]
        ended = 0
        while ended < len(futures):
            try:
                message = self._messages.get(timeout=_POLL_S)
            except Empty:
                beat(0)
                _raise_what_failed(futures)
                continue
            if message is None:
                ended += 1
            elif isinstance(message, int):
                beat(message)
            else:
                yield message


def _raise_what_failed(futures: Sequence["Future[None]"]) -> None:
    for future in (future for future in futures if future.done()):
        try:
            future.result()
        except BrokenProcessPool as error:
            raise StorageError(
                "a worker process ended before its answers: killed, most often for want of memory",
                kind=Kind.WORKER_DIED,
                hint="the same command goes on; --workers 1, or --set batch_size=32, takes less memory",
            ) from error


_target: LoadedTarget
_messages: "Queue[Any]"
_stop: Event


class _StoppedError(Exception):
    """The parent wants no more answers."""


def _start_worker(load: Load, threads: int, messages: "Queue[Any]", stop: Event) -> None:
    global _target, _messages, _stop
    _messages, _stop = messages, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    opening, dtype, device = load
    _target = load_target(open_target(*opening), dtype, device)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(sampling: Sampling, prompts: list[list[int]], name: str) -> None:
    def beat(tokens: int) -> None:
        if _stop.is_set():
            raise _StoppedError
        _messages.put(tokens)

    try:
        for row, answer in generate_batch(_target, prompts, sampling, name, beat):
            _messages.put((name, row, answer))
    except _StoppedError:
        return
    _messages.put(None)
