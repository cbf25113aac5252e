"""What storing a shared prefix (system prompt, tools, earlier turns) once would save: a bound, from tokens alone.

DATA is what ``hiddenstore prepare`` makes. A sample's prefix counts as shared where another sample begins with the same
tokens, at least ``--least`` of them; causal states there are the same. ``in units``: only samples of one unit share, as
prepared, and with samples that begin alike brought into one unit.
Usage: python -m benchmarks.shared_prefixes DATA... [--least 16] [--unit-tokens 65536]
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import report
from hiddenstore.inputs import PreparedInput


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.parser(__doc__)
    options.add_argument("data", type=Path, nargs="+")
    options.add_argument("--least", type=int, default=16, help="tokens that a shared prefix has at least")
    options.add_argument("--unit-tokens", type=int, default=65_536)
    args = options.parse_args(arguments)
    rows = []
    for path in args.data:
        samples = [sample.input_ids for sample in PreparedInput.open(path).samples()]
        tokens = sum(map(len, samples))
        alike = sorted(samples, key=lambda ids: ids.astype(">i4").tobytes())
        shares = {
            "everywhere": shared_tokens(alike, args.least) / tokens,
            "in units, grouped": _in_units(alike, args.least, args.unit_tokens) / tokens,
            "in units, as prepared": _in_units(samples, args.least, args.unit_tokens) / tokens,
        }
        rows.append({"data": path.name, "samples": len(samples), "tokens": tokens, **shares})
    page = [
        f"# Shared prefixes, {report.today()}",
        "",
        f"Share of all tokens that lie in a prefix of at least {args.least} tokens which another sample has too and "
        f"which would not be stored again; units of {args.unit_tokens:,} tokens.",
        "",
        "| data | samples | tokens | everywhere | in units, grouped | in units, as prepared |",
        "|---|---|---|---|---|---|",
    ]
    page += [
        f"| {row['data']} | {row['samples']:,} | {row['tokens']:,} | {row['everywhere']:.1%} | "
        f"{row['in units, grouped']:.1%} | {row['in units, as prepared']:.1%} |"
        for row in rows
    ]
    report.publish("shared-prefixes", {"least": args.least, "rows": rows}, args.results, page)


def shared_tokens(alike: Iterable[np.ndarray], least: int) -> int:
    """Tokens that need not be stored again, of samples in the order of their tokens: there the one before shares the
    longest prefix."""
    saved, before = 0, np.zeros(0, dtype=np.int32)
    for ids in alike:
        length = min(len(before), len(ids))
        differ = np.flatnonzero(before[:length] != ids[:length])
        common = int(differ[0]) if len(differ) else length
        saved += common if common >= least else 0
        before = ids
    return saved


def _in_units(samples: Sequence[np.ndarray], least: int, unit_tokens: int) -> int:
    return sum(
        shared_tokens(sorted(unit, key=lambda ids: ids.astype(">i4").tobytes()), least)
        for unit in _units(samples, unit_tokens)
    )


def _units(samples: Sequence[np.ndarray], most: int) -> Iterator[list[np.ndarray]]:
    unit: list[np.ndarray] = []
    for ids in samples:
        if unit and sum(map(len, unit)) + len(ids) > most:
            yield unit
            unit = []
        unit.append(ids)
    if unit:
        yield unit


if __name__ == "__main__":
    main()
