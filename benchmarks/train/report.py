"""The results of a run as a dated Markdown page and its JSON, with the bars of the plan and whether they were met."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.train.run import OURS, Found

TITLES = {
    "full": "EAGLE-3, T=512, every token supervised, U = V = 4,096",
    "half": "EAGLE-3, T=512, half of the tokens supervised, U = V/4 = 1,024",
    "dflash": "DFlash, S=512, blocks of 8, 32 anchors, 2 layers, 2 aux layers, V = 4,096",
}
METHOD = """`make bench-train`, {rounds} rounds, each engine in a process of its own, in turns of one step (DFlash:
eight). A step is forward, backward, clip and AdamW in fp32 on one thread; figures are medians of **CPU seconds of all
threads**, smallest and largest in brackets. How much cheaper ours is, is the median of the ratios of the rounds, each
of neighbouring turns (a machine changes its clock), the middle half of them in brackets. All engines start from the
same weights and tensors, D=256, F=1,024, 4/2 heads, TTT 7; before the run every peer's losses are compared with ours
under its settings (last column, relative, the largest of all TTT steps). Ours is the trainer's own loop, reading its
batch from a store at every step; the peers' tensors wait in memory in fp32."""
DIFFERENCES = """Differences that stay: Triton kernels give way to the torch formula SpecForge keeps beside them;
torch.compile is off; speculators' LM head trains, as the others' do; speculators and ModelOpt drop no slot and gate on
mask[p], ours on mask[p+1] (a slot of 512); ModelOpt normalises the hidden twice, which unit norms hide; speculators'
DFlash teaches the target's most probable token, so its step has the target's head over the block rows besides; DFlash
draws its anchors at random at every step in every engine. Automodel and TorchSpec are no installable packages: not
run."""
LAWS = """Over the last four lengths CPU seconds grow as T^{exponent_cpu:.2f}, because every slot attends to all before
it, and peak memory as T^{exponent_bytes:.2f}: {kilobytes:.0f} kB a token at the longest. A square through the memory
has {memory_square:+.3f} bytes per pair of tokens; one fp32 score per pair and head would be {dense:.0f}. By TTT steps a
line explains {steps_linear:.1%} of the variance of the CPU seconds; the last two added steps cost {steps_last:.2f} of
the mean added step."""
NO_GPU = """No GPU was at hand: `python -m benchmarks.train.gpu` measures tokens a second, MFU and peak memory at 8B and
70B shapes, and `tests/benchmarks` runs it in a tiny form on the CPU."""
WANTED = {"full": 1.2, "half": 1.5, "dflash": 1.3}


def median(found: Found) -> float | None:
    """CPU seconds a step, None where it did not run."""
    return statistics.median(found.cpu) if found.cpu and found.failed is None else None


