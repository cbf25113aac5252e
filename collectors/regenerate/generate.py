"""A batch of prompts is continued by the target in this process: one forward a token, finished rows dropped.

The noise of a batch follows from its name, so that a batch that was cut short gives the same answers again.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from collectors.regenerate.attention import newest_token
from collectors.regenerate.rewrite import Beat
from collectors.targets.load import LoadedTarget
from hiddenstore.targets.attention import any_length
from hiddenstore.targets.families import on_top_of

# Compacting copies the cache once; below this share of running rows it pays for itself within a few steps.
COMPACT_BELOW = 0.75
PREFILL_TOKENS = {"cpu": 512, "cuda": 16384}
"""Tokens of prompts that are read at once, padding included. Neighbours of similar length pad little; a CPU multiplies
128 rows as fast as 2,048, a GPU needs many (benchmarks/results/answers-2026-11-25.md)."""

OPENING_WORTH = 128
"""Tokens fewer to read from which on what all prompts begin with is read once, apart: one more forward takes about as
long as 30 of them."""

OPENING_PRODUCTS = 5000
"""Products of a prompt that is read alone to one token's forward: behind an opening its attention has a mask of all of
them, in memory too, where torch's kernel else leaves out half."""

OPENING_COPIES = 8
"""Columns that attend for each token that is read: their keys and values are copied for one layer at a time."""

SUMS_BYTES = 24 << 20
"""Of sums over the vocabulary at once: larger blocks than 32 MiB are not kept (``hiddenstore.threads``), and cost a
fault for every page."""

NUCLEUS_TOKENS = 1024
"""As many most often hold the share; a vocabulary in full order takes a CPU fourteen times longer."""

COLDEST = 1e-30
"""Temperature below which the most probable token is drawn anyway, and float32 has no room for a logit over it."""

