"""``python -m hiddenstore``."""

from hiddenstore.cli import main

main(prog_name="hiddenstore")
