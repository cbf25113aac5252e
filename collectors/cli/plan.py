"""``hiddenstore plan``."""

from typing import TYPE_CHECKING, Any

import click

from collectors.cli.options import revision_option
from hiddenstore.cli.output import common_options, examples, output
from hiddenstore.layout import CONTAINER_NAMES

if TYPE_CHECKING:
    from collectors.estimate import Plan


@click.command(
    epilog=examples(
        "hiddenstore plan DATA --target Qwen/Qwen3-8B",
        "hiddenstore plan DATA --target ./target --layers all-drafters --out /data/store --rate 6000",
    )
)
@click.argument("data", type=click.Path())
@click.option("--target", required=True, help="A local folder or a hub id; its weights are not read.")
@revision_option
@click.option("--template", type=click.Path(), help="The chat template file that prepare was given.")
@click.option("--layers", default="eagle3", show_default=True, help="As for collect.")
@click.option("--final", type=click.Choice(["supervised", "all", "none"]), help="As for collect.")
@click.option("--recipe", default="safe", show_default=True, help="The recipe to mark, as for collect.")
@click.option("--container", type=click.Choice(CONTAINER_NAMES), default=CONTAINER_NAMES[0], help="As for collect.")
@click.option("-o", "--out", default=".", type=click.Path(), help="Where the store will be: its free space is shown.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Tokens/s that collect reached; gives hours.")
@common_options
def plan(data: str, target: str, template: str | None, **asked: Any) -> None:
    """How many bytes, files and hours a collect needs, before anything is written."""
    from collectors.estimate import make_plan
    from collectors.job_open import require_data_fits, resolve_recipe
    from collectors.layers import choose_layers
    from collectors.target import open_target
    from collectors.template import read_template
    from hiddenstore.inputs import PreparedInput

    out = output()
    info = PreparedInput.open(data).info
    folder = open_target(target, asked["revision"], None if template is None else read_template(template))
    require_data_fits(info, folder)
    choice = choose_layers(asked["layers"], asked["final"], folder.num_layers)
    found = make_plan(
        info, folder, choice, resolve_recipe(asked["recipe"], choice), asked["out"], asked["rate"], asked["container"]
    )
    document = {
        "samples": info.samples,
        "tokens": info.tokens,
        "supervised_tokens": info.supervised_tokens,
        "layers": list(choice.aux_layers),
        "final": choice.final,
        "recipe": found.recipe,
        "container": asked["container"],
        "bytes_raw": found.bytes_raw,
        "bytes_free": found.bytes_free,
        "hours": found.hours,
        "recipes": [vars(row) | {"fits": row.bytes_stored < found.bytes_free} for row in found.estimates],
    }
    out.data(document, human=lambda: _show(found))
    if not all(row.bytes_stored < found.bytes_free for row in found.estimates if row.recipe == found.recipe):
        _say_what_fits(found)
        out.hint("hiddenstore", "plan", data, "--target", target, "-o", "ANOTHER_DISK/STORE")
        return
    store = "STORE" if asked["out"] == "." else asked["out"]
    same = {"template": template, **{name: asked[name] for name in ("revision", "layers", "final", "container")}}
    usual = (None, "eagle3", "zarr")
    words = [word for name, value in same.items() if value not in usual for word in (f"--{name}", value)]
    out.hint("hiddenstore", "collect", data, "-o", store, "--target", target, "--recipe", found.recipe, *words)


def _say_what_fits(found: "Plan") -> None:
    from hiddenstore.cli.terminal import size

    needed = next(row.bytes_stored for row in found.estimates if row.recipe == found.recipe)
    fitting = [row.recipe for row in found.estimates if row.bytes_stored < found.bytes_free]
    others = f"what fits: {', '.join(fitting)}" if fitting else "no recipe fits"
    output().warn(f"{found.recipe} needs {size(needed)} and {size(found.bytes_free)} are free; {others}")


def _show(found: "Plan") -> None:
    from hiddenstore.cli.terminal import count, plural, seconds, size

    out = output()
    hours = (
        "give --rate TOKENS_PER_S for hours" if found.hours is None else f"{seconds(3600 * found.hours)} at that rate"
    )
    out.pairs(
        [
            ("tokens", f"{count(found.info.tokens)} in {plural(found.info.samples, 'sample')}"),
            ("captured", found.choice.explained),
            ("raw", f"{size(found.bytes_raw)}: bf16 of every layer and of the final hidden at every token"),
            ("free", size(found.bytes_free)),
            ("time", hours),
        ]
    )
    rows = [
        (
            f"{row.recipe} (chosen)" if row.recipe == found.recipe else row.recipe,
            size(row.bytes_stored),
            f"{found.bytes_raw / row.bytes_stored:.1f}x",
            f"{row.bytes_per_token:,.0f}",
            count(row.segments),
            count(row.files),
            "yes" if row.bytes_stored < found.bytes_free else "no",
        )
        for row in found.estimates
    ]
    out.table(["recipe", ">size", ">smaller", ">bytes/token", ">segments", ">files", "fits"], rows)
