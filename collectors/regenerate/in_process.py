"""The target in this process, or in a few of them, answers: conversations in groups, each turn in batches.

Which conversations share a batch follows from the input and the answers alone, and the noise of a batch from its name,
so that a run that was killed gives the same answers as one that was not.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context

import torch
from torch import Tensor

from collectors.regenerate.options import RegenerateOptions
from collectors.regenerate.rewrite import AnswerAll, Recorded, Reply, Rewrite, Take
from collectors.targets.folder import TargetFolder, open_target
from collectors.targets.load import LoadedTarget, load_target
from collectors.tokenize.template import limited_rendering, read_template
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.records import LOOP_SHARE, repeated_share

# Compacting copies the cache once; below this share of running rows it pays for itself within a few steps.
COMPACT_BELOW = 0.75


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; at most ``max_new_tokens`` per answer.

    ``top_p`` below 1 draws from the fewest tokens that hold this share of the probability.
    """

    temperature: float
    max_new_tokens: int
    seed: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Answer:
    """Generated token ids without the end token; ``ended`` is False when ``max_new_tokens`` cut it."""

    token_ids: list[int]
    ended: bool


def prompt_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices by prompt length in batches of ``batch_size``; the longest first, which keeps workers even."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def generate_batch(
    target: LoadedTarget, prompts: Sequence[Sequence[int]], sampling: Sampling, name: str
) -> list[Answer]:
    """Continue every prompt until an end token or ``max_new_tokens``.

    ``name`` tells batches of one run apart; equal prompts, sampling and name give equal answers.
    """
    return _Batch(target, prompts, sampling, name).run()


