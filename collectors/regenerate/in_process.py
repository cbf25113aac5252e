"""The target in this process, or in a few of them, answers: conversations in groups, each turn in batches.

Which conversations share a batch follows from the input and the answers alone, so that a run that was killed gives the
same answers as one that was not.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from queue import Empty
from typing import Any

import torch

from collectors.regenerate.generate import Answer, Sampling, Task, generate_batch, prompt_batches
from collectors.regenerate.options import RegenerateOptions, open_answering
from collectors.regenerate.rewrite import NO_QUESTION, AnswerAll, Beat, Recorded, Reply, Rewrite, Take
from collectors.targets.load import LoadedTarget, load_target
from collectors.tokenize.batches import end_with_parent
from collectors.tokenize.template import ChatTemplate
from hiddenstore.console.output import output
from hiddenstore.console.text import plural
from hiddenstore.conversation import TEMPLATE_KWARGS
from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.records import LOOP_SHARE, repeated_share
from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.rendering import RENDER_ERRORS, reason_of
from hiddenstore.threads import usable_cores

GROUP_BATCHES = 32
LOOKED_AT = 8
"""Of so many whole answers at the beginning the chat template must write one as the target did."""
FEWEST_LOOKED_AT = 3
"""Fewer than these may be exceptions."""
_POLL_S = 0.5
_SHOWN = 40

Batch = list[tuple[Rewrite, list[int]]]
Submit = Callable[[Sequence[Task], Beat], Iterator[tuple[str, int, Answer]]]
"""Answers batches: name of the batch, row and answer, as each ends."""


def open_in_process(options: RegenerateOptions) -> tuple[str, AnswerAll]:
    """The target's label, and what answers with it; raises as ``open_target`` and ``ChatTemplate``, and ConfigError:
    ``option-invalid``: a member for requests to a server."""
    if others := sorted(options.extra.keys() - {TEMPLATE_KWARGS}):
        problem = f"extra.{others[0]} is a member of requests to a server, and the target answers in this process"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint="--server URL, or --engine-python PY with --target T")
    folder = open_answering(options, str(options.target))
    template = ChatTemplate(folder.tokenizer)
    sampling = Sampling(options.temperature, options.limit, options.seed or 0, options.top_p or 1.0)
    # Another adapter in a folder of the same name would give other answers.
    label = folder.label if folder.adapter is None else f"{folder.label}@{folder.adapter.sha256[:8]}"
    return label, _InProcess(folder, template, sampling, options).answer_all


@dataclass(frozen=True)
class _InProcess:
    """``options.workers`` processes share the batches of ``options.batch_size`` prompts."""

    folder: TargetFolder
    template: ChatTemplate
    sampling: Sampling
    options: RegenerateOptions

    def answer_all(self, rewrites: Iterator[Rewrite], recorded: Recorded, take: Take, beat: Beat) -> None:
        check = _TemplateCheck(self.template)
        with self._generator() as submit:
            for group in count():
                conversations = list(islice(rewrites, GROUP_BATCHES * self.options.batch_size))
                if not conversations:
                    break
                replies = {rewrite.number: recorded(rewrite) for rewrite in conversations}
                for turn in count():
                    conversations = [rewrite for rewrite in conversations if rewrite.advance()]
                    if not conversations:
                        break
                    unanswered = {number for number, given in replies.items() if len(given) <= turn}
                    batches = self._batches(conversations, unanswered, take)
                    for rewrite in conversations:
                        if rewrite.turn == turn < len(replies[rewrite.number]):
                            reply = replies[rewrite.number][turn]
                            check.look_at(rewrite, reply)
                            take(rewrite, reply)
                    names = [f"turn {turn} batch {group * GROUP_BATCHES + number}" for number in range(len(batches))]
                    answers = _answers(dict(zip(names, batches, strict=True)), turn, submit, beat)
                    new = ((rewrite, self._reply(answer)) for rewrite, answer in answers)
                    for rewrite, reply in check.pass_on(new):
                        take(rewrite, reply)
        check.warn()

    def _batches(self, conversations: list[Rewrite], unanswered: Set[int], take: Take) -> list[Batch]:
        """Conversations and the prompts of their next turn, in batches; those whose prompt is too long, or that the
        template refuses, are dropped, but for the answered ones, whose limit may have been a smaller one."""
        limit = getattr(self.folder.config, "max_position_embeddings", None) or 1 << 30
        fitting = []
        for rewrite in conversations:
            if not rewrite.done:
                take(rewrite, NO_QUESTION)
                continue
            try:
                prompt = self.template.prompt_ids(rewrite.so_far)
            except RENDER_ERRORS as error:
                take(rewrite, Reply(drop="refused", detail=reason_of(error)))
                continue
            if len(prompt) + self.sampling.max_new_tokens <= limit:
                fitting.append((rewrite, prompt))
            elif rewrite.number in unanswered:
                room = max(0, limit - len(prompt))
                detail = f"{len(prompt):,} tokens of {limit:,} leave {room:,} for an answer"
                take(rewrite, Reply(drop="prompt-too-long", detail=detail))
        lengths = [len(prompt) for _, prompt in fitting]
        return [[fitting[i] for i in batch] for batch in prompt_batches(lengths, self.options.batch_size)]

    def _reply(self, answer: Answer) -> Reply:
        # Special tokens too: channels, thoughts and calls are marked by them. The one that ends it is not among these.
        # Spaces too: transformers 4.57 takes those before punctuation out where a tokenizer says so, as Llama 3's does.
        text = self.folder.tokenizer.decode(
            answer.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        is_looping = repeated_share(answer.token_ids) > LOOP_SHARE
        drop = "looping" if is_looping else None if text.strip() else "empty"
        return Reply(text=text, tokens=len(answer.token_ids), is_cut=not answer.ended, drop=drop)

    @contextmanager
    def _generator(self) -> Iterator[Submit]:
        """What answers batches, in this process or in workers."""
        folder, sampling, options = self.folder, self.sampling, self.options
        if options.workers == 1:
            target = load_target(folder, options.dtype, options.device)

            def answer(tasks: Sequence[Task], beat: Beat) -> Iterator[tuple[str, int, Answer]]:
                for prompts, name in tasks:
                    for row, one in generate_batch(target, prompts, sampling, name, beat):
                        yield name, row, one

            yield answer
            return
        resolved = replace(options, target=folder.name, revision=folder.revision)
        with WorkerPool(resolved, max(1, usable_cores() // options.workers)) as pool:
            yield partial(pool.answer, sampling)


@dataclass
class _TemplateCheck:
    """Whether the chat template writes answers as the target did, which one that it does settles for the whole run."""

    template: ChatTemplate
    is_settled: bool = False
    change_count: int = 0
    difference: str | None = None

    def look_at(self, rewrite: Rewrite, reply: Reply) -> bool:
        """Whether the template writes a reply as other text, as long as nothing is settled."""
        # One that was cut in a thought, or is left out, need not be what the template writes.
        if self.is_settled or reply.is_cut or reply.drop is not None:
            return False
        change = self._change(rewrite, reply.text)
        if change is None:
            self.is_settled = True
            return False
        self.difference = self.difference or f"conversation {rewrite.number + 1}: {change}"
        return True

    def pass_on(self, replies: Iterator[tuple[Rewrite, Reply]]) -> Iterator[tuple[Rewrite, Reply]]:
        """The new replies of a turn; those that the template writes as other text once that is settled, or where they
        are few. Raises ConfigError: ``template-unstable``: they are not, and all whole ones are written so."""
        doubtful = []
        for rewrite, reply in replies:
            if self.look_at(rewrite, reply):
                doubtful.append((rewrite, reply))
                self.change_count += 1
                self._require_fewer(LOOKED_AT)
                continue
            if self.is_settled:
                yield from doubtful
                doubtful.clear()
            yield rewrite, reply
        if not self.is_settled:
            self._require_fewer(FEWEST_LOOKED_AT)
        yield from doubtful

    def warn(self) -> None:
        """Say at the end what was not settled."""
        if self.change_count and not self.is_settled:
            output().warn(
                f"the chat template writes other text in place of {plural(self.change_count, 'answer')} of the target, "
                f"or refuses them, so that prepare will too; {self.difference}"
            )

    def _require_fewer(self, count: int) -> None:
        if self.change_count >= count:
            raise ConfigError(
                f"the chat template writes other text in place of the target's answers, or refuses them, so that "
                f"prepare would too\n{self.difference}",
                kind=Kind.TEMPLATE_UNSTABLE,
                hint="--server URL of one with a reasoning parser; or --template FILE that writes answers as they are",
            )

    def _change(self, rewrite: Rewrite, answer: str) -> str | None:
        """What the chat template makes of an answer; None where it writes it as it is, white space left out: that is
        the template's to change."""
        messages = [*rewrite.done, {"role": "assistant", "content": answer}]
        try:
            prompt, _ = self.template.render(rewrite.so_far, prompt=True)
            text, _ = self.template.render(replace(rewrite.so_far, messages=messages))
        except RENDER_ERRORS as error:
            return reason_of(error)
        prompt, answer, text = ("".join(one.split()) for one in (prompt, answer, text))
        words = prompt + answer
        if answer and text.startswith(words):
            return None
        at = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
        excerpt = slice(at, at + _SHOWN)
        return f"{text[excerpt]!r} where the target read and wrote {words[excerpt]!r}, white space left out"


