"""Storage benchmark: ``python -m benchmarks.storage [--gb 2] [--states STORE] [--groups G … | --checks]
[--against CHECKOUT]``.

Run it through ``make bench-storage``, whose environment has the peers. Needs about 8 bytes of disk and of page cache
per byte of ``--gb``; less cache makes reads from disk part of the figures. Twenty minutes on two idle cores.
``--states``: those of a store of three aux layers and every final row (``collect --recipe raw --final all``) instead of
synthetic ones; the result is named after its folder. Against another checkout, each reading row is timed in both in
turn over the same files, without peers; with ``--groups write copy codecs`` the rows of those, of which each keeps a
process in either with about ``--gb`` of memory. ``--checks`` measures
only what checksums and digests cost. Any environment does for those, and for these groups and ``cold`` alone.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.report import Bar, progress, table
from benchmarks.storage import cases, cold
from benchmarks.storage.ours import recipe_sizes, write_store
from benchmarks.storage.states import (
    PT_BF16,
    SEED,
    WIDTH,
    RawStates,
    peer_sizes,
    sample_lengths,
    stored_lengths,
    synthetic_sample,
)
from benchmarks.workers import Answer, Row, Timing, Turns, WorkerProcess, running
from hiddenstore.store import Store

BUDGET = 256 << 20
SMALL_WIDTH, SMALL_SAMPLES = 64, 10_000
# Writes are judged by their smallest figure, which takes more rounds to find.
WRITE_ROUNDS = 4
WRITING = ("write", "copy", "codecs")

Groups = dict[str, list[Timing]]


class Bench:
    """The folders of one run under ``root``, over synthetic states as wide as ``states`` says or over those of a
    store."""

    def __init__(self, root: Path, gb: float, rounds: int, states: int | Store, device: str = "cpu") -> None:
        self.root, self.rounds, self.device = root, rounds, device
        path, size, bundled = root / "raw" / "raw.u16", int(gb * 1e9), cases.BUNDLED_WIDTH
        self.command = "make bench-storage"
        self.states = f"synthetic bf16 states (seed {SEED}, `benchmarks/storage/states.py`)"
        if isinstance(states, Store):
            self.command = "python -m benchmarks.storage --states STORE"
            self.states = f"bf16 states of {states.capture.target.name}, layers {states.capture.aux_layers}"
            width = states.capture.target.hidden_size
            self.raw = RawStates(path, stored_lengths(states, size), width, states)
        else:
            self.raw = RawStates(path, sample_lengths(size, states), states)
        self.quarter = self.raw.shortened(self.raw.logical_bytes // 4)
        self.bundled = RawStates(path, sample_lengths(cases.COPIED_BYTES, bundled), bundled)
        self.written: dict[str, Answer] = {}

    def group(self, name: str) -> list[Timing]:
        """Write what a group reads, then measure its rows in turn."""
        if name in WRITING:
            return self.writing(name, cases.GROUPS[name])
        return self.in_turn(self.write(cases.GROUPS[name]), self.raw, self.rounds)

    def writing(self, name: str, rows: Sequence[Row]) -> list[Timing]:
        """Rows of a group that reads no files, in turn."""
        rounds = self.rounds * (WRITE_ROUNDS if name == "write" else 1)
        return self.in_turn(rows, self.bundled if name == "copy" else self.quarter, rounds)

    def write(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The folders that the rows read, each once in a run; the rows."""

        def write_one(row: Row) -> None:
            writer = replace(row, kind=cases.WRITERS.get(row.folder, row.kind))
            self.written[row.folder] = self.ask_alone(writer, "write", keep=True)
            cold.warm(self.root / row.folder)

        missing = {row.folder: row for row in rows if row.folder not in {*self.written, "raw"}}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write_one, missing.values()))
        return rows

    def in_turn(self, rows: Sequence[Row], raw: RawStates, rounds: int) -> list[Timing]:
        """Every round of these rows, seconds per logical GB."""
        timings = [self._timing(row) for row in rows]

        def requests(turn: int) -> dict[str, dict[str, Any]]:
            seeded = {measure: {"seed": turn} for measure in ("random", "layer", "cold")}
            options = {"write": {"keep": False}, **seeded}
            return {measure: options.get(measure, {}) for row in rows for measure in row.measures}

        with running(lambda row: self._worker(row, raw), rows) as workers:
            for timing, worker in zip(timings, workers, strict=True):
                if timing.failed is None and "write" not in timing.row.measures:
                    timing.failed = self._opened(timing.row, worker)
            # Nobody pays for writing back what another left in the page cache.
            before = os.sync if "write" in rows[0].measures else lambda: None
            Turns(rounds, requests, raw.logical_bytes / 1e9, True, before).take(timings, workers)
        return timings

    def drop(self, *folders: str) -> None:
        """Free the page cache and the disk of what later groups do not read."""
        for folder in folders:
            shutil.rmtree(self.root / folder, ignore_errors=True)
            shutil.rmtree(self.root / f"{folder}-cache", ignore_errors=True)

    def ask_alone(self, row: Row, op: str, **options: Any) -> Answer:
        """One question to a fresh process."""
        with running(lambda row: self._worker(row, self.raw), [row]) as (worker,):
            return worker.ask(op, **options)

    def _timing(self, row: Row) -> Timing:
        written = self.written.get(row.folder, {})
        facts = {"stored_bytes": written["stored_bytes"]} if "stored_bytes" in written else {}
        return Timing(row, facts=facts, failed=written.get("failed"))

    def _opened(self, row: Row, worker: WorkerProcess) -> str | None:
        if "encode" in row.measures:
            return worker.ask("load", device=self.device).get("failed")
        answer = worker.ask("open")
        if {"copy", "cold"} & set(row.measures):
            return answer.get("failed")
        if "failed" not in answer:
            answer = worker.ask("check")
        is_exact = row.folder not in cases.LOSSY and row.kind != "TorchFilesDropped"
        differs = "did not give back what was written" if is_exact and not answer.get("same") else None
        failed: str | None = answer.get("failed", differs)
        return failed

    def _worker(self, row: Row, raw: RawStates) -> WorkerProcess:
        facts = [str(raw.path), json.dumps(raw.lengths), str(raw.width)]
        module = "benchmarks.storage.worker"
        return WorkerProcess(row, module, [row.kind, str(self.root / row.folder), *facts], self.root / "errors.log")


