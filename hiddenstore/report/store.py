"""What a store holds, as a page: metadata of all of it, states and text of a few samples spread over it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from pathlib import PurePath
from typing import Any

import numpy as np

from hiddenstore.codecs import get_layout
from hiddenstore.codecs.base import mean_row_bits
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.console.text import amount, count, number, percent, plural, size
from hiddenstore.files.damage import DAMAGE
from hiddenstore.inspect import facts
from hiddenstore.inspect.history import history
from hiddenstore.inspect.samples import load_tokenizer, pieces
from hiddenstore.records import Record, Sample
from hiddenstore.report import page
from hiddenstore.report.page import Bar, Html, Page, Section, Series, Verdict, join, table, tag
from hiddenstore.store import Store
from hiddenstore.verify import verify
from hiddenstore.verify.report import Begin, Report, unseen
from schemas.capture import REBUILT, Codecs, not_rebuildable
from schemas.manifest import ROLES, CommitRecord

FIRST_POSITIONS = 32
TEMPLATE = "template"
"""What stands between turns."""
SHOWN_TOKENS = 1_500
_LITTLE_TRAINED = 0.05
_MANY_REJECTS = 0.01
_CUT_SHARE = 0.02
_TOP1_OF_A_TARGET = 0.3
_LINEAGE_ROWS = 40
_INPUTS_SHOWN = 12
_SMALLER = 0.9
_SAME_TOKEN = "_same_token"
_NATS = (
    ("this_token_nats", "the token at the row itself", 5),
    ("next_token_nats", "the next token", 0),
    ("token_after_next_nats", "the token after the next", 5),
    ("unigram_nats", "by bare frequencies, without states", 1),
)


@dataclass
class Spread:
    """Counts over a few samples: tokens and trained ones by role, turns, rms of each aux layer by position; by
    id what is wrong with those that cannot be read."""

    samples: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    trained: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    rms: dict[str, list[np.ndarray]] = field(default_factory=dict)
    damage: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record, fields: Sequence[str]) -> None:
        """Count one record; ``fields`` name its aux layers."""
        sample, self.samples = record.sample, self.samples + 1
        roles = np.full(sample.tokens, len(ROLES))
        for role, start, end in sample.spans.tolist():
            self.turns[ROLES[role]] += 1
            roles[start:end] = role
        for role, name in enumerate((*ROLES, TEMPLATE)):
            self.tokens[name] += int((roles == role).sum())
            self.trained[name] += int(sample.loss_mask[roles == role].sum())
        for name, states in zip(fields, record.aux[:, :FIRST_POSITIONS], strict=True):
            rms = states.float().square().mean(-1).sqrt().numpy()
            padded = np.full(FIRST_POSITIONS, np.nan, dtype=np.float32)
            padded[: len(rms)] = rms
            self.rms.setdefault(name, []).append(padded)


def spread_ids(store: Store, most: int) -> list[str]:
    """At most ``most`` ids, evenly over the store."""
    places = np.unique(np.linspace(0, max(0, len(store) - 1), min(most, len(store))).astype(np.int64))
    return [store.sample_ids[int(place)] for place in places]


def store_page(store: Store, samples: int = 40, measured: int = 64, begin: Begin = unseen) -> Page:
    """The page of a store. ``samples`` are shown with their text, 0 shows none; the states of ``measured`` are read.
    Samples and records that are damaged are shown as that. Raises CorruptionError: store.json, or what is needed of the
    target's files, is damaged; StorageError: the storage refused to read."""
    info, stats = facts.info(store), facts.stats(store)
    spread, ids = Spread(), spread_ids(store, measured)
    advance = begin("read samples", len(ids), "samples")
    for sample_id in ids:
        try:
            spread.add(store.read(sample_id), store.capture.aux_fields)
        except DAMAGE as error:
            spread.damage[sample_id] = error.message
        advance(1)
    sections = [_holding(info, spread), _text(store, info, spread), _lengths(store, stats), _norms(stats, spread)]
    if info["samples"]:
        sections.append(_agreement(store, min(1.0, measured / info["samples"]), begin))
    sections.append(_sizes(store, info, stats))
    if samples and info["samples"]:
        sections.append(_browser(store, spread_ids(store, samples)))
    sections.append(_lineage(store))
    stored = info["bytes_stored"]
    smaller = f"{info['bytes_raw'] / stored:.2f}×" if stored else "–"
    tiles = [
        ("samples", count(info["samples"])),
        ("tokens", amount(info["tokens"])),
        ("trained", percent(info["supervised_tokens"] / max(1, info["tokens"]))),
        ("size", size(stored)),
        ("smaller than bf16", smaller),
    ]
    name = PurePath(store.path).name or store.path
    about = f"{store.path}{f' @ {store.catalog.snapshot}' if store.is_frozen else ''}"
    note = page.TEXT_WARNING if samples and info["samples"] else ""
    return Page(name, about, tiles, sections, note)


