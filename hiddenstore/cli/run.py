"""``hiddenstore run``: the whole way from conversations to an exported drafter, from one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.console.output import common_options, examples, output

if TYPE_CHECKING:
    from hiddenstore.cli.pipeline import Pipeline, StageResult


@click.command(
    epilog=examples(
        "hiddenstore run pipeline.yaml",
        "hiddenstore run pipeline.yaml out=second drafters.eagle3.settings.optim.lr=1e-3",
    )
)
@click.argument("pipeline", type=click.Path())
@click.argument("words", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@common_options
def run(pipeline: str, words: tuple[str, ...]) -> None:
    """Prepare, collect, verify, then train, evaluate and export every drafter of a PIPELINE file.

    Each stage is a command that is printed before it runs. Finished stages are not repeated: after a stop, whatever the
    reason, the same command goes on. Sections hold the options of their commands: see docs/run.md.
    """
    from hiddenstore.cli.pipeline import Pipeline
    from hiddenstore.cli.pipeline import run as run_pipeline
    from hiddenstore.settings import load

    settings = load(Pipeline, pipeline, words)
    results = run_pipeline(settings)
    rows = [_summary(name, results, settings) for name in settings.drafters]
    stages = [
        {
            "stage": result.stage.name,
            "command": ["hiddenstore", result.stage.command, *result.stage.words],
            "seconds": result.seconds,
            "was_done": result.was_done,
        }
        for result in results
    ]
    document = {"out": settings.out, "drafters": rows, "stages": stages}
    output().data(document, human=lambda: _show(rows, results))
    engine = str(settings.export.get("engine", ""))
    output().hint("hiddenstore", "serve", rows[0]["folder"], "--target", settings.target, "--engine", engine)


def _summary(name: str, results: "Sequence[StageResult]", pipeline: "Pipeline") -> dict[str, Any]:
    answers = {result.stage.name: result.answer for result in results}
    simulated, live = answers[f"{name}/eval"], answers.get(f"{name}/decode", {})
    longest = (simulated.get("sweep") or [simulated])[-1]
    return {
        "drafter": name,
        "draft_len": longest.get("draft_len"),
        "simulated": longest.get("accepted_length"),
        "ngram": longest.get("ngram_accepted_length", simulated.get("ngram_accepted_length")),
        "live": live.get("accepted_length"),
        "folder": str(Path(pipeline.out, name, "drafter")),
    }


def _show(rows: Sequence[dict[str, Any]], results: "Sequence[StageResult]") -> None:
    from hiddenstore.console.text import seconds

    def figures(row: dict[str, Any]) -> list[str]:
        values = (row[key] for key in ("ngram", "simulated", "live"))
        return [f"{value:.2f}" if isinstance(value, float) else "–" for value in values]

    out = output()
    out.print()
    out.table(
        ["drafter", ">draft", ">n-gram", ">simulated", ">live", "exported to"],
        [[row["drafter"], row["draft_len"], *figures(row), row["folder"]] for row in rows],
    )
    out.print()
    before = sum(result.was_done for result in results)
    spent = seconds(sum(result.seconds for result in results if not result.was_done))
    out.pairs([("stages", f"{len(results)} ({before} done before)" if before else str(len(results))), ("took", spent)])