def many_small(folder: Path) -> Path:
    """A q8 store of many short samples at D=64."""
    lengths = np.random.default_rng(SEED).integers(32, 96, SMALL_SAMPLES).tolist()
    samples = (synthetic_sample(i, 0, n, SMALL_WIDTH).view(torch.uint16).numpy() for i, n in enumerate(lengths))
    write_store(folder, "safe", samples, lengths, SMALL_WIDTH)
    cold.warm(folder)
    return folder


def measure(bench: Bench) -> tuple[dict[str, Any], Groups]:
    """Everything of one run: the facts, and the rows by group."""
    raw, root = bench.raw, bench.root
    progress(f"generating {raw.logical_bytes / 1e9:.2f} GB")
    raw.write()
    progress("stored bytes")
    facts: dict[str, Any] = {
        "logical_bytes": raw.logical_bytes,
        "command": bench.command,
        "states": bench.states,
        "width": raw.width,
        "samples": len(raw.lengths),
        "rounds": bench.rounds,
        "sizes": recipe_sizes(raw, root / "sizes", min(12, len(raw.lengths))),
        "peer_sizes": peer_sizes(raw, root),
    }
    bench.drop("sizes")
    groups: Groups = {}
    for name in cases.GROUPS:
        progress(f"measuring: {name}")
        groups[name] = bench.group(name)
        if name == "read":
            facts["memory"] = bench.ask_alone(cases.CHECKED, "memory_of_loader", budget=BUDGET, tokens=2048)
        bench.drop(*cases.READ_AWAY.get(name, ()))
    progress("first batch")
    small = many_small(root / "small")
    facts["first_batch"] = bench.ask_alone(replace(cases.CHECKED, folder=small.name), "first_batch")
    return facts, groups


def judged(facts: dict[str, Any], groups: Groups) -> list[tuple[str, str, str, str]]:
    """Every bar, judged by this run."""
    sizes = {row["recipe"]: row for row in facts["sizes"]}
    pt, memory = facts["peer_sizes"][PT_BF16], facts["memory"]
    lines = [
        Bar(f"stored size, {recipe}, final {final}, against .pt bf16", limit).judge(pt / sizes[recipe][final])
        for recipe, final, limit in cases.SIZES
    ]
    lines += judged_ratios(groups, cases.GROUPS)
    lossless = next((one for one in groups.get("lossless", ()) if one.row == cases.LOSSLESS), None)
    stored = lossless.facts.get("stored_bytes") if lossless else None
    over = (memory["growth_bytes"] - memory["budget"]) / 1e6 if "growth_bytes" in memory else None
    return [
        *lines,
        cases.STORED_SHARE.judge(stored and stored / facts["logical_bytes"]),
        cases.FIRST_BATCH.judge(facts["first_batch"].get("wall")),
        cases.READER_MEMORY.judge(over),
    ]


