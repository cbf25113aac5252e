"""``python -m hiddenstore.cli``."""

from hiddenstore.cli import main

main(prog_name="hiddenstore")
