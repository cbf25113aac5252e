"""The target in this process, or in a few of them, answers: conversations in groups, each turn in batches.

Which conversations share a batch follows from the input and the answers alone, and the noise of a batch from its name,
so that a run that was killed gives the same answers as one that was not.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

from collectors.generate import Answer, Sampling, generate_batch, prompt_batches
from collectors.regenerating.rewrite import Reply, Rewrite
from collectors.target import LoadedTarget, TargetFolder, load_target
from hiddenstore.loops import LOOP_SHARE, repeated_share

GROUP_BATCHES = 32

Tasks = Sequence[tuple[list[list[int]], str]]
Take = Callable[[Rewrite, Reply], None]


@dataclass(frozen=True)
class InProcess:
    """How to run the target: ``workers`` processes share the batches of ``batch_size`` prompts."""

    folder: TargetFolder
    sampling: Sampling
    batch_size: int
    workers: int
    dtype: str | None
    device: str


def answer_all(
    rewrites: Iterator[Rewrite],
    recorded: Callable[[Rewrite], list[Reply]],
    take: Take,
    setup: InProcess,
    check: Callable[[], None],
) -> None:
    """Answer every turn of every conversation; ``take`` gets each reply, ``check`` may raise to stop."""
    with _generator(setup) as submit:
        size, group = GROUP_BATCHES * setup.batch_size, 0
        while conversations := list(islice(rewrites, size)):
            known = {rewrite.number: recorded(rewrite) for rewrite in conversations}
            active, turn = conversations, 0
            while active := [rewrite for rewrite in active if rewrite.advance()]:
                _answer_turn(active, (turn, group * GROUP_BATCHES), known, take, setup, submit, check)
                turn += 1
            group += 1


def _answer_turn(
    active: list[Rewrite],
    place: tuple[int, int],
    known: dict[int, list[Reply]],
    take: Take,
    setup: InProcess,
    submit: Callable[[Tasks], Iterator[list[Answer]]],
    check: Callable[[], None],
) -> None:
    """Answer the next turn of every active conversation; ``place`` is the turn and the first batch's number."""
    turn, first = place
    prompts = [_prompt(setup.folder, rewrite) for rewrite in active]
    limit = getattr(setup.folder.config, "max_position_embeddings", None) or 1 << 30
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) + setup.sampling.max_new_tokens <= limit]
    for i in sorted({*range(len(active))} - {*fitting}):
        take(active[i], Reply(drop="prompt-too-long", detail=f"{len(prompts[i]):,} tokens of {limit:,}"))
    batches = [
        [fitting[k] for k in batch] for batch in prompt_batches([len(prompts[i]) for i in fitting], setup.batch_size)
    ]
    for batch in batches:
        for i in batch:
            if turn < len(known[active[i].number]):
                take(active[i], known[active[i].number][turn])
    open_batches = [
        (number, batch) for number, batch in enumerate(batches, first) if any(active[i].turn == turn for i in batch)
    ]
    tasks = [([prompts[i] for i in batch], f"turn {turn} batch {number}") for number, batch in open_batches]
    for (_, batch), answers in zip(open_batches, submit(tasks), strict=True):
        for i, answer in zip(batch, answers, strict=True):
            if active[i].turn == turn:
                take(active[i], _reply(setup.folder, answer))
        check()


def _reply(folder: TargetFolder, answer: Answer) -> Reply:
    text = str(folder.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
    looping = repeated_share(answer.token_ids) > LOOP_SHARE
    drop = "looping" if looping else None if text.strip() else "empty"
    return Reply(text=text, tokens=len(answer.token_ids), is_cut=not answer.ended, drop=drop)


def _prompt(folder: TargetFolder, rewrite: Rewrite) -> list[int]:
    ids: list[int] = folder.tokenizer.apply_chat_template(
        rewrite.done, tools=rewrite.tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


@contextmanager
def _generator(setup: InProcess) -> Iterator[Callable[[Tasks], Iterator[list[Answer]]]]:
    """A function that answers batches in order, here or in worker processes."""
    folder, sampling = setup.folder, setup.sampling
    if setup.workers == 1:
        target = load_target(folder, setup.dtype, setup.device)
        yield lambda tasks: (generate_batch(target, prompts, sampling, name) for prompts, name in tasks)
        return
    threads = max(1, len(os.sched_getaffinity(0)) // setup.workers)
    start = (folder.name, folder.revision, setup.dtype, setup.device, sampling, threads)
    # spawn, not fork: a forked child would inherit torch's thread pools in an undefined state.
    pool = ProcessPoolExecutor(setup.workers, get_context("spawn"), _start_worker, start)
    try:
        yield lambda tasks: pool.map(_answer, *zip(*tasks, strict=True)) if tasks else iter(())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[LoadedTarget, Sampling] | None = None


def _start_worker(
    name: str, revision: str | None, dtype: str | None, device: str, sampling: Sampling, threads: int
) -> None:
    import torch

    global _worker
    torch.set_num_threads(threads)
    _worker = (load_target(name, dtype, device, revision), sampling)


def _answer(prompts: list[list[int]], name: str) -> list[Answer]:
    assert _worker is not None
    target, sampling = _worker
    return generate_batch(target, prompts, sampling, name)