class _Batch:
    def __init__(self, target: LoadedTarget, prompts: Sequence[Sequence[int]], sampling: Sampling, name: str) -> None:
        from transformers import DynamicCache

        self._target, self._sampling = target, sampling
        self._ends = set(target.eos_token_ids())
        digest = hashlib.blake2b(f"{sampling.seed}/{name}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        self._generator = torch.Generator(device=target.device).manual_seed(seed)
        self._cache = DynamicCache(config=target.config)
        self._answers: list[list[int]] = [[] for _ in prompts]
        self._ended = [False] * len(prompts)
        # Which answer each row of the running batch belongs to.
        self._rows = list(range(len(prompts)))
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest + sampling.max_new_tokens, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = True
        self._prompt_ids = ids.to(target.device)
        # Prompts of one length need no mask, and attention without one is faster.
        self._mask = None if bool(mask.all()) else mask.to(target.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)

    @torch.inference_mode()
    def run(self) -> list[Answer]:
        width = self._prompt_ids.shape[1]
        positions = torch.arange(width, device=self._target.device) - (width - self._lengths[:, None])
        tokens = self._step(self._prompt_ids, positions.clamp_min(0), width)
        for step in range(1, self._sampling.max_new_tokens):
            running = self._record(tokens)
            if not running:
                break
            tokens = self._compact(tokens, running)
            tokens = self._step(tokens[:, None], (self._lengths + step - 1)[:, None], width + step)
        else:
            self._record(tokens)
        return [Answer(ids, ended) for ids, ended in zip(self._answers, self._ended, strict=True)]

    def _step(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        """Run the target and draw the next token of every row: int64 [B]."""
        output = self._target.parts.backbone(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, :width],
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        logits = self._target.lm_head(output.last_hidden_state[:, -1]).float()
        spec = self._target.head.spec
        logits = logits * spec.logit_scale
        if spec.final_logit_softcap is not None:
            logits = torch.tanh(logits / spec.final_logit_softcap) * spec.final_logit_softcap
        return self._draw(logits)

    def _draw(self, logits: Tensor) -> Tensor:
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        # argmax(p / Exp(1)) is a draw from p (the exponential race): one pass, no cumulative sum.
        race = torch.softmax(logits / self._sampling.temperature, dim=-1)
        if self._sampling.top_p < 1:
            race = nucleus(race, self._sampling.top_p)
        return race.div_(torch.empty_like(race).exponential_(generator=self._generator)).argmax(-1)

    def _record(self, tokens: Tensor) -> list[int]:
        """Append the drawn tokens; the rows that still run."""
        running = []
        for row, token in enumerate(tokens.tolist()):
            answer = self._rows[row]
            if self._ended[answer]:
                continue
            if token in self._ends:
                self._ended[answer] = True
            else:
                self._answers[answer].append(token)
                running.append(row)
        return running

    def _compact(self, tokens: Tensor, running: list[int]) -> Tensor:
        """Drop finished rows from the batch once enough have finished."""
        if len(running) > COMPACT_BELOW * len(self._rows):
            return tokens
        keep = torch.tensor(running, device=tokens.device)
        self._cache.batch_select_indices(keep)
        self._lengths = self._lengths[keep]
        self._mask = None if self._mask is None else self._mask[keep]
        self._rows = [self._rows[row] for row in running]
        return tokens[keep]


def nucleus(chances: Tensor, top_p: float) -> Tensor:
    """Chances [..., V], 0 outside the smallest set of tokens that holds ``top_p`` of them; not renormalised."""
    ordered, order = chances.sort(dim=-1, descending=True)
    # A token stays while those before it hold less than the share; the first one always does.
    outside = ordered.cumsum(-1) - ordered >= top_p
    return chances.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)


GROUP_BATCHES = 32

Batch = list[tuple[Rewrite, list[int]]]
Tasks = Sequence[tuple[list[list[int]], str]]


def open_in_process(options: RegenerateOptions) -> tuple[str, AnswerAll]:
    """The target's label, and what answers with it; raises as ``open_target``, and ``template-missing``."""
    template = None if options.template is None else read_template(options.template)
    folder = open_target(str(options.target), options.revision, template)
    if not folder.tokenizer.chat_template:
        raise ConfigError(f"target {folder.label} has no chat template", kind=Kind.TEMPLATE_MISSING)
    sampling = Sampling(options.temperature, options.max_new_tokens, options.seed or 0, options.top_p)
    return folder.label, _InProcess(folder, sampling, options).answer_all


@dataclass(frozen=True)
class _InProcess:
    """``options.workers`` processes share the batches of ``options.batch_size`` prompts."""

    folder: TargetFolder
    sampling: Sampling
    options: RegenerateOptions

    def answer_all(
        self, rewrites: Iterator[Rewrite], recorded: Recorded, take: Take, check: Callable[[], None]
    ) -> None:
        with self._generator() as submit:
            for group in count():
                conversations = list(islice(rewrites, GROUP_BATCHES * self.options.batch_size))
                if not conversations:
                    return
                replies = {rewrite.number: recorded(rewrite) for rewrite in conversations}
                for turn in count():
                    conversations = [rewrite for rewrite in conversations if rewrite.advance()]
                    if not conversations:
                        break
                    batches = self._batches(conversations, take)
                    for rewrite in conversations:
                        if rewrite.turn == turn < len(replies[rewrite.number]):
                            take(rewrite, replies[rewrite.number][turn])
                    names = [f"turn {turn} batch {group * GROUP_BATCHES + number}" for number in range(len(batches))]
                    for rewrite, answer in _answers(dict(zip(names, batches, strict=True)), turn, submit, check):
                        take(rewrite, self._reply(answer))

    def _batches(self, conversations: list[Rewrite], take: Take) -> list[Batch]:
        """Conversations and the prompts of their next turn, in batches; those whose prompt is too long are dropped."""
        limit = getattr(self.folder.config, "max_position_embeddings", None) or 1 << 30
        fitting = []
        for rewrite in conversations:
            with limited_rendering(f"conversation {rewrite.number + 1}"):
                prompt: list[int] = self.folder.tokenizer.apply_chat_template(
                    rewrite.done, tools=rewrite.tools, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            if len(prompt) + self.sampling.max_new_tokens <= limit:
                fitting.append((rewrite, prompt))
            else:
                take(rewrite, Reply(drop="prompt-too-long", detail=f"{len(prompt):,} tokens of {limit:,}"))
        lengths = [len(prompt) for _, prompt in fitting]
        return [[fitting[i] for i in batch] for batch in prompt_batches(lengths, self.options.batch_size)]

    def _reply(self, answer: Answer) -> Reply:
        text = str(self.folder.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        is_looping = repeated_share(answer.token_ids) > LOOP_SHARE
        drop = "looping" if is_looping else None if text.strip() else "empty"
        return Reply(text=text, tokens=len(answer.token_ids), is_cut=not answer.ended, drop=drop)

    @contextmanager
    def _generator(self) -> Iterator[Callable[[Tasks], Iterator[list[Answer]]]]:
        """A function that answers batches in order, in this process or in workers."""
        folder, sampling, options = self.folder, self.sampling, self.options
        if options.workers == 1:
            target = load_target(folder, options.dtype, options.device)
            yield lambda tasks: (generate_batch(target, prompts, sampling, name) for prompts, name in tasks)
            return
        threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
        start = (folder.name, folder.revision, options.dtype, options.device, sampling, threads)
        # spawn, not fork: a forked child would inherit torch's thread pools in an undefined state.
        pool = ProcessPoolExecutor(options.workers, get_context("spawn"), _start_worker, start)
        try:
            yield lambda tasks: pool.map(_answer, *zip(*tasks, strict=True)) if tasks else iter(())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _answers(
    batches: dict[str, Batch], turn: int, submit: Callable[[Tasks], Iterator[list[Answer]]], check: Callable[[], None]
) -> Iterator[tuple[Rewrite, Answer]]:
    """Answers of the named batches. One that a kill cut in two runs again entire, so that its noise is the same."""
    unanswered = {name: batch for name, batch in batches.items() if any(rewrite.turn == turn for rewrite, _ in batch)}
    tasks = [([prompt for _, prompt in batch], name) for name, batch in unanswered.items()]
    for batch, answers in zip(unanswered.values(), submit(tasks), strict=True):
        for (rewrite, _), answer in zip(batch, answers, strict=True):
            if rewrite.turn == turn:
                yield rewrite, answer
        check()


_worker: tuple[LoadedTarget, Sampling] | None = None


def _start_worker(
    name: str, revision: str | None, dtype: str | None, device: str, sampling: Sampling, threads: int
) -> None:
    global _worker
    torch.set_num_threads(threads)
    _worker = (load_target(name, dtype, device, revision), sampling)


def _answer(prompts: list[list[int]], name: str) -> list[Answer]:
    assert _worker is not None
    target, sampling = _worker
    return generate_batch(target, prompts, sampling, name)
