"""A real collect process with small units, for killing: DATA STORE TARGET RANK WORLD_SIZE."""

import sys

from collectors.capture.job import CollectOptions, collect
from hiddenstore import inputs
from hiddenstore.process import Rank

UNIT_TOKENS = 120


def main() -> None:
    data, store, target, rank, world_size = sys.argv[1:]
    inputs.UNIT_TOKENS = UNIT_TOKENS
    # Imports are over: the parent kills from here on.
    sys.stdout.write("started\n")
    sys.stdout.flush()
    collect(CollectOptions(data, store, target), Rank(int(rank), int(world_size)), note=lambda _text: None)


if __name__ == "__main__":
    main()
