"""``hiddenstore export``: a trained drafter as the checkpoint an engine loads."""

from pathlib import Path

import click

from hiddenstore.cli.output import common_options, examples, output


@click.command(
    epilog=examples(
        "hiddenstore export run --engine vllm -o drafter",
        "hiddenstore export run/checkpoints/step-2000 --engine vllm -o drafter --dtype float32",
    ),
)
@click.argument("run")
@click.option("--engine", required=True, help="Which engine will load it: vllm.")
@click.option("-o", "--out", required=True, help="Folder to write.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Default: the target's own.")
@click.option(
    "--yarn",
    type=(click.FloatRange(min=1), click.IntRange(min=1)),
    metavar="FACTOR WINDOW",
    help="Stretch rope FACTOR times beyond the WINDOW it was trained on: 32 2048 as ModelOpt does.",
)
@common_options
def export(run: str, engine: str, out: str, dtype: str | None, yarn: tuple[float, int] | None) -> None:
    """Write config.json and model.safetensors for an engine, and prove that they read back as the same drafter.

    RUN is a training run or one of its checkpoints.
    """
    from hiddenstore.errors import ConfigError
    from hiddenstore.identity import target_word
    from trainer import export as exporter
    from trainer.drafters.eagle3 import Eagle3
    from trainer.run.checkpoint import load_drafter

    layout = exporter.engine_format(engine)
    loaded = load_drafter(run)
    if not isinstance(loaded.model, Eagle3):
        raise ConfigError(
            f"{engine} export of {loaded.config.name} drafters is not written; there is: eagle3",
            kind="export-unsupported",
        )
    checkpoint = exporter.Checkpoint(loaded.model, loaded.vocab, loaded.head, loaded.identity)
    if yarn is not None:
        checkpoint = exporter.stretched(checkpoint, *yarn)
    done = exporter.export(checkpoint, engine, Path(out), dtype)
    serve = layout.serve(out, target_word(loaded.identity), 3)
    document = {
        "run": run,
        "step": loaded.step,
        "engine": engine,
        "path": out,
        "dtype": done.dtype,
        "bytes": done.bytes,
        "layer_ids": done.layer_ids,
        "tensors": {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in done.tensors.items()},
        "verified": True,
        "serve": serve,
    }

    def show() -> None:
        output().table(
            ["tensor", "dtype", "shape"],
            [(name, kind, " × ".join(str(n) for n in shape)) for name, (kind, shape) in done.tensors.items()],
        )
        output().pairs(
            [
                ("written", f"{out}: {done.bytes / 1e6:.2f} MB in {done.dtype}, step {loaded.step}"),
                ("reads layers", f"{done.layer_ids} in {engine}'s numbering"),
                ("read back", "same logits, bit for bit"),
            ]
        )

    output().data(document, human=show)
    output().hint(*serve)
