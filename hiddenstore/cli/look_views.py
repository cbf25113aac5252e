"""How the documents of info, ls, show and stats look on a terminal. Views print, and decide nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.text import Text

from hiddenstore.cli.output import output
from hiddenstore.cli.table import Column
from hiddenstore.cli.terminal import amount, bar, clean, count, number, percent, plural, size, spark
from schemas.capture import TOPK

_ROLE_STYLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
_TRAINED = "bold green"
_DIGEST_SHOWN = 12


def info_view(document: Mapping[str, Any]) -> None:
    """One screen: identity, what is captured, how much of it, how large."""
    out = output()
    heading(document["path"], f"format {document['format']} · {document['container']} · recipe {document['recipe']}")
    out.pairs(
        [
            ("target", _target_line(document["target"])),
            ("captured", captured_line(document)),
            ("codecs", f"aux {document['codecs']['aux']} · final {document['codecs']['final']}"),
            ("engine", _engine_line(document["engines"])),
            ("samples", _samples_line(document)),
            ("tokens", _tokens_line(document)),
            ("length", _length_line(document["lengths"])),
            ("size", _size_line(document)),
            ("units", _units_line(document)),
            *([("advice", _advice_line(document["advice"]))] if document["advice"] else []),
        ]
    )


def ls_view(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of samples."""
    columns = (">#", "sample", "split", ">tokens", ">trained", ">share", Column("unit", wide=True, style="dim"))
    output().table(
        columns,
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


def show_view(document: Mapping[str, Any], most_tokens: int | None) -> None:
    """The text turn by turn, then norms."""
    out = output()
    heading(document["id"], f"sample {count(document['index'])} · {document['split']} · unit {document['unit']}")
    trained = percent(document["supervised"] / document["tokens"])
    held = f"final hidden at {plural(document['final_rows'], 'token')}"
    out.pairs(
        [("tokens", f"{count(document['tokens'])}   {count(document['supervised'])} trained ({trained})   {held}")]
    )
    out.print()
    for turn in _turns(document["pieces"], most_tokens):
        out.print(turn)
    hidden = document["tokens"] - most_tokens if most_tokens is not None else 0
    if hidden > 0:
        out.print(Text(f"  … {plural(hidden, 'more token')} (--all prints them)", style="dim"))
    if not _has_colour():
        out.print("  trained text stands in ⟦ ⟧")
    out.print()
    _norms_table(document["norms"])


def stats_view(document: Mapping[str, Any]) -> None:
    """Splits, histogram, norms, bytes."""
    out = output()
    heading(document["path"], plural(document["samples"], "sample"))
    splits = document["splits"]
    out.table(
        ("split", ">samples", ">tokens", ">trained", ">share", ">longest"),
        (
            (
                name,
                count(part["samples"]),
                count(part["tokens"]),
                count(part["supervised_tokens"]),
                percent(part["supervised_share"]),
                count(part["longest"]),
            )
            for name, part in splits.items()
        ),
    )
    _histogram("tokens per sample", document["lengths"])
    out.print()
    _stats_layers(document["layers"])
    out.print()
    total = sum(document["bytes"].values()) or 1
    out.table(
        ("bytes of", ">size", ">share", ""),
        (
            (name, size(value), percent(value / total), Text(bar(value / total, 24), style="cyan"))
            for name, value in document["bytes"].items()
        ),
    )
    if document["rejects"]:
        out.print()
        out.table(("rejected because", ">samples"), ((name, count(n)) for name, n in document["rejects"].items()))


def heading(title: str, more: str) -> None:
    """A bold title and dim words after it."""
    output().out.print(
        Text.assemble((clean(title), "bold"), (f"   {clean(more)}" if more else "", "dim")), soft_wrap=True
    )


def captured_line(document: Mapping[str, Any]) -> str:
    """``layers 1, 15, 28 + final (pre-norm, supervised rows)``, or what stands in for the final hidden."""
    layers = ", ".join("embeddings" if k == -1 else str(k) for k in document["layers"])
    rows = {"supervised": "rows around supervised spans", "all": "every token"}.get(document["final"], "")
    final = f"final ({document['final_norm'].replace('_', '-')}, {rows})" if document["final"] != "none" else "no final"
    if document["final"] != "none" and document["codecs"]["final"] == TOPK:
        final = f"the target's top tokens in place of the final hidden ({rows})"
    return f"{'layers ' + layers if layers else 'no aux layers'} + {final}"


def _target_line(target: Mapping[str, Any]) -> str:
    revision = f" @ {target['revision'][:12]}" if target["revision"] else ""
    shape = f"{target['model_type']} · {plural(target['num_layers'], 'layer')} · width {count(target['hidden_size'])}"
    return f"{target['name']}{revision}   {shape} · vocabulary {count(target['vocab_size'])}"


def _engine_line(engines: Sequence[Mapping[str, Any]]) -> str:
    if not engines:
        return "nothing captured yet"
    names = [f"{engine['name']} {engine['version']}" for engine in engines]
    versions = " · ".join(f"{name} {version}" for name, version in engines[0]["versions"].items())
    return ", ".join(names) + (f"   {versions}" if versions and len(engines) == 1 else "")


def _samples_line(document: Mapping[str, Any]) -> str:
    splits = " · ".join(f"{name} {count(n)}" for name, n in document["splits"].items())
    text = f"{count(document['samples'])}   {splits}".rstrip()
    if document["duplicates"]:
        text += f"   {count(document['duplicates'])} stored twice"
    if document["rejects"]:
        reasons = ", ".join(f"{count(n)} {reason}" for reason, n in document["rejects_by_reason"].items())
        text += f"   rejected {count(document['rejects'])}: {reasons}"
    return text


def _tokens_line(document: Mapping[str, Any]) -> str:
    tokens = document["tokens"]
    share = f"   {percent(document['supervised_tokens'] / tokens)} trained" if tokens else ""
    return amount(tokens) + share


def _length_line(lengths: Mapping[str, Any]) -> Text:
    numbers = f"p50 {count(lengths['p50'])} · p95 {count(lengths['p95'])} · max {count(lengths['max'])}   "
    return Text.assemble(numbers, (spark(lengths["histogram"]["counts"]), "cyan"))


def _size_line(document: Mapping[str, Any]) -> str:
    stored, raw = document["bytes_stored"], document["bytes_raw"]
    if not stored:
        return "0 B"
    per_token = f"{size(stored / document['tokens'])} per token" if document["tokens"] else ""
    return f"{size(stored)}   from {size(raw)} as bf16 ({raw / stored:.2f}×)   {per_token}"


def _advice_line(advice: Mapping[str, Any]) -> str:
    """Per recipe the bytes of a token and what it costs, the chosen one first."""
    rows = sorted(advice["rows"], key=lambda row: not row["chosen"])
    lines = []
    for row in rows:
        if row["recipe"] not in ("safe", "compact", "tiny") and not row["chosen"]:
            continue
        kl = "" if row["kl"] is None else f", KL {row['kl']:.1e}"
        error = "" if row["channel_error"] is None else f", channel error {percent(row['channel_error'])}"
        mark = " (chosen)" if row["chosen"] else ""
        lines.append(f"{row['recipe']}{mark}  {row['bytes_per_token']:,.0f} B/token{kl}{error}")
    for row in advice["paired"]:
        lines.append(
            f"{row['recipe']} trained: {100 * row['difference']:+.2f} ± {100 * row['standard_error']:.2f} points of "
            "acceptance"
        )
    return "\n".join(lines)


def _units_line(document: Mapping[str, Any]) -> str:
    words = [count(document["units"]), f"from {plural(document['inputs'], 'input')}"]
    if document["snapshots"]:
        words.append("snapshots " + ", ".join(document["snapshots"]))
    return "   ".join(words)


def _turns(pieces: Sequence[Mapping[str, Any]], most_tokens: int | None) -> Iterable[Any]:
    """A role line and the indented text of each run of pieces with one role, cut after ``most_tokens`` tokens."""
    turn, role = Text(), None
    begun = False
    for piece in pieces:
        if most_tokens is not None and piece["start"] >= most_tokens:
            break
        if not begun or piece["role"] != role:
            if begun:
                yield Padding(turn, (0, 0, 0, 4))
            turn, role, begun = Text(), piece["role"], True
            name = role or "template"
            style = _ROLE_STYLES.get(name, "dim")
            yield Text.assemble("  ", (name, style), (f"  from token {count(piece['start'])}", "dim"))
        turn.append_text(_piece_text(piece, most_tokens))
    if begun:
        yield Padding(turn, (0, 0, 0, 4))


def _piece_text(piece: Mapping[str, Any], most_tokens: int | None) -> Text:
    text, length = clean(piece["text"]), piece["end"] - piece["start"]
    if most_tokens is not None and piece["end"] > most_tokens:
        text = text[: max(1, len(text) * (most_tokens - piece["start"]) // length)] + "…"
    if not piece["supervised"]:
        return Text(text, style="" if piece["role"] else "dim")
    return Text(text, style=_TRAINED) if _has_colour() else Text(f"⟦{text}⟧")


def _has_colour() -> bool:
    console = output().out
    return console.is_terminal and not console.no_color and console.color_system is not None


def _norms_table(norms: Sequence[Mapping[str, Any]]) -> None:
    loudest = max((row["rms_median"] for row in norms), default=0.0) or 1.0
    output().table(
        ("norms", ">rows", ">first", ">median", ">max", "", "along the text"),
        (
            (
                row["field"],
                count(row["rows"]),
                number(row["rms_first"], 3),
                number(row["rms_median"], 3),
                number(row["rms_max"], 3),
                Text(bar(row["rms_median"] / loudest, 8), style="cyan"),
                Text(spark(row["profile"]), style="cyan"),
            )
            for row in norms
        ),
    )


def _histogram(title: str, lengths: Mapping[str, Any]) -> None:
    counts, edges = lengths["histogram"]["counts"], lengths["histogram"]["edges"]
    top = max(counts, default=0) or 1
    output().print()
    output().table(
        (f">{title}", ">samples", ""),
        (
            (f"{count(edges[i] + 1)}–{count(edges[i + 1])}", count(n), Text(bar(n / top, 32), style="cyan"))
            for i, n in enumerate(counts)
        ),
    )


def _stats_layers(layers: Sequence[Mapping[str, Any]]) -> None:
    medians = [row["rms_median"] or 0.0 for row in layers]
    loudest = max(medians, default=0.0) or 1.0
    output().table(
        ("norms", ">rows", ">mean", ">median", ">max", ">|value|", ">raw rows", ""),
        (
            (
                row["field"],
                count(row["rows"]),
                *("–" if row[name] is None else number(row[name]) for name in ("rms_mean", "rms_median")),
                *("–" if row[name] is None else number(row[name]) for name in ("rms_max", "abs_max")),
                count(row["raw_rows"]),
                Text(bar(median / loudest, 10), style="cyan"),
            )
            for row, median in zip(layers, medians, strict=True)
        ),
    )
