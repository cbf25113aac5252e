"""Does a store mean what it says: are these the states of that target, at these layers, for these tokens?

Decided from the store alone. Statistics are compared with the same states under permuted tokens and with the other
samples of the store, so that every threshold comes from the data; a test without the power to tell says nothing.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from hiddenstore.cli.terminal import plural
from hiddenstore.data.order import Order
from hiddenstore.errors import HiddenstoreError
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.verify.probes import Matching, combined, unigram_nats
from hiddenstore.verify.profile import PROFILE_PATH, LayerProfile, read_profile
from hiddenstore.verify.report import Advance, Finding, Report
from hiddenstore.verify.survey import Survey
from hiddenstore.verify.target import RETOKENISED_SHARE, load_head, load_tokenizer, retokenised_share
from schemas.capture import FINAL

AHEAD = 4
CALIBRATING = 8
RETOKENISED_SAMPLES = 16
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


def check_meaning(store: Store, report: Report, share: float, advance: Advance) -> None:
    """Add to ``report`` what a share of the samples says about the store. ``advance`` is told each sample read."""
    if not len(store):
        return
    head = load_head(store, report)
    tokenizer = load_tokenizer(store, report)
    survey = Survey(store, head, _profile(store, report))
    names = chosen(store, share)
    survey.calibrate([item for item in _read(store, names[:CALIBRATING]) if isinstance(item, Record)])
    kept: list[np.ndarray] = []
    for item in _read(store, names):
        advance(1)
        if isinstance(item, Record):
            survey.add(item)
            kept = [*kept, item.sample.input_ids][:RETOKENISED_SAMPLES]
        else:
            report.findings.append(Finding.of(item))
    report.samples_checked = survey.samples
    _retokenised(tokenizer, kept, report)
    _judge_pairs(survey, report)
    _judge_predictions(survey, report)
    if store.capture.holds_topk:
        detail = "top tokens stand in place of the final hidden: its layer and norm state cannot be checked"
        report.notes.append(Finding("final-undecided", FINAL, (), detail))
    unseen = [name for name in store.capture.state_fields if name not in survey.profiled]
    if survey.profile is not None and unseen:
        detail = f"the profile has no row of {', '.join(unseen)}: whether it is the right layer was not decided"
        report.notes.append(Finding("layers-undecided", PROFILE_PATH, (), detail))
    report.findings += survey.findings()


def chosen(store: Store, share: float) -> list[str]:
    """Ids to look at: the profile's sample first, then a fixed share in an order that follows from the ids."""
    ids = store.sample_ids
    order = Order(ids).permutation(0, 0)
    names = [ids[int(i)] for i in order[: max(1, int(np.ceil(len(ids) * share)))]]
    profile = _read_profile(store)
    if isinstance(profile, LayerProfile) and profile.sample_id in store:
        names = [profile.sample_id, *(name for name in names if name != profile.sample_id)]
    return names


def _read_profile(store: Store) -> LayerProfile | HiddenstoreError | None:
    try:
        return read_profile(store.fs)
    except HiddenstoreError as error:
        return error


def _profile(store: Store, report: Report) -> LayerProfile | None:
    found = _read_profile(store)
    if isinstance(found, HiddenstoreError):
        report.findings.append(Finding.of(found, PROFILE_PATH))
        return None
    if found is None:
        detail = f"no {PROFILE_PATH}: a layer one off can only be seen where it makes the samples disagree"
        report.notes.append(Finding("profile-absent", PROFILE_PATH, (), detail))
    elif len(found.layers) != store.capture.target.num_layers + 1:
        detail = f"it has {len(found.layers) - 1} layers, the target {store.capture.target.num_layers}"
        report.findings.append(Finding("profile-mismatch", PROFILE_PATH, (), detail))
        return None
    return found


def _read(store: Store, names: list[str]) -> Iterator[Record | HiddenstoreError]:
    """Records in order, a few read ahead; what cannot be read comes as its error."""

    def read(name: str) -> Record | HiddenstoreError:
        try:
            return store.read(name)
        except HiddenstoreError as error:
            return error

    with ThreadPoolExecutor(AHEAD) as pool:
        waiting = iter(names)
        running: list[Future[Record | HiddenstoreError]] = [pool.submit(read, name) for name in islice(waiting, AHEAD)]
        while running:
            yield running.pop(0).result()
            running += [pool.submit(read, name) for name in islice(waiting, 1)]


def _judge_pairs(survey: Survey, report: Report) -> None:
    """Per field: samples whose rows do not belong to their tokens, or all of them."""
    for name, pairing in survey.pairing.items():
        sick = survey.said(*_ROW_KINDS, field=name)
        tested = {sample: found for sample, found in pairing.test().items() if sample not in sick}
        whole = combined(list(tested.values()))
        report.measures[f"{name}_same_token"] = round(whole.effect, 4)
        if whole.effect >= SAME_TOKEN and whole.rows >= ENOUGH_ROWS:
            _judge_each(survey, name, tested, "rows do not belong to their tokens")
        elif whole.rows >= ENOUGH_ROWS and whole.effect + CERTAIN_SIGMAS * whole.spread < CERTAIN:
            detail = f"rows resemble their own tokens' hardly more than any ({whole.effect:.3f} over all samples)"
            for sample in tested:
                survey.say("other-sample", sample, name, detail)
        else:
            detail = f"{name}: {whole.rows} rows share a token with another sample, too few to tell whose they are"
            report.notes.append(Finding("pairing-undecided", name, (), detail))


