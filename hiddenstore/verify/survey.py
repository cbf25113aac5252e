"""One record after the other: what can be said of each, and what is collected to be judged together.

What is algebra is decided here row by row (zeros, repeats, ids, masks); what needs a reference is compared with the
layer profile; what is statistics is collected for ``hiddenstore.verify.meaning``.

Shapes: L aux layers, T tokens of a sample, R final rows, D target width.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.base import MaskedCodec
from hiddenstore.console.text import plural
from hiddenstore.images import is_text
from hiddenstore.records import Record, Sample, TopK, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.verify.probes import (
    Prediction,
    Rows,
    TokenPairing,
    mask_of_turns_fault,
    non_finite_rows,
    predict,
    predict_from_top_tokens,
    repeated_rows,
    unit_scale_error,
    zero_rows,
)
from hiddenstore.verify.profile import NORMED, LayerProfile, first_true, match_layer
from hiddenstore.verify.report import Finding
from schemas.capture import FINAL
from schemas.layers import field_name

# Rows past the final norm have unit scale up to the codec's error; any other row misses it by more.
NORMED_MEDIAN = 0.01
NORMED_NINE_TENTHS = 0.03
# Distances of ``match_layer``: what no neighbouring layer reaches; what codec and batch shape cost, the codec says.
NEARER = 0.25
FOREIGN = 0.1


@dataclass(frozen=True, eq=False)
class _Field:
    """states bf16 [R, D] at token positions [R]; ``declared`` is the profile's name of the layer."""

    name: str
    declared: int | str
    states: Tensor
    positions: np.ndarray