def _holding(info: Mapping[str, Any], spread: Spread) -> Section:
    target, layers = info["target"], ", ".join("embeddings" if k == -1 else str(k) for k in info["layers"])
    final = "none" if info["final"] == "none" else f"{info['final']} rows, {info['final_norm'].replace('_', '-')}"
    engines = ", ".join(f"{engine['name']} {engine['version']}" for engine in info["engines"]) or "nothing captured yet"
    splits = " · ".join(f"{name} {count(samples)}" for name, samples in info["splits"].items())
    rows = [
        ("target", f"{target['name']}{' @ ' + target['revision'] if target['revision'] else ''}"),
        ("its shape", f"{target['model_type']}, {target['num_layers']} layers, width {count(target['hidden_size'])}"),
        ("layers", layers or "none"),
        ("final hidden", final),
        ("stored as", f"{info['recipe']}: aux {info['codecs']['aux']}, final {info['codecs']['final']}"),
        ("container", f"{info['container']}, format {info['format']}"),
        ("engine", engines),
        ("samples", f"{count(info['samples'])}: {splits}"),
        ("units", f"{count(info['units'])} from {plural(info['inputs'], 'input')}"),
    ]
    verdicts = [Verdict("bad", f"a record cannot be read: {message}") for message in info["damaged_commits"]]
    if spread.damage:
        text = f"{count(len(spread.damage))} of {count(spread.samples + len(spread.damage))} samples read are damaged"
        verdicts.append(Verdict("bad", f"{text}: {next(iter(spread.damage.values()))}"))
    if info["duplicates"]:
        verdicts.append(Verdict("look", f"{plural(info['duplicates'], 'sample')} stored twice, read once"))
    rejects, samples = info["rejects"], info["samples"]
    reasons = ", ".join(f"{count(n)} {reason}" for reason, n in info["rejects_by_reason"].items())
    if rejects:
        level: page.Level = "look" if rejects > _MANY_REJECTS * (samples + rejects) else "good"
        verdicts.append(Verdict(level, f"{plural(rejects, 'sample')} rejected: {reasons}"))
    elif samples:
        verdicts.append(Verdict("good", "no sample was rejected"))
    else:
        verdicts.append(Verdict("bad", "the store holds no sample yet"))
    if samples and "validation" not in info["splits"]:
        verdicts.append(Verdict("look", "no validation split: training cannot tell when it overfits"))
    healthy = "every record can be read, under 1 % is rejected, and a few percent of the samples are for validation."
    return Section("What it holds", page.facts(rows), healthy, tuple(verdicts), ("info", info["path"]))


def _lengths(store: Store, stats: Mapping[str, Any]) -> Section:
    drawn = [("Tokens per sample", "lengths"), ("Trained tokens per sample", "supervised")]
    histograms = [(title, stats[key]["histogram"]) for title, key in drawn]
    body = [page.histogram(title, bins["edges"], bins["counts"], "tokens", "samples") for title, bins in histograms]
    verdicts = []
    for what, lengths in (("samples", store.catalog.table.tokens), ("answers", store.catalog.table.supervised)):
        length, many = _wall(lengths)
        if many > max(2, _CUT_SHARE * len(lengths)):
            text = f"{count(many)} {what} have {count(length)} tokens, hardly one has more: a limit probably cut them"
            verdicts.append(Verdict("look", text))
    if len(store) and not verdicts:
        p50, p95 = (count(stats["lengths"][name]) for name in ("p50", "p95"))
        verdicts.append(Verdict("good", f"half of the samples have at most {p50} tokens, 95 % at most {p95}"))
    healthy = "a smooth slope to the right; a tall last column means that a limit cut the longest samples."
    return Section("Lengths", page.beside(*body), healthy, tuple(verdicts), wide=True)


