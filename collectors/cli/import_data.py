"""``hiddenstore import``: another project's dump into a store."""

from typing import TYPE_CHECKING, Any

import click

from collectors.cli.options import container_option, revision_option
from collectors.cli.prepare import Share
from collectors.importers import FORMATS
from hiddenstore.cli.output import common_options, examples, output

if TYPE_CHECKING:
    from collectors.importers.report import ImportReport


@click.command(
    "import",
    epilog=examples(
        "hiddenstore import cache/hidden_states --from specforge-eagle3 -o store --target Qwen/Qwen3-8B",
        "hiddenstore import dump --from modelopt-vllm -o store --target T --peer-layers 2,18,33 --tokens-from data",
        "hiddenstore import training_data --from speculators -o store --target T --recipe lossless --delete-source",
    ),
)
@click.argument("source", type=click.Path(), metavar="SRC")
@click.option("--from", "peer", required=True, metavar="FORMAT", help=f"Who wrote it: {', '.join(FORMATS)}.")
@click.option("-o", "--out", "store", required=True, type=click.Path(), help="The store; the same command goes on.")
@click.option("--target", required=True, help="The target the dump was made with: a local folder or a hub id.")
@revision_option
@click.option("--template", type=click.Path(), help="The chat template file that the conversations were rendered with.")
@click.option("--layers", help="Layers of the dump's columns: eagle3, dflash or 1,15,28 (by their output, from 0).")
@click.option("--peer-layers", help="The same, as the ids that the dump was made with.")
@click.option("--norm", type=click.Choice(["pre", "post"]), help="The final hidden is before or after the final norm.")
@click.option(
    "--tokens-from",
    type=click.Path(),
    metavar="DATA",
    help="Prepared DATA of the same conversations: true ends, masks, turns and split.",
)
@click.option("--loss-on", type=click.Choice(["all"]), help="Train on every token of a dump without loss masks.")
@click.option(
    "--val", "validation", type=Share(), default="1%", show_default=True, help="Share held out where nothing says so."
)
@click.option(
    "--recipe",
    default="safe",
    show_default=True,
    help="safe, compact, tiny, lossless or raw; per field: aux=q4,final=q8.",
)
@container_option
@click.option(
    "--max-rejects", type=Share(), default="0.1%", show_default=True, help="Share of samples that may be unusable."
)
@click.option(
    "--check",
    default="auto",
    show_default=True,
    help="hf: hold the layers against Hugging Face's; auto: where the target fits half of the free memory; none.",
)
@click.option("--delete-source", is_flag=True, help="Delete each file once all it holds is committed and read back.")
@common_options
def import_data(peer: str, norm: str | None, **asked: Any) -> None:
    """Bring another project's dump of hidden states into a store.

    What the numbers mean follows from FORMAT, and the first samples are held against it before anything is written.
    What no file says is asked for. Samples that cannot be used are listed with their reason. Torch files are read by a
    limited process that runs no code of theirs.
    """
    from collectors.importers.job import import_dump
    from collectors.importers.opening import ImportOptions
    from hiddenstore.rank import drain_on_signal

    out = output()
    options = ImportOptions(peer=peer, norm=None if norm is None else f"{norm}_norm", **asked)  # type: ignore[arg-type]
    with drain_on_signal() as drain:
        report = import_dump(options, drain, out.note)
    out.data(_document(report), human=lambda: out.pairs(_lines(report)))
    if report.rounded:
        out.warn(f"{report.rounded:,} samples held wider numbers than bf16 and were rounded")
    if options.delete_source and report.kept_files:
        out.note(f"{report.kept_files:,} source files stay: not everything in them is in the store")
    if report.units or report.resumed_units:
        out.hint("hiddenstore", "verify", report.store, "--meaning")


def _document(report: "ImportReport") -> dict[str, object]:
    return {
        "store": report.store,
        "from": report.peer,
        "inputs": report.inputs,
        "layers": report.explained,
        "final_norm": report.final_norm,
        "units": report.units,
        "samples": report.samples,
        "tokens": report.tokens,
        "bytes_stored": report.bytes_stored,
        "rejects": dict(report.rejects),
        "skipped": dict(report.skipped),
        "units_before": report.resumed_units,
        "units_pending": report.pending_units,
        "padding_rows": report.padding,
        "rounded_samples": report.rounded,
        "deleted_files": report.deleted_files,
        "evidence": report.evidence.document(),
        "seconds": round(report.seconds, 3),
    }


def _lines(report: "ImportReport") -> list[tuple[str, str]]:
    from hiddenstore.cli.terminal import size

    before = f" ({report.resumed_units} were committed before)" if report.resumed_units else ""
    per_token = f", {report.bytes_stored / report.tokens:,.0f} bytes per token" if report.tokens else ""
    lines = [
        ("store", report.store),
        ("units", f"{report.units}{before}"),
        ("samples", f"{report.samples:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("written", f"{size(report.bytes_stored)}{per_token}"),
        ("rejects", _counts(report.rejects)),
    ]
    if report.skipped:
        lines.append(("skipped", _counts(report.skipped)))
    if report.padding:
        lines.append(("padding", f"{report.padding:,} rows left behind"))
    if report.deleted_files:
        lines.append(("deleted", f"{report.deleted_files:,} source files"))
    found = report.evidence
    if found.next_token_top1 is not None:
        text = f"top-1 of the next token {found.next_token_top1:.0%} on supervised spans of {found.samples} samples"
        lines.append(("meaning", text))
    return lines


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counted.items())) or "none"