Task = tuple[list[list[int]], str]
"""Prompts of a batch, and its name."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; at most ``max_new_tokens`` per answer.

    ``top_p`` below 1 draws from the fewest tokens that hold this share of the probability. ``ends`` end an answer
    beside the target's own end tokens.
    """

    temperature: float
    max_new_tokens: int
    seed: int = 0
    top_p: float = 1.0
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Generated token ids without the end token; ``ended`` is False when ``max_new_tokens`` cut it."""

    token_ids: list[int]
    ended: bool


def prompt_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices by prompt length in batches of ``batch_size``; the longest first, which keeps workers even."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def prefill_parts(lengths: Sequence[int], most: int, opening: int = 0) -> list[tuple[slice, int]]:
    """Neighbouring prompts of at most ``most`` tokens with their padding, one at least, and the longest of each; behind
    a long ``opening``, of which every row takes a copy, fewer."""
    parts: list[tuple[slice, int]] = []
    for row, length in enumerate(lengths):
        rows, longest = parts[-1] if parts else (slice(0, 0), 0)
        longest = max(longest, length)
        count = row + 1 - rows.start
        if parts and count * longest <= most and count * (opening + longest) <= OPENING_COPIES * most:
            parts[-1] = (slice(rows.start, row + 1), longest)
        else:
            parts.append((slice(row, row + 1), length))
    return parts


def common_opening(prompts: Sequence[Sequence[int]], most: int = PREFILL_TOKENS["cpu"]) -> int:
    """Tokens that all prompts begin with, a system prompt most often, and that leave one of each; 0 where reading them
    once is not worth a forward, and the masks of prompts that are read alone, of ``most`` tokens at once."""
    alike = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    alike = min(alike, *(len(prompt) - 1 for prompt in prompts))
    masks = sum((n - alike) * n for n in map(len, prompts) if 2 * n > most) // OPENING_PRODUCTS
    return alike if alike * (len(prompts) - 1) >= OPENING_WORTH + masks else 0


def generate_batch(
    target: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    name: str,
    beat: Beat = lambda drawn, read: None,
) -> Iterator[tuple[int, Answer]]:
    """Continue every prompt until an end token or ``max_new_tokens``: its index and answer as each ends.

    ``name`` tells batches of one run apart; equal prompts, sampling and name give equal answers. ``beat`` is
    called at every step.
    """
    return _Batch(target, prompts, sampling, name).run(beat)


class _Batch:
    def __init__(self, target: LoadedTarget, prompts: Sequence[Sequence[int]], sampling: Sampling, name: str) -> None:
        self._target, self._sampling = target, sampling
        self._ends = {*target.eos_token_ids(), *sampling.ends}
        digest = hashlib.blake2b(f"{sampling.seed}/{name}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        self._generator = torch.Generator(device=target.device).manual_seed(seed)
        self._answers: list[list[int]] = [[] for _ in prompts]
        self._ended = [False] * len(prompts)
        # Which answer each row of the running batch belongs to.
        self._rows = list(range(len(prompts)))
        self._running = list(range(len(prompts)))
        longest = max(len(prompt) for prompt in prompts)
        self._cache = roomy_cache(target.config, longest + sampling.max_new_tokens)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest + sampling.max_new_tokens, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = True
        self._most = PREFILL_TOKENS.get(target.device.type, PREFILL_TOKENS["cuda"])
        self._opening = 0 if _turns_by_length(target.config) else common_opening(prompts, self._most)
        self._prompt_ids = ids.to(target.device)
        # Prompts of one length need no mask, and attention without one is faster.
        self._mask = None if bool(mask.all()) else mask.to(target.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)

    @torch.inference_mode()
    def run(self, beat: Beat) -> Iterator[tuple[int, Answer]]:
        width = self._prompt_ids.shape[1]
        tokens = self._draw(torch.cat(list(self._prefill(beat))))
        with newest_token(self._target.parts.backbone, self._bytes_to_read()) as attention:
            for step in range(1, self._sampling.max_new_tokens + 1):
                before = [self._rows[row] for row in self._running]
                self._record(tokens)
                yield from ((index, Answer(self._answers[index], True)) for index in before if self._ended[index])
                beat(len(self._running), 0)
                if not self._running or step == self._sampling.max_new_tokens:
                    break
                tokens = self._compact(tokens)
                mask = None if self._mask is None else self._mask[:, : width + step]
                positions = (self._lengths + step - 1)[:, None]
                with attention():
                    logits = self._logits(tokens[:, None], mask, positions, self._cache)
                tokens = self._draw(logits)
        yield from ((self._rows[row], Answer(self._answers[self._rows[row]], False)) for row in self._running)

    def _bytes_to_read(self) -> int:
        """Keys and values that the steps read if no answer ends before its limit, for an attention that reads them
        where they are: those of rooms on a CPU, in bf16; 0 of others."""
        layers = self._cache.layers
        if self._target.device.type != "cpu" or not all(isinstance(layer, _RoomyLayer) for layer in layers):
            return 0
        if any(layer.keys.dtype != torch.bfloat16 for layer in layers):
            return 0
        steps = self._sampling.max_new_tokens
        columns = int(self._lengths.sum()) * steps + len(self._lengths) * steps * steps // 2
        return columns * sum(room[0, :, 0].nbytes for layer in layers for room in (layer.keys, layer.values))

    def _prefill(self, beat: Beat) -> Iterator[Tensor]:
        """Read the prompts, some rows at a time, and give the logits [rows, V] of the first token of each."""
        total, width = self._prompt_ids.shape
        layers = [layer for layer in self._cache.layers if isinstance(layer, _RoomyLayer)]
        # Only rooms of our own can be filled by rows.
        is_by_rows = len(layers) == len(self._cache.layers)
        opening = self._read_opening(layers) if is_by_rows else 0
        lengths = self._lengths - opening
        parts = prefill_parts(lengths.tolist(), self._most, opening) if is_by_rows else [(slice(0, total), width)]
        for rows, longest in parts:
            start = width - longest
            for layer in layers:
                layer.part = (rows, start, total)
            places = torch.arange(longest, device=self._target.device) - (longest - lengths[rows, None])
            mask = None if bool((places >= 0).all()) else places >= 0
            if mask is not None and opening:
                mask = torch.cat([mask.new_ones(len(mask), opening), mask], dim=1)
            yield self._logits(self._prompt_ids[rows, start:], mask, opening + places.clamp_min(0), self._cache)
            beat(0, int(self._lengths[rows].sum()))
        for layer in layers:
            layer.hand_out(width, width - self._lengths)

    def _read_opening(self, layers: "Sequence[_RoomyLayer]") -> int:
        """Read what all prompts begin with, once; its tokens."""
        if self._opening:
            cache = DynamicCache(config=self._target.config)
            longest = int(self._lengths.argmax())
            ids = self._prompt_ids[longest : longest + 1, : self._opening]
            self._hidden(ids, None, torch.arange(self._opening, device=ids.device)[None], cache)
            for layer, read in zip(layers, cache.layers, strict=True):
                layer.begin_with(read.keys, read.values)
        return self._opening

    def _logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Run the target over ids [B, T] on top of ``cache``; the logits [B, V] behind the last of them."""
        logits = self._target.lm_head(self._hidden(ids, mask, positions, cache)[:, -1]).float()
        spec = self._target.head.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.final_logit_softcap is not None:
            logits = torch.tanh(logits / spec.final_logit_softcap) * spec.final_logit_softcap
        return logits

    def _hidden(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        """The final hidden [B, T, D]."""
        backbone = self._target.parts.backbone
        with any_length():
            output = backbone(input_ids=ids, attention_mask=mask, position_ids=positions, **on_top_of(cache, backbone))
        states: Tensor = output.last_hidden_state
        return states

    def _draw(self, logits: Tensor) -> Tensor:
        if self._sampling.temperature < COLDEST:
            return logits.argmax(-1)
        chances = torch.softmax(logits / self._sampling.temperature, dim=-1)
        if self._sampling.top_p < 1:
            chances = nucleus(chances, self._sampling.top_p)
        # One uniform number a row; noise for every token of the vocabulary costs more than the target's own head.
        uniform = torch.rand(len(chances), 1, dtype=torch.float64, device=chances.device, generator=self._generator)
        rows = max(1, SUMS_BYTES // (8 * chances.shape[-1]))
        drawn = []
        for part, share in zip(chances.split(rows), uniform.split(rows), strict=True):
            sums = part.cumsum(-1, dtype=torch.float64)
            drawn.append(torch.searchsorted(sums, share * sums[:, -1:], right=True)[:, 0])
        return torch.cat(drawn).clamp_max(chances.shape[-1] - 1)

    def _record(self, tokens: Tensor) -> None:
        """Append the drawn tokens of the rows that run; some end."""
        drawn = tokens.tolist()
        for row in self._running:
            if drawn[row] in self._ends:
                self._ended[self._rows[row]] = True
            else:
                self._answers[self._rows[row]].append(drawn[row])
        self._running = [row for row in self._running if not self._ended[self._rows[row]]]

    def _compact(self, tokens: Tensor) -> Tensor:
        """Drop finished rows from the batch once enough have finished."""
        if len(self._running) > COMPACT_BELOW * len(self._rows):
            return tokens
        keep = torch.tensor(self._running, device=tokens.device)
        self._cache.batch_select_indices(keep)
        self._lengths = self._lengths[keep]
        self._mask = None if self._mask is None else self._mask[keep]
        self._rows = [self._rows[row] for row in self._running]
        self._running = list(range(len(self._rows)))
        return tokens[keep]


def _turns_by_length(config: Any) -> bool:
    """Whether rotations depend on how long a text is: an opening that is read alone would turn by other angles."""
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return "dynamic" in rope or "longrope" in rope


def nucleus(chances: Tensor, top_p: float) -> Tensor:
    """Chances [..., V], 0 outside the smallest set of tokens that holds ``top_p`` of them; not renormalised."""
    vocab = chances.shape[-1]
    few = min(NUCLEUS_TOKENS, vocab)
    ordered, order = chances.topk(few, dim=-1)
    sums = ordered.cumsum(-1)
    while few < vocab and bool((sums[..., -1] < top_p).any()):
        few = min(4 * few, vocab)
        ordered, order = chances.topk(few, dim=-1)
        sums = ordered.cumsum(-1)
    # A token stays while those before it hold less than the share; the first one always does.
    outside = sums - ordered >= top_p
    return torch.zeros_like(chances).scatter_(-1, order, ordered.masked_fill(outside, 0.0))


class _RoomyLayer(DynamicLayer):
    """Keys and values [B, G, capacity, E], of which the written rows are handed out: transformers' own layer joins the
    past and the newest row anew at every step, which on a CPU takes as long as the products.

    ``part`` is which rows are written, from which column, and of how many; until ``hand_out`` each part, behind the
    opening of all rows, is all there is for the model, and what lies before its columns is never looked at."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._rooms: tuple[Tensor, ...] = ()
        self._opening: tuple[Tensor, ...] = ()
        self.part: tuple[slice, int, int] | None = None

    def begin_with(self, keys: Tensor, values: Tensor) -> None:
        """What every row begins with, [1, G, T, E]."""
        self.keys, self.values = self._opening = (keys, values)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        states, past = (key_states, value_states), self.get_seq_length()
        rows, start, total = self.part or (slice(None), past, len(key_states))
        if not self._rooms:
            self.dtype, self.device = key_states.dtype, key_states.device
            # Padding is masked, and zero times what memory happened to hold need not be zero.
            self._rooms = tuple(s.new_zeros(total, *s.shape[1:-2], self._capacity, s.shape[-1]) for s in states)
        end = start + key_states.shape[-2]
        for room, new in zip(self._rooms, states, strict=True):
            room[rows, ..., start:end, :] = new
        if self.part is None:
            self.hand_out(end)
            return self.keys, self.values
        if not self._opening:
            return states
        keys, values = (
            torch.cat([opening.expand(len(new), *opening.shape[1:]), new], dim=-2)
            for opening, new in zip(self._opening, states, strict=True)
        )
        return keys, values

    def batch_select_indices(self, indices: Tensor) -> None:
        end = self.get_seq_length()
        self._rooms = tuple(room[indices] for room in self._rooms)
        self.hand_out(end)

    def hand_out(self, end: int, starts: Tensor | None = None) -> None:
        """From here on the first ``end`` columns of every row are the past; an opening goes to the columns from
        ``starts`` int64 [B] on."""
        for room, opening in zip(self._rooms, self._opening, strict=False):
            if starts is not None:
                columns = starts[:, None] + torch.arange(opening.shape[-2], device=room.device)
                rows = torch.arange(len(room), device=room.device)[:, None]
                room[rows, ..., columns, :] = opening[0].movedim(-2, 0)
        self.part, self.is_initialized, self._opening = None, True, ()
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)


def roomy_cache(config: Any, capacity: int) -> DynamicCache:
    """A cache for at most ``capacity`` tokens; layers that slide or keep a state stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [_RoomyLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