def _answers(batches: dict[str, Batch], turn: int, submit: Submit, beat: Beat) -> Iterator[tuple[Rewrite, Answer]]:
    """Answers of the named batches. One that a kill cut in two runs again entire, so that its noise is the same."""
    unanswered = {name: batch for name, batch in batches.items() if any(rewrite.turn == turn for rewrite, _ in batch)}
    tasks = [([prompt for _, prompt in batch], name) for name, batch in unanswered.items()]
    for name, row, answer in submit(tasks, beat):
        rewrite, _ = unanswered[name][row]
        if rewrite.turn == turn:
            yield rewrite, answer


class WorkerPool:
    """``options.workers`` processes of ``threads`` threads, each with the target, that share batches of prompts.
    Leaving it stops them at their next token; they end with the process that started them, however that ended."""

    def __init__(self, options: RegenerateOptions, threads: int) -> None:
        # spawn, not fork: a forked child would inherit torch's thread pools in an undefined state.
        context = get_context("spawn")
        self._messages: Queue[Any] = context.Queue()
        self._stop = context.Event()
        start = (options, threads, self._messages, self._stop)
        self._pool = ProcessPoolExecutor(options.workers, context, _start_worker, start)

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
                beat(0, 0)
                _raise_what_failed(futures)
                continue
            if message is None:
                ended += 1
            elif len(message) == 2:
                beat(*message)
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


def _start_worker(options: RegenerateOptions, threads: int, messages: "Queue[Any]", stop: Event) -> None:
    global _target, _messages, _stop
    _messages, _stop = messages, stop
    # More answers than a pipe takes would keep this process, and its parent, from their end once nobody reads them.
    messages.cancel_join_thread()
    end_with_parent()
    torch.set_num_threads(threads)
    _target = load_target(open_answering(options, str(options.target)), options.dtype, options.device)


def _answer(sampling: Sampling, prompts: list[list[int]], name: str) -> None:
    def beat(drawn: int, read: int) -> None:
        if _stop.is_set():
            raise _StoppedError
        _messages.put((drawn, read))

    try:
        for row, answer in generate_batch(_target, prompts, sampling, name, beat):
            _messages.put((name, row, answer))
    except _StoppedError:
        return
    _messages.put(None)
