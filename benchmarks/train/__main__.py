"""Training benchmark: ``python -m benchmarks.train [--rounds 15] [--bf16 | --against CHECKOUT | --device cuda]``.

Run it through ``make bench-train``, which makes the peers' environment. About fifteen minutes on two quiet cores.
Against another checkout, only the steps that read a store are timed, in both in turn, without peers. On a device, whole
steps at the shapes of large targets, without a store.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import Bar, progress, table
from benchmarks.train import device
from benchmarks.train.case import Case
from benchmarks.workers import ONE_THREAD, ROOT, Answer, Row, Timing, Turns, WorkerProcess, running

ENVIRONMENT = {
    **ONE_THREAD,
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # Without it the peers' modules do not import where there is no GPU.
    "TRITON_INTERPRET": "1",
}
PEERS_PYTHON = ROOT / ".venv-parity" / "bin" / "python"
STEPS = ("steps",)
WARM_STEPS = 2


def _peer(label: str, kind: str) -> Row:
    return Row(label, kind, STEPS, python=PEERS_PYTHON)


OURS = Row("hiddenstore, reading a bf16 store", "Ours", STEPS)
OURS_Q8 = Row("hiddenstore, reading a q8 store", "OursQ8", STEPS)
IN_MEMORY = Row("hiddenstore, batch in memory", "OursInMemory", STEPS)
EAGLE3 = (
    _peer("SpecForge 0.2, sdpa", "peers_specforge.Eagle3"),
    _peer("speculators 0.9, sdpa", "peers_speculators.Eagle3"),
    _peer("speculators 0.9, eager", "peers_speculators.Eagle3Eager"),
    _peer("ModelOpt 0.47, sdpa", "peers_modelopt.Eagle3"),
)
DFLASH = (
    _peer("SpecForge 0.2, sdpa", "peers_specforge.DFlash"),
    _peer("SpecForge 0.2, eager", "peers_specforge.DFlashEager"),
    _peer("speculators 0.9, eager", "peers_speculators.DFlash"),
    _peer("speculators 0.9, sdpa", "peers_speculators.DFlashSdpa"),
)
ROWS = {"eagle3": (OURS, OURS_Q8, IN_MEMORY, *EAGLE3), "dflash": (OURS, IN_MEMORY, *DFLASH)}
CASES = {
    "EAGLE-3, T=512, every token supervised, U = V = 4,096": (Case("eagle3", 512), 1.2),
    "EAGLE-3, T=512, half of the tokens supervised, U = V/4 = 1,024": (
        Case("eagle3", 512, draft=1024, supervised=0.5),
        1.5,
    ),
    "DFlash, S=512, blocks of 8, 32 anchors, 2 layers, 2 aux layers, V = 4,096": (Case("dflash", 512, layers=2), 1.3),
}
"""Each with how many times cheaper than the best peer a step is to be."""
BF16 = {"EAGLE-3, SmolLM2-135M's shape, T=1,024, 70 % supervised, U=9,024, 3 TTT steps, bf16, peers by autocast": (
    Case("eagle3", 1024, 49_152, 9_024, 576, 1536, 9, 3, 0.7, 3, aux=(1, 14, 26), precision="bf16"), 1.5)}  # fmt: skip
"""Peers under torch's autocast, their own bf16 but SpecForge's, which holds its weights in it; AdamW in fp32."""
LARGE = {
    "T=2,048, V=32,768, U=8,192, every token supervised": Case("eagle3", 2048, vocab=32768, draft=8192),
    "T=2,048, V=32,768, U=8,192, half supervised": Case("eagle3", 2048, vocab=32768, draft=8192, supervised=0.5),
}
SMALL = Case("eagle3", 1024, vocab=1024, draft=1024, width=128, wider=512, heads=2, kv_heads=1)
GROWTH = (
    *(replace(SMALL, tokens=tokens) for tokens in (16384, 8192, 4096, 2048, 1024, 512)),
    *(replace(SMALL, steps=steps) for steps in (1, 2, 3, 4, 5, 6, 8)),
)
METHOD = """Each engine in a process of its own, in turns of one step (DFlash: eight): forward, backward, clip, AdamW;
fp32 or as a case says; one thread, the same weights and tensors. Medians of **CPU seconds of all threads**, lowest and
highest in brackets; how much cheaper ours is: the median ratio of neighbouring turns, the middle half in brackets. Ours
is the trainer's own loop and reads its batch from a store at every step; the peers' tensors wait in memory in fp32.

