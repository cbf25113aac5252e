"""Does a store mean what it says: are these the states of that target, at these layers, for these tokens?

Decided from the store alone, one record after the other. What is algebra is decided row by row (zeros, repeats, ids,
masks), what needs a reference is compared with the layer profile. Statistics are compared with the same states under
permuted tokens and with the other samples of the store, so that every threshold comes from the data; a test without the
power to tell says nothing.

Shapes: L aux layers, T tokens of a sample, R final rows, D target width.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.base import MaskedCodec
from hiddenstore.console.text import plural
from hiddenstore.data.order import Order
from hiddenstore.errors import ConfigError, HiddenstoreError, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, twice
from hiddenstore.records import Record, Sample, TopK, final_row_positions, is_text, sample_id
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE
from hiddenstore.targets.calibration import SLICE_PATH, read_slice
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import tokenizer_rules_sha256, tokenizer_sha256, weights_sha256
from hiddenstore.targets.rebuild import TOLERANCE
from hiddenstore.threads import Threads
from hiddenstore.verify.probes import (
    LOGIT_ROWS,
    Matching,
    Prediction,
    Rows,
    TokenPairing,
    combined,
    mask_of_turns_fault,
    non_finite_rows,
    predict,
    predict_from_top_tokens,
    repeated_rows,
    unigram_nats,
    unit_scale_error,
    zero_rows,
)
from hiddenstore.verify.profile import NORMED, PROFILE_PATH, LayerProfile, first_true, match_layer, read_profile
from hiddenstore.verify.report import Begin, Finding, Report
from schemas.capture import FINAL
from schemas.layers import field_name

SHARE_OF_CAPTURE = 0.2
ALWAYS_AFFORDABLE = 10**12
"""Operations that cost less than the start of the command: some two CPU seconds."""
MOST_READ_BYTES, FEWEST_SAMPLES = 8 * 10**9, 100
"""Of a large target looking costs little beside the capture, but its store is terabytes. The tests over all samples
have their power from hundreds of rows, which these have."""
# On SmolLM2-135M a sample cost 0.29 CPU seconds to look at and 0.18 to capture: fp32 products of the head and a softmax
# over the vocabulary stand beside bf16 products of the blocks.
HEAD_COST = 8
SOFTMAX_COST = 100
AHEAD = 4
CALIBRATING = 8
RETOKENISED_SAMPLES = 16
RETOKENISED_TOKENS = 512
RETOKENISED_SHARE = 0.6
# All samples together: rows resemble their own tokens' by this much (a difference of cosines). Measured: 0.15 to 0.9
# in healthy stores, 0.035 at most where every sample held another's states (conversations share a rhythm).
ENOUGH_ROWS = 200
SAME_TOKEN = 0.06
CERTAIN = 0.1
CERTAIN_SIGMAS = 3.0
# One sample among healthy ones: the test must have the power to see the usual effect, and see next to none of it.
POWER_SIGMAS = 8.0
SICK_SIGMAS = 6.0
SICK_SHARE = 0.2

_ROW_KINDS = ("zeros", "repeated-rows", "non-finite", "states-mismatch")
_RULES_FILE = "tokenizer.json"
_TOKENIZER_FILES = (_RULES_FILE, "tokenizer.model", "vocab.json")
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
        common = np.intersect1d(
            field.positions, np.asarray(profile.positions[:shared], dtype=np.int64), return_indices=True
        )
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


def affordable_share(store: Store) -> float:
    """The share of the samples that is looked at unless another is named: as many as ``SHARE_OF_CAPTURE`` of the
    capture's arithmetic pays for, and what is ``ALWAYS_AFFORDABLE``, but no more than ``MOST_READ_BYTES`` hold or
    ``FEWEST_SAMPLES``. A function of shapes, lengths and sizes alone, so that the same samples are looked at on every
    machine."""
    target, samples = store.capture.target, max(1, len(store))
    tokens = store.totals["tokens"] / samples
    capture = tokens * 24 * target.num_layers * target.hidden_size**2
    rows = min(tokens, LOGIT_ROWS)
    look = rows * target.vocab_size * (2 * target.hidden_size + SOFTMAX_COST) * HEAD_COST
    read = max(FEWEST_SAMPLES / samples, MOST_READ_BYTES / max(1, store.totals["bytes_stored"]))
    return min(1.0, read, max(ALWAYS_AFFORDABLE / samples, SHARE_OF_CAPTURE * capture) / max(1.0, look))


def check_meaning(store: Store, report: Report, share: float | None, begin: Begin) -> None:
    """Add to ``report`` what a share of the samples says about the store."""
    if not len(store):
        report.sample_share = 1.0
        return
    share = affordable_share(store) if share is None else share
    if not can_rebuild(store, report):
        return
    head = load_head(store, report)
    tokenizer = load_tokenizer(store, report)
    profile = _profile(store, report)
    survey = Survey(store, head, profile)
    names = _samples_to_read(store, share, profile)
    report.sample_share = len(names) / len(store)
    advance = begin("verify meaning", len(names), "samples")
    survey.calibrate([item for item in _read(store, names[:CALIBRATING]) if isinstance(item, Record)])
    tokens: list[np.ndarray] = []
    for name, item in zip(names, _read(store, names), strict=True):
        advance(1)
        if isinstance(item, Record):
            survey.add(item)
            tokens = [*tokens, item.sample.input_ids][:RETOKENISED_SAMPLES]
        else:
            report.findings.append(Finding.of(item, store.locate(name)[0].segment, (name,)))
    report.samples_checked = survey.samples
    _retokenised(tokenizer, tokens, report)
    _judge_pairs(survey, report)
    _judge_predictions(survey, report)
    if store.capture.holds_topk:
        detail = "top tokens stand in place of the final hidden: its layer and norm state cannot be checked"
        report.notes.append(Finding("final-undecided", FINAL, (), detail))
    unprofiled = [name for name in store.capture.state_fields if name not in survey.profiled]
    if profile is not None and unprofiled:
        detail = f"the profile has no row of {', '.join(unprofiled)}: whether it is the right layer was not decided"
        report.notes.append(Finding("layers-undecided", PROFILE_PATH, (), detail))
    report.findings += survey.findings()


def _profile(store: Store, report: Report) -> LayerProfile | None:
    try:
        profile = twice(store.fs, lambda: read_profile(store.fs), PROFILE_PATH)
    except DAMAGE as error:
        report.findings.append(Finding.of(error, PROFILE_PATH))
        return None
    if profile is None:
        detail = f"no {PROFILE_PATH}: a layer one off can only be seen where it makes the samples disagree"
        report.notes.append(Finding("profile-absent", PROFILE_PATH, (), detail))
    elif len(profile.layers) != store.capture.target.num_layers + 1:
        detail = f"it has {len(profile.layers) - 1} layers, the target {store.capture.target.num_layers}"
        report.findings.append(Finding("profile-mismatch", PROFILE_PATH, (), detail))
        return None
    return profile


def _samples_to_read(store: Store, share: float, profile: LayerProfile | None) -> list[str]:
    """Ids to look at: the profile's sample first, then a fixed share in an order that follows from the ids."""
    ids = store.sample_ids
    order = Order(ids).permutation(0, 0)
    names = [ids[int(i)] for i in order[: max(1, int(np.ceil(len(ids) * share)))]]
    if profile is not None and profile.sample_id in store:
        names = [profile.sample_id, *(name for name in names if name != profile.sample_id)]
    return names


