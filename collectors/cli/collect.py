"""``hiddenstore plan``, ``collect`` and ``import``: how large a store will be, and what fills one."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from collectors.cli.prepare import Share
from collectors.engines import ENGINES, EngineRow
from collectors.engines.dump import FORMATS
from collectors.targets.layers import layer_names, require_layers
from hiddenstore.cli.words import (
    DATA,
    FiniteRange,
    Name,
    opening_words,
    remote_code_option,
    revision_option,
    same_target_option,
    target_options,
)
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, RECIPE_HELP, RECIPES, get_recipe
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import count, percent, plural, seconds, size
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.process import drain_on_signal
from hiddenstore.segments import CONTAINERS
from hiddenstore.targets import LAYER_RULES

if TYPE_CHECKING:
    from collectors.capture.estimate import Plan
    from collectors.capture.import_job import ImportReport
    from collectors.capture.job import CollectReport

SHARED = "zarr-shared"
_SHARE_WORTH_SAYING = 0.05
_RANKS_NAMED = 8

layers_type = Name(require_layers, layer_names())
recipe_type = Name(lambda text: text == "auto" or get_recipe(text), (*RECIPES, "auto"))

container_option = click.option(
    "--container",
    type=click.Choice(tuple(CONTAINERS)),
    help="What a segment is: a Zarr group; one with what samples begin alike with once; or a tar that stock webdataset "
    "iterates. Default: zarr; on object storage webdataset; of a store that is there, its own.",
)


def _our_engines() -> Iterator[tuple[str, EngineRow]]:
    """Engines of other packages are set by ``--engine-arg``: importing them would slow every ``--help``."""
    for name, row in ENGINES.rows.items():
        if isinstance(row, EngineRow):
            yield name, row


*_first, _last = ENGINES
engine_option = click.option(
    "--engine",
    type=Name(ENGINES.require, ENGINES),
    default=_first[0],
    show_default=True,
    help=f"What runs the target: {', '.join(_first)} or {_last}.",
)

tensor_parallel_option = click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help=f"GPUs per engine: {', '.join(name for name, row in _our_engines() if row.tensor_parallel)}.",
)

server_option = click.option(
    "--server",
    metavar="URL",
    help=" ".join(f"Engine {name}: {row.server}" for name, row in _our_engines() if row.server),
)


def engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The options that one engine alone takes; those given reach ``command`` as ``engine_flags``, by setting."""
    flags = [(setting, name, text) for name, row in _our_engines() for setting, text in row.flags.items()]

    @wraps(command)
    def run(**options: Any) -> None:
        values = {setting: options.pop(setting) for setting, _, _ in flags}
        command(engine_flags={setting: value for setting, value in values.items() if value}, **options)

    for setting, name, text in reversed(flags):
        run = click.option(f"--{setting.replace('_', '-')}", help=f"Engine {name}: {text}")(run)
    return run


def job_document(report: "CollectReport") -> dict[str, Any]:
    """What every job that fills a store says for ``--json``."""
    names = ("store", "units", "samples", "tokens", "bytes_stored")
    return {name: getattr(report, name) for name in names} | {
        **{name: number for name, number in report.bytes_in_all.items() if name != "bytes_stored"},
        "rejects": dict(report.rejects),
        "units_before": report.resumed_units,
        "units_pending": report.pending_units,
        "seconds": round(report.seconds, 3),
    }


def job_lines(report: "CollectReport", rate: str = "") -> list[tuple[str, str]]:
    """The same for people; ``rate`` follows the tokens."""
    before = f" ({report.resumed_units} were committed before)" if report.resumed_units else ""
    per_token = f", {report.bytes_stored / report.tokens:,.0f} bytes per token" if report.tokens else ""
    return [
        ("store", report.store),
        ("units", f"{report.units}{before}"),
        ("samples", f"{report.samples:,}"),
        ("tokens", f"{report.tokens:,}{rate}"),
        ("written", f"{size(report.bytes_stored)}{per_token}"),
        ("on disk", f"{size(report.bytes_in_all['bytes_on_disk'])} in all, with target and calibration"),
        ("rejects", counts(report.rejects)),
    ]


