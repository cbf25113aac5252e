"""The results of a run as a dated Markdown page and its JSON, with the bars of the plan and whether they were met."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.storage.run import WRITE_ROUNDS, Found

FP8 = "fp8 per token"
PT = "pt bf16 per sample"

# Why a bar may be missed, by a part of its claim; of a claim that several match, the first.
REASONS = (
    (
        "against safetensors durable",
        "Statistics of every channel, the sha256 that the commit names and crc32c of every chunk come on top.",
    ),
    (
        "against safetensors",
        "safetensors leaves its bytes in the page cache, neither made durable nor hashed; ours are both before a "
        "commit names them, and sha256 alone (`part: sha256 of the bytes`) costs more than the whole bar allows.",
    ),
    (
        "against preadv",
        "Four bytes of checksum after every chunk put the next one off the alignment of its place in memory, where the "
        "kernel copies more slowly; runs differ by a tenth to either side of the bar.",
    ),
    (
        "against LitData zstd",
        "Both decode the same Huffman codes by the same zstd, which is two thirds of our time; ours stores 0.69 of the "
        "bytes where LitData stores 0.80, checks every chunk, and decodes the chunks at both ends of a sample whole.",
    ),
    ("one layer of four", "A short read is mostly opening and finding, which one layer and four share."),
)


def cpu(found: Sequence[Found], kind: str, measure: str = "sequential") -> float | None:
    """CPU seconds a logical GB of one row: the median, and of writes the smallest.

    A write costs up to ten times as much where the page cache has no memory to hand, whoever writes.
    """
    for one in found:
        if one.row.kind == kind and measure in one.cpu:
            return min(one.cpu[measure]) if measure == "write" else statistics.median(one.cpu[measure])
    return None


def bars(result: dict[str, Any], groups: dict[str, list[Found]]) -> list[tuple[str, str, str, str]]:
    """(claim, found, wanted, met) of every line of the plan that this run can judge."""
    lines: list[tuple[str, str, str, str]] = []

    def cheaper(claim: str, other: float | None, ours: float | None, wanted: float) -> None:
        if other is None or ours is None:
            lines.append((claim, "not measured", f">= {wanted:g}x", "–"))
        else:
            lines.append((claim, f"{other / ours:.2f}x", f">= {wanted:g}x", "yes" if other / ours >= wanted else "no"))

    def within(claim: str, other: float | None, ours: float | None, wanted: float) -> None:
        if other is None or ours is None:
            lines.append((claim, "not measured", f"<= {wanted:g}x", "–"))
        else:
            lines.append((claim, f"{ours / other:.2f}x", f"<= {wanted:g}x", "yes" if ours / other <= wanted else "no"))

    sizes, pt = {row["recipe"]: row for row in result["sizes"]}, result["peer_sizes"][PT]
    for recipe, final, wanted in (
        ("lossless", "all", 1.4),
        ("lossless", "supervised", 1.55),
        ("safe", "supervised", 2.2),
        ("compact", "supervised", 3.5),
        ("tiny", "supervised", 4.6),
    ):
        if recipe in sizes:
            cheaper(
                f"stored size, {recipe}, final {final}, against .pt bf16", pt, sizes[recipe][f"final_{final}"], wanted
            )
    read, loaders, lossless, write = (groups.get(name, []) for name in ("read", "loaders", "lossless", "write"))

    def beside_load(claim: str, kind: str, order: str, wanted: float) -> None:
        """Against ``torch.load`` to the same place; in brackets against one whose tensor is dropped at once."""
        ours, dropped = cpu(read, kind, order), cpu(read, "TorchFilesDropped", order)
        cheaper(f"{order} {claim}, against torch.load", cpu(read, "TorchFiles", order), ours, wanted)
        if ours is not None and dropped is not None:
            text, found, least, met = lines.pop()
            lines.append((text, f"{found} ({dropped / ours:.2f}x)", least, met))

    for order in ("sequential", "random"):
        load = cpu(read, "TorchFiles", order)
        beside_load("bf16 without checksum", "OursUnchecked", order, 2)
        within(
            f"{order} bf16 without checksum, against preadv",
            cpu(read, "Preadv", order),
            cpu(read, "OursUnchecked", order),
            1.2,
        )
        beside_load("bf16, every chunk checked", "Ours", order, 1.5)
        beside_load("q8 to packed bytes, checked", "SafePacked", order, 3)
        beside_load("compact to packed bytes, checked", "CompactPacked", order, 5)
        within(f"{order} q8 dequantised on the CPU, against torch.load", load, cpu(read, "SafeDecoded", order), 1.5)
    for kind, name in (("Mds", "MDS"), ("LitData", "LitData"), ("Lance", "Lance")):
        cheaper(
            f"random bf16, every chunk checked, against {name}",
            cpu(loaders, kind, "random"),
            cpu(loaders, "Ours", "random"),
            1,
        )
    ours = cpu(lossless, "OursLossless")
    for kind, name, wanted in (
        ("StockZarr", "zarr-python", 2),
        ("MdsZstd", "MDS zstd", 4),
        ("LitDataZstd", "LitData zstd", 4),
    ):
        cheaper(f"lossless read, against {name}", cpu(lossless, kind), ours, wanted)
    if one := next((one for one in lossless if one.row.kind == "OursLossless" and one.stored_bytes), None):
        ratio = one.stored_bytes / result["logical_bytes"]
        lines.append(("lossless stored share of bf16", f"{ratio:.3f}", "<= 0.70", "yes" if ratio <= 0.70 else "no"))
    for kind, name in (("RawSegment", "files alone"), ("Ours", "encode to commit")):
        for peer, label in (("Safetensors", "safetensors"), ("SafetensorsSealed", "safetensors durable and hashed")):
            within(f"write bf16 ({name}), against {label}", cpu(write, peer, "write"), cpu(write, kind, "write"), 1.5)
        cheaper(
            f"write bf16 ({name}), against zarr-python",
            cpu(write, "ZarrSharded", "write"),
            cpu(write, kind, "write"),
            2,
        )
    cheaper("write q8, against zarr-python bf16", cpu(write, "ZarrSharded", "write"), cpu(write, "Safe", "write"), 2)
    layer = cpu(read, "Ours", "layer")
    cheaper("one layer of four, against reading all", cpu(read, "Ours", "random"), layer, 3.5)
    first = result["first_batch"].get("wall")
    if first is not None:
        samples = result["first_batch"]["samples"]
        lines.append(
            (
                f"first batch after start, {samples:,} samples, D=64",
                f"{first:.2f} s",
                "< 1 s",
                "yes" if first < 1 else "no",
            )
        )
    growth = result["memory"].get("growth_bytes")
    if growth is not None:
        over = (growth - result["memory"]["budget"]) / 1e6
        lines.append(
            (
                "peak memory of the reader over its budget",
                f"{over:+.0f} MB",
                "<= 100 MB",
                "yes" if over <= 100 else "no",
            )
        )
    return lines


def page(result: dict[str, Any], groups: dict[str, list[Found]]) -> str:
    """The Markdown page."""
    facts, gb = result["machine"], result["logical_bytes"] / 1e9
    text = [
        f"# Storage: size, read and write, {result['date']}",
        "",
        f"`make bench-storage`, {gb:.2f} GB of bf16 states (D={result['width']}, 3 aux layers and the final hidden, "
        f"{result['samples']} samples), {result['rounds']} rounds, each format in a process of its own, the formats of "
        "a round one after the other in an order of its own. Figures are medians of **CPU seconds of all threads per "
        "logical GB** (10^9 bytes of the bf16 states, "
        "whatever is stored), smallest and largest in brackets. Every read ends in the same page-aligned memory, as a "
        "pack is filled, and comes from the page cache; three samples of each format are read before and compared with "
        "what was written.",
        "",
        f"{facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, load average at the end "
        f"{facts['load_average'][0]:.1f}: {result['note']}",
        "",
        "## Bars",
        "",
        "Medians of all rounds, of writes the smallest round of either side. Against torch.load: read to the same "
        "place as ours, and in brackets with the loaded tensor dropped at once, without the copy into a pack.",
        "",
        "| claim | found | wanted | met |",
        "|---|---|---|---|",
        *(f"| {' | '.join(line)} |" for line in bars(result, groups)),
        "",
        *_missed(bars(result, groups)),
        "## Stored bytes a token",
        "",
        f"bf16 of 3 + 1 vectors is {4 * 2 * result['width']:,} bytes. "
        + ", ".join(f"{name}: {value:,.0f}" for name, value in result["peer_sizes"].items())
        + ". Codec alone: the final hidden of every token. Dropped rows: what leaving out unsupervised "
        "final rows saves on top (60 % of the tokens are supervised).",
        "",
        "| recipe | every final row | x smaller than .pt | supervised rows | x smaller than .pt | dropped rows save |",
        "|---|---|---|---|---|---|",
    ]
    pt = result["peer_sizes"][PT]
    for row in result["sizes"]:
        whole, some = row["final_all"], row["final_supervised"]
        sizes = f"{whole:,.0f} | {pt / whole:.2f} | {some:,.0f} | {pt / some:.2f}"
        text.append(f"| {row['recipe']} | {sizes} | {1 - some / whole:.1%} |")
    titles = {
        "read": "Reading bf16, and packed bytes",
        "loaders": "Loaders",
        "lossless": "Lossless",
        "write": f"Writing (a quarter of the data, states in memory, {result['rounds'] * WRITE_ROUNDS} rounds)",
    }
    for name, found in groups.items():
        measures = list(dict.fromkeys(measure for one in found for measure in one.row.measures))
        text += ["", f"## {titles[name]}", ""]
        text.append(f"| format | stored share | {' | '.join(measures)} |")
        text.append(f"|---|---|{'---|' * len(measures)}")
        for one in found:
            share = f"{one.stored_bytes / result['logical_bytes']:.3f}" if one.stored_bytes and name != "write" else ""
            cells = [_cell(one, measure) for measure in measures]
            text.append(f"| {one.row.label} | {share} | {' | '.join(cells)} |")
    text += ["", "## The data", "", result["data"], "", *_statistics(result)]
    return "\n".join(text) + "\n"


def _missed(lines: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Why each missed bar is missed, as far as it is known."""
    found = []
    for claim, _, _, met in lines:
        why = next((why for part, why in REASONS if part in claim), None)
        if met == "no" and why is not None:
            found += [f"*Missed: {claim}.* {why}", ""]
    return found


