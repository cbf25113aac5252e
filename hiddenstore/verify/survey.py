"""One record after the other: what can be said of each, and what is kept to be judged together.

What is algebra is decided here row by row (zeros, repeats, ids, masks); what needs a reference is compared with the
layer profile; what is statistics is kept for ``hiddenstore.verify.meaning``.

Shapes: L aux layers, T tokens of a sample, R final rows, D target width.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.head import HeadBundle
from hiddenstore.records import Record, Sample, TopK, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.verify.pairing import TokenPairing
from hiddenstore.verify.probes import (
    Held,
    Prediction,
    mask_fault,
    non_finite_rows,
    predict,
    predict_from_top_tokens,
    repeated_rows,
    unit_scale_error,
    zero_rows,
)
from hiddenstore.verify.profile import NORMED, LayerProfile, match_layer
from hiddenstore.verify.report import Finding
from schemas.capture import FINAL
from schemas.layers import field_name

# Rows past the final norm have unit scale up to the codec's error; any other row misses it by more.
NORMED_MEDIAN = 0.01
NORMED_NINE_TENTHS = 0.03
# Distances of ``match_layer``: what codec and batch shape cost, and what no neighbouring layer reaches.
SAME_LAYER = {"bf16": 3e-4, "lossless": 3e-4, "q8": 3e-4}
SAME_LAYER_OTHERWISE = 4e-3
NEARER = 0.25
FOREIGN = 0.1


@dataclass(frozen=True, eq=False)
class _Field:
    """states bf16 [R, D] at token positions ``places`` [R]; ``declared`` is the profile's name of the layer."""

    name: str
    declared: int | str
    states: Tensor
    places: np.ndarray


