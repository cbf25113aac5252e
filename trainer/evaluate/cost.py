"""What a draft costs on this machine, and which length pays: a check of more tokens is dearer than a plain forward.

Shapes: K drafted tokens per draft.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import quantiles
from typing import Any

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.documents import seal, unseal
from hiddenstore.fs.publish import replace_file
from hiddenstore.fs.seam import storage_errors
from schemas.base import FORMAT_VERSION, Document, Format
from trainer.drafters.base import DrafterInUse, most_probable
from trainer.evaluate.target import LiveTarget

FILE = "draft-length.json"
CONTEXT, STEPS, ROUNDS = 128, 3, 8


@dataclass(frozen=True)
class Costs:
    """Seconds of a plain forward, and by K those of drafting K tokens and checking them."""

    token_s: float
    draft_s: Mapping[int, float]

    def speedup(self, row: Mapping[str, Any]) -> float:
        """Tokens/s over plain decoding's at the accepted length of a row of the sweep."""
        return float(row["accepted_length"]) * self.token_s / self.draft_s[row["draft_len"]]


class DraftLength(Document):
    """The length that `eval --costs` chose for the drafter of ``step``, and what it gave there."""

    format: Format = FORMAT_VERSION
    step: int
    draft_len: int
    speedup: float
    dtype: str


def measure_costs(target: LiveTarget, drafter: DrafterInUse, text: Sequence[int], lengths: Sequence[int]) -> Costs:
    """Lower quartiles over a few steps behind the first tokens of ``text``; lengths take turns, so that a busy minute
    is everybody's. A longer draft is never taken to cost less than a shorter one. Raises ConfigError: ``input-empty``:
    no length, or a text of one token; the drafter cannot draft so far."""
    context = list(text[:CONTEXT])
    if not lengths or len(context) < 2:
        raise ConfigError(
            "no chain to measure the cost of", kind=Kind.INPUT_EMPTY, hint="--draft-len 1,2,3,5 and a longer text"
        )
    drafter.require_length(max(lengths))
    seconds: dict[int, list[float]] = {length: [] for length in (0, *lengths)}
    # What runs first runs slowly, so the first round is not counted.
    for number in range(1 + ROUNDS):
        for length, steps in seconds.items():
            taken = _steps(target, drafter, context, length)
            steps += taken if number else []
    # What other processes do only ever adds.
    cheapest = accumulate((quantiles(seconds[length])[0] for length in sorted(seconds)), max)
    token_s, *of_drafts = cheapest
    return Costs(token_s, dict(zip(sorted(lengths), of_drafts, strict=True)))


def _steps(target: LiveTarget, drafter: DrafterInUse, context: Sequence[int], length: int) -> list[float]:
    """Seconds of a few decoding steps with drafts of ``length``, 0 for none; all proposals but one are taken back."""
    live, cache = drafter.live(), target.new_cache()
    live.reset()
    prefill = target.forward(context[:-1], cache, last_only=True)
    states, newest, seconds = prefill.states(context[1:]), context[-1], []
    if length:
        # The first draft reads all of the context.
        live.propose(states, length, most_probable)
        forward = target.forward([newest], cache)
        newest = int(forward.logits[-1].argmax())
        states = forward.states([newest])
    for _ in range(STEPS):
        began = time.perf_counter()
        proposals = live.propose(states, length, most_probable) if length else []
        forward = target.forward([newest, *proposals], cache)
        chosen = forward.logits.argmax(-1).tolist()
        seconds.append(time.perf_counter() - began)
        states, newest = forward.states(chosen[:1]), chosen[0]
        target.drop_last(cache, len(proposals))
    return seconds


def paying(sweep: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row with the highest speed; the shorter draft of equals."""
    return max((row for row in sweep if "speedup" in row), key=lambda row: (row["speedup"], -row["draft_len"]))


def keep(run: Path, step: int, best: Mapping[str, Any], dtype: str) -> None:
    """Write ``best_draft_len`` and its ``speedup`` beside the run, where `export` finds them. Raises StorageError."""
    chosen = DraftLength(step=step, draft_len=best["best_draft_len"], speedup=best["speedup"], dtype=dtype)
    replace_file(run / FILE, seal(chosen))


def forget(run: Path) -> None:
    """Remove what an earlier ``keep`` left. Raises StorageError."""
    with storage_errors(run / FILE):
        (run / FILE).unlink(missing_ok=True)


def kept(run: Path, step: int, dtype: str) -> int | None:
    """The length chosen for the drafter of ``step`` beside a target in ``dtype``, None where nobody did: which one pays
    in another is not known. Raises CorruptionError, StorageError."""
    path = run / FILE
    if not path.is_file():
        return None
    with storage_errors(path):
        data = path.read_bytes()
    chosen = unseal(data, DraftLength, str(path))
    return chosen.draft_len if (chosen.step, chosen.dtype) == (step, dtype) else None
