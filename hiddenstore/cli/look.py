"""The commands that look and change nothing: info, ls, show, stats, diff."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

import click
from rich.padding import Padding
from rich.text import Text

from hiddenstore.cli.words import STORE, FiniteRange, open_store
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.progress import Progress
from hiddenstore.console.text import Column, amount, bar, clean, count, number, percent, plural, size, spark
from hiddenstore.files.layout import split_snapshot
from hiddenstore.inspect.choice import points_of
from schemas.capture import REBUILT, TOPK
from schemas.layers import field_name

_DIGEST_SHOWN = 12
_ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
_DIFFERENT_EXIT = 3


@click.command(epilog=examples("hiddenstore info my-store", "hiddenstore info my-store@train-v1 --json"))
@click.argument("store", type=STORE)
@common_options
def info(store: str) -> None:
    """What STORE holds, on one screen. Reads metadata only."""
    from hiddenstore.inspect import facts
    from hiddenstore.targets.identity import target_words

    opened = open_store(store, strict=False)
    document = facts.info(opened)
    output().data(document, human=lambda: _show_info(document))
    for problem in document["damaged_commits"]:
        output().warn(problem)
    if document["damaged_commits"]:
        output().hint("hiddenstore", "verify", store)
    elif document["samples"]:
        output().hint("hiddenstore", "show", store, "0")
    else:
        words = target_words(opened.capture.target)
        output().hint("hiddenstore", "collect", "DATA", "-o", split_snapshot(store)[0], *words)


def _show_info(document: Mapping[str, Any]) -> None:
    """One screen: identity, what is captured, how much of it, how large."""
    out, codecs, lengths = output(), document["codecs"], document["lengths"]
    _heading(document["path"], f"format {document['format']} · {document['container']} · recipe {document['recipe']}")
    tokens, share = amount(document["tokens"]), document["supervised_tokens"] / max(1, document["tokens"])
    numbers = f"p50 {count(lengths['p50'])} · p95 {count(lengths['p95'])} · max {count(lengths['max'])}   "
    units = [count(document["units"]), f"from {plural(document['inputs'], 'input')}"]
    if document["snapshots"]:
        units.append("snapshots " + ", ".join(document["snapshots"]))
    rows = [
        ("target", _target_line(document["target"], document["quantisation"])),
        ("captured", _captured_line(document)),
        ("codecs", f"aux {codecs['aux']} · final {codecs['final']}"),
        ("engine", _engine_line(document["engines"])),
        ("samples", _samples_line(document)),
        ("tokens", f"{tokens}   {percent(share)} trained" if document["tokens"] else tokens),
        ("length", Text.assemble(numbers, (spark(lengths["histogram"]["counts"]), "cyan"))),
        ("size", _size_line(document)),
        ("units", "   ".join(units)),
    ]
    out.pairs(rows + ([("advice", _advice_lines(document["advice"]))] if document["advice"] else []))


def _heading(title: str, more: str = "") -> None:
    """A bold title and dim words after it."""
    more = f"   {clean(more)}" if more else ""
    output().out.print(Text.assemble((clean(title), "bold"), (more, "dim")), soft_wrap=True)


def _target_line(target: Mapping[str, Any], quantisation: str | None) -> str:
    revision = f" @ {target['revision'][:12]}" if target["revision"] else ""
    shape = f"{target['model_type']} · {plural(target['num_layers'], 'layer')} · width {count(target['hidden_size'])}"
    how = f" · quantised: {quantisation}" if quantisation else ""
    return f"{target['name']}{revision}   {shape} · vocabulary {count(target['vocab_size'])}{how}"


def _captured_line(document: Mapping[str, Any]) -> str:
    """``layers 1, 15, 28 + final (pre-norm, supervised rows)``, or what stands in for the final hidden."""
    rebuilt = [name for name, kept in document["states"].items() if kept == "rebuilt"]
    words = (("embeddings" if k == -1 else str(k), field_name(k) in rebuilt) for k in document["layers"])
    layers = ", ".join(f"{word} (rebuilt)" if is_rebuilt else word for word, is_rebuilt in words)
    rows = {"supervised": "rows around supervised spans", "all": "every token"}.get(document["final"], "")
    if document["final"] == "none":
        final = "no final"
    elif document["codecs"]["final"] == TOPK:
        final = f"the target's top tokens in place of the final hidden ({rows})"
    elif document["codecs"]["final"] == REBUILT:
        final = f"final rebuilt from layer {document['layers'][-1]} ({rows})"
    else:
        final = f"final ({document['final_norm'].replace('_', '-')}, {rows})"
    return f"{'layers ' + layers if layers else 'no aux layers'} + {final}"


def _engine_line(engines: Sequence[Mapping[str, Any]]) -> str:
    if not engines:
        return "nothing captured yet"
    names = ", ".join(f"{engine['name']} {engine['version']}" for engine in engines)
    versions = " · ".join(f"{name} {version}" for name, version in engines[0]["versions"].items())
    return f"{names}   {versions}" if versions and len(engines) == 1 else names


def _samples_line(document: Mapping[str, Any]) -> str:
    splits = " · ".join(f"{name} {count(n)}" for name, n in document["splits"].items())
    text = f"{count(document['samples'])}   {splits}".rstrip()
    if document["samples_with_images"]:
        text += f"   {count(document['samples_with_images'])} with images"
    if document["duplicates"]:
        text += f"   {count(document['duplicates'])} stored twice"
    if document["rejects"]:
        reasons = ", ".join(f"{count(n)} {reason}" for reason, n in document["rejects_by_reason"].items())
        text += f"   rejected {count(document['rejects'])}: {reasons}"
    return text


def _size_line(document: Mapping[str, Any]) -> str:
    stored, raw = document["bytes_stored"], document["bytes_raw"]
    if not stored:
        return "0 B"
    per_token = f"{size(stored / document['tokens'])} per token" if document["tokens"] else ""
    beside = {"target": document["bytes_target"], "calibration": document["bytes_calibration"]}
    more = ", ".join(f"{name} {size(number)}" for name, number in beside.items() if number)
    on_disk = f"{size(document['bytes_on_disk'])} on disk" + (f" with {more}" if more else "")
    return f"{size(stored)}   from {size(raw)} as bf16 at every token ({raw / stored:.2f}×)   {per_token}   {on_disk}"


def _advice_lines(advice: Mapping[str, Any]) -> str:
    """Per recipe the bytes of a token and what it costs, the chosen one first."""
    lines = []
    for row in sorted(advice["rows"], key=lambda row: not row["chosen"]):
        is_rounded = row["recipe"] in RECIPES and (row["kl"] or row["channel_error"])
        if is_rounded or row["chosen"]:
            kl = "" if row["kl"] is None else f", KL {row['kl']:.1e}"
            error = "" if row["channel_error"] is None else f", channel error {percent(row['channel_error'])}"
            mark = " (chosen)" if row["chosen"] else ""
            lines.append(f"{row['recipe']}{mark}  {row['bytes_per_token']:,.0f} B/token{kl}{error}")
    for row in advice["paired"]:
        lines.append(f"{row['recipe']} trained: {points_of(row['difference'], row['half_width'])} of acceptance")
    return "\n".join(lines)


@click.command(epilog=examples("hiddenstore ls my-store -n 5", "hiddenstore ls my-store --where 'tokens>4096' -q"))
@click.argument("store", type=STORE)
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Rows to print; 0 prints all."
)
@click.option("--where", multiple=True, metavar="TEST", help="tokens>4096, supervised>0, share<0.1, split=train, …")
@common_options
def ls(store: str, limit: int, where: tuple[str, ...]) -> None:
    """The samples of STORE: length, what is trained on, split and unit. -q prints ids only."""
    from hiddenstore.inspect.samples import parse_where, samples

    opened = open_store(store)
    rows, matching = samples(opened, parse_where(where), limit or None)
    document = {"path": opened.path, "samples": len(opened), "matching": matching, "rows": rows}
    output().data(document, human=lambda: _show_samples(rows), quiet="\n".join(row["id"] for row in rows))
    output().note(f"{len(rows):,} of {matching:,} samples" + (f" ({len(opened):,} in the store)" if where else ""))
    if rows:
        output().hint("hiddenstore", "show", store, rows[0]["id"][:8])


def _show_samples(rows: Sequence[Mapping[str, Any]]) -> None:
    output().table(
        (">#", "sample", "split", ">tokens", ">trained", ">share", Column("unit", wide=True, style="dim")),
        (
            (
                count(row["index"]),
                row["id"][:_DIGEST_SHOWN],
                row["split"],
                count(row["tokens"]),
                count(row["supervised"]),
                percent(row["supervised"] / row["tokens"]),
                row["unit"],
            )
            for row in rows
        ),
    )


@click.command(epilog=examples("hiddenstore show my-store", "hiddenstore show my-store 4f2a --all"))
@click.argument("store", type=STORE)
@click.argument("sample", default="0")
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=600,
    show_default=True,
    help="Print at most this many tokens of text.",
)
@click.option("--all", "all_tokens", is_flag=True, help="Print the whole text.")
@common_options
def show(store: str, sample: str, tokens: int, all_tokens: bool) -> None:
    """One SAMPLE of STORE: its text, trained tokens in colour, and the norms of every layer.

    SAMPLE is an index counted from 0, an id, or the start of an id.
    """
    from hiddenstore.inspect.samples import find_sample, view

    opened = open_store(store)
    document = view(opened, find_sample(opened, sample))
    output().data(document, human=lambda: _show_sample(document, document["tokens"] if all_tokens else tokens))
    following = document["index"] + 1
    if following < len(opened):
        output().hint("hiddenstore", "show", store, str(following))
    else:
        output().hint("hiddenstore", "stats", store)


def _show_sample(document: Mapping[str, Any], most_tokens: int) -> None:
    """The text turn by turn, then norms."""
    out = output()
    _heading(document["id"], f"sample {count(document['index'])} · {document['split']} · unit {document['unit']}")
    trained = f"{count(document['supervised'])} trained ({percent(document['supervised'] / document['tokens'])})"
    final = f"final hidden at {plural(document['final_rows'], 'token')}"
    images = ", ".join(f"{i['height']} × {i['width']} from token {count(i['start'])}" for i in document["images"])
    rows = [("tokens", f"{count(document['tokens'])}   {trained}   {final}")]
    out.pairs(rows + ([("images", images)] if images else []))
    out.print()
    for turn in _turns(document["pieces"], most_tokens):
        out.print(turn)
    hidden = document["tokens"] - most_tokens
    if hidden > 0:
        out.print(Text(f"  … {plural(hidden, 'more token')} (--all prints them)", style="dim"))
    if not _has_colour():
        out.print("  trained text stands in ⟦ ⟧")
    out.print()
    loudest = _largest(row["rms_median"] for row in document["norms"])
    out.table(
        ("norms", ">rows", ">first", ">median", ">max", "", "along the text"),
        (
            (
                row["field"],
                count(row["rows"]),
                *(number(row[name], 3) for name in ("rms_first", "rms_median", "rms_max")),
                _bar(row["rms_median"] / loudest, 8),
                Text(spark(row["profile"]), style="cyan"),
            )
            for row in document["norms"]
        ),
    )


def _turns(pieces: Sequence[Mapping[str, Any]], most_tokens: int) -> Iterable[Any]:
    """A role line and the indented text of each run of pieces with one role, cut after ``most_tokens`` tokens."""
    shown = [piece for piece in pieces if piece["start"] < most_tokens]
    for role, turn in groupby(shown, key=lambda piece: piece["role"]):
        texts = list(turn)
        name = role or "template"
        start = f"  from token {count(texts[0]['start'])}"
        yield Text.assemble("  ", (name, _ROLE_STYLES.get(name, "dim")), (start, "dim"))
        yield Padding(Text().join(_piece_text(piece, most_tokens) for piece in texts), (0, 0, 0, 4))


def _piece_text(piece: Mapping[str, Any], most_tokens: int) -> Text:
    text, length = clean(piece["text"]), piece["end"] - piece["start"]
    if piece["end"] > most_tokens:
        text = text[: max(1, len(text) * (most_tokens - piece["start"]) // length)] + "…"
    if not piece["supervised"]:
        return Text(text, style="" if piece["role"] else "dim")
    return Text(text, style="bold green") if _has_colour() else Text(f"⟦{text}⟧")


def _has_colour() -> bool:
    console = output().out
    return console.is_terminal and not console.no_color and console.color_system is not None


def _largest(values: Iterable[float | None]) -> float:
    """The largest number, to draw others against; 1 where there is none above 0."""
    return max((value for value in values if value is not None and isfinite(value)), default=0.0) or 1.0


def _bar(share: float, width: int) -> Text:
    return Text(bar(share, width), style="cyan")


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


@click.command(epilog=examples("hiddenstore stats my-store", "hiddenstore stats my-store --json"))
@click.argument("store", type=STORE)
@common_options
def stats(store: str) -> None:
    """Lengths, splits, bytes and norms per layer over all of STORE. Reads metadata only."""
    from hiddenstore.inspect import facts

    document = facts.stats(open_store(store))
    output().data(document, human=lambda: _show_stats(document))
    output().hint("hiddenstore", "verify", split_snapshot(store)[0], "--meaning")


def _show_stats(document: Mapping[str, Any]) -> None:
    """Splits, histogram, norms, bytes."""
    out = output()
    _heading(document["path"], plural(document["samples"], "sample"))
    counted = ("samples", "tokens", "supervised_tokens")
    out.table(
        ("split", ">samples", ">tokens", ">trained", ">share", ">longest"),
        (
            (name, *(count(part[key]) for key in counted), percent(part["supervised_share"]), count(part["longest"]))
            for name, part in document["splits"].items()
        ),
    )
    counts, edges = (document["lengths"]["histogram"][name] for name in ("counts", "edges"))
    top = _largest(counts)
    out.print()
    out.table(
        (">tokens per sample", ">samples", ""),
        ((f"{count(edges[i] + 1)}–{count(edges[i + 1])}", count(n), _bar(n / top, 32)) for i, n in enumerate(counts)),
    )
    loudest = _largest(row["rms_median"] for row in document["layers"])
    out.print()
    out.table(
        ("norms", ">rows", ">mean", ">median", ">max", ">|value|", ">raw rows", ""),
        (
            (
                row["field"],
                count(row["rows"]),
                *(_or_dash(row[name], number) for name in ("rms_mean", "rms_median", "rms_max", "abs_max")),
                count(row["raw_rows"]),
                _bar((row["rms_median"] or 0.0) / loudest, 10),
            )
            for row in document["layers"]
        ),
    )
    total = sum(document["bytes"].values()) or 1
    out.print()
    out.table(
        ("bytes of", ">size", ">share", ""),
        ((name, size(n), percent(n / total), _bar(n / total, 24)) for name, n in document["bytes"].items()),
    )
    if document["rejects"]:
        out.print()
        out.table(("rejected because", ">samples"), ((name, count(n)) for name, n in document["rejects"].items()))


@click.command(
    epilog=examples("hiddenstore diff raw-store q8-store", "hiddenstore diff with-vllm with-hf --tolerance 0.01")
)
@click.argument("a", type=STORE)
@click.argument("b", type=STORE)
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Common samples to compare in numbers; 0: all of them.",
)
@click.option(
    "--tolerance",
    type=FiniteRange(min=0),
    help="Equal means: target, layers and samples are the same, and no row differs by more than this of its length "
    "(one bf16 step is at most 0.008); engine and recipe may differ.",
)
@common_options
def diff(a: str, b: str, samples: int, tolerance: float | None) -> None:
    """How the stores or snapshots A and B differ: capture, samples held, and the states of samples both hold.

    Exits 3 when anything differs, or with --tolerance when more than that does. Numbers are B minus A.
    """
    from hiddenstore.inspect.compare import compare
    from hiddenstore.writer import capture_differences

    stores = open_store(a), open_store(b)
    common = len(set(stores[0].sample_ids) & set(stores[1].sample_ids))
    with Progress("compare", total=min(common, samples or common), unit="samples") as progress:
        comparison = compare(*stores, max_samples=samples or None, advance=progress.advance)
    names = (f"{store.path}{_at_snapshot(text)}" for store, text in zip(stores, (a, b), strict=True))
    document = {**dict(zip("ab", names, strict=True)), **comparison.document(), "tolerance": tolerance}
    if tolerance is not None:
        document["beyond_tolerance"] = comparison.beyond(tolerance)
    output().data(document, human=lambda: _show_diff(document))
    differences = capture_differences(stores[0].manifest, stores[1].manifest)
    if not all(line.startswith(("capture.codecs.", "container:")) for line in differences):
        output().hint("hiddenstore", "info", b)
    elif comparison.only_a or comparison.only_b:
        output().hint("hiddenstore", "copy", a, b, "merged-store")
    else:
        output().hint("hiddenstore", "verify", split_snapshot(b)[0], "--meaning")
    if comparison.different if tolerance is None else document["beyond_tolerance"]:
        raise click.exceptions.Exit(_DIFFERENT_EXIT)


def _at_snapshot(text: str) -> str:
    snapshot = split_snapshot(text)[1]
    return "" if snapshot is None else f"@{snapshot}"


def _show_diff(document: Mapping[str, Any]) -> None:
    """Schema, coverage, numbers, verdict."""
    out = output()
    _heading("A " + document["a"])
    _heading("B " + document["b"])
    if document["schema_differences"]:
        out.table(
            ("capture differs in", Column("A", wide=True), Column("B", wide=True)),
            ((item["field"], _setting(item["a"]), _setting(item["b"])) for item in document["schema_differences"]),
        )
    else:
        out.print("  capture: equal")
    only_a, both, only_b = (count(document["coverage"][name]) for name in ("only_a", "both", "only_b"))
    out.print(f"  samples: {only_a} only in A · {both} in both · {only_b} only in B")
    for name, text in (("other_split", "in another split"), ("other_spans", "with other turn spans")):
        if document[name]:
            out.print(f"  of those in both, {count(document[name])} {text}")
    if document["not_compared"]:
        out.print(f"  states: not compared, {document['not_compared']}")
    else:
        _show_field_differences(document)
    for reason in document.get("beyond_tolerance", ()) if document["different"] else ():
        out.print(Text(f"  different: {reason}", style="yellow"))
    if not document["different"]:
        out.print(Text("  equal", style="green"))
    elif document["tolerance"] is None:
        out.print(Text("  different", style="yellow"))
    elif not document["beyond_tolerance"]:
        out.print(Text(f"  equal within {document['tolerance']:g}", style="green"))


def _show_field_differences(document: Mapping[str, Any]) -> None:
    out = output()
    out.print(f"  states of {plural(document['compared_samples'], 'common sample')}:")
    out.table(
        ("field", ">rows", ">different", ">max |B-A|", ">relative", ">worst row", ">cosine"),
        (
            (
                row["field"],
                count(row["rows"]),
                percent(row["different_rows"] / row["rows"]) if row["rows"] else "–",
                number(row["max_abs"], 3),
                *(_or_dash(row[name], percent) for name in ("relative", "worst_relative")),
                _or_dash(row["cosine"], "{:.6f}".format),
            )
            for row in document["fields"]
        ),
    )
    for row in document["fields"]:
        if row["nonfinite_rows"]:
            out.print(f"  {row['field']}: {plural(row['nonfinite_rows'], 'row')} not finite on one side")
    if document["final_normed"]:
        out.print("  final: compared after the final norm, which one side holds it before and the other after")
    if document["top1_agreement"] is not None:
        share, rows = percent(document["top1_agreement"]), plural(document["top1_rows"], "row")
        out.print(f"  next token (argmax through the head) agrees on {share} of {rows}")


def _setting(value: Any) -> str:
    """A value of store.json; of a digest its first characters."""
    if isinstance(value, str) and len(value) == 64:
        return value[:_DIGEST_SHOWN] + "…"
    return "–" if value is None else str(value)
