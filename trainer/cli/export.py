"""Out to others and in: ``hiddenstore export``, ``export-data`` and ``import-drafter``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.words import OUT, RUN, STORE, FiniteRange, Name, layers_option, open_store
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.dumps import LAYOUTS, SHORT_NAMES
from hiddenstore.files.layout import split_snapshot
from hiddenstore.fs import require_local

if TYPE_CHECKING:
    from hiddenstore.dumps.common import ExportedData, MissingFinal
    from trainer.export.write import ExportedDrafter
    from trainer.train.run_folder import LoadedDrafter


def _require_engine(name: str) -> None:
    from trainer.export.support import ENGINES

    ENGINES.require(name)


@click.command(
    epilog=examples(
        "hiddenstore export run --engine vllm -o drafter",
        "hiddenstore export run --engine sglang --engine-version 0.5.23 -o drafter --dtype float32",
        "hiddenstore export run --engine speculators --target ORG/MODEL -o drafter    # then: vllm serve drafter",
        "hiddenstore export run --engine llamacpp --target target.gguf -o drafter.gguf",
        "hiddenstore export --list",
    ),
)
@click.argument("run", type=RUN, required=False)
@click.option(
    "--engine",
    type=Name(_require_engine, ()),
    help="Which engine will load it: vllm, sglang, trtllm, llamacpp, or the speculators format.",
)
@click.option("--engine-version", "version", metavar="VERSION", help="Of the engine; default: the one --list shows.")
@click.option("-o", "--out", type=OUT, help="Folder to write; for llama.cpp also a file, such as drafter.gguf.")
@click.option(
    "--draft-len",
    "length",
    type=click.IntRange(1, 256),
    help="Tokens a draft has. Default: what pays, where `eval --costs` measured it; else as many as the drafter's "
    "block or heads give, and 3 of a drafter without either.",
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Default: the target's own.")
@click.option(
    "--yarn",
    type=(FiniteRange(min=1), click.IntRange(min=1)),
    metavar="FACTOR WINDOW",
    help="Stretch rope FACTOR times beyond the WINDOW it was trained on: 32 2048 as ModelOpt does.",
)
@click.option(
    "--target",
    help="The target, for what names it: hub id or path for the speculators format, its GGUF file for llamacpp.",
)
@click.option("--list", "is_list", is_flag=True, help="Which engine takes which drafter.")
@common_options
def export(
    run: str | None,
    engine: str | None,
    version: str | None,
    out: str | None,
    length: int | None,
    dtype: str | None,
    yarn: tuple[float, int] | None,
    target: str | None,
    is_list: bool,
) -> None:
    """Write a drafter's files for an engine, and prove that they read back as the same drafter.

    RUN is a training run or one of its checkpoints. An engine that cannot run the drafter is refused with the reason.
    """
    if is_list:
        _list(engine, version)
        return
    missing = [name for name, value in (("RUN", run), ("--engine", engine), ("--out", out)) if value is None]
    if run is None or engine is None or out is None:
        raise click.UsageError(f"{' and '.join(missing)} missing; --list shows which engine takes which drafter")
    from trainer.export.support import ENGINES

    engine, folder = ENGINES[engine].name, require_local(out, "an export")

    from trainer.export.write import checkpoint_of, stretched
    from trainer.export.write import export as write
    from trainer.train.run_folder import load_drafter

    loaded = load_drafter(run)
    if length is not None:
        loaded.require_length(length)
    checkpoint = checkpoint_of(loaded, run, target, length, dtype)
    if yarn is not None:
        checkpoint = stretched(checkpoint, *yarn)
    done = write(checkpoint, engine, folder, dtype, version)
    serve = _to_serve(loaded, engine, run, out, target)
    document = {
        "run": run,
        "step": loaded.step,
        "engine": engine,
        "engine_version": done.version,
        "drafter": done.drafter,
        "draft_len": done.draft_len,
        "path": out,
        "dtype": done.dtype,
        "bytes": done.bytes,
        "layer_ids": done.layer_ids,
        "tensors": {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in done.tensors.items()},
        "verified": True,
        "serve": serve,
    }
    output().data(document, human=lambda: _show(done, loaded.step))
    output().hint(*serve)


def _show(done: "ExportedDrafter", step: int) -> None:
    if output().verbose:
        output().table(
            ["tensor", "dtype", "shape"],
            [(name, kind, " × ".join(str(n) for n in shape)) for name, (kind, shape) in done.tensors.items()],
        )
    reads = f"{done.layer_ids} in {done.engine}'s numbering" if done.layer_ids else "none: the final hidden only"
    output().pairs(
        [
            ("written", f"{done.path}: {done.bytes / 1e6:.2f} MB in {done.dtype}, step {step}"),
            ("for", f"{done.engine} {done.version}: {done.drafter}, {done.draft_len} tokens a draft"),
            ("reads layers", reads),
            ("read back", "same logits, bit for bit"),
        ]
    )


def _to_serve(loaded: "LoadedDrafter", engine: str, run: str, out: str, target: str | None) -> list[str]:
    from hiddenstore.files.documents import foreign_json
    from hiddenstore.targets.folder import CONFIG_FILE
    from hiddenstore.targets.identity import target_argument
    from trainer.export.support import drafter_export

    if engine == "speculators":
        config = foreign_json((Path(out) / CONFIG_FILE).read_bytes())
        read = drafter_export(loaded.kind.name).unread(config, "vllm") is None
        return ["vllm", "serve", out] if read else ["hiddenstore", "export", run, "--engine", "vllm", "-o", "OUT"]
    served = target if target and engine == "llamacpp" else target_argument(loaded.identity)
    return ["hiddenstore", "serve", out, "--engine", engine, "--target", served]


def _list(engine: str | None, version: str | None) -> None:
    from trainer.export.support import ENGINES, matrix

    if engine is not None:
        asked = [(engine, version or ENGINES[engine].version)]
    elif version is not None:
        raise click.UsageError("--engine-version is of an --engine")
    else:
        asked = []
    rows = matrix(asked)
    document: dict[str, Any] = {"schema": "hiddenstore.export-list/1", "support": [vars(row) for row in rows]}

    def show() -> None:
        drafters = list(dict.fromkeys(row.drafter for row in rows))
        engines = list(dict.fromkeys((row.engine, row.version) for row in rows))
        proofs = {(row.engine, row.drafter): row.proof for row in rows}
        output().table(
            ["drafter", *(name for name, _ in engines)],
            [
                ("version", *(at for _, at in engines)),
                *((drafter, *(proofs[name, drafter] or "no" for name, _ in engines)) for drafter in drafters),
            ],
        )
        output().pairs(
            [
                ("ran", "a real engine ran an exported drafter"),
                ("names", "written and read back; every name and shape compared with the engine's published loader"),
                *((f"{row.engine}: {row.drafter}", row.reason) for row in rows if not row.ok),
            ]
        )

    output().data(document, human=show)


@click.command(
    "export-data",
    epilog=examples(
        "hiddenstore export-data store --to speculators -o data",
        "hiddenstore export-data store --to specforge-dflash -o data --layers 1,8,15,22,29",
    ),
)
@click.argument("store", type=STORE)
@click.option(
    "--to",
    "name",
    required=True,
    type=click.Choice([*LAYOUTS, *SHORT_NAMES]),
    help="Whose layout; specforge is specforge-eagle3, modelopt is modelopt-hf.",
)
@click.option("-o", "--out", type=OUT, required=True, help="Folder to write.")
@layers_option
@click.option(
    "--missing-final",
    type=click.Choice(["refuse", "zeros"]),
    default="refuse",
    show_default=True,
    help="What to do where the store holds no final hidden: zeros are right only for a trainer that masks its loss "
    "(ModelOpt: training.answer_only_loss=true).",
)
@common_options
def export_data(store: str, name: str, out: str, layers: tuple[int, ...] | None, missing_final: "MissingFinal") -> None:
    """Write captured states in the layout another project trains on.

    Where that project reads the final hidden after the target's final norm, a store that holds it before is normed on
    the way out; the other way round is refused.
    """
    from hiddenstore.console.progress import Progress
    from hiddenstore.dumps import get_layout
    from hiddenstore.dumps.common import export_samples
    from hiddenstore.dumps.speculators import train_command

    source = open_store(store)
    total = sum(entry.tokens for _, entry in source.entries)
    layout = get_layout(name)
    scope = layout, layers, missing_final
    with Progress("export-data", total=total, unit="tokens") as progress:
        exported = export_samples(source, require_local(out, "an export of data"), *scope, progress.advance)
    output().data(_document(store, exported), human=lambda: output().pairs(_lines(exported, layout.is_in_order)))
    if exported.zero_rows:
        rows = f"{exported.zero_rows:,} of {exported.tokens:,} rows"
        taught = f", and its trainer teaches them unless it is told {layout.masks_by}" if layout.masks_by else ""
        output().warn(f"{rows} of the final hidden are zeros: the store lacks them{taught}")
    elif layout.masks_by:
        output().note(f"its trainer teaches every token, questions too, unless it is told {layout.masks_by}")
    if command := train_command(exported, split_snapshot(store)[0]):
        output().hint(*command)


def _document(store: str, exported: "ExportedData") -> dict[str, object]:
    return {
        "store": store,
        "to": exported.layout,
        "path": str(exported.path),
        "samples": exported.samples,
        "validation_samples": exported.validation_samples,
        "tokens": exported.tokens,
        "bytes": exported.bytes,
        "layers": exported.layers,
        "layer_ids": exported.layer_ids,
        "train_data_ratio": exported.train_data_ratio,
        "final_rows_of_zeros": exported.zero_rows,
        "final_norm_applied": exported.normed,
    }


def _lines(exported: "ExportedData", is_in_order: bool) -> list[tuple[str, str]]:
    from hiddenstore.dumps.common import SAMPLES_FILE

    size = f"{exported.samples:,} samples, {exported.tokens:,} tokens, {exported.bytes / 1e6:,.1f} MB"
    final = ", final norm applied" if exported.normed else ""
    validation = f"the last {exported.validation_samples:,} samples"
    if not is_in_order:
        listed = f"{SAMPLES_FILE} lists them, and its trainer would train on all"
        validation = f"{exported.validation_samples:,} samples: {listed}"
    return [
        ("written", f"{exported.path}: {size}"),
        ("layers", f"{exported.layer_ids} as {exported.layout} counts{final}"),
        ("validation", validation),
    ]


@click.command(
    "import-drafter",
    epilog=examples(
        "hiddenstore import-drafter yuhuili/EAGLE3-LLaMA3.1-Instruct-8B -o runs/published --store STORE",
        "hiddenstore import-drafter ./eagle3-qwen -o runs/published --store STORE --layer-convention vllm",
        "hiddenstore import-drafter ./medusa-vicuna -o runs/medusa --store STORE",
        "hiddenstore train STORE -o runs/tuned train.init_from=runs/published",
    ),
)
@click.argument("folder", metavar="DIR")
@click.option("-o", "--out", "run", type=OUT, required=True, metavar="RUN", help="Folder of the run to make.")
@click.option("--store", required=True, help="A store of the target it drafts for.")
@click.option(
    "--layer-convention",
    type=click.Choice(["vllm", "output", "hf"]),
    help="Whose its layer ids are: vllm (as hf), or output: SGLang, TensorRT-LLM, ModelOpt, SpecForge.",
)
@common_options
def import_drafter(folder: str, run: str, store: str, layer_convention: str | None) -> None:
    """A published drafter as a run to evaluate, decode with, export or start training from.

    Every kind of drafter that `train` knows, under the names of its authors, of engines and of other trainers.

    DIR, or a hub id, holds config.json and safetensors files, or torch files of tensors. Nothing in it is executed.
    """
    from hiddenstore.console.text import percent
    from trainer.export.published import import_drafter as bring_in

    done = bring_in(folder, run, store, layer_convention)  # type: ignore[arg-type]
    document = {
        "source": folder,
        "run": run,
        **vars(done),
        "checkpoint": str(done.checkpoint),
        "aux_layers": list(done.aux_layers),
    }
    rows = [
        ("drafter", f"{done.drafter}, {done.parameters:,} parameters"),
        ("reads layers", ", ".join(str(layer) for layer in done.aux_layers) or "none: the final hidden only"),
        ("draft vocabulary", f"{done.vocab_size:,} tokens, {percent(done.vocab_coverage)} of the supervised ones"),
        ("checkpoint", str(done.checkpoint)),
    ]
    output().data(document, human=lambda: output().pairs(rows), quiet=str(done.checkpoint))
    output().hint("hiddenstore", "eval", run, store)
