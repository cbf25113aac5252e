"""``hiddenstore plan``."""

from typing import TYPE_CHECKING, Any

import click

from collectors.cli.options import layers_type, recipe_type
from hiddenstore.cli.words import DATA, FiniteRange, remote_code_option, revision_option
from hiddenstore.codecs.recipes import DEFAULT_RECIPE
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import count, plural, seconds, size
from hiddenstore.inspect.expect import expectation
from hiddenstore.segments import CONTAINERS

if TYPE_CHECKING:
    from collectors.capture.estimate import Plan


@click.command(
    epilog=examples(
        "hiddenstore plan DATA --target Qwen/Qwen3-8B",
        "hiddenstore plan DATA --target ./target --layers all-drafters --out /data/store --rate 6000",
    )
)
@click.argument("data", type=DATA)
@click.option("--target", required=True, help="A local folder, a GGUF file or a hub id; its weights are not read.")
@revision_option
@remote_code_option
@click.option("--template", type=click.Path(), help="The chat template file that prepare was given.")
@click.option("--layers", type=layers_type, default="eagle3", show_default=True, help="As for collect.")
@click.option("--final", type=click.Choice(["supervised", "all", "none"]), help="As for collect.")
@click.option(
    "--recipe", type=recipe_type, default=DEFAULT_RECIPE, show_default=True, help="The recipe to mark, as for collect."
)
@click.option("--container", type=click.Choice(tuple(CONTAINERS)), help="As for collect.")
@click.option("-o", "--out", default=".", type=click.Path(), help="Where the store will be: its free space is shown.")
@click.option("--rate", type=FiniteRange(min=0, min_open=True), help="Tokens/s that collect reached; gives hours.")
@common_options
def plan(data: str, target: str, template: str | None, **options: Any) -> None:
    """How many bytes, files and hours a collect needs, before anything is written."""
    from collectors.capture.estimate import make_plan
    from collectors.capture.options import require_data_fits, resolve_recipe
    from collectors.targets.layers import choose_layers
    from collectors.tokenize.template import read_template
    from hiddenstore.inputs import PreparedInput
    from hiddenstore.targets.folder import open_target

    out = output()
    info = PreparedInput.open(data).info
    folder = open_target(target, options["revision"], read_template(template), options["trust_remote_code"])
    require_data_fits(info, folder)
    choice = choose_layers(options["layers"], options["final"], folder.num_layers)
    recipe = resolve_recipe(options["recipe"], choice, folder.num_layers, info.images is not None)
    needs = make_plan(info, folder, choice, recipe, options["out"], options["rate"], options["container"])
    document = {
        "samples": info.samples,
        "tokens": info.tokens,
        "supervised_tokens": info.supervised_tokens,
        "layers": list(choice.aux_layers),
        "final": choice.final,
        "recipe": needs.recipe,
        "container": needs.container,
        "bytes_raw": needs.bytes_raw,
        "bytes_free": needs.bytes_free,
        "hours": needs.hours,
        "recipes": [
            vars(row) | {"bytes_on_disk": row.bytes_on_disk, "fits": row.recipe in needs.fitting}
            for row in needs.estimates
        ],
    }
    out.data(document, human=lambda: _show(needs))
    if needs.recipe not in needs.fitting:
        _warn_of_room(needs)
        out.hint("hiddenstore", "plan", data, "--target", target, "-o", "ANOTHER_DISK/STORE")
        return
    store = "STORE" if options["out"] == "." else options["out"]
    capture = {"template": template, "revision": options["revision"], "layers": options["layers"]}
    capture |= {"final": options["final"], "container": options["container"]}
    defaults = (None, "eagle3")
    words = [word for name, value in capture.items() if value not in defaults for word in (f"--{name}", str(value))]
    out.hint("hiddenstore", "collect", data, "-o", store, "--target", target, "--recipe", needs.recipe, *words)


def _warn_of_room(needs: "Plan") -> None:
    needed = next(row.bytes_on_disk for row in needs.estimates if row.recipe == needs.recipe)
    others = f"what fits: {', '.join(needs.fitting)}" if needs.fitting else "no recipe fits"
    output().warn(f"{needs.recipe} needs {size(needed)} and {size(needs.bytes_free or 0)} are free; {others}")


def _show(needs: "Plan") -> None:
    out = output()
    hours = (
        "give --rate TOKENS_PER_S for hours" if needs.hours is None else f"{seconds(3600 * needs.hours)} at that rate"
    )
    out.pairs(
        [
            ("tokens", f"{count(needs.info.tokens)} in {plural(needs.info.samples, 'sample')}"),
            ("captured", needs.choice.explained),
            ("raw", f"{size(needs.bytes_raw)}: bf16 of every layer and of the final hidden at every token"),
            ("free", "no end of it" if needs.bytes_free is None else size(needs.bytes_free)),
            ("time", hours),
        ]
    )
    rows = [
        (
            f"{row.recipe} (chosen)" if row.recipe == needs.recipe else row.recipe,
            size(row.bytes_stored),
            size(row.bytes_on_disk),
            f"{needs.bytes_raw / row.bytes_stored:.1f}x",
            f"{row.bytes_per_token:,.0f}",
            count(row.segments),
            count(row.files),
            "yes" if row.recipe in needs.fitting else "no",
        )
        for row in needs.estimates
    ]
    out.table(["recipe", ">size", ">on disk", ">smaller", ">bytes/token", ">segments", ">files", "fits"], rows)
    _note_of_blocks(needs)
    out.note(f"for scale: {expectation(needs.info.tokens)}")


def _note_of_blocks(needs: "Plan") -> None:
    """What states that are not stored save, and what bringing them back takes."""
    rebuilt = next((row for row in needs.estimates if row.recipe == needs.recipe and row.rebuild_flops), None)
    stored = next((row for row in needs.estimates if row.recipe == "compact"), None)
    if rebuilt is None or stored is None:
        return
    output().note(
        f"{rebuilt.recipe} saves {size(stored.bytes_stored - rebuilt.bytes_stored)} of segments beside compact; "
        f"training holds {size(rebuilt.bytes_target - stored.bytes_target)} of the target's blocks in memory and "
        f"computes {rebuilt.rebuild_flops / 1e6:,.0f} MFLOPs more a token"
    )
