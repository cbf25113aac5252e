"""Options that several commands of the collectors have."""

import click

from hiddenstore.layout import CONTAINER_NAMES

container_option = click.option(
    "--container",
    type=click.Choice(CONTAINER_NAMES),
    default=CONTAINER_NAMES[0],
    show_default=True,
    help="What a segment is: a Zarr group, or a tar that stock webdataset iterates.",
)

revision_option = click.option("--revision", help="Commit, tag or branch of a hub id.")

own_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run the repository's own Python; needs --revision COMMIT."
)
