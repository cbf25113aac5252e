"""A training run, or several beside each other, as one HTML page that needs nothing beside it.

Of a run: its log, its acceptance measured anew beside the floor, and text as it was drafted. Of several: what was
validated, what it cost, and the settings they do not share.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from hiddenstore import settings
from hiddenstore.console.text import count, percent, plural, seconds
from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from hiddenstore.index.table import SPLITS
from hiddenstore.inspect.samples import load_tokenizer, token_text
from hiddenstore.report import page
from hiddenstore.report.page import Bar, Html, Page, Section, Series, Verdict, join, table, tag
from hiddenstore.report.store import browser_tools
from hiddenstore.store import Store
from hiddenstore.targets.load import pick_device
from schemas.manifest import Split
from trainer.evaluate.acceptance import DraftShape, answers, drafts
from trainer.evaluate.simulate import Evaluation, NgramFloor, evaluate_packs, floor, split_packs
from trainer.settings import config_class, derived, derived_lr, load_config
from trainer.train.checkpoint import read_state
from trainer.train.log import Curves, read_curves, step_seconds
from trainer.train.run_folder import CONFIG, RunFacts, RunInfo, drafter_name, load_drafter, read_facts

_WAITING = 0.1
_SPIKES = 0.01
_KNOWN = 0.95
_SHOWN_TOKENS = 1_200
_MOST_SHOWN = 12


@dataclass(frozen=True, eq=False)
class Measured:
    """Acceptance over some samples of a split: the drafter, itself before training, and the n-gram floor."""

    split: Split
    trained: Evaluation
    untrained: Evaluation
    floor: NgramFloor
    step: int
    parameters: int


def measure(
    info: RunInfo, store: Store, samples: int, draft_len: int, advance: Callable[[int], None] | None = None
) -> Measured | None:
    """Walk ``samples`` of the validation split, of the training split where there is none, with drafts of
    ``draft_len``; None where nothing can be drafted. Raises ConfigError, CorruptionError: as `evaluate`."""
    device = pick_device("auto")
    head, norm = store.head(), store.capture.final_norm
    drafters = [
        load_drafter(info.checkpoint, device, head=head, final_norm=norm, untrained=fresh) for fresh in (False, True)
    ]
    shape = DraftShape(drafters[0].within(draft_len))
    split: Split = "validation" if (store.catalog.table.split == SPLITS.index("validation")).any() else "train"
    packs = _first(split_packs(store, split, drafters[0].needs, device), samples)
    trained, untrained = evaluate_packs(drafters, packs, [shape], device=device, on_pack=advance)
    if not trained.tally.drafts:
        return None
    parameters = sum(weight.numel() for weight in drafters[0].model.parameters())
    least = floor(store, trained.texts, shape.length, split)
    return Measured(split, trained, untrained, least, drafters[0].step, parameters)


def _first(packs: Iterator[PackedBatch], samples: int) -> Iterator[PackedBatch]:
    read = 0
    for pack in packs:
        yield pack
        read += len(pack.sample_ids)
        if read >= samples:
            return


def run_page(info: RunInfo, store: Store | None, measured: Measured | None, samples: int = 12) -> Page:
    """The page of a run. ``store``: what it was trained on, None where that is gone; ``samples``: texts shown as they
    were drafted, 0 shows none. Raises CorruptionError: ``run-corrupt``; a file of the run is damaged."""
    curves, run_facts, config = read_curves(info.run), read_facts(info.run), read_config(info.run)
    step = measured.step if measured is not None else info.spec.step
    tiles = [
        ("accepted length", _length(measured.trained.tally.accepted_length if measured else None)),
        ("n-gram floor", _length(measured.floor.accepted_length if measured else None)),
        ("untrained", _length(measured.untrained.tally.accepted_length if measured else None)),
        ("steps", count(step)),
        ("training took", seconds(curves.seconds) if curves.steps else "–"),
    ]
    sections = [_curves(curves, step), _acceptance(measured, info), _data(info, run_facts, store, measured, config)]
    sections += [_time(curves), _settings(store, config)]
    is_text = bool(samples) and measured is not None and store is not None
    if is_text:
        assert measured is not None
        assert store is not None
        sections.append(_drafted(measured, store, min(samples, _MOST_SHOWN)))
    about = f"{config['drafter']['name']} for {info.spec.target.name} · {info.run}"
    return Page(info.run.name or str(info.run), about, tiles, sections, page.TEXT_WARNING if is_text else "")


def _length(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def read_config(run: Path) -> dict[str, dict[str, Any]]:
    """``config.yaml`` by section, resolved as `settings` loads it."""
    return dict(settings.load(config_class(drafter_name(run)), run / CONFIG).model_dump(mode="json"))


def _line(name: str, rows: Sequence[dict[str, Any]], value: Callable[[Any], float], dots: bool = False) -> Series:
    return Series(name, [row["step"] for row in rows], [value(row) for row in rows], dots)


def _length_line(name: str, curves: Curves) -> Series:
    return _line(name, curves.validations, lambda one: _number(one["accepted_length"]), dots=True)


def _mean_loss(step: dict[str, Any]) -> float:
    # A depth that teaches nothing in a step has none, which is written as 0.
    losses = [loss for loss in step["losses"] if loss]
    return float(sum(losses) / max(1, len(losses)))


def by_depth(rows: Sequence[Mapping[str, Any]], key: str, name: str, dots: bool = False) -> list[Series]:
    """A line for each depth of a member that has one value a depth."""
    depths = max((len(row[key]) for row in rows), default=0)
    able = [[row for row in rows if len(row[key]) > depth] for depth in range(depths)]
    return [
        Series(f"{name} {depth + 1}", [row["step"] for row in some], [row[key][depth] for row in some], dots)
        for depth, some in enumerate(able)
    ]


def _curves(curves: Curves, step: int) -> Section:
    steps, validations = curves.taught, curves.validations
    loss = [_line("training", steps, _mean_loss)]
    if validations:
        loss.append(_line("validation", validations, lambda one: _number(one["loss"]), dots=True))
    norms, rates = (_line(name, steps, itemgetter(name)) for name in ("grad_norm", "lr"))
    accuracy = by_depth(validations, "acc", "depth", dots=True)
    body = page.beside(
        page.lines("Loss, mean over depths", loss, "step", "loss"),
        page.lines("Accepted length in validation", [_length_line("drafter", curves)], "step", "tokens"),
        page.lines("Accuracy in training, by depth", by_depth(steps, "acc", "depth"), "step", "share", zero=True),
        page.lines("Loss in training, by depth", by_depth(steps, "losses", "depth"), "step", "loss"),
        page.lines("Accuracy in validation, by depth", accuracy, "step", "share", zero=True),
        page.lines("Gradient norm before it is clipped", [norms], "step", "norm", log=True),
        page.lines("Learning rate", [rates], "step", "rate", zero=True),
    )
    overfit = curves.overfit(step)
    verdicts = [Verdict("look", overfit)] if overfit else []
    if not curves.steps:
        verdicts.append(Verdict("unknown", "the run has no log of its steps"))
    elif len(validations) < 2:
        text = f"{plural(len(validations), 'validation')}: too few to tell whether it overfits; train.validate_every"
        verdicts.append(Verdict("unknown", text))
    elif not overfit:
        verdicts.append(Verdict("good", f"no sign of overfitting in {plural(len(validations), 'validation')}"))
    if curves.skipped > _SPIKES * len(steps):
        verdicts.append(Verdict("look", f"{plural(curves.skipped, 'step')} skipped as spikes: try a lower optim.lr"))
    healthy = (
        "both losses fall and flatten near each other, accuracy falls with depth; a gradient norm of hundreds at "
        "the start is usual."
    )
    return Section("Loss and accuracy", body, healthy, tuple(verdicts), wide=True)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _acceptance(measured: Measured | None, info: RunInfo) -> Section:
    if measured is None:
        text = "its store is gone or has nothing to draft: acceptance was not measured"
        return Section("Acceptance", tag("p", text, class_="none"), verdicts=(Verdict("unknown", text),))
    trained, floor_length, order = measured.trained.tally, measured.floor.accepted_length, measured.floor.order
    positions = {
        "drafter": trained.per_position,
        "n-gram floor": list(measured.floor.per_position),
        "untrained": measured.untrained.tally.per_position,
    }
    lengths = {
        "drafter": trained.accepted_length,
        "n-gram table" + (f" of order {order}" if order else ""): floor_length,
        "untrained": measured.untrained.tally.accepted_length,
    }
    bars = [Bar(name, _number(value), _length(value), series) for series, (name, value) in enumerate(lengths.items())]
    lines = [Series(name, range(1, len(shares) + 1), shares, dots=True) for name, shares in positions.items() if shares]
    title = f"Tokens per target forward, drafts of {trained.draft_len}"
    body = page.beside(
        page.bars(title, bars),
        page.lines("Share of drafts accepted up to a position", lines, "position", "share", zero=True),
    )
    walked = f"{plural(len(measured.trained.texts), measured.split + ' sample')}, {count(trained.drafts)} drafts"
    verdicts = []
    length = trained.accepted_length
    if length is not None and floor_length is not None:
        above = f"{length:.2f} tokens per target forward, {floor_length:.2f} by an n-gram table"
        if length <= floor_length:
            verdicts.append(Verdict("bad", f"{above}: nothing is gained from the hidden states so far; train longer"))
        else:
            verdicts.append(Verdict("good", above))
    if measured.split == "train":
        verdicts.append(Verdict("look", "the store has no validation split: this is text it was trained on"))
    note = tag("p", f"Greedy drafts over recorded text ({walked}); the bonus token is counted.", class_="soft")
    healthy = "well above both others; the line falls slowly. A drafter near the floor reads states it cannot use."
    command = ("eval", str(info.run), info.spec.store, "--untrained")
    return Section("Acceptance", join([body, note]), healthy, tuple(verdicts), command, wide=True)


def _data(
    info: RunInfo, run_facts: RunFacts, store: Store | None, measured: Measured | None, config: Mapping[str, Any]
) -> Section:
    capture, target = run_facts.capture, info.spec.target
    rows = [
        ("store", run_facts.store),
        ("target", f"{target.name}, {target.num_layers} layers, width {count(target.hidden_size)}"),
        ("layers read", ", ".join(map(str, config["drafter"]["aux_layers"])) or "none"),
        ("stored as", f"aux {capture.codecs.aux}, final {capture.codecs.final}"),
        ("draft vocabulary", f"{count(config['drafter']['vocab_size'])} of {count(target.vocab_size)} tokens"),
    ]
    if measured is not None:
        rows.append(("parameters", count(measured.parameters)))
    if store is not None:
        rows.append(("samples", f"{count(len(store))}, {count(store.totals['tokens'])} tokens"))
        rows.append(("trained tokens", percent(store.totals["supervised"] / max(1, store.totals["tokens"]))))
    if run_facts.init_from is not None:
        rows.append(("started from", f"{run_facts.init_from.path}, step {run_facts.init_from.step:,}"))
    if run_facts.imported_from is not None:
        rows.append(("imported from", run_facts.imported_from))
    covered = run_facts.vocab_coverage
    level: page.Level = "good" if covered >= _KNOWN else "look"
    verdicts = [Verdict(level, f"the draft vocabulary holds {percent(covered)} of the trained tokens")]
    if store is None:
        verdicts.append(Verdict("look", "the store it was trained on is not there any more"))
    healthy = "the vocabulary covers over 95 % of what is trained; what it lacks can never be drafted."
    return Section("Data", page.facts(rows), healthy, tuple(verdicts), ("info", run_facts.store))


def _time(curves: Curves) -> Section:
    wait, total = curves.wait_share, curves.seconds
    bars = [
        Bar("computing", 1 - wait, f"{percent(1 - wait)}, {seconds(total * (1 - wait))}", 0),
        Bar("waiting for data", wait, f"{percent(wait)}, {seconds(total * wait)}", 1),
    ]
    speed = _line("tokens/s", curves.steps, itemgetter("tokens_per_s"))
    body = [page.bars("Where the time of the steps went", bars if total else [])]
    body.append(page.lines("Tokens per second", [speed], "step", "tokens/s", zero=True))
    verdicts = []
    if total:
        level: page.Level = "look" if wait > _WAITING else "good"
        verdicts.append(Verdict(level, f"{percent(wait)} of the time of the steps was spent waiting for data"))
    slowest = max((step_seconds(row) for row in curves.steps), default=0.0)
    note = tag("p", f"{plural(len(curves.steps), 'step')}, the slowest {seconds(slowest)}.", class_="soft")
    healthy = "under 10 % waiting; more means a slow disk: a smaller recipe, --cache, or more data.prefetch_mb."
    return Section("Time", join([*body, note]), healthy, tuple(verdicts))


def flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """``section.key`` to the value as a word of the command line."""
    return {
        f"{section}.{key}": str(value).lower() if isinstance(value, bool) else str(value)
        for section, values in config.items()
        for key, value in values.items()
    }


def _settings(store: Store | None, config: Mapping[str, Mapping[str, Any]]) -> Section:
    usual = {} if store is None else _usual(store, config)
    values = flat(config)
    changed = {key: value for key, value in values.items() if key in usual and usual[key] != value}
    body = []
    if usual:
        rows = [(key, value, usual[key]) for key, value in changed.items()]
        body.append(table(("setting", "value", "default for this store"), rows))
    body.append(page.details(f"All {len(values)} settings", table(("setting", "value"), list(values.items()))))
    healthy = "few settings differ from what the store suggests, and each for a reason you can name."
    return Section("Settings", join(body), healthy, command=("train", "STORE", "--settings"), wide=True)


def _usual(store: Store, config: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What a store suggests, the rate for the optimizer and the steps of the run; only what follows from it where a
    setting, as a mask token, has no default at all."""
    drafter = config["drafter"]["name"]
    try:
        usual = load_config(store, drafter).model_dump(mode="json")
    except ConfigError:
        usual = derived(store, drafter)
    usual["optim"]["lr"] = derived_lr(store, config_class(drafter).model_validate(config))
    return flat(usual)


