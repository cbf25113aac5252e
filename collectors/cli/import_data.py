"""``hiddenstore import``: another project's dump into a store."""

from typing import TYPE_CHECKING, Any

import click

from collectors.cli.options import container_option, counts, job_document, job_lines
from collectors.cli.prepare import Share
from collectors.engines.dump import FORMATS
from hiddenstore.cli.words import remote_code_option, revision_option
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, RECIPE_HELP
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.process import drain_on_signal

if TYPE_CHECKING:
    from collectors.capture.import_job import ImportReport


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
@click.option("--target", required=True, help="What the dump was made with: a local folder, a GGUF file or a hub id.")
@revision_option
@remote_code_option
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
    default=DEFAULT_RECIPE,
    show_default=True,
    help=f"{RECIPE_HELP}.",
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
def import_data(norm: str | None, **options: Any) -> None:
    """Bring another project's dump of hidden states into a store.

    What the numbers mean follows from FORMAT, and the first samples are held against it before anything is written.
    What no file says is asked for. Samples that cannot be used are listed with their reason. No code of a torch file
    runs.
    """
    from collectors.capture.import_job import ImportOptions, import_dump

    out = output()
    options["norm"] = norm and f"{norm}_norm"
    with drain_on_signal() as drain:
        report = import_dump(ImportOptions(**options), drain, out.note)
    out.data(_document(report), human=lambda: out.pairs(_lines(report)))
    if report.rounded:
        out.warn(f"{report.rounded:,} samples held wider numbers than bf16 and were rounded")
    if report.units and options["validation"] > 0:
        _warn_of_no_validation(report.store)
    if options["delete_source"] and report.remaining_files:
        out.note(f"{report.remaining_files:,} source files stay: not everything in them is in the store")
    if report.changed_files:
        out.warn(
            f"{report.changed_files:,} of them have changed since they were read: what they hold may be nowhere else"
        )
    if report.units or report.resumed_units:
        out.hint("hiddenstore", "verify", report.store, "--meaning")
    elif report.skipped and "already-stored" not in report.skipped:
        why = ", ".join(f"{count:,} {reason}" for reason, count in report.skipped.items())
        raise ConfigError(f"nothing of {options['source']} can be used: {why}", kind=Kind.NOTHING_USABLE)


def _warn_of_no_validation(location: str) -> None:
    from hiddenstore.index.table import SPLITS
    from hiddenstore.store import Store

    if not (Store.open(location).catalog.table.split == SPLITS.index("validation")).any():
        output().warn("no sample fell into the validation split, which eval reads; a larger --val gives it some")


def _document(report: "ImportReport") -> dict[str, Any]:
    return job_document(report) | {
        "from": report.peer,
        "inputs": report.inputs,
        "layers": report.explained,
        "final_norm": report.final_norm,
        "skipped": dict(report.skipped),
        "padding_rows": report.padding,
        "rounded_samples": report.rounded,
        "deleted_files": report.deleted_files,
        "changed_files": report.changed_files,
        "evidence": report.evidence.document(),
    }


def _lines(report: "ImportReport") -> list[tuple[str, str]]:
    lines = job_lines(report)
    if report.skipped:
        lines.append(("skipped", counts(report.skipped)))
    if report.padding:
        lines.append(("padding", f"{report.padding:,} rows left behind"))
    if report.deleted_files:
        lines.append(("deleted", f"{report.deleted_files:,} source files"))
    top1, samples = report.evidence.next_token_top1, report.evidence.samples
    if top1 is not None:
        lines.append(("meaning", f"top-1 of the next token {top1:.0%} on supervised spans of {samples} samples"))
    return lines
