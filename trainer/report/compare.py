"""Runs beside each other: what was validated, what it cost, and the settings they do not share."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiddenstore.console.text import count, plural, seconds
from hiddenstore.report import page
from hiddenstore.report.page import Bar, Html, Page, Section, Series, Verdict, table, tag
from trainer.report.run import flat, read_config
from trainer.train.log import Curves, read_curves
from trainer.train.run_folder import RunInfo, run_snapshot

_AS_GOOD = 0.02


def compare_page(runs: Sequence[RunInfo]) -> Page:
    """The page of several runs, from their logs alone. Raises CorruptionError: ``run-corrupt``."""
    names = short_names([info.run for info in runs])
    logs = {name: read_curves(info.run) for name, info in zip(names, runs, strict=True)}
    configs = {name: flat(read_config(info.run)) for name, info in zip(names, runs, strict=True)}
    differing = [key for key in _keys(configs) if len({config.get(key) for config in configs.values()}) > 1]
    lengths = {name: length for name, curves in logs.items() if (length := longest(curves)) is not None}
    best = max(lengths, key=lambda name: lengths[name], default=None)
    tiles = [("runs", count(len(runs))), ("settings that differ", count(len(differing)))]
    if best is not None:
        tiles += [("longest accepted", f"{lengths[best]:.2f}"), ("by", best)]
    sections = [_result(runs, names, logs, lengths), _losses(logs), _settings(configs, differing)]
    return Page("Runs compared", " · ".join(str(info.run) for info in runs), tiles, sections)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, as many as tell them apart."""
    whole = [path.absolute().parts for path in paths]
    for parts in range(1, max(map(len, whole)) + 1):
        names = ["/".join(path[-parts:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path)} ({place})" for place, path in enumerate(whole, 1)]


def longest(curves: Curves) -> float | None:
    """The largest accepted length that was validated."""
    return max((v for one in curves.validations if (v := one["accepted_length"]) is not None), default=None)


def _keys(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for config in configs.values() for key in config))


def _result(
    runs: Sequence[RunInfo], names: Sequence[str], logs: Mapping[str, Curves], lengths: Mapping[str, float]
) -> Section:
    bars = [
        Bar(name, length, "not validated" if math.isnan(length) else f"{length:.3f}", place)
        for place, name in enumerate(names)
        for length in [lengths.get(name, math.nan)]
    ]
    curves = [
        Series(
            name,
            [one["step"] for one in log.validations],
            [math.nan if one["accepted_length"] is None else one["accepted_length"] for one in log.validations],
            dots=True,
        )
        for name, log in logs.items()
    ]
    body = page.beside(
        tag("div", page.bars("Best accepted length in validation", bars), _cost(logs)),
        page.lines("Accepted length in validation", curves, "step", "tokens"),
    )
    verdicts = []
    snapshots = {run_snapshot(info.run).commits for info in runs}
    if len(snapshots) > 1:
        text = "they were trained on different samples, and validated on different text: lengths do not compare"
        verdicts.append(Verdict("look", f"{text}; hiddenstore eval RUN STORE on one store does"))
    if len(lengths) > 1:
        first, second = sorted(lengths, key=lambda name: -lengths[name])[:2]
        ahead = lengths[first] - lengths[second]
        text = f"{first} is ahead of {second} by {ahead:.3f} tokens per target forward"
        level: page.Level = "good" if ahead > _AS_GOOD else "unknown"
        verdicts.append(Verdict(level, text if ahead > _AS_GOOD else f"{text}: another seed may turn that"))
    missing = [name for name in names if name not in lengths]
    if missing:
        verdicts.append(Verdict("unknown", f"{', '.join(missing)} never validated an accepted length"))
    healthy = "one snapshot, one split, and worth what it cost; under 0.02 another seed may turn the order."
    return Section("Result", body, healthy, tuple(verdicts), wide=True)


def _losses(logs: Mapping[str, Curves]) -> Section:
    training = [
        Series(name, [row["step"] for row in log.steps], [sum(row["losses"]) / len(row["losses"]) for row in log.steps])
        for name, log in logs.items()
    ]
    validation = [
        Series(name, [one["step"] for one in log.validations], [one["loss"] for one in log.validations], dots=True)
        for name, log in logs.items()
    ]
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


def _settings(configs: Mapping[str, Mapping[str, str]], differing: Sequence[str]) -> Section:
    rows = [(key, *(config.get(key, "–") for config in configs.values())) for key in differing]
    body = table(("setting", *configs), rows) if rows else tag("p", "They share every setting.", class_="none")
    healthy = f"one difference at a time says what it does; here {plural(len(differing), 'setting')} differ."
    return Section("Settings that differ", body, healthy, wide=True)
