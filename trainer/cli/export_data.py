"""``hiddenstore export-data``: a store in another project's layout."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hiddenstore.console.output import common_options, examples, output
from hiddenstore.dumps import LAYOUTS, SHORT_NAMES
from hiddenstore.errors import ConfigError, Kind

if TYPE_CHECKING:
    from hiddenstore.dumps.common import ExportedData


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
    from hiddenstore.console.progress import Progress
    from hiddenstore.dumps import get_layout
    from hiddenstore.dumps.common import ExportOptions, export_samples
    from hiddenstore.dumps.speculators import train_command
    from hiddenstore.store import Store

    source = Store.open(store)
    total = sum(entry.tokens for _, entry in source.entries)
    options = ExportOptions(_numbers(layers), missing_final)  # type: ignore[arg-type]
    with Progress("export-data", total=total, unit="tokens") as progress:
        exported = export_samples(source, Path(out), get_layout(name), options, progress.advance)
    output().data(_document(store, exported), human=lambda: output().pairs(_lines(exported)))
    if exported.zero_rows:
        rows = f"{exported.zero_rows:,} of {exported.tokens:,} rows"
        output().warn(f"{rows} of the final hidden are zeros: the store lacks them")
    if exported.layout == "speculators":
        output().hint(*train_command(exported))


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


def _lines(exported: "ExportedData") -> list[tuple[str, str]]:
    size = f"{exported.samples:,} samples, {exported.tokens:,} tokens, {exported.bytes / 1e6:,.1f} MB"
    final = ", final norm applied" if exported.normed else ""
    return [
        ("written", f"{exported.path}: {size}"),
        ("layers", f"{exported.layer_ids} as {exported.layout} counts{final}"),
        ("validation", f"the last {exported.validation_samples:,} samples"),
    ]


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--layers {text!r} is no list of numbers such as 1,15,28", kind=Kind.LAYERS_INVALID
        ) from error