def _read(store: Store, names: list[str]) -> Iterator[Record | HiddenstoreError]:
    """Records in order, a few read ahead; what cannot be read comes as its error."""

    def read(name: str) -> Record | HiddenstoreError:
        record, _ = store.locate(name)
        try:
            return twice(store.fs, partial(store.read, name), *(f"{record.segment}/{f.path}" for f in record.files))
        except DAMAGE as error:
            return error

    with Threads(AHEAD) as pool:
        waiting = iter(names)
        running: list[Future[Record | HiddenstoreError]] = [pool.submit(read, name) for name in islice(waiting, AHEAD)]
        while running:
            yield running.pop(0).result()
            running += [pool.submit(read, name) for name in islice(waiting, 1)]


def _judge_pairs(survey: Survey, report: Report) -> None:
    """Per field: samples whose rows do not belong to their tokens, or all of them."""
    for name, pairing in survey.pairing.items():
        sick = survey.noted(*_ROW_KINDS, field=name)
        tests = {sample: test for sample, test in pairing.test().items() if sample not in sick}
        total = combined(list(tests.values()))
        report.measures[f"{name}_same_token"] = round(total.effect, 4)
        if total.effect >= SAME_TOKEN and total.rows >= ENOUGH_ROWS:
            _judge_each(survey, name, tests, "rows do not belong to their tokens")
        elif total.rows >= ENOUGH_ROWS and total.effect + CERTAIN_SIGMAS * total.spread < CERTAIN:
            detail = f"rows resemble their own tokens' hardly more than any ({total.effect:.3f} over all samples)"
            for sample in tests:
                survey.note("other-sample", sample, name, detail)
        else:
            detail = f"{name}: {total.rows} rows share a token with another sample, too few to tell whose they are"
            report.notes.append(Finding("pairing-undecided", name, (), detail + _unlooked(survey, report)))


