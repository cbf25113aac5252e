"""``hiddenstore export-data``: a store in another project's layout."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.errors import ConfigError
from hiddenstore.interop import LAYOUTS, SHORT_NAMES

if TYPE_CHECKING:
    from hiddenstore.interop.common import ExportedData


@click.command(
    "export-data",
    epilog=examples(
        "hiddenstore export-data store --to speculators -o data",
        "hiddenstore export-data store --to specforge-dflash -o data --layers 1,8,15,22,29",
    ),
)
@click.argument("store")
@click.option(
    "--to",
    "name",
    required=True,
    type=click.Choice([*LAYOUTS, *SHORT_NAMES]),
    help="Whose layout; specforge is specforge-eagle3, modelopt is modelopt-hf.",
)
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
def export_data(store: str, name: str, out: str, layers: str | None, missing_final: str) -> None:
    """Write captured states in the layout another project trains on.

    Where that project reads the final hidden after the target's final norm, a store that holds it before is normed on
    the way out; the other way round is refused.
    """
    from hiddenstore.interop import get_layout
    from hiddenstore.interop.common import ExportOptions, export_samples
    from hiddenstore.interop.speculators import train_command
    from hiddenstore.progress import Progress
    from hiddenstore.store import Store

    source = Store.open(store)
    total = sum(entry.tokens for _, entry in source.entries)
    options = ExportOptions(_numbers(layers), missing_final)  # type: ignore[arg-type]
    with Progress("export-data", total=total, unit="tokens") as progress:
        done = export_samples(source, Path(out), get_layout(name), options, progress.advance)
    output().data(_document(store, done), human=lambda: output().pairs(_lines(done)))
    if done.zero_rows:
        output().warn(f"{done.zero_rows:,} of {done.tokens:,} rows of the final hidden are zeros: the store lacks them")
    if done.layout == "speculators":
        output().hint(*train_command(done))


def _document(store: str, done: "ExportedData") -> dict[str, object]:
    return {
        "store": store,
        "to": done.layout,
        "path": str(done.path),
        "samples": done.samples,
        "validation_samples": done.validation_samples,
        "tokens": done.tokens,
        "bytes": done.bytes,
        "layers": done.layers,
        "layer_ids": done.layer_ids,
        "train_data_ratio": done.train_data_ratio,
        "final_rows_of_zeros": done.zero_rows,
        "final_norm_applied": done.normed,
    }


def _lines(done: "ExportedData") -> list[tuple[str, str]]:
    final = ", final norm applied" if done.normed else ""
    return [
        ("written", f"{done.path}: {done.samples:,} samples, {done.tokens:,} tokens, {done.bytes / 1e6:,.1f} MB"),
        ("layers", f"{done.layer_ids} as {done.layout} counts{final}"),
        ("validation", f"the last {done.validation_samples:,} samples"),
    ]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--layers {text!r} is no list of numbers such as 1,15,28", kind="layers-invalid") from error