def counts(counter: dict[str, int]) -> str:
    """``3 duplicate, 1 empty``, or none."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counter.items())) or "none"


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
@click.option(
    "--scratch",
    type=click.Path(),
    help="RAM-backed folder for states in files: trtllm (default /dev/shm), vllm with --server.",
)
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
        named = ", ".join(map(str, report.pending_ranks[:_RANKS_NAMED]))
        more = ", …" if len(report.pending_ranks) > _RANKS_NAMED else ""
        whose = f"the share of rank {named}{more}" if named else "another job's share"
        out.note(f"{plural(report.pending_units, 'unit')} still pending: {whose}, or run the same command again")
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
    prepared = PreparedInput.open(data)
    info = prepared.info
    folder = open_target(target, options["revision"], read_template(template), options["trust_remote_code"])
    require_data_fits(info, folder)
    choice = choose_layers(options["layers"], options["final"], folder.num_layers)
    recipe = resolve_recipe(options["recipe"], choice, folder.num_layers, info.images is not None)
    needs = make_plan(prepared, folder, choice, recipe, options["out"], options["rate"], options["container"])
    document = {
        "samples": info.samples,
        "tokens": info.tokens,
        "supervised_tokens": info.supervised_tokens,
        "layers": list(choice.aux_layers),
        "final": choice.final,
        "recipe": needs.recipe,
        "container": needs.container,
        "shared_prefixes": round(needs.shared, 4),
        "bytes_raw": needs.bytes_raw,
        "bytes_free": needs.bytes_free,
        "hours": needs.hours,
        "recipes": [
            vars(row) | {"bytes_on_disk": row.bytes_on_disk, "fits": row.recipe in needs.fitting}
            for row in needs.estimates
        ],
    }
    out.data(document, human=lambda: _show_plan(needs))
    opened = opening_words(target, template, options["revision"], options["trust_remote_code"])
    capture = {name: options[name] for name in ("layers", "final", "container")}
    defaults = (None, "eagle3")
    chosen = [word for name, value in capture.items() if value not in defaults for word in (f"--{name}", str(value))]
    words = (*opened, "--recipe", needs.recipe, *chosen)
    if needs.recipe not in needs.fitting:
        _warn_of_room(needs)
        out.hint("hiddenstore", "plan", data, "-o", "ANOTHER_DISK/STORE", *words)
        return
    store = "STORE" if options["out"] == "." else options["out"]
    out.hint("hiddenstore", "collect", data, "-o", store, *words)


def _warn_of_room(needs: "Plan") -> None:
    needed = next(row.bytes_on_disk for row in needs.estimates if row.recipe == needs.recipe)
    others = f"what fits: {', '.join(needs.fitting)}" if needs.fitting else "no recipe fits"
    output().warn(f"{needs.recipe} needs {size(needed)} and {size(needs.bytes_free or 0)} are free; {others}")


def _show_plan(needs: "Plan") -> None:
    from hiddenstore.inspect.forecast import expectation

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
    if needs.container != SHARED and needs.shared >= _SHARE_WORTH_SAYING:
        out.note(
            f"{percent(needs.shared)} of the tokens repeat how another sample begins (a system prompt, tools, earlier "
            f"turns): --container {SHARED} keeps their states once"
        )
    out.note(f"for scale: {expectation(round(needs.info.tokens * (1 - needs.info.validation_share)))}")


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
@click.option("--loss-on", type=click.Choice(["all"]), help="Train on every token, whatever loss masks the dump has.")
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
    out.data(_import_document(report), human=lambda: out.pairs(_import_lines(report)))
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


def _import_document(report: "ImportReport") -> dict[str, Any]:
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


def _import_lines(report: "ImportReport") -> list[tuple[str, str]]:
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
