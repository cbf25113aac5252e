"""How the document of diff looks on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from hiddenstore.cli.look_views import heading
from hiddenstore.cli.output import output
from hiddenstore.cli.table import Column
from hiddenstore.cli.terminal import count, number, percent, plural

_DIGEST_SHOWN = 12


def diff_view(document: Mapping[str, Any]) -> None:
    """Schema, coverage, numbers, verdict."""
    out = output()
    heading("A " + document["a"], "")
    heading("B " + document["b"], "")
    if document["schema_differences"]:
        out.table(
            ("capture differs in", Column("A", wide=True), Column("B", wide=True)),
            ((item["field"], _value(item["a"]), _value(item["b"])) for item in document["schema_differences"]),
        )
    else:
        out.print("  capture: equal")
    coverage = document["coverage"]
    out.print(
        f"  samples: {count(coverage['only_a'])} only in A · {count(coverage['both'])} in both · "
        f"{count(coverage['only_b'])} only in B"
    )
    for name, text in (("other_split", "in another split"), ("other_spans", "with other turn spans")):
        if document[name]:
            out.print(f"  of those in both, {count(document[name])} {text}")
    if document["not_compared"]:
        out.print(f"  states: not compared, {document['not_compared']}")
    else:
        _diff_fields(document)
    _verdict(document)


def _diff_fields(document: Mapping[str, Any]) -> None:
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
                "–" if row["relative"] is None else percent(row["relative"]),
                "–" if row["worst_relative"] is None else percent(row["worst_relative"]),
                "–" if row["cosine"] is None else f"{row['cosine']:.6f}",
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
        agreement = percent(document["top1_agreement"])
        out.print(
            f"  next token (argmax through the head) agrees on {agreement} of {plural(document['top1_rows'], 'row')}"
        )


def _verdict(document: Mapping[str, Any]) -> None:
    out = output()
    if document["tolerance"] is None or not document["different"]:
        same = not document["different"]
        out.print(Text("  equal", style="green") if same else Text("  different", style="yellow"))
        return
    for reason in document["beyond_tolerance"]:
        out.print(Text(f"  different: {reason}", style="yellow"))
    if not document["beyond_tolerance"]:
        out.print(Text(f"  equal within {document['tolerance']:g}", style="green"))


def _value(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:_DIGEST_SHOWN] + "…"
    return "–" if value is None else str(value)