def _judge_predictions(survey: Survey, report: Report) -> None:
    """The final hidden: does it predict the next token, and that of its own sample."""
    tests = {name: prediction.matching for name, prediction in survey.predictions.items()}
    if not tests:
        reason = "the store holds no final hidden" if survey.capture.final == "none" else "too few final rows"
        _undecided(survey, report, f"{reason}: next tokens were not predicted")
        return
    nll, chance = _measure(survey, report)
    total, best = combined(list(tests.values())), min(nll[0], nll[2])
    against = f"{nll[1]:.2f} nats, their bare frequencies {chance:.2f}"
    if total.rows < ENOUGH_ROWS:
        _undecided(survey, report, f"{total.rows} final rows were looked at, {ENOUGH_ROWS} are needed")
    elif survey.noted("norm-state", "layer-shift", *_ROW_KINDS, field=FINAL) >= set(tests):
        return
    elif best < nll[1] and best < chance:
        token = "own" if nll[0] < nll[2] else "next but one"
        detail = f"rows predict their {token} token ({best:.2f} nats) rather than the next ({nll[1]:.2f})"
        for sample in tests:
            survey.note("row-shift", sample, FINAL, detail)
    elif nll[1] < chance:
        _judge_each(survey, FINAL, tests, "rows do not predict its tokens")
    elif total.sigmas > POWER_SIGMAS:
        # The rows know their own next tokens from others': the text is foreign to the target, its tokens are not.
        detail = f"the target gives the next tokens {against}: it is weak on this text"
        report.notes.append(Finding("weak-target", FINAL, (), detail))
    elif 2 * len(survey.noted("other-sample", field=FINAL)) < len(tests):
        # The states stand at their own tokens, and still the text surprises the target more than token counts would.
        detail = (
            f"the target gives the next tokens {against}: another tokenizer cut this text, or the target is untrained"
        )
        if len(tests) < CALIBRATING:
            _undecided(survey, report, f"{detail}, or the text is odd: {plural(len(tests), 'sample')} cannot tell")
            return
        for sample in tests:
            survey.note("tokenizer", sample, "input_ids", detail)


def _undecided(survey: Survey, report: Report, detail: str) -> None:
    report.notes.append(Finding("prediction-undecided", FINAL, (), detail + _unlooked(survey, report)))


def _unlooked(survey: Survey, report: Report) -> str:
    """What is added to a reason that more samples might remove."""
    if report.sample_share >= 1:
        return ""
    looked_at = f"{survey.samples:,} of {plural(len(survey.store), 'sample')} were looked at"
    return f"; {looked_at}; verify --meaning --share 1 looks at all"


def _measure(survey: Survey, report: Report) -> tuple[list[float], float]:
    """Mean nats of the token at a row, the next one and the one after, and the entropy of the next tokens' own
    frequencies."""
    predictions = list(survey.predictions.values())
    weights = np.array([p.matching.rows for p in predictions], dtype=np.float64)
    weights /= weights.sum()
    nll = [float(weights @ np.array([p.nll[offset] for p in predictions])) for offset in range(3)]
    chance = unigram_nats(np.concatenate([p.next_tokens for p in predictions]))
    names = ("this_token_nats", "next_token_nats", "token_after_next_nats")
    report.measures |= {name: round(value, 4) for name, value in zip(names, nll, strict=True)}
    report.measures["unigram_nats"] = round(chance, 4)
    report.measures["next_token_top1"] = round(float(weights @ np.array([p.hits for p in predictions])), 4)
    report.measures["next_token_sigmas"] = round(combined([p.matching for p in predictions]).sigmas, 2)
    return nll, chance


def _judge_each(survey: Survey, name: str, tests: dict[str, Matching], what: str) -> None:
    sick = survey.noted(*_ROW_KINDS, field=name)
    tests = {sample: test for sample, test in tests.items() if sample not in sick}
    usual = float(np.median([test.effect for test in tests.values()])) if tests else 0.0
    for sample, test in tests.items():
        able = test.spread > 0 and usual / test.spread > POWER_SIGMAS
        if able and test.sigmas < SICK_SIGMAS and test.effect < SICK_SHARE * usual:
            detail = f"{what} ({test.sigmas:.1f} sigma, usual here {usual / test.spread:.1f})"
            survey.note("other-sample", sample, name, detail)


