"""Batched generation with a KV cache: a lean loop over the transformers model, deterministic given a seed.

A batch is the atom: its noise comes from (seed, name of the batch) and its rows never meet another batch, so answers do
not depend on how many processes share the work.

Shapes: B rows still running, P padded prompt length, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectors.target import LoadedTarget

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
        self._generator = torch.Generator(device=target.device).manual_seed(_seed(sampling.seed, name))
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
        for made in range(1, self._sampling.max_new_tokens):
            running = self._record(tokens)
            if not running:
                break
            tokens = self._compact(tokens, running)
            tokens = self._step(tokens[:, None], (self._lengths + made - 1)[:, None], width + made)
        else:
            self._record(tokens)
        return [Answer(ids, ended) for ids, ended in zip(self._answers, self._ended, strict=True)]

    def _step(self, ids: Tensor, positions: Tensor, seen: int) -> Tensor:
        """Run the target and draw the next token of every row: int64 [B]."""
        output = self._target.parts.backbone(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, :seen],
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


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nucleus(chances: Tensor, top_p: float) -> Tensor:
    """Chances [..., V], 0 outside the smallest set of tokens that holds ``top_p`` of them; not renormalised."""
    ordered, order = chances.sort(dim=-1, descending=True)
    # A token stays while those before it hold less than the share; the first one always does.
    outside = ordered.cumsum(-1) - ordered >= top_p
    return chances.masked_fill(outside.gather(-1, order.argsort(-1)), 0.0)