def _drafted(measured: Measured, store: Store, samples: int) -> Section:
    tokenizer, evaluation = load_tokenizer(store), measured.trained
    shown, used = [], 0
    for number, ((ids, mask), hits) in enumerate(islice(zip(evaluation.texts, evaluation.hits, strict=True), samples)):
        article = _article(number, ids, mask, hits, tokenizer)
        used += len(article.encode())
        if used > page.TEXT_BYTES:
            break
        shown.append(article)
    about = tag(
        "p",
        tag("mark", "Marked", class_="taken"),
        " tokens were drafted and accepted, ",
        tag("mark", "these", class_="own"),
        " are the target's own: one closes each draft, and one begins each answer.",
    )
    body = tag("div", about, browser_tools(), *shown, data_browser="")
    healthy = "long accepted runs in set phrases, code and repeated names; single tokens where the text turns."
    return Section("Drafted text", body, healthy, wide=True)


def _article(number: int, ids: np.ndarray, mask: np.ndarray, hits: np.ndarray, tokenizer: Any) -> Html:
    """One sample: what was given, then each answer draft by draft."""
    parts: list[str] = []
    accepted_total = total = at = 0
    cut = min(len(ids), _SHOWN_TOKENS)

    def write(start: int, end: int, class_: str | None) -> None:
        if (end := min(end, cut)) > start:
            text = token_text(ids, start, end, tokenizer)
            parts.append(text if class_ is None else tag("mark", text, class_=class_))

    for start, end in answers(mask):
        first = max(start, 1)
        write(at, start, None)
        write(start, min(first + 1, end), "own")
        for n, accepted, emitted in drafts(hits, first, end):
            write(n + 1, n + 1 + accepted, "taken")
            write(n + 1 + accepted, n + 1 + emitted, "own")
            accepted_total, total = accepted_total + accepted, total + emitted
        at = end
    write(at, len(ids), None)
    facts = f"{count(len(ids))} tokens; {count(accepted_total)} of {count(total)} generated ones were accepted drafts"
    if cut < len(ids):
        facts += f"; the first {count(cut)} are shown"
    heading = tag("h3", f"sample {number + 1}")
    return tag("article", heading, tag("p", facts, class_="soft"), tag("div", *parts, class_="turn"), class_="sample")