class Survey:
    """What samples show, one after the other. Notes of one kind in one field of one segment become one finding."""

    def __init__(self, store: Store, head: HeadBundle | None, profile: LayerProfile | None) -> None:
        self.store, self.head, self.profile = store, head, profile
        self.capture = store.capture
        self.samples = 0
        self.profiled: set[str] = set()
        self.pairing = {name: TokenPairing(self.capture.target.hidden_size) for name in self.capture.state_fields}
        self.predictions: dict[str, Prediction] = {}
        self._vocab = max(self.capture.target.vocab_size, head.vocab_size if head else 0)
        self._openings: dict[str, np.ndarray] = {}
        self._notes: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)

    def calibrate(self, records: Sequence[Record]) -> None:
        """A few samples to learn the channels' scales and the shared first tokens from, before the first ``add``."""
        self._openings = {record.sample.id: record.sample.input_ids for record in records}
        fields = [self._fields(record) for record in records]
        for index, pairing in enumerate(self.pairing.values()):
            pairing.calibrate([sample_fields[index].states for sample_fields in fields])

    def add(self, record: Record) -> None:
        """One sample as it is stored."""
        sample, lead = record.sample, self._lead(record.sample)
        self.samples += 1
        self._check_tokens(record)
        for field in self._fields(record):
            self._check_rows(sample, field)
            self._compare_with_profile(sample, field)
            # Behind equal first tokens the rows of all samples are equal: they tell no sample from another.
            self.pairing[field.name].add(sample.id, _rows_from(sample, field.states, field.positions, lead))
        if self.capture.holds_final_hidden:
            self._check_final(record, lead)
        elif record.topk is not None:
            self._check_top_tokens(record, record.topk, lead)

    def note(self, kind: str, sample: str, field: str, detail: str) -> None:
        """Note one sample under a kind, in a field of its segment."""
        segment = self.store.locate(sample)[0].segment
        self._notes[kind, segment, field].setdefault(sample, detail)

    def noted(self, *kinds: str, field: str) -> set[str]:
        """Samples noted under any of these kinds in a field."""
        return {
            sample
            for (kind, _, f), samples in self._notes.items()
            if kind in kinds and f == field
            for sample in samples
        }

    def findings(self) -> list[Finding]:
        """Everything noted, with the first detail as the example."""
        findings = []
        for (kind, segment, field), samples in self._notes.items():
            first, detail = next(iter(samples.items()))
            text = f"{plural(len(samples), 'sample')}, {first[:12]}…: {detail}"
            findings.append(Finding(kind, f"{segment}/{field}" if field else segment, tuple(samples), text))
        return sorted(findings, key=lambda finding: (finding.kind, finding.path))

    def _lead(self, sample: Sample) -> int:
        """How many first tokens the sample shares with another of those it was calibrated with."""
        lead = 0
        for name, tokens in self._openings.items():
            if name != sample.id:
                count = min(len(tokens), sample.tokens)
                lead = max(lead, first_true(tokens[:count] != sample.input_ids[:count]))
        return lead

    def _fields(self, record: Record) -> list[_Field]:
        capture, every = self.capture, np.arange(record.sample.tokens)
        fields = [_Field(field_name(k), k, record.aux[i], every) for i, k in enumerate(capture.aux_layers)]
        if capture.holds_final_hidden:
            declared = NORMED if capture.final_norm == "post_norm" else capture.target.num_layers - 1
            fields.append(_Field(FINAL, declared, record.final, record.final_rows))
        return fields

    def _check_tokens(self, record: Record) -> None:
        sample = record.sample
        # No token of an image is taught, not even where everything is.
        is_everything = sample.loss_mask[is_text(sample.tokens, sample.images)].all()
        fault = None if is_everything else mask_of_turns_fault(sample.loss_mask, sample.spans)
        expected = final_row_positions(sample.loss_mask, self.capture.final)
        if fault is not None:
            self.note(fault[0], sample.id, "loss_mask", fault[1])
        elif sample_id(sample.input_ids, sample.loss_mask, sample.images) != sample.id:
            self.note("sample-id", sample.id, "", "its id is not the digest of its tokens and mask")
        elif not np.array_equal(expected, record.final_rows):
            detail = f"final hiddens at {len(record.final_rows)} positions, not at the {len(expected)} of its mask"
            self.note("final-rows", sample.id, "final_rows", detail)

    def _check_rows(self, sample: Sample, field: _Field) -> None:
        states, positions = field.states, field.positions

        def note(kind: str, bad: np.ndarray, what: str) -> None:
            if len(bad):
                detail = f"{len(bad)} of {len(positions)} rows {what}, the first at token {positions[bad[0]]}"
                self.note(kind, sample.id, field.name, detail)

        note("non-finite", non_finite_rows(states), "hold NaN or infinity")
        if field.name == field_name(-1):
            # Embeddings depend on the token alone and may be zero for unused ones.
            return
        stats = self.store.locate(sample.id)[0].stats.get(field.name)
        zeros = zero_rows(states, stats.rms_median if stats else 0.0)
        note("zeros", zeros, "are all zero")
        repeats = np.setdiff1d(repeated_rows(states, sample.input_ids[positions]), zeros)
        note("repeated-rows", repeats, "repeat the row of another token")

    def _compare_with_profile(self, sample: Sample, field: _Field) -> None:
        """Compare the rows of the profile's own sample, or of the tokens it begins with, with every layer."""
        name, declared, profile = field.name, field.declared, self.profile
        if profile is None or declared not in profile.names:
            return
        # The profile of a sample with images is of its text alone.
        is_profiled = sample.id == profile.sample_id and not sample.images
        shared = len(profile.positions) if is_profiled else profile.common_prefix(sample.input_ids)
        common = np.intersect1d(field.positions, np.asarray(profile.positions[:shared]), return_indices=True)
        positions, rows, indices = common
        if isinstance(codec := get_codec(self.capture.codecs.aux), MaskedCodec) and name != FINAL:
            # Rows that no loss is taken at are too coarse to tell a layer from its neighbour.
            is_fine = codec.fine_rows(sample.loss_mask, [sample.tokens])[positions]
            rows, indices = rows[is_fine], indices[is_fine]
        if not len(rows):
            return
        self.profiled.add(name)
        distances = match_layer(profile, field.states[rows.tolist()], indices)
        codecs = self.capture.codecs
        # What is rebuilt has the error of the layer it comes from.
        stored = name == FINAL and not self.capture.rebuilds_final
        floor = get_codec(codecs.final if stored else codecs.aux).same_layer
        best, distance = min(distances, key=distances.__getitem__), distances[declared]
        if distance <= floor:
            return
        if best != declared and distances[best] < NEARER * distance and distances[best] < FOREIGN:
            self._note_other_layer(sample.id, field, best, distances)
        elif distance > FOREIGN:
            kind = "other-sample" if is_profiled else "states-mismatch"
            detail = f"its rows are not the target's for these tokens (distance {distance:.2g})"
            self.note(kind, sample.id, name, detail)

    def _note_other_layer(self, sample: str, field: _Field, best: int | str, distances: dict[int | str, float]) -> None:
        last = self.capture.target.num_layers - 1
        title = {NORMED: "the final hidden after the norm", last: "the last layer"}.get(best, f"layer {best}")
        apart = f"(distance {distances[best]:.1e}, to the declared {distances[field.declared]:.1e})"
        if {field.declared, best} == {NORMED, last}:
            detail = f"declared {self.capture.final_norm}, but it is {title} {apart}"
            self.note("norm-state", sample, field.name, detail)
        else:
            self.note("layer-shift", sample, field.name, f"it holds {title} {apart}")

    def _check_top_tokens(self, record: Record, topk: TopK, lead: int) -> None:
        """Top tokens know the next token as the hidden does; norm state and layer cannot be told from them."""
        fault = _top_token_fault(topk)
        if fault is not None:
            self.note("top-tokens", record.sample.id, FINAL, fault)
            return
        after = record.final_rows >= lead
        top, positions = topk.at(torch.from_numpy(after)), record.final_rows[after]
        self._predicted(record.sample, predict_from_top_tokens(top, positions, record.sample.input_ids, self._vocab))

    def _check_final(self, record: Record, lead: int) -> None:
        if self.head is None or len(record.final_rows) < 2:
            return
        sample, norm = record.sample, self.capture.final_norm
        error = unit_scale_error(self.head, record.final)
        error = error[np.isfinite(error)]
        if len(error):
            median, most = float(np.median(error)), float(np.quantile(error, 0.9))
            has_unit_scale = median < NORMED_MEDIAN and most < NORMED_NINE_TENTHS
            if has_unit_scale != (norm == "post_norm"):
                what = "have" if has_unit_scale else "do not have"
                detail = f"declared {norm}, but rows {what} the unit scale of the final norm"
                self.note("norm-state", sample.id, FINAL, f"{detail} (median error {median:.1e})")
        rows = _rows_from(sample, record.final, record.final_rows, lead)
        self._predicted(sample, predict(self.head, rows, norm))

    def _predicted(self, sample: Sample, prediction: Prediction | None) -> None:
        if prediction is not None:
            self.predictions[sample.id] = prediction


def _top_token_fault(topk: TopK) -> str | None:
    """What no distribution's top tokens can be."""
    above_one = topk.log_probs.exp().sum(-1) >= 1.01
    if above_one.any():
        return f"{int(above_one.sum())} of {topk.rows} rows hold no log-probabilities"
    if bool((topk.log_probs.diff(dim=-1) > 0).any()):
        return "top tokens are not in order of their probability"
    return None


def _rows_from(sample: Sample, states: Tensor, positions: np.ndarray, lead: int) -> Rows:
    """The rows of text from token ``lead`` on: those of images share their token with other pictures."""
    after = (positions >= lead) & is_text(sample.tokens, sample.images)[positions]
    return Rows(states[torch.from_numpy(after)], positions[after], sample.input_ids)