def cheaper(found: Found, ours: Found) -> list[float]:
    """CPU seconds over ours, round by round: lower quartile, median, upper quartile."""
    ratios = [theirs / mine for theirs, mine in zip(found.cpu, ours.cpu, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3


def best_peer(found: Sequence[Found]) -> Found | None:
    """The peer that took least beside ours, the first row."""
    ran = [one for one in found if not one.row.is_ours and median(one) is not None]
    if median(found[0]) is None or not ran:
        return None
    return min(ran, key=lambda one: cheaper(one, found[0])[1])


def bars(
    speed: dict[str, list[Found]], memory: dict[str, dict[str, Any]], shares: dict[str, float]
) -> list[tuple[str, str, str, str]]:
    """(claim, found, wanted, met) of every line of the plan that this run can judge."""
    lines = []
    for name, found in speed.items():
        best = best_peer(found)
        claim = f"CPU seconds, {TITLES[name]}; against "
        if best is None:
            lines.append((claim + "the best peer", "not measured", f">= {WANTED[name]}x", "–"))
            continue
        ratio = cheaper(best, found[0])[1]
        lines.append((claim + best.row.label, f"{ratio:.2f}x", f">= {WANTED[name]}x", met_if(ratio >= WANTED[name])))
    if shares:
        attention = sum(share for name, share in shares.items() if "attention" in name)
        for what, share in (
            ("matrix products", shares["products"]),
            ("matrix products and attention kernels, which are products too", shares["products"] + attention),
        ):
            lines.append((f"share of our step in {what}, U = V", f"{share:.0%}", ">= 80%", met_if(share >= 0.8)))
    for name, rows in memory.items():
        label, least = least_memory(rows)
        mine = rows[OURS.label].get("growth_bytes")
        if mine and least:
            claim = f"growth of peak memory, {name}, against {label}"
            lines.append((claim, f"{least / mine:.2f}x", ">= 2x", met_if(least / mine >= 2)))
    return lines


def met_if(held: bool) -> str:
    """The word for a bar."""
    return "yes" if held else "no"


def least_memory(rows: dict[str, Any]) -> tuple[str, int]:
    """The peer that grew least, and its bytes; 0 where none ran."""
    ran = {label: row["growth_bytes"] for label, row in rows.items() if "hiddenstore" not in label and len(row) == 1}
    ran = {label: size for label, size in ran.items() if isinstance(size, int)}
    return min(ran.items(), key=lambda item: item[1]) if ran else ("no peer", 0)


def speed_table(found: Sequence[Found]) -> str:
    """Rows with their medians, spread and ratio to the first."""
    rows: list[Sequence[str]] = []
    ours = median(found[0])
    for one in found:
        cpu = median(one)
        if cpu is None:
            rows.append((one.row.label, f"did not run: {one.failed}", "", "", ""))
            continue
        spread = f"{cpu:.3f} [{min(one.cpu):.3f}–{max(one.cpu):.3f}]"
        ratio = ""
        if ours and one is not found[0]:
            low, middle, high = cheaper(one, found[0])
            ratio = f"{middle:.2f}x [{low:.2f}–{high:.2f}]"
        equal = "" if one.difference is None else f"{one.difference:.0e}"
        rows.append((one.row.label, spread, f"{statistics.median(one.wall):.3f}", ratio, equal))
    return table(("engine", "CPU s/step", "wall s/step", "ours is cheaper by", "losses differ from ours by"), rows)


def page(result: dict[str, Any], speed: dict[str, list[Found]]) -> str:
    """The Markdown of a run."""
    machine, shares = result["machine"], result["shares"]
    named = (f"{'matrix products' if key == 'products' else f'`{key}`'} {value:.1%}" for key, value in shares.items())
    parts = [
        f"# Training: a step beside installed peers, {result['date']}",
        METHOD.format(rounds=result["rounds"]),
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, torch {machine['torch']}, load "
        f"average {machine['load_before']} before and {machine['load_after']} after. {result['note']}",
        DIFFERENCES,
        "## Bars",
        table(("claim", "found", "wanted", "met"), result["bars"]),
    ]
    for name, found in speed.items():
        parts += [f"## {TITLES[name]}", speed_table(found)]
    parts += [
        "## Where our step's time goes",
        f"torch.profiler, self CPU time, EAGLE-3 with every token supervised: {', '.join(named)}.",
        "## Growth of peak memory over the imported process, two steps",
        "Ours holds the store's reader, its memory for two packs, head, weights, AdamW state and one step; peers all "
        "but a reader.",
    ]
    for name, rows in result["memory"].items():
        sizes = [(label, _megabytes(row)) for label, row in rows.items()]
        parts += [f"{name}:", table(("engine", "MB"), sizes)]
    parts += ["## Growth with tokens and TTT steps", f"![growth]({result['plot']})", _laws(result["fits"])]
    parts += [_growth_table(result["growth"]), "## GPU", NO_GPU]
    return "\n\n".join(parts) + "\n"


def _megabytes(row: dict[str, Any]) -> str:
    return f"{row['growth_bytes'] / 1e6:,.0f}" if "growth_bytes" in row else f"did not run: {row['failed']}"


def _laws(fits: dict[str, float]) -> str:
    return LAWS.format(**fits, kilobytes=fits["bytes_per_token"] / 1e3)


def _growth_table(points: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"{p['tokens']:,}", p["steps"], f"{p['cpu']:.3f}", f"{p['cpu'] / p['tokens'] * 1e3:.3f}",
            f"{p['bytes'] / 1e6:,.0f}", f"{p['bytes'] / p['tokens'] / 1e3:.0f}",
        )
        for p in sorted(points, key=lambda p: (p["tokens"], p["steps"]))
    ]  # fmt: skip
    return table(("tokens", "TTT steps", "CPU s/step", "CPU ms/token", "peak growth MB", "kB/token"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write(result: dict[str, Any], speed: dict[str, list[Found]], folder: Path) -> Path:
    """``train-DATE.json`` and ``.md``; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: [{**one.__dict__, "row": one.row.label} for one in found] for name, found in speed.items()}
    path = folder / f"train-{result['date']}.json"
    path.write_text(json.dumps({**result, "speed": rows}, indent=1) + "\n", encoding="utf-8")
    page_path = path.with_suffix(".md")
    page_path.write_text(page(result, speed), encoding="utf-8")
    return page_path
