"""``hiddenstore collect``."""

from typing import TYPE_CHECKING, Any

import click

from collectors.cli.options import (
    container_option,
    engine_flags,
    engine_option,
    job_document,
    job_lines,
    layers_type,
    recipe_type,
    server_option,
    tensor_parallel_option,
)
from hiddenstore.cli.words import DATA, same_target_option, target_options
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, RECIPE_HELP
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import plural
from hiddenstore.process import drain_on_signal
from hiddenstore.targets import LAYER_RULES

if TYPE_CHECKING:
    from collectors.capture.job import CollectReport


@click.command(
    epilog=examples(
        "hiddenstore collect DATA -o STORE --target ./target",
        "hiddenstore collect DATA -o STORE --target Qwen/Qwen3-8B --layers all-drafters --recipe lossless",
        "hiddenstore collect DATA -o STORE --target Qwen/Qwen3-32B --engine vllm --tensor-parallel 4 --check hf",
        "hiddenstore collect DATA -o STORE --target Qwen/Qwen3-8B --engine vllm --server http://127.0.0.1:8000",
        "hiddenstore collect DATA -o STORE --target Qwen/Qwen3-8B --launcher ray:8",
        "torchrun --nproc-per-node 8 -m hiddenstore.cli collect DATA -o STORE --target Qwen/Qwen3-8B",
    )
)
@click.argument("data", type=DATA)
@click.option("-o", "--out", "store", required=True, type=click.Path(), help="The store; the same command resumes.")
@click.option("--target", required=True, help="A local folder, a GGUF file or a hub id.")
@target_options
@click.option("--template", type=click.Path(), help="The chat template file that prepare was given.")
@engine_option
@click.option(
    "--check",
    default="auto",
    show_default=True,
    help="Recompute samples with Hugging Face and refuse states that differ: hf, hf=N samples a unit, none; auto: "
    "their first 512 tokens, for another engine, if that takes at most half of the free memory and ten minutes.",
)
@click.option(
    "--layers",
    type=layers_type,
    default="eagle3",
    show_default=True,
    help=f"{', '.join(LAYER_RULES)}, all-drafters, or numbers such as 1,15,28 (-1 = embeddings).",
)
@click.option("--final", type=click.Choice(["supervised", "all", "none"]), help="Rows of the final hidden to keep.")
@click.option(
    "--recipe",
    type=recipe_type,
    default=DEFAULT_RECIPE,
    show_default=True,
    help=f"{RECIPE_HELP}; auto: measure first, as advise does.",
)
@container_option
@click.option("--batch-tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens per forward.")
@click.option("--dtype", help="bf16, fp16 or fp32; default: the checkpoint's own.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1 … for Hugging Face.")
@engine_flags
@tensor_parallel_option
@click.option("--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="A setting of the engine's own.")
@server_option
@click.option("--scratch", type=click.Path(), help="RAM-backed folder for states in files; default: /dev/shm.")
@click.option(
    "--launcher",
    default="local",
    show_default=True,
    help="What starts the workers: local (this process, or torchrun's and SLURM's), ray, or ray:N for N workers.",
)
@same_target_option
@common_options
def collect(
    store: str, engine_args: tuple[str, ...], engine_flags: dict[str, str], launcher: str, **options: Any
) -> None:
    """Capture the target's hidden states over prepared DATA into a store.

    Resumable: what is committed stays, the same command does the rest, under any number of workers (torchrun, SLURM,
    Ray). Ctrl-C or SIGTERM drops the open unit and exits 75.
    """
    from collectors.capture.options import CollectOptions, read_engine_args
    from collectors.launch import launch
    from hiddenstore.threads import use_all_cores

    use_all_cores()
    out = output()
    extra = read_engine_args(engine_args) | engine_flags
    with drain_on_signal() as drain:
        report = launch(launcher, CollectOptions(store=store, extra=extra, **options), drain, out.note)
    out.data(_document(report), human=lambda: out.pairs(_lines(report)))
    if report.pending_units:
        out.note(
            f"{plural(report.pending_units, 'unit')} still pending: other ranks' share, or run the same command again"
        )
    out.hint("hiddenstore", "verify", store, "--meaning")


def _document(report: "CollectReport") -> dict[str, Any]:
    document = job_document(report) | {
        "input": report.input,
        "samples_compared": report.compared_samples,
        "forward_s": round(report.forward_s, 3),
        "compare_s": round(report.compare_s, 3),
        "wait_s": round(report.wait_s, 3),
        "tokens_per_s": round(report.tokens_per_s, 1),
    }
    if report.workers:
        document |= {"workers": report.workers, "workers_lost": report.workers_lost}
    return document


def _lines(report: "CollectReport") -> list[tuple[str, str]]:
    if report.resumed_units and not report.units and not report.pending_units:
        return [("store", report.store), ("units", f"{report.resumed_units}, committed before: nothing to do")]
    lines = job_lines(report, f" at {report.tokens_per_s:,.0f} tokens/s")
    if report.compared_samples:
        lines.append(("compared", f"{report.compared_samples} samples equal Hugging Face's"))
    if report.workers:
        lost = f", {report.workers_lost} lost and replaced" if report.workers_lost else ""
        lines.append(("workers", f"{report.workers}{lost}"))
    if report.seconds:
        share = 100 / (report.seconds * max(report.workers, 1))
        parts = {"target": report.forward_s, "comparing": report.compare_s, "waiting for writes": report.wait_s}
        shares = [f"{name} {share * s:.0f} %" for name, s in parts.items() if s or name != "comparing"]
        lines.append(("time", f"{report.seconds:.1f} s: {', '.join(shares)}"))
    return lines