def _judge_predictions(survey: Survey, report: Report) -> None:
    """The final hidden: does it predict the next token, and that of its own sample."""
    found = survey.predictions
    if not found:
        reason = "the store holds no final hidden" if survey.capture.final == "none" else "too few final rows"
        report.notes.append(Finding("prediction-undecided", FINAL, (), f"{reason}: next tokens were not predicted"))
        return
    nll, chance = _measure(survey, report)
    whole = combined([p.matching for p in found.values()])
    best = min(nll[0], nll[2])
    if whole.rows < ENOUGH_ROWS:
        detail = f"{whole.rows} final rows were looked at, {ENOUGH_ROWS} are needed"
        report.notes.append(Finding("prediction-undecided", FINAL, (), detail))
    elif survey.said("norm-state", "layer-shift", *_ROW_KINDS, field=FINAL) >= set(found):
        return
    elif best < nll[1] and best < chance:
        place = "own" if nll[0] < nll[2] else "next but one"
        detail = f"rows predict their {place} token ({best:.2f} nats) rather than the next ({nll[1]:.2f})"
        for sample in found:
            survey.say("row-shift", sample, FINAL, detail)
    elif nll[1] < chance:
        _judge_each(survey, FINAL, {name: p.matching for name, p in found.items()}, "rows do not predict its tokens")
    elif whole.sigmas > POWER_SIGMAS:
        # The rows know their own next tokens from others': the text is foreign to the target, its tokens are not.
        against = f"{nll[1]:.2f} nats, their bare frequencies {chance:.2f}"
        detail = f"the target gives the next tokens {against}: it is weak on this text"
        report.notes.append(Finding("weak-target", FINAL, (), detail))
    elif 2 * len(survey.said("other-sample", field=FINAL)) < len(found):
        # The states stand at their own tokens, and still the text surprises the target more than token counts would.
        detail = (
            f"the target gives the next tokens {nll[1]:.2f} nats, their bare frequencies {chance:.2f}: another "
            "tokenizer cut this text, or the target is untrained"
        )
        if len(found) < CALIBRATING:
            few = f"{detail}, or the text is odd: {plural(len(found), 'sample')} cannot tell"
            report.notes.append(Finding("prediction-undecided", FINAL, (), few))
            return
        for sample in found:
            survey.say("tokenizer", sample, "input_ids", detail)


def _measure(survey: Survey, report: Report) -> tuple[list[float], float]:
    """Mean nats of the tokens 0, 1 and 2 places on, and the entropy of the next tokens' own frequencies."""
    found = list(survey.predictions.values())
    weights = np.array([p.matching.rows for p in found], dtype=np.float64)
    weights /= weights.sum()
    nll = [float(weights @ np.array([p.nll[offset] for p in found])) for offset in range(3)]
    chance = unigram_nats(np.concatenate([p.next_tokens for p in found]))
    names = ("this_token_nats", "next_token_nats", "token_after_next_nats")
    report.measures |= {name: round(value, 4) for name, value in zip(names, nll, strict=True)}
    report.measures["unigram_nats"] = round(chance, 4)
    report.measures["next_token_top1"] = round(float(weights @ np.array([p.hits for p in found])), 4)
    report.measures["next_token_sigmas"] = round(combined([p.matching for p in found]).sigmas, 2)
    return nll, chance


def _judge_each(survey: Survey, name: str, tested: dict[str, Matching], what: str) -> None:
    sick = survey.said(*_ROW_KINDS, field=name)
    tested = {sample: found for sample, found in tested.items() if sample not in sick}
    usual = float(np.median([found.effect for found in tested.values()])) if tested else 0.0
    for sample, found in tested.items():
        effect, spread = found.effect, found.spread
        able = spread > 0 and usual / spread > POWER_SIGMAS
        if able and found.sigmas < SICK_SIGMAS and effect < SICK_SHARE * usual:
            detail = f"{what} ({found.sigmas:.1f} sigma, usual here {usual / spread:.1f})"
            survey.say("other-sample", sample, name, detail)


def _retokenised(tokenizer: object, samples: list[np.ndarray], report: Report) -> None:
    if tokenizer is None or not samples:
        return
    share = retokenised_share(tokenizer, samples)
    report.measures["retokenised_share"] = round(share, 4)
    if share < RETOKENISED_SHARE:
        detail = f"only {share:.0%} of the tokens come back when their text is tokenised again by target/"
        report.findings.append(Finding("tokenizer", "target/tokenizer", (), detail))
