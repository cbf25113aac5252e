"""``hiddenstore report`` and ``compare``: one HTML file to look at, send or keep."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from hiddenstore.cli.words import RUN, STORE, Place, open_store
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.progress import Progress
from hiddenstore.errors import Kind, NotFoundError
from hiddenstore.files.layout import kind_of, refuse_snapshot, split_snapshot
from hiddenstore.fs.publish import room_beside
from hiddenstore.report.page import refuse_other_file, write_page

if TYPE_CHECKING:
    from hiddenstore.report.page import Page

_STYLES = {"good": ("✓", "green"), "look": ("!", "yellow"), "bad": ("✗", "red"), "unknown": ("·", "dim")}


def _is_run(path: str) -> bool:
    return kind_of(path) == "run" or (Path(path) / "state.json").is_file() or Path(path).name == "LATEST"


def _require(path: str) -> None:
    if "://" not in path and not Path(split_snapshot(path)[0]).exists():
        raise NotFoundError(
            f"{path} does not exist; a report is of a store or of a run",
            kind=Kind.PATH_MISSING,
            hint="hiddenstore collect DATA -o STORE --target T makes a store, hiddenstore train STORE -o RUN a run",
        )
    place = RUN if _is_run(path) else STORE
    place.convert(path, None, None)


_out = click.option(
    "-o", "--out", type=click.Path(dir_okay=False), help="The file; a report that lies there is replaced."
)


@click.command(
    epilog=examples("hiddenstore report my-store", "hiddenstore report my-run -o run.html --samples 0 --draft-len 5")
)
@click.argument("path", type=Place(_require), metavar="STORE|RUN")
@_out
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Samples to show with their text; 0 shows none.",
)
@click.option(
    "--measure",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Samples to read for what is measured anew.",
)
@click.option(
    "--draft-len", type=click.IntRange(1, 256), default=3, show_default=True, help="Of a run: tokens drafted at a time."
)
@common_options
def report(path: str, out: str | None, samples: int, measure: int, draft_len: int) -> None:
    """What a STORE holds or a RUN learned, as one HTML file with pictures and verdicts; it loads nothing.

    The file shows text of the data set unless --samples 0 is given.
    """
    folder, snapshot = split_snapshot(path)
    suffix = "" if snapshot is None else f"@{snapshot}"
    file = _file(out, f"{Path(folder).name or 'store'}{suffix}-report.html")
    made = _run_page(path, samples, measure, draft_len) if _is_run(path) else _store_page(path, samples, measure)
    _write(made, file, {"path": path})


@click.command(epilog=examples("hiddenstore compare run-a run-b", "hiddenstore compare runs/* -o runs.html --json"))
@click.argument("runs", type=RUN, nargs=-1, required=True, metavar="RUN RUN...")
@_out
@common_options
def compare(runs: tuple[str, ...], out: str | None) -> None:
    """RUNs beside each other, as one HTML file: accepted length, losses, cost, and the settings that differ."""
    if len(runs) < 2:
        raise click.UsageError(f"compare needs two runs; hiddenstore report {runs[0]} shows one")
    from trainer.report import compare_page
    from trainer.train.run_folder import describe

    file = _file(out, "runs-report.html")
    _write(compare_page([describe(run) for run in runs]), file, {"runs": list(runs)})


def _file(out: str | None, usual: str) -> Path:
    """Where to write, refused before the minutes that measuring may take."""
    if out is not None:
        refuse_snapshot(out)
    file = Path(out or usual)
    refuse_other_file(file)
    with room_beside(file):
        return file


def _store_page(path: str, samples: int, measure: int) -> "Page":
    from contextlib import ExitStack

    from hiddenstore.report.store import store_page

    with ExitStack() as shown:

        def begin(label: str, total: int, unit: str) -> Any:
            shown.close()
            return shown.enter_context(Progress(label, total, unit)).advance

        return store_page(open_store(path, strict=False), samples, measure, begin)


def _run_page(path: str, samples: int, measure: int, draft_len: int) -> "Page":
    from trainer.report import measure as measure_run
    from trainer.report import run_page
    from trainer.train.run_folder import describe, training_store

    info = describe(path)
    store = training_store(info)
    measured = None
    if store is None:
        output().warn(f"{info.lost_store}: acceptance is not measured, and no text is shown")
    else:
        with Progress("report", unit="tokens") as progress:
            measured = measure_run(info, store, measure, draft_len, progress.advance)
    return run_page(info, store, measured, samples)


def _write(made: "Page", out: Path, about: dict[str, Any]) -> None:
    size = write_page(out, made)
    verdicts = [
        {"section": section.title, "level": verdict.level, "text": verdict.text} for section, verdict in made.verdicts
    ]
    document = {**about, "report": str(out), "bytes": size, "figures": dict(made.tiles), "verdicts": verdicts}

    def human() -> None:
        for one in verdicts:
            mark, style = _STYLES[one["level"]]
            output().print(Text.assemble((f"{mark} ", style), one["text"]))

    output().data(document, human=human, quiet=str(out))
    output().hint(f"open {out} in a browser")
