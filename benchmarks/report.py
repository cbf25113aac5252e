"""What every benchmark writes: its figures and the machine's facts as a dated JSON, and a page of tables beside it."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.workers import Timing

RESULTS = Path(__file__).parent / "results"


def parser(text: str | None) -> argparse.ArgumentParser:
    """Of a benchmark's command, with ``--results`` and ``--no-result``."""
    options = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    options.add_argument("--no-result", dest="results", action="store_const", const=None, help="print only")
    return options


def publish(name: str, result: Mapping[str, Any], folder: Path | None, page: Sequence[str] = ()) -> None:
    """Print the page, or the JSON where there is none, and write ``NAME-DATE.json`` and ``.md`` into ``folder``."""
    document = {"benchmark": name, "date": today(), "machine": machine(), **result}
    body, text = json.dumps(document, indent=1) + "\n", "\n".join(page) + "\n"
    print(text if page else body)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{today()}.json"
    path.write_text(body, encoding="utf-8")
    if page:
        path.with_suffix(".md").write_text(text, encoding="utf-8")
    progress(f"written: {path}")


def machine() -> dict[str, Any]:
    """What figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "transformers", "vllm")},
    }


def machine_line() -> str:
    """The same in a sentence."""
    facts = machine()
    loads = " ".join(map(str, facts["load_average"]))
    return f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, torch {facts['torch']}, load {loads}."


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def progress(text: str) -> None:
    """A line with the time."""
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", flush=True)


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3f}" + (f" ({low:.3f}–{high:.3f})" if len(values) > 1 else "")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


BAR_HEAD = ("claim", "figure", "limit", "met")


@dataclass(frozen=True)
class Bar:
    """A claim with its limit; ``reason``: why it may be missed, as far as that is understood."""

    claim: str
    limit: float
    is_least: bool = True
    form: str = "{:.2f}x"
    reason: str = ""

    def judge(self, value: float | None) -> tuple[str, str, str, str]:
        """(claim, figure, limit, met)."""
        limit = f"{'>=' if self.is_least else '<='} {self.form.format(self.limit)}"
        if value is None:
            return self.claim, "not measured", limit, "–"
        is_met = value >= self.limit if self.is_least else value <= self.limit
        missed = f"no: {self.reason}" if self.reason else "no"
        return self.claim, self.form.format(value), limit, "yes" if is_met else missed


def paired_table(timings: Sequence[Timing]) -> str:
    """Rows of this checkout, each with that of another behind it, timed in turn."""
    lines = []
    for ours, theirs in zip(timings[::2], timings[1::2], strict=True):
        if failed := ours.failed or theirs.failed:
            lines.append([ours.row.label, f"did not run: {failed}", "", "", ""])
            continue
        for name in ours.row.measures:
            low, middle, high = theirs.ratios(ours, name)
            cells = [f"{ours.median(name):.4f}", f"{theirs.median(name):.4f}", f"{middle:.3f} ({low:.3f}–{high:.3f})"]
            lines.append([ours.row.label, name, *cells])
    return table(["row", "measure", "here", "there", "here / there: median, middle half"], lines)