def write(result: dict[str, Any], groups: dict[str, list[Found]], folder: Path) -> Path:
    """``storage-DATE.md`` and ``.json``; the path of the page."""
    folder.mkdir(exist_ok=True)
    rows = {
        name: [
            {
                "format": one.row.label,
                "cpu_s_per_gb": one.cpu,
                "wall_s_per_gb": one.wall,
                "stored_bytes": one.stored_bytes,
                "failed": one.failed,
            }
            for one in found
        ]
        for name, found in groups.items()
    }
    document = {**result, "bars": bars(result, groups), "rows": rows}
    path = folder / f"storage-{result['date']}.md"
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    path.write_text(page(result, groups), encoding="utf-8")
    return path


def _cell(one: Found, measure: str) -> str:
    if one.failed:
        return f"did not run: {one.failed[:80]}"
    values = one.cpu.get(measure)
    if not values:
        return "–"
    return f"{statistics.median(values):.3f} [{min(values):.3f}–{max(values):.3f}]"


def _statistics(result: dict[str, Any]) -> list[str]:
    sources = {"synthetic": result["statistics"]} | {
        store["target"]: store["layers"] for store in result["genuine"] if store["recipe"] == "raw"
    }
    names = list(next(iter(result["statistics"].values())))
    lines = [f"| states | layer | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for source, layers in sources.items():
        for layer, values in layers.items():
            cells = [f"{values[name]:.4g}" for name in names]
            lines.append(f"| {source} | {layer} | {' | '.join(cells)} |")
    if result["genuine"]:
        lines += ["", *genuine_table(result["genuine"])]
    return lines


def genuine_table(stores: list[dict[str, Any]]) -> list[str]:
    """Genuine states are narrow here, so that scales and the unquantised rows of sinks weigh more than at D=4096."""
    lines = [
        "| genuine states of | width | trained | recipe | bytes a token | bf16 of every vector | smaller |",
        "|---|---|---|---|---|---|---|",
    ]
    for store in sorted(stores, key=lambda store: (store["target"], -store["bytes_per_token"])):
        ratio = store["bf16_bytes_per_token"] / store["bytes_per_token"]
        lines.append(
            f"| {store['target']} | {store['width']} | {store['supervised']:.0%} | {store['recipe']} "
            f"| {store['bytes_per_token']:,.0f} | {store['bf16_bytes_per_token']:,} | {ratio:.2f}x |"
        )
    return lines
