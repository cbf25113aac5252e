"""``hiddenstore plan`` and ``collect``."""

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
from hiddenstore.cli.words import (
    DATA,
    FiniteRange,
    remote_code_option,
    revision_option,
    same_target_option,
    target_options,
)
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, RECIPE_HELP
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import count, plural, seconds, size
from hiddenstore.inspect.expect import expectation
from hiddenstore.process import drain_on_signal
from hiddenstore.segments import CONTAINERS
from hiddenstore.targets import LAYER_RULES

if TYPE_CHECKING:
    from collectors.capture.estimate import Plan
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
    help="Recompute samples with Hugging Face and refuse states that differ: hf, hf=N samples a unit, none; auto: hf "
    "for another engine, if the weights take at most half of the free memory.",
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
        forward, wait = share * report.forward_s, share * report.wait_s
        lines.append(("time", f"{report.seconds:.1f} s: target {forward:.0f} %, waiting for writes {wait:.0f} %"))
    return lines


@click.command(
    epilog=examples(
        "hiddenstore plan DATA --target Qwen/Qwen3-8B",
        "hiddenstore plan DATA --target ./target --layers all-drafters --out /data/store --rate 6000",
    )
)
@click.argument("data", type=DATA)
@click.option("--target", required=True, help="A local folder, a GGUF file or a hub id; its weights are not read.")
@revision_option
@remote_code_option
@click.option("--template", type=click.Path(), help="The chat template file that prepare was given.")
@click.option("--layers", type=layers_type, default="eagle3", show_default=True, help="As for collect.")
@click.option("--final", type=click.Choice(["supervised", "all", "none"]), help="As for collect.")
@click.option(
    "--recipe", type=recipe_type, default=DEFAULT_RECIPE, show_default=True, help="The recipe to mark, as for collect."
)
@click.option("--container", type=click.Choice(tuple(CONTAINERS)), help="As for collect.")
@click.option("-o", "--out", default=".", type=click.Path(), help="Where the store will be: its free space is shown.")
@click.option("--rate", type=FiniteRange(min=0, min_open=True), help="Tokens/s that collect reached; gives hours.")
@common_options
def plan(data: str, target: str, template: str | None, **options: Any) -> None:
    """How many bytes, files and hours a collect needs, before anything is written."""
    from collectors.capture.estimate import make_plan
    from collectors.capture.options import require_data_fits, resolve_recipe
    from collectors.targets.layers import choose_layers
    from collectors.tokenize.template import read_template
    from hiddenstore.inputs import PreparedInput
    from hiddenstore.targets.folder import open_target

    out = output()
    info = PreparedInput.open(data).info
    folder = open_target(target, options["revision"], read_template(template), options["trust_remote_code"])
    require_data_fits(info, folder)
    choice = choose_layers(options["layers"], options["final"], folder.num_layers)
    recipe = resolve_recipe(options["recipe"], choice, folder.num_layers, info.images is not None)
    needs = make_plan(info, folder, choice, recipe, options["out"], options["rate"], options["container"])
    document = {
        "samples": info.samples,
        "tokens": info.tokens,
        "supervised_tokens": info.supervised_tokens,
        "layers": list(choice.aux_layers),
        "final": choice.final,
        "recipe": needs.recipe,
        "container": needs.container,
        "bytes_raw": needs.bytes_raw,
        "bytes_free": needs.bytes_free,
        "hours": needs.hours,
        "recipes": [
            vars(row) | {"bytes_on_disk": row.bytes_on_disk, "fits": row.recipe in needs.fitting}
            for row in needs.estimates
        ],
    }
    out.data(document, human=lambda: _show_plan(needs))
    if needs.recipe not in needs.fitting:
        _warn_of_room(needs)
        out.hint("hiddenstore", "plan", data, "--target", target, "-o", "ANOTHER_DISK/STORE")
        return
    store = "STORE" if options["out"] == "." else options["out"]
    capture = {"template": template, "revision": options["revision"], "layers": options["layers"]}
    capture |= {"final": options["final"], "container": options["container"]}
    defaults = (None, "eagle3")
    words = [word for name, value in capture.items() if value not in defaults for word in (f"--{name}", str(value))]
    out.hint("hiddenstore", "collect", data, "-o", store, "--target", target, "--recipe", needs.recipe, *words)


def _warn_of_room(needs: "Plan") -> None:
    needed = next(row.bytes_on_disk for row in needs.estimates if row.recipe == needs.recipe)
    others = f"what fits: {', '.join(needs.fitting)}" if needs.fitting else "no recipe fits"
    output().warn(f"{needs.recipe} needs {size(needed)} and {size(needs.bytes_free or 0)} are free; {others}")


def _show_plan(needs: "Plan") -> None:
    out = output()
    hours = (
        "give --rate TOKENS_PER_S for hours" if needs.hours is None else f"{seconds(3600 * needs.hours)} at that rate"
    )
    out.pairs(
        [
            ("tokens", f"{count(needs.info.tokens)} in {plural(needs.info.samples, 'sample')}"),
            ("captured", needs.choice.explained),
            ("raw", f"{size(needs.bytes_raw)}: bf16 of every layer and of the final hidden at every token"),
            ("free", "no end of it" if needs.bytes_free is None else size(needs.bytes_free)),
            ("time", hours),
        ]
    )
    rows = [
        (
            f"{row.recipe} (chosen)" if row.recipe == needs.recipe else row.recipe,
            size(row.bytes_stored),
            size(row.bytes_on_disk),
            f"{needs.bytes_raw / row.bytes_stored:.1f}x",
            f"{row.bytes_per_token:,.0f}",
            count(row.segments),
            count(row.files),
            "yes" if row.recipe in needs.fitting else "no",
        )
        for row in needs.estimates
    ]
    out.table(["recipe", ">size", ">on disk", ">smaller", ">bytes/token", ">segments", ">files", "fits"], rows)
    _note_of_blocks(needs)
    out.note(f"for scale: {expectation(needs.info.tokens)}")


def _note_of_blocks(needs: "Plan") -> None:
    """What states that are not stored save, and what bringing them back takes."""
    rebuilt = next((row for row in needs.estimates if row.recipe == needs.recipe and row.rebuild_flops), None)
    stored = next((row for row in needs.estimates if row.recipe == "compact"), None)
    if rebuilt is None or stored is None:
        return
    output().note(
        f"{rebuilt.recipe} saves {size(stored.bytes_stored - rebuilt.bytes_stored)} of segments beside compact; "
        f"training holds {size(rebuilt.bytes_target - stored.bytes_target)} of the target's blocks in memory and "
        f"computes {rebuilt.rebuild_flops / 1e6:,.0f} MFLOPs more a token"
    )