def _wall(lengths: np.ndarray) -> tuple[int, int]:
    """The most frequent of the longest tenth of lengths, and how many have it; none where a few are longer by far."""
    counts = np.bincount(lengths[lengths > 0]) if len(lengths) else np.zeros(0, dtype=np.int64)
    if not len(counts):
        return 0, 0
    start = int(0.9 * (len(counts) - 1))
    length = start + int(counts[start:].argmax())
    return (length, int(counts[length])) if counts[length + 1 :].sum() <= counts[length] / 10 else (length, 0)


def _text(store: Store, info: Mapping[str, Any], spread: Spread) -> Section:
    share = info["supervised_tokens"] / max(1, info["tokens"])
    roles = [role for role in (*ROLES, TEMPLATE) if spread.tokens[role]]
    rows = [
        (
            role,
            count(spread.turns[role]) if role != TEMPLATE else "–",
            count(spread.tokens[role]),
            percent(spread.trained[role] / spread.tokens[role]),
        )
        for role in roles
    ]
    shown = f"of {plural(spread.samples, 'sample')} spread over the store"
    body = [table(("role", ">turns", ">tokens", ">trained"), rows, f"Spans {shown}")]
    inputs = Counter(record.input for record in store.commits())
    units = [(digest[:12], count(number_of)) for digest, number_of in inputs.most_common(_INPUTS_SHOWN)]
    caption = f"The {plural(len(inputs), 'input')} it was captured from, by digest; names of files stay with DATA"
    body.append(table(("input", ">units"), units, caption))
    level: page.Level = "bad" if not share else "look" if share < _LITTLE_TRAINED else "good"
    verdict = Verdict(level, f"{percent(share)} of all tokens are trained")
    foreign = [role for role in roles if role not in ("assistant", TEMPLATE) and spread.trained[role]]
    verdicts = [verdict] if info["tokens"] else []
    if foreign:
        verdicts.append(Verdict("look", f"tokens of {' and '.join(foreign)} turns are trained, not answers alone"))
    healthy = "answers are trained, questions and template are not; 20 to 80 % is usual for chats."
    return Section("Sources and spans", tag("div", *body), healthy, tuple(verdicts))


def _norms(stats: Mapping[str, Any], spread: Spread) -> Section:
    layers = [layer for layer in stats["layers"] if layer["rows"]]
    rows = [
        Bar(layer["field"], layer["rms_median"], number(layer["rms_median"], 3), high=layer["rms_max"])
        for layer in layers
    ]
    body = [page.bars("Root mean square of a row: median, line to the loudest", rows, log=True)]
    curves = [_by_position(name, np.stack(states)) for name, states in spread.rms.items()]
    body.append(page.lines(f"Median norm at the first {FIRST_POSITIONS} tokens", curves, "position", "rms", log=True))
    silent = [layer["field"] for layer in layers if not layer["rms_median"] or not isfinite(layer["rms_median"])]
    verdict = Verdict("good", "every layer has states, and none is silent")
    if silent:
        verdict = Verdict("bad", f"{', '.join(silent)}: half of the rows are zero or not finite")
    healthy = (
        "norms grow with depth, and the first token is often a hundred times louder (an attention sink); two layers "
        "with the same figures are probably the same layer."
    )
    verdicts = (verdict,) if layers else ()
    command = ("stats", stats["path"])
    return Section("Norms per layer", page.beside(*body), healthy, verdicts, command, wide=True)


def _by_position(name: str, rms: np.ndarray) -> Series:
    """The median over samples; rms float32 [samples, positions], NaN behind the end of a sample."""
    reached = np.flatnonzero(~np.isnan(rms).all(axis=0))
    return Series(name, reached.tolist(), np.nanmedian(rms[:, reached], axis=0).tolist(), dots=True)