Differences that stay: Triton kernels give way to SpecForge's own torch formula; torch.compile is off; speculators' LM
head trains, as the others' do; speculators and ModelOpt drop no slot and gate on mask[p], ours on mask[p+1];
speculators' DFlash has the target's head over the block rows besides; DFlash draws its anchors at random."""


class Bench:
    """Cases under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self, row: Row) -> WorkerProcess:
        """The worker of one engine, in its environment."""
        return WorkerProcess(row, "benchmarks.train.worker", [row.kind], self.root / "errors.log", ENVIRONMENT)

    def prepare(self, case: Case, name: str) -> str:
        """Write a case's tensors and the weights all engines start from; the folder."""
        folder = self.root / name
        case.save(folder)
        with running(self.start, [OURS]) as (worker,):
            worker.demand("open", folder=str(folder))
            worker.demand("save_weights")
        return str(folder)

    def speed(self, case: Case, name: str, rows: Sequence[Row], rounds: int) -> list[Timing]:
        """Compare every peer's losses with ours, then take turns."""
        folder, timings = self.prepare(case, name), [Timing(row) for row in rows]
        with running(self.start, rows) as workers:
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(lambda worker: worker.ask("open", folder=folder), workers))
            for timing, worker, answer in zip(timings, workers, answers, strict=True):
                timing.failed = answer.get("failed")
                if timing.failed is None and answer["equal"] is not None:
                    self._compare(case, timing, (worker, workers[0]), answer["equal"])
            for timing, worker in zip(timings, workers, strict=True):
                if timing.failed is None:
                    timing.failed = worker.ask("steps", count=WARM_STEPS).get("failed")
            Turns(rounds, lambda _: {"steps": {"count": case.steps_a_turn}}).take(timings, workers)
        return timings

    def memory(self, case: Case, name: str) -> dict[str, Answer]:
        """Growth of the peak over the imported process, each engine alone; ours reads ahead two packs."""
        folder, answers = self.prepare(case, name), {}
        for row in (OURS, *EAGLE3):
            options = {"prefetch_mb": case.two_packs_mb} if row == OURS else {}
            with running(self.start, [row]) as (worker,):
                opened = worker.ask("open", folder=folder, **options)
                answers[row.label] = opened if "failed" in opened else worker.ask("memory", count=2)
        return answers

    @staticmethod
    def _compare(case: Case, timing: Timing, pair: tuple[WorkerProcess, WorkerProcess], equal: dict[str, Any]) -> None:
        anchors = []
        if case.drafter == "dflash":
            step = max(1, (case.tokens - case.first_supervised - 2 * case.block) // case.anchors)
            anchors = [case.first_supervised + i * step for i in range(case.anchors)]
        else:
            equal = equal | {"steps": case.steps}
        theirs, ours = pair[0].ask("loss", anchors=anchors), pair[1].ask("loss", settings=equal, anchors=anchors)
        timing.failed = theirs.get("failed") or ours.get("failed")
        if timing.failed is None:
            timing.facts = {"loss": theirs["loss"], "our_loss": ours["loss"]}


def measure(bench: Bench, rounds: int, *, bf16: bool) -> tuple[dict[str, list[Timing]], dict[str, Any]]:
    """The rows of every case, and but for those in bf16 the other figures of a run."""
    speed: dict[str, list[Timing]] = {}
    for index, (title, (case, _)) in enumerate((BF16 if bf16 else CASES).items()):
        progress(f"speed: {title}")
        speed[title] = bench.speed(case, f"speed-{index}", ROWS[case.drafter], rounds)
    facts: dict[str, Any] = {"rounds": rounds}
    if bf16:
        return speed, facts
    progress("memory")
    facts["memory"] = {title: bench.memory(case, f"large-{index}") for index, (title, case) in enumerate(LARGE.items())}
    progress("growth")
    facts["growth"] = growth(bench)
    return speed, facts


def growth(bench: Bench, cases: Sequence[Case] = GROWTH) -> list[dict[str, Any]]:
    """Tokens, TTT steps, CPU seconds of a warm step and growth of the peak, each case in a process of its own."""

    def point(case: Case) -> dict[str, Any]:
        folder = bench.root / f"growth-{case.tokens}-{case.steps}"
        case.save(folder)
        with running(bench.start, [IN_MEMORY]) as (worker,):
            worker.demand("open", folder=str(folder), prefetch_mb=case.two_packs_mb)
            worker.demand("steps", count=1)
            seconds = worker.demand("steps", count=1 if case.tokens > 4096 else 3)["cpu"]
            growth = worker.demand("memory", count=0)["growth_bytes"]
        return {"tokens": case.tokens, "steps": case.steps, "cpu": seconds, "bytes": growth}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(point, cases))


def points_table(points: list[dict[str, Any]]) -> str:
    """Every point with its seconds and bytes a token."""
    rows = []
    for p in sorted(points, key=lambda p: (p["tokens"], p["steps"])):
        cells = [f"{p['cpu']:.3f}", f"{p['cpu'] / p['tokens'] * 1e3:.3f}", f"{p['bytes'] / 1e6:,.0f}"]
        rows.append([f"{p['tokens']:,}", p["steps"], *cells, f"{p['bytes'] / p['tokens'] / 1e3:.0f}"])
    return table(["tokens", "TTT steps", "CPU s/step", "CPU ms/token", "peak growth MB", "kB/token"], rows)


def best_peer(timings: Sequence[Timing]) -> Timing | None:
    """The peer that took least beside ours, the first row."""
    peers = [timing for timing in timings if timing.row.python == PEERS_PYTHON and timing.median("steps")]
    if timings[0].median("steps") is None or not peers:
        return None
    return min(peers, key=lambda peer: timings[0].ratios(peer, "steps")[1])


