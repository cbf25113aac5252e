"""``hiddenstore demo``: the whole path on the bundled target, as the commands a user would type."""

import click

from hiddenstore.cli.output import common_options, examples, output


@click.command(epilog=examples("hiddenstore demo", "hiddenstore demo /tmp/demo --seed 1"))
@click.argument("folder", default="hiddenstore-demo", type=click.Path())
@click.option("--seed", default=0, show_default=True, help="Seed of the drafter.")
@common_options
def demo(folder: str, seed: int) -> None:
    """The whole path on CPU: conversations, states, a trained drafter, its accepted length, an export.

    Runs the commands it prints, on the bundled target of 2.85 M parameters, and downloads nothing. About five minutes
    on two cores.
    """
    from collectors.demo.walk import Walk

    walk = Walk(folder, seed)
    document = walk.run()
    out = output()
    out.data(document, human=lambda: walk.show(document))
    out.hint("hiddenstore", "show", document["paths"]["store"])