def compare_page(runs: Sequence[RunInfo]) -> Page:
    """The page of several runs, from their logs alone. Raises CorruptionError: ``run-corrupt``."""
    names = short_names([info.run for info in runs])
    logs = {name: read_curves(info.run) for name, info in zip(names, runs, strict=True)}
    configs = {name: flat(read_config(info.run)) for name, info in zip(names, runs, strict=True)}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    differing = [key for key in keys if len({config.get(key) for config in configs.values()}) > 1]
    step, lengths = accepted_lengths(logs)
    best = max(lengths, key=lambda name: lengths[name]) if step is not None else None
    tiles = [("runs", count(len(runs))), ("settings that differ", count(len(differing)))]
    if best is not None:
        tiles += [(f"longest accepted at step {count(step or 0)}", f"{lengths[best]:.2f}"), ("by", best)]
    sections = [_result(runs, logs, step, lengths), _losses(logs), _differing(configs, differing)]
    return Page("Runs compared", " · ".join(str(info.run) for info in runs), tiles, sections)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, as many as tell them apart."""
    whole = [path.absolute().parts for path in paths]
    for parts in range(1, max(map(len, whole)) + 1):
        names = ["/".join(path[-parts:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{Path(*path)} ({place})" for place, path in enumerate(whole, 1)]


def accepted_lengths(logs: Mapping[str, Curves]) -> tuple[int | None, dict[str, float]]:
    """The last step at which all runs that validated an accepted length did over the same text, and what each had
    there; None and the last of each where there is no such step. A validation that names no text is known to be of no
    other's. The greatest of each would favour who validates most often."""
    of_runs = {
        name: {one["step"]: one for one in rows}
        for name, curves in logs.items()
        if (rows := [one for one in curves.validations if one["accepted_length"] is not None])
    }
    texts = [{(step, one["text"]) for step, one in by_step.items() if "text" in one} for by_step in of_runs.values()]
    step = max((step for step, _ in set.intersection(*texts)), default=None) if texts else None
    return step, {
        name: by_step[max(by_step) if step is None else step]["accepted_length"] for name, by_step in of_runs.items()
    }