def judged_ratios(groups: Groups, names: Collection[str]) -> list[tuple[str, str, str, str]]:
    """The bars on CPU seconds of the groups of these names."""
    lines = [ratio.judge(groups) for ratio in cases.RATIOS if ratio.group in names]
    if "codecs" in names:
        seconds = {codec: cases.cpu(groups.get("codecs", ()), codec, "encode") for codec in cases.ENCODING}
        lines += [bar.judge(1 / s if (s := seconds[codec]) else None) for codec, bar in cases.ENCODING.items()]
    return lines


def group_table(timings: Sequence[Timing], logical_bytes: int) -> str:
    """Stored share and every measure of a group's rows."""
    measures = list(dict.fromkeys(measure for timing in timings for measure in timing.row.measures))

    def cell(timing: Timing, measure: str) -> str:
        if timing.failed:
            return f"did not run: {timing.failed[:80]}"
        return report.spread(timing.cpu[measure]) if measure in timing.cpu else "–"

    rows = []
    for timing in timings:
        stored = timing.facts.get("stored_bytes")
        share = f"{stored / logical_bytes:.3f}" if stored else ""
        rows.append([timing.row.label, share, *(cell(timing, measure) for measure in measures)])
    return table(["format", "stored share", *measures], rows)


def sizes_table(facts: dict[str, Any]) -> str:
    """Bytes a token of every recipe."""
    pt, rows = facts["peer_sizes"][PT_BF16], []
    for row in facts["sizes"]:
        cells = [f"{row[final]:,.0f} ({pt / row[final]:.2f}x)" for final in ("all", "supervised")]
        rows.append([row["recipe"], *cells, f"{1 - row['supervised'] / row['all']:.1%}"])
    rows += [[name, f"{size:,.0f} ({pt / size:.2f}x)", "", ""] for name, size in facts["peer_sizes"].items()]
    return table(["recipe", "every final row (smaller than .pt)", "supervised rows", "dropped rows save"], rows)


def page(facts: dict[str, Any], groups: Groups) -> list[str]:
    """Markdown."""
    lines = [
        f"# Storage: size, read and write, {report.today()}",
        "",
        f"`{facts['command']}`, {facts['logical_bytes'] / 1e9:.2f} GB of {facts['states']} (D={facts['width']}, 3 aux "
        f"layers and the final hidden, {facts['samples']} samples of "
        f"{facts['logical_bytes'] / facts['samples'] / 1e6:.2f} MB), {facts['rounds']} rounds, each "
        "format in a process of its own, the formats of a round one after "
        "the other in an order of its own. Medians of **CPU seconds of all threads per logical GB** (10^9 bytes of "
        "the bf16 states), lowest and highest in brackets; wall seconds are in the JSON. Every read ends in the same "
        "page-aligned memory and comes from the page cache; three samples of each format are compared with what was "
        "written before.",
        "",
        report.machine_line(),
        "",
        "## Bars",
        "",
        "Medians of all rounds, of writes the smallest round of either side. The limits were set at D=4096 and samples "
        "of 29 MB: of smaller ones each costs more than its bytes.",
        "",
        table(report.BAR_HEAD, judged(facts, groups)),
        "",
        *checks_lines(groups),
        "",
        "## Stored bytes a token",
        "",
        sizes_table(facts),
    ]
    for name, timings in groups.items():
        lines += ["", f"## {cases.TITLES[name]}", "", *group_lines(name, timings, facts["logical_bytes"])]
    return lines


def group_lines(name: str, timings: Sequence[Timing], logical_bytes: int) -> list[str]:
    """The tables of a group."""
    return cold.lines_of(timings, logical_bytes) if name == "cold" else [group_table(timings, logical_bytes)]


def checks_lines(groups: Groups) -> list[str]:
    """The section on what checksums and digests cost."""
    head = ["what", "checked, CPU s per logical GB", "unchecked", "checks add"]
    text = (
        "Chunk crc32c and file digests, against the same code without them (`benchmarks/storage/ours.py`); medians of "
        "reads, the smallest round of writes."
    )
    return ["## Cost of checks", "", text, "", table(head, cases.checks_cost(groups))]


