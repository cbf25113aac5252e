"""``hiddenstore import-drafter``."""

import click

from hiddenstore.console.output import common_options, examples, output


@click.command(
    "import-drafter",
    epilog=examples(
        "hiddenstore import-drafter ./eagle3-llama -o runs/published --store STORE",
        "hiddenstore import-drafter ./eagle3-qwen -o runs/published --store STORE --layer-convention vllm",
        "hiddenstore import-drafter ./medusa-vicuna -o runs/medusa --store STORE",
        "hiddenstore train STORE -o runs/tuned train.init_from=runs/published",
    ),
)
@click.argument("folder", metavar="DIR")
@click.option("-o", "--out", "run", required=True, metavar="RUN", help="Folder of the run to make.")
@click.option("--store", required=True, help="A store of the target it drafts for.")
@click.option(
    "--layer-convention",
    type=click.Choice(["vllm", "output", "hf"]),
    help="Whose its layer ids are: vllm (as hf), or output: SGLang, TensorRT-LLM, ModelOpt, SpecForge.",
)
@common_options
def import_drafter(folder: str, run: str, store: str, layer_convention: str | None) -> None:
    """A published drafter as a run to evaluate, decode with, export or start training from.

    EAGLE-1, EAGLE-3, DFlash and Medusa, under the names of their authors, of engines and of other trainers.

    DIR holds config.json and safetensors files. Nothing in it is executed.
    """
    from hiddenstore.console.text import percent
    from trainer.export.import_drafter import import_drafter as bring_in

    done = bring_in(folder, run, store, layer_convention)  # type: ignore[arg-type]
    document = {
        "source": folder,
        "run": run,
        "checkpoint": str(done.checkpoint),
        "drafter": done.drafter,
        "aux_layers": list(done.aux_layers),
        "parameters": done.parameters,
        "vocab_size": done.vocab_size,
        "vocab_coverage": done.vocab_coverage,
    }
    rows = [
        ("drafter", f"{done.drafter}, {done.parameters:,} parameters"),
        ("reads layers", ", ".join(str(layer) for layer in done.aux_layers) or "none: the final hidden only"),
        ("draft vocabulary", f"{done.vocab_size:,} tokens, {percent(done.vocab_coverage)} of the supervised ones"),
        ("checkpoint", str(done.checkpoint)),
    ]
    output().data(document, human=lambda: output().pairs(rows), quiet=str(done.checkpoint))
    output().hint("hiddenstore", "eval", run, store)
