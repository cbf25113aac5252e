"""Conversations whose answers the target itself wrote: what a drafter should learn to predict.

Every assistant turn is rewritten in order, each one after the rewritten turns before it. Answers that loop are dropped
with their conversation and counted.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from collectors.conversations import Conversation, Message, read_conversations
from collectors.generate import Answer, Sampling, generate_batch, prompt_batches, repeated_share
from collectors.target import LoadedTarget, TargetFolder, load_target, open_target
from collectors.template import read_template
from hiddenstore.cli.terminal import plural
from hiddenstore.errors import ConfigError, ConflictError
from hiddenstore.fs import LocalFilesystem
from hiddenstore.progress import Progress

LOOP_SHARE = 0.30


@dataclass(frozen=True)
class RegenerateOptions:
    """``workers`` processes share the batches; the answers do not depend on their number."""

    inputs: tuple[str, ...]
    out: str | Path
    target: str
    revision: str | None = None
    template: str | None = None
    temperature: float = 0.8
    max_new_tokens: int = 256
    max_samples: int | None = None
    batch_size: int = 128
    workers: int = 1
    seed: int = 0
    dtype: str | None = None
    device: str = "auto"


@dataclass
class RegenerateReport:
    """Conversations read and written; ``dropped`` counts whole conversations by reason."""

    out: str
    read: int = 0
    written: int = 0
    answers: int = 0
    tokens: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def looping_share(self) -> float:
        """Share of the generated answers that loop."""
        return self.dropped["looping"] / self.answers if self.answers else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Rewrite:
    """A conversation being rewritten: ``done`` messages hold new answers, ``todo`` are still to come."""

    done: list[Message]
    todo: list[Message]
    tools: list[dict[str, Any]] | None

    def advance(self) -> bool:
        """Move up to the next assistant turn; False when none is left (what follows the last answer is dropped)."""
        while self.todo and self.todo[0]["role"] != "assistant":
            self.done.append(self.todo.pop(0))
        return bool(self.todo)

    def answer(self, text: str) -> None:
        self.todo.pop(0)
        self.done.append({"role": "assistant", "content": text})

    def row(self) -> dict[str, Any]:
        last = max(i for i, message in enumerate(self.done) if message["role"] == "assistant")
        return {"messages": self.done[: last + 1]} | ({"tools": self.tools} if self.tools else {})


def regenerate(options: RegenerateOptions, note: Callable[[str], None] = print) -> RegenerateReport:
    """Rewrite every answer and write ``messages`` JSONL, in input order, whole or not at all.

    Raises:
        ConflictError: ``output-exists``.
        ConfigError: ``nothing-usable``: no conversation has an answer to rewrite; or an option is out of range.
    """
    out = Path(options.out)
    _require_possible(options, out)
    began = time.monotonic()
    report = RegenerateReport(str(out))
    template = None if options.template is None else read_template(options.template)
    folder = open_target(options.target, options.revision, template)
    if not folder.tokenizer.chat_template:
        raise ConfigError(f"target {folder.label} has no chat template", kind="target-no-chat-template")
    rewrites = _read(options, report)
    finished: list[_Rewrite] = []
    answers = sum(message["role"] == "assistant" for rewrite in rewrites for message in rewrite.todo)
    with _generator(options, folder) as submit, Progress("regenerate", answers, "answers") as progress:
        active, turn = list(rewrites), 0
        while active := [rewrite for rewrite in active if rewrite.advance()]:
            active = _rewrite_turn(active, f"turn {turn}", folder, options, report, submit, progress)
            finished += [rewrite for rewrite in active if not any(m["role"] == "assistant" for m in rewrite.todo)]
            turn += 1
    kept = {id(rewrite) for rewrite in finished}
    lines = [json.dumps(rewrite.row(), ensure_ascii=False) + "\n" for rewrite in rewrites if id(rewrite) in kept]
    report.written = len(lines)
    if not LocalFilesystem(out.parent).put_if_absent(out.name, "".join(lines).encode()):
        raise _exists(out)
    report.seconds = time.monotonic() - began
    if report.dropped:
        note("dropped: " + ", ".join(f"{count} {reason}" for reason, count in sorted(report.dropped.items())))
    return report


def _require_possible(options: RegenerateOptions, out: Path) -> None:
    if options.temperature < 0 or options.max_new_tokens < 1 or options.batch_size < 1 or options.workers < 1:
        raise ConfigError(
            "temperature must be at least 0; max new tokens, batch size and workers at least 1", kind="option-invalid"
        )
    if out.exists():
        raise _exists(out)


def _exists(out: Path) -> ConflictError:
    return ConflictError(f"{out} exists already", kind="output-exists", hint=f"rm {out}, or name another file with -o")


def _read(options: RegenerateOptions, report: RegenerateReport) -> list[_Rewrite]:
    rewrites: list[_Rewrite] = []
    first: dict[str, str] = {}
    for item in read_conversations(options.inputs):
        if options.max_samples is not None and len(rewrites) >= options.max_samples:
            break
        report.read += 1
        if not isinstance(item, Conversation):
            report.dropped[item.reason] += 1
            first.setdefault(item.reason, f"{item.place}: {item.detail}")
        elif not item.has_answer:
            report.dropped["no-answer"] += 1
            first.setdefault("no-answer", f"{item.place}: there is no assistant message")
        else:
            rewrites.append(_Rewrite([], list(item.messages), item.tools))
    if not rewrites:
        reasons = [f"{name}: {plural(report.dropped[name], 'row')}, first {where}" for name, where in first.items()]
        what = f"no conversation with an answer in {', '.join(options.inputs)}; nothing was written"
        raise ConfigError("\n".join([what, *reasons]), kind="nothing-usable")
    return rewrites


def _rewrite_turn(
    active: list[_Rewrite],
    turn: str,
    folder: TargetFolder,
    options: RegenerateOptions,
    report: RegenerateReport,
    submit: Callable[[Sequence[tuple[list[list[int]], str]]], Iterator[list[Answer]]],
    progress: Progress,
) -> list[_Rewrite]:
    """Answer the next assistant turn of every active conversation; those that survive, in order."""
    prompts = [_prompt(folder, rewrite) for rewrite in active]
    limit = getattr(folder.config, "max_position_embeddings", None) or 1 << 30
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) + options.max_new_tokens <= limit]
    if len(fitting) < len(prompts):
        report.dropped["prompt-too-long"] += len(prompts) - len(fitting)
    batches = [
        [fitting[k] for k in batch] for batch in prompt_batches([len(prompts[i]) for i in fitting], options.batch_size)
    ]
    tasks = [([prompts[i] for i in batch], f"{turn} batch {number}") for number, batch in enumerate(batches)]
    survivors: set[int] = set()
    for batch, answers in zip(batches, submit(tasks), strict=True):
        for i, answer in zip(batch, answers, strict=True):
            if _accept(active[i], answer, folder, report):
                survivors.add(i)
        progress.advance(len(batch), tokens=report.tokens, looping=report.dropped["looping"])
    return [rewrite for i, rewrite in enumerate(active) if i in survivors]


def _accept(rewrite: _Rewrite, answer: Answer, folder: TargetFolder, report: RegenerateReport) -> bool:
    report.answers += 1
    report.tokens += len(answer.token_ids)
    report.cut += not answer.ended
    text = folder.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    if repeated_share(answer.token_ids) > LOOP_SHARE:
        report.dropped["looping"] += 1
        return False
    if not text.strip():
        report.dropped["empty"] += 1
        return False
    rewrite.answer(text)
    return True


def _prompt(folder: TargetFolder, rewrite: _Rewrite) -> list[int]:
    ids: list[int] = folder.tokenizer.apply_chat_template(
        rewrite.done, tools=rewrite.tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


@contextmanager
def _generator(
    options: RegenerateOptions, folder: TargetFolder
) -> Iterator[Callable[[Sequence[tuple[list[list[int]], str]]], Iterator[list[Answer]]]]:
    """A function that answers batches in order, here or in worker processes."""
    sampling = Sampling(options.temperature, options.max_new_tokens, options.seed)
    if options.workers == 1:
        target = load_target(folder, options.dtype, options.device)
        yield lambda tasks: (generate_batch(target, prompts, sampling, name) for prompts, name in tasks)
        return
    threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
    setup = (folder.name, folder.revision, options.dtype, options.device, sampling, threads)
    # spawn, not fork: a forked child would inherit torch's thread pools in an undefined state.
    with ProcessPoolExecutor(options.workers, get_context("spawn"), _start_worker, setup) as pool:
        yield lambda tasks: pool.map(_answer, *zip(*tasks, strict=True)) if tasks else iter(())


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