def _result(
    runs: Sequence[RunInfo], logs: Mapping[str, Curves], step: int | None, lengths: Mapping[str, float]
) -> Section:
    """``step``: of which the lengths are, None where they are the last of each run."""
    bars = [
        Bar(name, length, "not validated" if math.isnan(length) else f"{length:.3f}", place)
        for place, name in enumerate(logs)
        for length in [lengths.get(name, math.nan)]
    ]
    curves = [_length_line(name, log) for name, log in logs.items()]
    where = "the last of each" if step is None else f"at step {count(step)}"
    body = page.beside(
        tag("div", page.bars(f"Accepted length in validation, {where}", bars), _cost(logs)),
        page.lines("Accepted length in validation", curves, "step", "tokens"),
    )
    verdicts = []
    if len({read_state(info.checkpoint).cursor["snapshot"] for info in runs}) > 1:
        verdicts.append(Verdict("look", "they were trained on different samples"))
    if len(lengths) > 1 and step is None:
        text = "no step is known at which they were validated over the same text: lengths do not compare"
        verdicts.append(Verdict("unknown", f"{text}; hiddenstore eval RUN STORE of each on one store does"))
    elif len(lengths) > 1:
        first, second = sorted(lengths, key=lambda name: -lengths[name])[:2]
        ahead = f"{lengths[first] - lengths[second]:.3f} tokens per target forward"
        # A log has no lengths of single samples, and a run one seed: no interval follows from it.
        text = f"{first} has {ahead} more than {second} {where}; not compared in pairs: another seed may turn that"
        verdicts.append(Verdict("unknown", text))
    missing = [name for name in logs if name not in lengths]
    if missing:
        verdicts.append(Verdict("unknown", f"{', '.join(missing)} never validated an accepted length"))
    healthy = "one snapshot, one split, and worth what it cost; who leads in several seeds is ahead."
    return Section("Result", body, healthy, tuple(verdicts), wide=True)


