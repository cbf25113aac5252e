"""``hiddenstore export``: a trained drafter as the checkpoint an engine loads."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.console.output import common_options, examples, output

if TYPE_CHECKING:
    from trainer.export.write import ExportedDrafter
    from trainer.train.loaded import LoadedDrafter


@click.command(
    epilog=examples(
        "hiddenstore export run --engine vllm -o drafter",
        "hiddenstore export run --engine sglang --engine-version 0.5.23 -o drafter --dtype float32",
        "hiddenstore export run --engine speculators --target ORG/MODEL -o drafter    # then: vllm serve drafter",
        "hiddenstore export --list",
    ),
)
@click.argument("run", required=False)
@click.option("--engine", help="Which engine will load it: vllm, sglang, trtllm, or the speculators format.")
@click.option("--engine-version", "version", metavar="VERSION", help="Of the engine; default: the one --list shows.")
@click.option("-o", "--out", help="Folder to write.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Default: the target's own.")
@click.option(
    "--yarn",
    type=(click.FloatRange(min=1), click.IntRange(min=1)),
    metavar="FACTOR WINDOW",
    help="Stretch rope FACTOR times beyond the WINDOW it was trained on: 32 2048 as ModelOpt does.",
)
@click.option("--target", help="Hub id or path of the target, for the speculators format, which names it.")
@click.option("--list", "is_list", is_flag=True, help="Which engine takes which drafter.")
@common_options
def export(
    run: str | None,
    engine: str | None,
    version: str | None,
    out: str | None,
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
    from trainer.export.support import engine_named
    from trainer.export.write import checkpoint_of, stretched
    from trainer.export.write import export as write
    from trainer.train.loaded import load_drafter

    engine_named(engine)
    loaded = load_drafter(run)
    checkpoint = checkpoint_of(loaded, run, target)
    if yarn is not None:
        checkpoint = stretched(checkpoint, *yarn)
    done = write(checkpoint, engine, Path(out), dtype, version)
    serve = _to_serve(loaded, engine, out)
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


def _to_serve(loaded: "LoadedDrafter", engine: str, out: str) -> list[str]:
    from hiddenstore.targets.identity import target_argument

    if engine == "speculators":
        return ["vllm", "serve", out]
    return ["hiddenstore", "serve", out, "--engine", engine, "--target", target_argument(loaded.identity)]


def _list(engine: str | None, version: str | None) -> None:
    from trainer.export.support import engine_named, matrix

    if engine is not None:
        asked = [(engine, version or engine_named(engine).version)]
    elif version is not None:
        raise click.UsageError("--engine-version is of an --engine")
    else:
        asked = []
    rows = matrix(asked)
    document: dict[str, Any] = {
        "schema": "hiddenstore.export-list/1",
        "support": [
            {
                "engine": row.engine,
                "version": row.version,
                "drafter": row.drafter,
                "ok": row.ok,
                "proof": row.proof,
                "reason": row.reason,
                "nearest": row.nearest,
                "source": row.source,
            }
            for row in rows
        ],
    }
    words = {"ran": "ran", "names": "names", None: "no"}

    def show() -> None:
        drafters = list(dict.fromkeys(row.drafter for row in rows))
        engines = list(dict.fromkeys((row.engine, row.version) for row in rows))
        found = {(row.engine, row.drafter): row for row in rows}
        output().table(
            ["engine", *drafters],
            [(f"{name} {at}", *(words[found[name, drafter].proof] for drafter in drafters)) for name, at in engines],
        )
        output().pairs(
            [
                ("ran", "a real engine ran an exported drafter"),
                ("names", "written and read back; every name and shape compared with the engine's published loader"),
                *((f"{row.engine}: {row.drafter}", row.reason) for row in rows if not row.ok),
            ]
        )

    output().data(document, human=show)
