"""``hiddenstore collect``."""

from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.layout import CONTAINER_NAMES

if TYPE_CHECKING:
    from collectors.job import CollectReport


@click.command(
    epilog=examples(
        "hiddenstore collect DATA -o STORE --target ./target",
        "hiddenstore collect DATA -o STORE --target Qwen/Qwen3-8B --layers all-drafters --recipe lossless",
        "torchrun --nproc-per-node 8 -m hiddenstore.cli collect DATA -o STORE --target Qwen/Qwen3-8B",
    )
)
@click.argument("data", type=click.Path())
@click.option("-o", "--out", "store", required=True, type=click.Path(), help="The store; the same command resumes.")
@click.option("--target", required=True, help="A local folder or a hub id.")
@click.option("--revision", help="Commit, tag or branch of a hub id.")
@click.option("--template", type=click.Path(), help="The chat template file that prepare was given.")
@click.option("--engine", default="hf", show_default=True, help="What runs the target: hf.")
@click.option(
    "--layers",
    default="eagle3",
    show_default=True,
    help="eagle3, dflash, eagle1, medusa, all-drafters, or numbers such as 1,15,28 (-1 = embeddings).",
)
@click.option("--final", type=click.Choice(["supervised", "all", "none"]), help="Rows of the final hidden to keep.")
@click.option(
    "--recipe",
    default="safe",
    show_default=True,
    help="safe, compact, tiny, lossless or raw; per field: aux=q4,final=q8; auto: measure first, as advise does.",
)
@click.option(
    "--container",
    type=click.Choice(CONTAINER_NAMES),
    default=CONTAINER_NAMES[0],
    show_default=True,
    help="What a segment is: a Zarr group, or a tar that stock webdataset iterates.",
)
@click.option("--batch-tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens per forward.")
@click.option("--dtype", help="bf16, fp16 or fp32; default: the checkpoint's own.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 …")
@common_options
def collect(store: str, **asked: Any) -> None:
    """Capture the target's hidden states over prepared DATA into a store.

    Resumable: what is committed stays, the same command does the rest, under any number of workers (torchrun, SLURM).
    Ctrl-C or SIGTERM drops the open unit and exits 75.
    """
    from collectors.job import CollectOptions
    from collectors.job import collect as run
    from hiddenstore.cli.terminal import plural
    from hiddenstore.rank import drain_on_signal, from_environment

    out = output()
    options = CollectOptions(store=store, **asked)
    with drain_on_signal() as drain:
        report = run(options, from_environment(), drain, out.note)
    out.data(_document(report), human=lambda: out.pairs(_lines(report)))
    if report.pending_units:
        out.note(
            f"{plural(report.pending_units, 'unit')} still pending: other ranks' share, or run the same command again"
        )
    out.hint("hiddenstore", "verify", store, "--meaning")


def _document(report: "CollectReport") -> dict[str, object]:
    return {
        "store": report.store,
        "input": report.input,
        "units": report.units,
        "samples": report.samples,
        "tokens": report.tokens,
        "bytes_stored": report.bytes_stored,
        "rejects": dict(report.rejects),
        "units_before": report.resumed_units,
        "units_pending": report.pending_units,
        "seconds": round(report.seconds, 3),
        "forward_s": round(report.forward_s, 3),
        "wait_s": round(report.wait_s, 3),
        "tokens_per_s": round(report.tokens_per_s, 1),
    }


def _lines(report: "CollectReport") -> list[tuple[str, str]]:
    from hiddenstore.cli.terminal import size

    rejects = ", ".join(f"{count} {reason}" for reason, count in sorted(report.rejects.items())) or "none"
    before = f" ({report.resumed_units} were committed before)" if report.resumed_units else ""
    per_token = f", {report.bytes_stored / report.tokens:,.0f} bytes per token" if report.tokens else ""
    lines = [
        ("store", report.store),
        ("units", f"{report.units}{before}"),
        ("samples", f"{report.samples:,}"),
        ("tokens", f"{report.tokens:,} at {report.tokens_per_s:,.0f} tokens/s"),
        ("written", f"{size(report.bytes_stored)}{per_token}"),
        ("rejects", rejects),
    ]
    if report.seconds:
        forward, wait = 100 * report.forward_s / report.seconds, 100 * report.wait_s / report.seconds
        lines.append(("time", f"{report.seconds:.1f} s: target {forward:.0f} %, waiting for writes {wait:.0f} %"))
    return lines