def _losses(logs: Mapping[str, Curves]) -> Section:
    training = [_line(name, log.taught, _mean_loss) for name, log in logs.items()]
    validation = [_line(name, log.validations, itemgetter("loss"), dots=True) for name, log in logs.items()]
    body = page.beside(
        page.lines("Loss in training, mean over depths", training, "step", "loss"),
        page.lines("Loss in validation", validation, "step", "loss"),
    )
    verdicts = []
    for name, log in logs.items():
        if log.steps and (overfit := log.overfit(log.steps[-1]["step"])):
            verdicts.append(Verdict("look", f"{name}: {overfit}"))
    healthy = "losses of different kinds or depths do not compare; accepted length does."
    return Section("Losses", body, healthy, tuple(verdicts), wide=True)


def _cost(logs: Mapping[str, Curves]) -> Html:
    # Steps are rarely skipped, and a phone has no room for a column of zeros.
    has_skipped = any(log.skipped for log in logs.values())
    rows = [
        (
            name,
            count(log.steps[-1]["step"]) if log.steps else "–",
            seconds(log.seconds) if log.steps else "–",
            f"{sum(row['tokens'] for row in log.steps) / log.seconds:,.0f}" if log.seconds else "–",
            f"{100 * log.wait_share:.1f} %",
            *([count(log.skipped)] if has_skipped else []),
        )
        for name, log in logs.items()
    ]
    columns = ("run", ">steps", ">took", ">tokens/s", ">waited", *([">skipped"] if has_skipped else []))
    return table(columns, rows, "What each took")


def _differing(configs: Mapping[str, Mapping[str, str]], differing: Sequence[str]) -> Section:
    rows = [(key, *(config.get(key, "–") for config in configs.values())) for key in differing]
    body = table(("setting", *configs), rows) if rows else tag("p", "They share every setting.", class_="none")
    healthy = f"one difference at a time says what it does; here {plural(len(differing), 'setting')} differ."
    return Section("Settings that differ", body, healthy, wide=True)
