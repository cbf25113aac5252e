"""``hiddenstore export-data``: a store in another project's layout."""

from pathlib import Path

import click

from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.errors import ConfigError

FORMATS = ("speculators",)


@click.command(
    "export-data",
    epilog=examples(
        "hiddenstore export-data store --to speculators -o data",
        "hiddenstore export-data store --to speculators -o data --layers 1,15,28",
    ),
)
@click.argument("store")
@click.option("--to", "layout", required=True, type=click.Choice(FORMATS), help="Whose layout.")
@click.option("-o", "--out", required=True, help="Folder to write.")
@click.option("--layers", help="Layers to write, such as 1,15,28. Default: all the store holds.")
@click.option(
    "--missing-final",
    type=click.Choice(["refuse", "zeros"]),
    default="refuse",
    show_default=True,
    help="What to do where the store holds no final hidden: zeros are right only for a trainer that masks its loss.",
)
@common_options
def export_data(store: str, layout: str, out: str, layers: str | None, missing_final: str) -> None:
    """Write captured states in the layout another project trains on."""
    from hiddenstore.interop.speculators import export_speculators
    from hiddenstore.progress import Progress
    from hiddenstore.store import Store

    source = Store.open(store)
    total = sum(entry.tokens for _, entry in source.entries)
    with Progress("export-data", total=total, unit="tokens") as progress:
        done = export_speculators(
            source,
            Path(out),
            layers=_numbers(layers),
            missing_final=missing_final,  # type: ignore[arg-type]
            on_sample=progress.advance,
        )
    document = {
        "store": store,
        "to": layout,
        "path": out,
        "samples": done.samples,
        "validation_samples": done.validation_samples,
        "tokens": done.tokens,
        "bytes": done.bytes,
        "layer_ids": done.layer_ids,
        "train_data_ratio": done.train_data_ratio,
        "final_rows_of_zeros": done.zero_rows,
    }

    def show() -> None:
        output().pairs(
            [
                ("written", f"{out}: {done.samples:,} samples, {done.tokens:,} tokens, {done.bytes / 1e6:,.1f} MB"),
                ("layers", f"{done.layer_ids} in {layout}' numbering, then the final hidden before its norm"),
                ("validation", f"the last {done.validation_samples:,} samples"),
            ]
        )

    output().data(document, human=show)
    if done.zero_rows:
        output().warn(f"{done.zero_rows:,} of {done.tokens:,} rows of the final hidden are zeros: the store lacks them")
    output().hint(*done.train_command)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--layers {text!r} is no list of numbers such as 1,15,28", kind="layers-invalid") from error