def judged(speed: dict[str, list[Timing]], facts: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Every bar, judged by this run."""
    lines = []
    for title, timings in speed.items():
        best = best_peer(timings)
        limit = (CASES | BF16)[title][1]
        bar = Bar(f"CPU seconds, {title}; against {best.row.label if best else 'the best peer'}", limit)
        lines.append(bar.judge(timings[0].ratios(best, "steps")[1] if best else None))
    for title, answers in facts.get("memory", {}).items():
        sizes = {label: answer["growth_bytes"] for label, answer in answers.items() if "failed" not in answer}
        ours = sizes.pop(OURS.label, None)
        best_label = min(sizes, key=lambda label: sizes[label]) if sizes else "the best peer"
        ratio = sizes[best_label] / ours if ours and sizes else None
        lines.append(Bar(f"growth of peak memory, {title}, against {best_label}", 2).judge(ratio))
    return lines


def speed_table(timings: Sequence[Timing]) -> str:
    """Rows with their medians, spread and ratio to the first."""
    rows: list[Sequence[str]] = []
    for timing in timings:
        if timing.median("steps") is None:
            rows.append((timing.row.label, f"did not run: {timing.failed}", "", "", ""))
            continue
        ratio = equal = ""
        if timing is not timings[0] and timings[0].median("steps"):
            low, middle, high = timings[0].ratios(timing, "steps")
            ratio = f"{middle:.2f}x [{low:.2f}–{high:.2f}]"
        if timing.facts:
            equal = f"{abs(timing.facts['loss'] / timing.facts['our_loss'] - 1):.0e}"
        wall = f"{statistics.median(timing.wall['steps']):.3f}"
        rows.append((timing.row.label, report.spread(timing.cpu["steps"]), wall, ratio, equal))
    return table(("engine", "CPU s/step", "wall s/step", "ours is cheaper by", "loss differs from ours by"), rows)


def page(speed: dict[str, list[Timing]], facts: dict[str, Any]) -> list[str]:
    """Markdown."""
    lines = [f"# Training: a step beside installed peers, {report.today()}", ""]
    lines += [f"`make bench-train`, {facts['rounds']} rounds. {METHOD}", "", report.machine_line(), ""]
    lines += ["## Bars", "", table(report.BAR_HEAD, judged(speed, facts))]
    for title, timings in speed.items():
        lines += ["", f"## {title}", "", speed_table(timings)]
    if "memory" not in facts:
        return lines
    lines.append("")
    lines += ["## Growth of peak memory over the imported process, two steps", ""]
    lines += ["Ours holds the store's reader, its memory for two packs, head, weights, AdamW state and one step; "
              "peers all but a reader."]  # fmt: skip
    for title, answers in facts["memory"].items():
        sizes = [
            (label, answer.get("failed") or f"{answer['growth_bytes'] / 1e6:,.0f}") for label, answer in answers.items()
        ]
        lines += ["", f"{title}:", "", table(("engine", "MB"), sizes)]
    return [*lines, "", "## Growth with tokens and TTT steps", "", points_table(facts["growth"])]


def against(bench: Bench, checkout: Path, rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Steps of this checkout and of another in turn: the figures and their table."""
    document, lines = {}, []
    for index, (title, (case, _)) in enumerate(CASES.items()):
        progress(title)
        rows = [row for row in ROWS[case.drafter] if row in (OURS, OURS_Q8)]
        pairs = [side for row in rows for side in (row, replace(row, checkout=checkout.resolve()))]
        timings = bench.speed(case, f"against-{index}", pairs, rounds)
        document[title] = [timing.document() for timing in timings]
        lines += [f"{title}, CPU s a step", "", report.paired_table(timings), ""]
    return document, lines


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: temporary)")
    parser.add_argument("--against", type=Path, help="another checkout: only its steps beside ours")
    parser.add_argument("--bf16", action="store_true", help="only the step at SmolLM2's shape, everybody in bf16")
    parser.add_argument("--device", help="cuda, or cpu to try: only large shapes on it, as many steps as rounds")
    parser.add_argument("--only", nargs="*", default=[], help="large shapes whose names start so")
    parser.add_argument("--recompute", action="store_true", help="layers are made again in the backward")
    parser.add_argument("--shrink", type=json.loads, default={}, help="dimensions of the large shapes as JSON, to try")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder))
        if options.device:
            train = {"device": options.device, "checkpoint_activations": options.recompute}
            result = device.every_case(bench.root, options.only, options.shrink, options.rounds, **train)
            report.publish("train-device", result, options.results)
            return
        if options.against:
            document, lines = against(bench, options.against, options.rounds)
            report.publish("train-against", document, options.results, lines)
            return
        speed, facts = measure(bench, options.rounds, bf16=options.bf16)
    rows = {title: [timing.document() for timing in timings] for title, timings in speed.items()}
    document = {**facts, "speed": rows, "bars": judged(speed, facts)}
    report.publish("train-bf16" if options.bf16 else "train", document, options.results, page(speed, facts))


if __name__ == "__main__":
    main()