def _retokenised(tokenizer: object, samples: list[np.ndarray], report: Report) -> None:
    if tokenizer is None or not samples:
        return
    share = retokenised_share(tokenizer, samples)
    report.measures["retokenised_share"] = round(share, 4)
    if share < RETOKENISED_SHARE:
        detail = f"only {share:.0%} of the tokens come back when their text is tokenised again by target/"
        report.findings.append(Finding("tokenizer", "target/tokenizer", (), detail))


def load_head(store: Store, report: Report) -> HeadBundle | None:
    """The head bundle, checked against the fingerprint of the target; None (and a finding) when it cannot be used."""
    try:
        head = twice(store.fs, store.head, layout.HEAD_PATH)
    except DAMAGE as error:
        report.findings.append(Finding.of(error, layout.HEAD_PATH))
        return None
    digest = weights_sha256(head.embed_tokens, head.norm_weight, head.lm_head)
    expected = store.capture.target.weights_sha256
    if digest != expected:
        detail = f"embeddings, norm and LM head have sha256 {digest[:12]}…, the capture names {expected[:12]}…"
        report.findings.append(Finding("head-mismatch", layout.HEAD_PATH, (), detail))
    return head


def load_tokenizer(store: Store, report: Report) -> Any:
    """The tokenizer of ``target/``, checked against the fingerprint of the target; None when there is none."""
    if all(store.fs.size(f"{layout.TARGET_DIR}/{name}") is None for name in _TOKENIZER_FILES):
        detail = "target/ holds no tokenizer: whether the tokens are its own was not checked"
        report.notes.append(Finding("tokenizer-absent", layout.TARGET_DIR, (), detail))
        return None
    try:
        tokenizer = store.tokenizer
    except (ConfigError, NotFoundError) as error:
        report.findings.append(Finding("tokenizer-unreadable", layout.TARGET_DIR, (), error.message))
        return None
    target, path = store.capture.target, f"{layout.TARGET_DIR}/{_RULES_FILE}"
    digest, expected = tokenizer_sha256(tokenizer), target.tokenizer_sha256
    if digest == expected and target.tokenizer_rules_sha256 is not None and store.fs.size(path) is not None:
        digest, expected = tokenizer_rules_sha256(store.fs.read(path)), target.tokenizer_rules_sha256
    if digest != expected:
        detail = f"the tokenizer of target/ has sha256 {digest[:12]}…, the capture names {expected[:12]}…"
        report.findings.append(Finding("tokenizer", layout.TARGET_DIR, (), detail))
    return tokenizer


def retokenised_share(tokenizer: Any, samples: list[np.ndarray]) -> float:
    """Median share of a sample's tokens that come back when its text is tokenised again.

    Near 1 for text that this tokenizer cut; foreign ids spell another text, or spell it in other pieces.
    """
    shares = []
    for input_ids in samples:
        ids = input_ids[:RETOKENISED_TOKENS].tolist()
        again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
        shares.append(SequenceMatcher(None, ids, again, autojunk=False).ratio())
    return median(shares)


def can_rebuild(store: Store, report: Report) -> bool:
    """Add to ``report`` how far rebuilt states are from the captured ones; False where none can be rebuilt."""
    if not store.capture.states:
        return True
    path = f"{layout.TARGET_DIR}/{BLOCKS_FILE}"
    try:
        rebuilder = twice(store.fs, store.rebuilder, path)
    except (ConfigError, *DAMAGE) as error:
        report.findings.append(Finding.of(error, path))
        return False
    assert rebuilder is not None
    try:
        states = twice(store.fs, lambda: read_slice(store.fs, store.capture), SLICE_PATH)
        known = [] if states is None else [entry for entry in states.samples if entry.id in store]
        samples = [store.sample(entry.id) for entry in known]
    except DAMAGE as error:
        report.findings.append(Finding.of(error, SLICE_PATH))
        return True
    errors, count = ({}, 0) if states is None or len(known) < len(states.samples) else rebuilder.errors(states, samples)
    if not count:
        detail = "no captured states of whole samples are at hand: whether rebuilt ones equal them was not decided"
        report.notes.append(Finding("rebuilt-undecided", SLICE_PATH, (), detail))
    for name, distance in errors.items():
        report.measures[f"rebuilt_error_{name}"] = distance
        if not distance <= TOLERANCE:
            detail = f"{name} comes back {distance:.1%} off what was captured, at most {TOLERANCE:.0%} is allowed"
            report.findings.append(Finding("rebuilt-differs", path, (), detail))
    return True