def _agreement(store: Store, share: float, begin: Begin) -> Section:
    report = _verified(store, share, begin)
    measures = report.measures
    kinds = [
        Verdict("look" if kind == "incomplete" else "bad", f"{plural(n, 'finding')} of kind {kind}: {first.detail}")
        for kind, n in report.kinds.items()
        for first in [next(finding for finding in report.findings if finding.kind == kind)]
    ]
    nats = [
        Bar(text, measures[name], f"{measures[name]:.2f}", series) for name, text, series in _NATS if name in measures
    ]
    cosines = [
        Bar(name.removesuffix(_SAME_TOKEN), value, f"{value:.2f}")
        for name, value in measures.items()
        if name.endswith(_SAME_TOKEN)
    ]
    is_undecided = any(note.kind == "prediction-undecided" for note in report.notes)
    top1 = None if is_undecided else measures.get("next_token_top1")
    verdicts = kinds or [Verdict("good", f"{plural(report.samples_checked, 'sample')} looked at, nothing is wrong")]
    if top1 is not None and top1 < _TOP1_OF_A_TARGET:
        text = f"the target would say the next token in {percent(top1)} of the rows only: the text is foreign to it"
        verdicts.append(Verdict("look", f"{text}; hiddenstore regenerate writes answers of its own"))
    elif top1 is not None and not kinds:
        verdicts.append(Verdict("good", f"the target would say the next token in {percent(top1)} of the rows"))
    verdicts += [Verdict("unknown", note.detail) for note in report.notes if note.kind.endswith("-undecided")]
    numbers = table(("measure", ">value"), [(name.replace("_", " "), f"{value:g}") for name, value in measures.items()])
    figures = page.beside(
        page.bars("How surprising a token is to the stored final hidden, in nats", nats),
        page.bars("How much rows resemble those of their own token (cosine above chance)", cosines),
    )
    healthy = (
        "of the three offsets the next token surprises least, and less than bare frequencies; every layer is clearly "
        "above 0. Otherwise the layer, the norm, the shift or the text is another."
    )
    body = join([figures, page.details("All measures", numbers)])
    command = ("verify", store.path, "--meaning")
    return Section("Agreement", body, healthy, tuple(verdicts), command, wide=True)


def _verified(store: Store, share: float, begin: Begin) -> Report:
    """Of a snapshot the meaning of its own samples: what was written later is no part of it."""
    if not store.is_frozen:
        return verify(store.fs, "meaning", share, begin=begin)
    from hiddenstore.verify.meaning import check_meaning

    report = Report("meaning")
    check_meaning(store, report, share, begin)
    return report


def _sizes(store: Store, info: Mapping[str, Any], stats: Mapping[str, Any]) -> Section:
    tokens, stored = info["tokens"], info["bytes_stored"]
    rows = [Bar(name, float(n), size(n)) for name, n in stats["bytes"].items()]
    body = [page.bars("Bytes by field", rows)]
    verdicts = []
    if tokens:
        here = stored / tokens
        advice = info["advice"]
        measured = {row["recipe"]: row["bytes_per_token"] for row in advice["rows"]} if advice else {}
        estimates = {name: measured.get(name, nominal) for name, nominal in nominal_bytes(store).items()}
        bars = [Bar("as stored", here, f"{here:,.0f} B/token", series=1)]
        bars += [Bar(name, value, f"{value:,.0f} B/token") for name, value in estimates.items()]
        how = "measured by advise" if advice else "by arithmetic, states alone"
        body.append(page.bars(f"Bytes per token by recipe ({how})", bars))
        if not advice:
            verdicts.append(Verdict("unknown", "which recipe these states can take was not measured yet"))
        elif measured.get(advice["chosen"], here) < _SMALLER * here:
            verdicts.append(Verdict("look", f"{advice['chosen']} keeps the limits of advise and is smaller"))
        else:
            verdicts.append(Verdict("good", f"advise found no smaller recipe than {info['recipe']} within its limits"))
    healthy = "aux layers take most of it; a small store is larger than its arithmetic, as each file has a fixed part."
    command = ("advise", store.path)
    return Section("Sizes", page.beside(*body), healthy, tuple(verdicts), command, wide=True)


def nominal_bytes(store: Store) -> dict[str, float]:
    """Bytes of a token's states in each recipe that can hold this capture, by the arithmetic of its codecs."""
    capture, samples = store.capture, store.catalog.table
    width = capture.target.hidden_size
    tokens, supervised, rows = (
        int(column.sum(dtype=np.int64)) for column in (samples.tokens, samples.supervised, samples.final_rows)
    )
    unable = not_rebuildable(capture.aux_layers, capture.target.num_layers) is not None
    sizes = {}
    for name, (aux, final) in RECIPES.items():
        if (name == "tiny" and not capture.aux_layers) or (final == REBUILT and unable):
            continue
        kept = capture.with_codecs(Codecs(aux=aux, final=final)) if final == REBUILT else capture
        layers = len(kept.stored_layers if final == REBUILT else capture.aux_layers)
        row_bits = mean_row_bits(get_layout(aux), width, tokens, supervised, len(samples.tokens))
        sizes[name] = (layers * row_bits + rows / max(1, tokens) * get_layout(final).row_bits(width)) / 8
    return sizes