class Survey:
    """Findings of one kind in one field of one segment become one, which names the samples."""

    def __init__(self, store: Store, head: HeadBundle | None, profile: LayerProfile | None) -> None:
        self.store, self.head, self.profile = store, head, profile
        self.capture = store.capture
        self.samples = 0
        self.profiled: set[str] = set()
        self.pairing = {name: TokenPairing(self.capture.target.hidden_size) for name in self.capture.state_fields}
        self.predictions: dict[str, Prediction] = {}
        self._openings: dict[str, np.ndarray] = {}
        self._found: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)

    def calibrate(self, records: Sequence[Record]) -> None:
        """A few samples to learn the channels' scales and the shared first tokens from, before the first ``add``."""
        self._openings = {record.sample.id: record.sample.input_ids for record in records}
        fields = [self._fields(record) for record in records]
        for index, pairing in enumerate(self.pairing.values()):
            pairing.calibrate([held[index].states for held in fields])

    def add(self, record: Record) -> None:
        """One sample as it is stored."""
        sample, lead = record.sample, self._lead(record.sample)
        self.samples += 1
        self._tokens(record)
        for field in self._fields(record):
            self._rows(record, field)
            self._layer(record, field)
            # Behind equal first tokens the rows of all samples are equal: they tell no sample from another.
            self.pairing[field.name].add(sample.id, _own(sample, field.states, field.places, lead))
        if self.capture.holds_final_hidden:
            self._final(record, lead)
        elif record.topk is not None:
            self._top_tokens(record, record.topk, lead)

    def say(self, kind: str, sample: str, field: str, detail: str) -> None:
        """Note one sample under a kind, in a field of its segment."""
        segment = self.store.locate(sample)[0].segment
        self._found[kind, segment, field].setdefault(sample, detail)

    def said(self, *kinds: str, field: str) -> set[str]:
        """Samples noted under any of these kinds in a field."""
        chosen = [samples for (kind, _, f), samples in self._found.items() if kind in kinds and f == field]
        return {name for samples in chosen for name in samples}

    def findings(self) -> list[Finding]:
        """Everything noted, with the first detail as the example."""
        result = []
        for (kind, segment, field), samples in self._found.items():
            first, detail = next(iter(samples.items()))
            count = f"{len(samples)} sample{'s' if len(samples) > 1 else ''}, {first[:12]}…: {detail}"
            result.append(Finding(kind, f"{segment}/{field}" if field else segment, tuple(samples), count))
        return sorted(result, key=lambda finding: (finding.kind, finding.path))

    def _lead(self, sample: Sample) -> int:
        """How many first tokens the sample shares with another of the few known ones."""
        lead = 0
        for name, tokens in self._openings.items():
            if name != sample.id:
                count = min(len(tokens), sample.tokens)
                differs = np.flatnonzero(tokens[:count] != sample.input_ids[:count])
                lead = max(lead, int(differs[0]) if len(differs) else count)
        return lead

    def _fields(self, record: Record) -> list[_Field]:
        capture, every = self.capture, np.arange(record.sample.tokens)
        held = [_Field(field_name(k), k, record.aux[i], every) for i, k in enumerate(capture.aux_layers)]
        if capture.holds_final_hidden:
            declared = NORMED if capture.final_norm == "post_norm" else capture.target.num_layers - 1
            held.append(_Field(FINAL, declared, record.final, record.final_rows))
        return held

    @property
    def _vocab(self) -> int:
        return max(self.capture.target.vocab_size, self.head.vocab_size if self.head else 0)

    def _tokens(self, record: Record) -> None:
        sample = record.sample
        vocab = self._vocab
        outside = np.flatnonzero((sample.input_ids < 0) | (sample.input_ids >= vocab))
        if len(outside):
            token = int(sample.input_ids[outside[0]])
            self.say("token-range", sample.id, "input_ids", f"token {token} is outside the target's {vocab:,}")
        fault = mask_fault(sample.loss_mask, sample.spans)
        expected = final_row_positions(sample.loss_mask, self.capture.final)
        if fault is not None:
            self.say(fault[0], sample.id, "loss_mask", fault[1])
        elif sample_id(sample.input_ids, sample.loss_mask) != sample.id:
            self.say("sample-id", sample.id, "", "its id is not the digest of its tokens and mask")
        elif not np.array_equal(expected, record.final_rows):
            detail = f"final hiddens at {len(record.final_rows)} positions, not at the {len(expected)} of its mask"
            self.say("final-rows", sample.id, "final_rows", detail)

    def _rows(self, record: Record, field: _Field) -> None:
        sample, name, states, places = record.sample, field.name, field.states, field.places

        def note(kind: str, bad: np.ndarray, what: str) -> None:
            if len(bad):
                detail = f"{len(bad)} of {len(places)} rows {what}, the first at token {places[bad[0]]}"
                self.say(kind, sample.id, name, detail)

        note("non-finite", non_finite_rows(states), "hold NaN or infinity")
        if name == field_name(-1):
            # Embeddings depend on the token alone and may be zero for unused ones.
            return
        stats = self.store.locate(sample.id)[0].stats.get(name)
        zeros = zero_rows(states, stats.rms_median if stats else 0.0)
        note("zeros", zeros, "are all zero")
        repeats = np.setdiff1d(repeated_rows(states, sample.input_ids[places]), zeros)
        note("repeated-rows", repeats, "repeat the row of another token")

    def _layer(self, record: Record, field: _Field) -> None:
        """Compare the rows of the profile's own sample, or of the tokens it begins with, with every layer."""
        name, declared, profile = field.name, field.declared, self.profile
        if profile is None or declared not in profile.names:
            return
        sample = record.sample
        own = sample.id == profile.sample_id
        known = len(profile.positions) if own else profile.common_prefix(sample.input_ids)
        _, rows, spots = np.intersect1d(field.places, np.asarray(profile.positions[:known]), return_indices=True)
        if not len(rows):
            return
        self.profiled.add(name)
        distances = match_layer(profile, field.states[rows.tolist()], spots)
        codecs = self.capture.codecs
        floor = SAME_LAYER.get(codecs.final if name == FINAL else codecs.aux, SAME_LAYER_OTHERWISE)
        best, mine = min(distances, key=distances.__getitem__), distances[declared]
        if mine <= floor:
            return
        if best != declared and distances[best] < NEARER * mine and distances[best] < FOREIGN:
            self._misplaced(sample.id, name, declared, best, (mine, distances[best]))
        elif mine > FOREIGN:
            kind = "other-sample" if own else "states-mismatch"
            self.say(kind, sample.id, name, f"its rows are not the target's for these tokens (distance {mine:.2g})")

    def _misplaced(
        self, sample: str, name: str, declared: int | str, best: int | str, distance: tuple[float, float]
    ) -> None:
        titles = {NORMED: "the final hidden after the norm", self.capture.target.num_layers - 1: "the last layer"}
        found = titles.get(best, f"layer {best}")
        apart = f"(distance {distance[1]:.1e}, to the declared {distance[0]:.1e})"
        if {declared, best} == {NORMED, self.capture.target.num_layers - 1}:
            self.say("norm-state", sample, name, f"declared {self.capture.final_norm}, but it is {found} {apart}")
        else:
            self.say("layer-shift", sample, name, f"it holds {found} {apart}")

    def _top_tokens(self, record: Record, topk: TopK, lead: int) -> None:
        """Top tokens know the next token as the hidden does; norm state and layer cannot be told from them."""
        sample = record.sample
        vocab = self._vocab
        fault = _top_token_fault(topk, vocab)
        if fault is not None:
            self.say(fault[0], sample.id, FINAL, fault[1])
            return
        own = record.final_rows >= lead
        held = topk.at(torch.from_numpy(own))
        found = predict_from_top_tokens(held, record.final_rows[own], sample.input_ids, vocab)
        if found is not None:
            self.predictions[sample.id] = found

    def _final(self, record: Record, lead: int) -> None:
        if self.head is None or len(record.final_rows) < 2:
            return
        sample = record.sample
        error = unit_scale_error(self.head, record.final)
        error = error[np.isfinite(error)]
        if len(error):
            median, most = float(np.median(error)), float(np.quantile(error, 0.9))
            passed = median < NORMED_MEDIAN and most < NORMED_NINE_TENTHS
            if passed != (self.capture.final_norm == "post_norm"):
                what = "have" if passed else "do not have"
                detail = f"declared {self.capture.final_norm}, but rows {what} the unit scale of the final norm"
                self.say("norm-state", sample.id, FINAL, f"{detail} (median error {median:.1e})")
        held = _own(sample, record.final, record.final_rows, lead)
        found = predict(self.head, held, self.capture.final_norm)
        if found is not None:
            self.predictions[sample.id] = found


def _top_token_fault(topk: TopK, vocab: int) -> tuple[str, str] | None:
    """What no distribution's top tokens can be: a kind and what is wrong, or None."""
    bad = ~(torch.isfinite(topk.lse) & (topk.log_probs.exp().sum(-1) < 1.01))
    if bad.any():
        return "non-finite", f"{int(bad.sum())} of {topk.rows} rows hold no log-probabilities"
    if bool(((topk.ids < 0) | (topk.ids >= vocab)).any()):
        return "token-range", f"top tokens are outside the target's {vocab:,}"
    if bool((topk.log_probs.diff(dim=-1) > 0).any()):
        return "top-tokens", "top tokens are not in order of their probability"
    return None


def _own(sample: Sample, states: Tensor, places: np.ndarray, lead: int) -> Held:
    """The rows from token ``lead`` on."""
    own = places >= lead
    return Held(states[torch.from_numpy(own)], places[own], sample.input_ids)