def checks(bench: Bench) -> tuple[dict[str, Any], list[str]]:
    """Only the rows of ``cases.CHECKS``: the figures and their page."""
    bench.raw.write()
    groups: Groups = {}
    for name in ("read", "write"):
        kinds = {kind for _, group, _, *both in cases.CHECKS for kind in both if group == name}
        rows = [row for row in cases.GROUPS[name] if row.kind in kinds]
        rounds = bench.rounds * (WRITE_ROUNDS if name == "write" else 1)
        raw = bench.quarter if name == "write" else bench.raw
        groups[name] = bench.in_turn(rows if name == "write" else bench.write(rows), raw, rounds)
    rows_of = {name: [timing.document() for timing in timings] for name, timings in groups.items()}
    gb = bench.raw.logical_bytes / 1e9
    command = f"python -m benchmarks.storage --checks --gb {gb:.1f} --rounds {bench.rounds}"
    facts = f"`{command}`: {gb:.2f} GB of synthetic bf16 states (writes: a quarter of them, four times the rounds)."
    lines = [f"# Cost of checks, {report.today()}", "", facts, ""]
    tables = [line for timings in groups.values() for line in ("", group_table(timings, bench.raw.logical_bytes))]
    return {"rows": rows_of}, [*lines, report.machine_line(), "", *checks_lines(groups), *tables]


def against(bench: Bench, checkout: Path, names: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Rows of this checkout and of another in turn, those that read over the same files: the figures and their table.

    ``names``: groups of ``WRITING``; none: the reading rows.
    """

    def pairs(rows: Sequence[Row], suffix: str = "") -> list[Row]:
        theirs = (replace(row, checkout=checkout.resolve(), folder=row.folder + suffix) for row in rows)
        return [row for pair in zip(rows, theirs, strict=True) for row in pair]

    bench.raw.write()
    timings = [timing for name in names for timing in bench.writing(name, pairs(cases.GROUPS[name], "-there"))]
    if not names:
        timings = bench.in_turn(pairs(bench.write(cases.AGAINST)), bench.raw, bench.rounds)
    return {"rows": [timing.document() for timing in timings]}, [
        "CPU s per logical GB",
        "",
        report.paired_table(timings),
    ]


def some(bench: Bench, names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """These groups alone: their figures, tables and bars."""
    bench.raw.write()
    groups = {name: bench.group(name) for name in names}
    bars = judged_ratios(groups, names)
    facts = f"{bench.raw.logical_bytes / 1e9:.2f} GB of {bench.states}, {bench.rounds} rounds. {report.machine_line()}"
    lines = [f"# Storage: {', '.join(names)}, {report.today()}", "", facts]
    lines += ["", table(report.BAR_HEAD, bars)] if bars else []
    for name, timings in groups.items():
        raw = bench.quarter if name in WRITING else bench.raw
        lines += ["", f"## {cases.TITLES[name]}", "", *group_lines(name, timings, raw.logical_bytes)]
    rows = {name: [timing.document() for timing in timings] for name, timings in groups.items()}
    return {"bars": bars, "rows": rows}, lines


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="logical GB of bf16 states")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--states", type=Path, help="a store whose states take the place of synthetic ones")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: temporary)")
    parser.add_argument("--device", help="cuda: only the codecs alone, on it")
    parser.add_argument("--checks", action="store_true", help="only what checksums and digests cost")
    parser.add_argument("--against", type=Path, help="another checkout: only its reading rows beside ours")
    parser.add_argument("--groups", nargs="+", choices=(*WRITING, "cold"), default=(), help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        states = options.width if options.states is None else Store.open(options.states)
        of_states = [] if options.states is None else [options.states.name]
        bench = Bench(Path(folder), options.gb, options.rounds, states, options.device or "cpu")
        if options.device:
            bench.raw.write()
            timings = bench.writing("codecs", cases.ON_A_DEVICE)
            result = {"device": options.device, "rows": [timing.document() for timing in timings]}
            report.publish("storage-device", result, options.results)
            return
        if options.checks:
            document, lines = checks(bench)
            report.publish("checks", document, options.results, lines)
            return
        if options.against:
            document, lines = against(bench, options.against, options.groups)
            report.publish("storage-against", document, options.results, lines)
            return
        if options.groups:
            document, lines = some(bench, options.groups)
            report.publish("-".join(["storage", *of_states, *options.groups]), document, options.results, lines)
            return
        facts, groups = measure(bench)
    rows = {name: [timing.document() for timing in timings] for name, timings in groups.items()}
    document = {**facts, "bars": judged(facts, groups), "rows": rows}
    report.publish("-".join(["storage", *of_states]), document, options.results, page(facts, groups))


if __name__ == "__main__":
    main()