def _browser(store: Store, ids: Iterable[str]) -> Section:
    tokenizer, shown, used, left_out, damaged = load_tokenizer(store), [], 0, 0, 0
    for sample_id in ids:
        try:
            tokens = store.sample(sample_id)
        except DAMAGE:
            damaged += 1
            continue
        sample = _shown(tokens, tokenizer, store.index_of(sample_id), store.locate(sample_id)[0])
        used += len(sample.encode())
        if used > page.TEXT_BYTES:
            left_out += 1
            continue
        shown.append(sample)
    about = f"{plural(len(shown), 'sample')}, evenly spread over {count(len(store))}. Trained text is marked."
    if left_out:
        about += f" {plural(left_out, 'more')} would make the page too large."
    if damaged:
        about += f" {plural(damaged, 'sample')} could not be read."
    body = tag("div", tag("p", about), browser_tools(), *shown, data_browser="")
    healthy = "what is marked is what the drafter should learn to say: whole answers, without the question."
    return Section("Samples", body, healthy, command=("show", store.path, "0"), wide=True)


def browser_tools() -> Html:
    """Search, previous and next; shown by the script that makes them work."""
    search = tag("input", type="search", placeholder="search their text", aria_label="search the text of the samples")
    buttons = [tag("button", text, type="button", value=step) for text, step in (("← previous", "-1"), ("next →", "1"))]
    return tag("div", search, *buttons, tag("output", aria_live="polite"), class_="tools", hidden="")


def _shown(sample: Sample, tokenizer: Any, place: int, commit: CommitRecord) -> Html:
    few = Sample(
        sample.id, sample.input_ids[:SHOWN_TOKENS], sample.loss_mask[:SHOWN_TOKENS],
        np.minimum(sample.spans, SHOWN_TOKENS) if len(sample.spans) else sample.spans, sample.split, sample.source,
    )  # fmt: skip
    facts_line = f"{count(sample.tokens)} tokens, {count(sample.supervised)} trained · {sample.split}"
    more = sample.tokens - SHOWN_TOKENS
    end = [tag("p", f"… {plural(more, 'more token')}", class_="soft")] if more > 0 else []
    return tag(
        "article",
        tag("h3", f"{count(place)} · {sample.id[:12]}"),
        tag("p", f"{facts_line} · unit {commit.unit}", class_="soft"),
        *_turns(few, tokenizer),
        *end,
        class_="sample",
    )


def _turns(sample: Sample, tokenizer: Any) -> Iterator[Html]:
    for role, turn in groupby(pieces(sample, tokenizer), key=lambda piece: piece.role):
        texts = [tag("mark", piece.text) if piece.supervised else piece.text for piece in turn]
        yield tag("div", tag("b", role or TEMPLATE), *texts, class_="turn")


def _lineage(store: Store) -> Section:
    events, errors = history(store)
    rows = [
        (
            (document["last"] or "–").replace("T", " ").replace("+00:00", " UTC"),
            document["action"],
            document["name"] if document["action"] == "froze" else f"{document['engine']} {document['version']}",
            count(document["units"]),
            count(document["samples"]),
            size(document["size_bytes"]) if document["size_bytes"] else "–",
        )
        for document in (event.document() for event in events[:_LINEAGE_ROWS])
    ]
    target = store.capture.target
    digests = [
        ("weights", getattr(target, "weights_sha256", None)),
        ("config", target.config_sha256),
        ("tokenizer", target.tokenizer_sha256),
        ("chat template", target.chat_template_sha256),
        *((f"input {place}", digest) for place, digest in enumerate(sorted(store.inputs()), 1)),
    ]
    stands_on = page.facts((name, tag("code", digest or "–")) for name, digest in digests[:20])
    columns = ("when", "what", "by, as", ">units", ">samples", ">size")
    body = join([table(columns, rows, "The newest first"), page.details("What it stands on", stands_on)])
    verdicts = tuple(Verdict("bad", error.message) for error in errors)
    return Section(
        "Lineage", body, "one engine in one version wrote all units; repairs stand in it.", verdicts,
        ("log", store.path), wide=True,
    )  # fmt: skip
