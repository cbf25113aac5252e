"""Training benchmark: ``python -m benchmarks.train [--rounds 15] [--folder DIR] [--results DIR]``.

Run it through ``make bench-train``, which makes the peers' environment. About fifteen minutes on two quiet cores.
"""

import argparse
import datetime
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.storage.__main__ import machine, say
from benchmarks.train import growth, report
from benchmarks.train.case import Case
from benchmarks.train.run import EAGLE3, Bench, Found

RESULTS = Path(__file__).parents[1] / "results"
SPEED = {
    "full": Case("eagle3", 512),
    "half": Case("eagle3", 512, draft=1024, supervised=0.5),
    "dflash": Case("dflash", 512, layers=2),
}
LARGE = {
    "T=2,048, V=32,768, U=8,192, every token supervised": Case("eagle3", 2048, vocab=32768, draft=8192),
    "T=2,048, V=32,768, U=8,192, half supervised": Case("eagle3", 2048, vocab=32768, draft=8192, supervised=0.5),
}


def measure(bench: Bench, rounds: int) -> tuple[dict[str, list[Found]], dict[str, Any]]:
    """The rows of every case, and the other figures of a run."""
    found: dict[str, Any] = {"load_before": load()}
    speed: dict[str, list[Found]] = {}
    for drafter in ("eagle3", "dflash"):
        say(f"speed: {drafter}")
        cases = {name: case for name, case in SPEED.items() if case.drafter == drafter}
        speed |= bench.speed(cases, rounds)
    found["load_after"] = load()
    say("profile")
    found["shares"] = bench.products_share("full")
    say("memory")
    memory_bench = Bench(bench.root, {"eagle3": [row for row in EAGLE3 if row.kind not in ("OursQ8", "OursHeld")]})
    found["memory"] = {
        label: memory_bench.memory(case, f"large-{index}") for index, (label, case) in enumerate(LARGE.items())
    }
    say("growth")
    found["growth"] = growth.measure(bench)
    return speed, found


def load() -> str:
    """The load averages of one, five and fifteen minutes."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: temporary)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        speed, found = measure(Bench(Path(folder)), arguments.rounds)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"date": date, "rounds": arguments.rounds, "note": arguments.note, **found}
    result |= {
        "machine": machine() | {"load_before": found["load_before"], "load_after": found["load_after"]},
        "bars": report.bars(speed, found["memory"], found["shares"]),
        "fits": growth.fits(found["growth"]),
        "plot": f"train-growth-{date}.png",
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    growth.plot(found["growth"], arguments.results / result["plot"])
    path = report.write(result, speed, arguments.results)
    print(path.read_text(encoding="utf-8"))
    say(f"written: {path}")


if __name__ == "__main__":
    main()
