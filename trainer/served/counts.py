"""What a server counts of its drafts, and where each engine says it: Prometheus text (vLLM) or an answer (SGLang)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VLLM_PREFIX = "vllm:spec_decode_num_"

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')

# The spellings of successive SGLang releases, newest first.
_SGLANG_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_SGLANG_DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_SGLANG_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


@dataclass(frozen=True)
class DraftCounts:
    """Counts of greedy or sampled drafts. ``accepted_at[i]``: drafts whose first i+1 tokens were all accepted; empty
    where the server does not say."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return self._with(other, 1)

    def __sub__(self, other: "DraftCounts") -> "DraftCounts":
        return self._with(other, -1)

    def _with(self, other: "DraftCounts", sign: int) -> "DraftCounts":
        longest = max(len(self.accepted_at), len(other.accepted_at))
        mine, theirs = (list(one.accepted_at) + [0] * (longest - len(one.accepted_at)) for one in (self, other))
        return DraftCounts(
            self.drafts + sign * other.drafts,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def accepted_length(self) -> float | None:
        """Tokens per draft, the target's own token included; None when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def per_position(self) -> list[float]:
        """Joint acceptance by depth: share of drafts whose first i+1 tokens were all accepted."""
        return [count / self.drafts for count in self.accepted_at] if self.drafts else []

    @property
    def draft_len(self) -> int | None:
        """Tokens drafted at a time."""
        if self.accepted_at:
            return len(self.accepted_at)
        return round(self.drafted / self.drafts) if self.drafts and self.drafted else None


def vllm_counts(text: str) -> DraftCounts | None:
    """The counters of vLLM's ``/metrics``, all engines and models of the server added; None where it does not draft.

    Read under their own names and with the ``_total`` that Prometheus clients append; no name is read twice.
    """
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None or not sample["name"].startswith(VLLM_PREFIX):
            continue
        name = sample["name"].removeprefix(VLLM_PREFIX).removesuffix("_total")
        if name == "accepted_tokens_per_pos":
            where = _POSITION.search(sample["labels"] or "")
            if where:
                place = int(where[1])
                positions[place] = positions.get(place, 0.0) + float(sample["value"])
        else:
            sums[name] = sums.get(name, 0.0) + float(sample["value"])
    if "drafts" not in sums:
        return None
    depths = range(max(positions, default=-1) + 1)
    return DraftCounts(
        drafts=int(sums["drafts"]),
        drafted=int(sums.get("draft_tokens", 0)),
        accepted=int(sums.get("accepted_tokens", 0)),
        accepted_at=tuple(int(positions.get(depth, 0)) for depth in depths),
    )


def sglang_counts(meta_info: Mapping[str, Any]) -> DraftCounts | None:
    """The counts in the ``meta_info`` of one SGLang answer; None where the server did not draft.

    A histogram there says how many verifications accepted exactly n drafted tokens. Where the number of accepted tokens
    is missing it follows from the answer's length: one token of the prefill, one of each verification, and those.
    SGLang's own ``spec_accept_length`` counts the prefill's token too, so it is not read.
    """
    drafts = int(meta_info.get("spec_verify_ct") or 0)
    if not drafts:
        return None
    histogram = _first(meta_info, _SGLANG_HISTOGRAM)
    exactly = [int(count) for count in histogram] if isinstance(histogram, Sequence) else []
    accepted = _first(meta_info, _SGLANG_ACCEPTED)
    if accepted is None and exactly:
        accepted = sum(depth * count for depth, count in enumerate(exactly))
    if accepted is None:
        accepted = max(0, int(meta_info.get("completion_tokens") or 0) - 1 - drafts)
    drafted = int(_first(meta_info, _SGLANG_DRAFTED) or 0)
    # The histogram ends at the deepest acceptance; the draft may be longer.
    depths = max(len(exactly) - 1, drafted // drafts) if exactly else 0
    return DraftCounts(drafts, drafted, int(accepted), tuple(sum(exactly[depth + 1 :]) for depth in range(depths)))


def _first(meta_info: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta_info[name] for name in names if meta_info.get(name) is not None), None)
