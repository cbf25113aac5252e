"""Does a store mean what it says: are these the states of that target, at these layers, for these tokens?

Decided from the store alone. Statistics are compared with the same states under permuted tokens and with the other
samples of the store, so that every threshold comes from the data; a test without the power to tell says nothing.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from difflib import SequenceMatcher
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from hiddenstore.console.text import plural
from hiddenstore.data.order import Order
from hiddenstore.errors import ConfigError, HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, raise_refusal, twice
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE
from hiddenstore.targets.calibration import SLICE_PATH, read_slice
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import tokenizer_rules_sha256, tokenizer_sha256, weights_sha256
from hiddenstore.targets.rebuild import TOLERANCE
from hiddenstore.threads import Threads
from hiddenstore.verify.probes import LOGIT_ROWS, Matching, combined, unigram_nats
from hiddenstore.verify.profile import PROFILE_PATH, LayerProfile, read_profile
from hiddenstore.verify.report import Begin, Finding, Report
from hiddenstore.verify.survey import Survey
from schemas.capture import FINAL

SHARE_OF_CAPTURE = 0.2
ALWAYS_AFFORDABLE = 10**12
"""Operations that cost less than the start of the command: some two CPU seconds."""
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


def affordable_share(store: Store) -> float:
    """The share of the samples that is looked at unless another is named: as many as ``SHARE_OF_CAPTURE`` of the
    capture's arithmetic pays for, and what is ``ALWAYS_AFFORDABLE``. A function of shapes and lengths alone, so that
    the same samples are looked at on every machine."""
    target, samples = store.capture.target, max(1, len(store))
    tokens = sum(record.tokens for record in store.commits()) / samples
    capture = tokens * 24 * target.num_layers * target.hidden_size**2
    rows = min(tokens, LOGIT_ROWS)
    look = rows * target.vocab_size * (2 * target.hidden_size + SOFTMAX_COST) * HEAD_COST
    return min(1.0, max(ALWAYS_AFFORDABLE / samples, SHARE_OF_CAPTURE * capture) / max(1.0, look))


def check_meaning(store: Store, report: Report, share: float | None, begin: Begin) -> None:
    """Add to ``report`` what a share of the samples says about the store."""
    if not len(store):
        return
    share = affordable_share(store) if share is None else share
    if not can_rebuild(store, report):
        return
    report.sample_share = share
    head = load_head(store, report)
    tokenizer = load_tokenizer(store, report)
    profile = _profile(store, report)
    survey = Survey(store, head, profile)
    names = _samples_to_read(store, share, profile)
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
            report.notes.append(Finding("pairing-undecided", name, (), detail + _unlooked(report)))


def _judge_predictions(survey: Survey, report: Report) -> None:
    """The final hidden: does it predict the next token, and that of its own sample."""
    tests = {name: prediction.matching for name, prediction in survey.predictions.items()}
    if not tests:
        reason = "the store holds no final hidden" if survey.capture.final == "none" else "too few final rows"
        _undecided(report, f"{reason}: next tokens were not predicted")
        return
    nll, chance = _measure(survey, report)
    total, best = combined(list(tests.values())), min(nll[0], nll[2])
    against = f"{nll[1]:.2f} nats, their bare frequencies {chance:.2f}"
    if total.rows < ENOUGH_ROWS:
        _undecided(report, f"{total.rows} final rows were looked at, {ENOUGH_ROWS} are needed")
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
            _undecided(report, f"{detail}, or the text is odd: {plural(len(tests), 'sample')} cannot tell")
            return
        for sample in tests:
            survey.note("tokenizer", sample, "input_ids", detail)


def _undecided(report: Report, detail: str) -> None:
    report.notes.append(Finding("prediction-undecided", FINAL, (), detail + _unlooked(report)))


def _unlooked(report: Report) -> str:
    """What is added to a reason that more samples might remove."""
    if report.sample_share >= 1:
        return ""
    looked_at = f"{report.samples_checked:,} of {plural(report.samples, 'sample')} were looked at"
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
    from transformers import AutoTokenizer

    try:
        with store.fs.local_copy(layout.TARGET_DIR, without=".safetensors") as folder:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise_refusal(error, f"{store.path}/{layout.TARGET_DIR}")
        report.findings.append(Finding("tokenizer-unreadable", layout.TARGET_DIR, (), str(error)))
        return None
    target, file = store.capture.target, folder / _RULES_FILE
    digest, expected = tokenizer_sha256(tokenizer), target.tokenizer_sha256
    if digest == expected and target.tokenizer_rules_sha256 is not None and file.is_file():
        digest, expected = tokenizer_rules_sha256(file.read_bytes()), target.tokenizer_rules_sha256
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
