"""``hiddenstore run``: the whole way from conversations to an exported drafter, from one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.cli.output import common_options, examples, output

if TYPE_CHECKING:
    from hiddenstore.pipeline.recipe import Recipe
    from hiddenstore.pipeline.run import Ran


@click.command(
    epilog=examples(
        "hiddenstore run recipe.yaml",
        "hiddenstore run recipe.yaml out=second drafters.eagle3.settings.optim.lr=1e-3",
    )
)
@click.argument("recipe", type=click.Path())
@click.argument("words", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@common_options
def run(recipe: str, words: tuple[str, ...]) -> None:
    """Prepare, collect, verify, then train, evaluate and export every drafter of a recipe.

    Each stage is a command that is printed before it runs. Finished stages are not repeated: after a stop, whatever the
    reason, the same command goes on. Sections hold the options of their commands: see docs/run.md.
    """
    from hiddenstore.config import load
    from hiddenstore.pipeline.recipe import Recipe
    from hiddenstore.pipeline.run import run as run_recipe

    asked = load(Recipe, recipe, words)
    ran = run_recipe(asked)
    out = output()
    rows = [_summary(name, ran, asked) for name in asked.drafters]
    stages = [
        {"stage": one.stage.name, "command": ["hiddenstore", one.stage.command, *one.stage.words]}
        | {"seconds": one.seconds, "was_done": one.was_done}
        for one in ran
    ]
    document = {"out": asked.out, "drafters": rows, "stages": stages}
    out.data(document, human=lambda: _show(rows, ran))
    first = next(iter(asked.drafters))
    engine = str(asked.export.get("engine", ""))
    out.hint(
        "hiddenstore", "serve", str(Path(asked.out, first, "drafter")), "--target", asked.target, "--engine", engine
    )


def _summary(name: str, ran: "Sequence[Ran]", asked: "Recipe") -> dict[str, Any]:
    answers = {one.stage.name: one.answer for one in ran}
    simulated, live = answers[f"{name}/eval"], answers.get(f"{name}/decode", {})
    sweep = simulated.get("sweep") or [simulated]
    return {
        "drafter": name,
        "draft_len": sweep[-1].get("draft_len"),
        "simulated": sweep[-1].get("accepted_length"),
        "ngram": sweep[-1].get("ngram_accepted_length", simulated.get("ngram_accepted_length")),
        "live": live.get("accepted_length"),
        "folder": str(Path(asked.out, name, "drafter")),
    }


def _show(rows: Sequence[dict[str, Any]], ran: "Sequence[Ran]") -> None:
    from hiddenstore.cli.terminal import seconds

    out = output()

    def figure(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else "–"

    out.print()
    out.table(
        ["drafter", ">draft", ">n-gram", ">simulated", ">live", "exported to"],
        [
            [
                row["drafter"],
                row["draft_len"],
                *(figure(row[key]) for key in ("ngram", "simulated", "live")),
                row["folder"],
            ]
            for row in rows
        ],
    )
    out.print()
    before = sum(one.was_done for one in ran)
    here = seconds(sum(one.seconds for one in ran if not one.was_done))
    out.pairs([("stages", f"{len(ran)} ({before} done before)" if before else str(len(ran))), ("took", here)])
