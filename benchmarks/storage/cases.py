"""What `make bench-storage` measures: the rows of each group, and the bars that they are held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Bar
from benchmarks.storage import cold
from benchmarks.workers import Row, Timing
from hiddenstore.codecs import CODECS, FITTED

READ = ("sequential", "random")
LOAD = Row("torch.load per sample, copied into the pack", "TorchFiles", READ, "pt")
CHECKED = Row("hiddenstore raw, every chunk checked", "Ours", (*READ, "layer"), "raw-store")
UNCHECKED = Row("hiddenstore raw, no checksums", "OursUnchecked", READ, "raw-store")
LOSSLESS = Row("hiddenstore lossless", "OursLossless", READ, "lossless-store")
PACKED = (
    Row("hiddenstore q8, to packed bytes", "SafePacked", READ, "safe-store"),
    Row("hiddenstore compact, to packed bytes", "CompactPacked", READ, "compact-store"),
    Row("hiddenstore q8, dequantised on the CPU", "SafeDecoded", READ, "safe-store"),
    Row("hiddenstore compact, dequantised on the CPU", "CompactDecoded", READ, "compact-store"),
)
GROUPS: dict[str, tuple[Row, ...]] = {
    "read": (
        Row("raw file, preadv", "Preadv", READ, "raw"),
        Row("raw file, preadv by 512 KiB, each checked", "PreadvChecked", READ, "raw"),
        LOAD,
        Row("torch.load per sample, dropped at once", "TorchFilesDropped", READ, "pt"),
        Row("safetensors per sample", "Safetensors", READ, "safetensors"),
        Row("speculators fp8, dequantised on the CPU", "SpeculatorsFp8", READ, "fp8"),
        UNCHECKED,
        CHECKED,
        Row("zarr-python on our store", "StockZarr", READ, "raw-store"),
        Row("zarrs on our store", "StockZarrs", READ, "raw-store"),
        Row("tensorstore on our store", "StockTensorstore", READ, "raw-store"),
        *PACKED,
    ),
    "loaders": (
        LOAD,
        UNCHECKED,
        CHECKED,
        Row("MosaicML MDS", "Mds", READ, "mds"),
        Row("LitData", "LitData", READ, "litdata"),
        Row("WebDataset, stock", "WebDataset", ("sequential",), "webdataset"),
        Row("Lance", "Lance", READ, "lance"),
    ),
    "lossless": (
        LOAD,
        LOSSLESS,
        Row("zarr-python on our lossless store", "StockZarr", ("sequential",), "lossless-store"),
        Row("MosaicML MDS zstd", "MdsZstd", ("sequential",), "mds-zstd"),
        Row("LitData zstd", "LitDataZstd", ("sequential",), "litdata-zstd"),
    ),
    "cold": cold.ROWS,
    "write": (
        Row("torch.save per sample", "TorchFiles", ("write",), "w-pt"),
        Row("safetensors per sample", "Safetensors", ("write",), "w-safetensors"),
        Row("safetensors per sample, made durable", "SafetensorsDurable", ("write",), "w-durable"),
        Row("speculators fp8", "SpeculatorsFp8", ("write",), "w-fp8"),
        Row("zarr-python, sharded", "ZarrSharded", ("write",), "w-zarr"),
        Row("hiddenstore raw, encode to commit", "Ours", ("write",), "w-raw"),
        Row("hiddenstore q8, encode to commit", "Safe", ("write",), "w-safe"),
        Row("hiddenstore raw, without crc and digest", "OursWithoutChecks", ("write",), "w-raw-bare"),
        Row("hiddenstore q8, without crc and digest", "SafeWithoutChecks", ("write",), "w-safe-bare"),
    ),
}
GROUPS["copy"] = (
    Row("hiddenstore copy --recipe compact", "CopyCompact", ("copy",), "copy-compact"),
    Row("hiddenstore copy --recipe tiny", "CopyTiny", ("copy",), "copy-tiny"),
)
GROUPS["codecs"] = tuple(Row(f"codec {name}", name, ("encode", "decode")) for name in CODECS)
ON_A_DEVICE = (*GROUPS["codecs"], *(Row(f"codec {name}", name, ("encode", "decode")) for name in FITTED))
"""Those whose products are for GPUs too."""
COPIED_BYTES = 30_000_000
BUNDLED_WIDTH = 192
"""What ``copy`` reads: so many bytes of states, as wide as those of the bundled target."""
AGAINST = (GROUPS["read"][0], CHECKED, UNCHECKED, LOSSLESS, *PACKED)
"""What two checkouts are compared in; the first row is theirs and ours alike."""

WRITERS = {"raw-store": "Ours", "safe-store": "Safe", "compact-store": "Compact", "lossless-store": "OursLossless"}
LOSSY = ("safe-store", "compact-store", "fp8")
READ_AWAY = {
    "read": ("safetensors", "fp8"),
    "loaders": ("mds", "litdata", "webdataset", "lance"),
    "cold": ("raw-store", "safe-store", "compact-store"),
}
"""Folders that no later group reads: their disk and page cache are given back."""

TITLES = {
    "read": "Reading bf16, and packed bytes",
    "loaders": "Loaders",
    "lossless": "Lossless",
    "cold": "From the disk: nothing in the page cache",
    "write": "Writing (a quarter of the data, states in memory, four times the rounds)",
    "copy": "Copies of a raw store with the bundled target's head (D=192, V=1024, supervised final rows)",
    "codecs": "Codecs alone, in memory (a quarter of the data); encoding with the statistics of a commit record",
}


@dataclass(frozen=True)
class Ratio:
    """A bar on CPU seconds: the peer's over ours where that is to be large, ours over the peer's where small."""

    bar: Bar
    group: str
    measure: str
    ours: str
    peer: str
    peer_measure: str = ""

    def judge(self, groups: Mapping[str, Sequence[Timing]]) -> tuple[str, str, str, str]:
        timings = groups.get(self.group, ())
        ours = cpu(timings, self.ours, self.measure)
        peer = cpu(timings, self.peer, self.peer_measure or self.measure)
        if ours is None or peer is None:
            return self.bar.judge(None)
        return self.bar.judge(peer / ours if self.bar.is_least else ours / peer)


CHECKS = (
    ("reading bf16 in stored order", "read", "sequential", "Ours", "OursUnchecked"),
    ("reading bf16 at random", "read", "random", "Ours", "OursUnchecked"),
    ("writing bf16", "write", "write", "Ours", "OursWithoutChecks"),
    ("writing q8", "write", "write", "Safe", "SafeWithoutChecks"),
)
"""What is done, its group and measure, and the kinds with and without checksums and digests."""


def checks_cost(groups: Mapping[str, Sequence[Timing]]) -> list[tuple[str, str, str, str]]:
    """Rows of CPU seconds a logical GB with checks and without, and what they add in %."""
    rows = []
    for what, group, measure, *kinds in CHECKS:
        timings = groups.get(group, ())
        checked, bare = (cpu(timings, kind, measure) for kind in kinds)
        if checked is not None and bare is not None:
            rows.append((what, f"{checked:.3f}", f"{bare:.3f}", f"{checked / bare - 1:+.0%}"))
    return rows


def cpu(timings: Sequence[Timing], kind: str, measure: str) -> float | None:
    """CPU seconds a logical GB of one row: the median, and of writes the smallest. A write costs up to ten times as
    much where the page cache has no memory to hand, whoever writes."""
    timing = next((timing for timing in timings if timing.row.kind == kind and measure in timing.cpu), None)
    if timing is None or timing.failed is not None:
        return None
    return min(timing.cpu[measure]) if measure == "write" else timing.median(measure)


BEYOND_THE_COPY = "the ends of the first and last chunk, gaps between chunks, and Python"
READING = (
    (Bar("bf16 without checksum, against torch.load", 2), "OursUnchecked", "TorchFiles"),
    (Bar("the same, loaded tensor dropped at once", 2), "OursUnchecked", "TorchFilesDropped"),
    (Bar("bf16 without checksum, against preadv", 1.15, False, reason=BEYOND_THE_COPY), "OursUnchecked", "Preadv"),
    (Bar("bf16, every chunk checked, against preadv", 1.4, False), "Ours", "Preadv"),
    (Bar("the same, against preadv by 512 KiB, each checked", 1.15, False), "Ours", "PreadvChecked"),
    (Bar("q8 to packed bytes, checked, against preadv", 0.85, False), "SafePacked", "Preadv"),
    (Bar("compact to packed bytes, checked, against preadv", 0.55, False), "CompactPacked", "Preadv"),
    (Bar("bf16, every chunk checked, against torch.load", 1.5), "Ours", "TorchFiles"),
    (Bar("the same, loaded tensor dropped at once", 1.5), "Ours", "TorchFilesDropped"),
    (Bar("q8 to packed bytes, checked, against torch.load", 3), "SafePacked", "TorchFiles"),
    (Bar("compact to packed bytes, checked, against torch.load", 5), "CompactPacked", "TorchFiles"),
    (Bar("q8 dequantised on the CPU, against torch.load", 1.5, False), "SafeDecoded", "TorchFiles"),
)
LOSSLESS_READING = (
    (Bar("lossless read, against zarr-python", 2), "StockZarr"),
    (Bar("lossless read, against MDS zstd", 4), "MdsZstd"),
    (Bar("lossless read, against LitData zstd", 4, reason="the same zstd; ours checks every chunk"), "LitDataZstd"),
)
WRITING = (
    (Bar("write bf16, against safetensors made durable", 1.5, False), "Ours", "SafetensorsDurable"),
    (Bar("write q8, against safetensors made durable", 2, False), "Safe", "SafetensorsDurable"),
    (Bar("write bf16, against zarr-python", 2), "Ours", "ZarrSharded"),
    (Bar("write q8, against zarr-python bf16", 2), "Safe", "ZarrSharded"),
)
COPY = Bar("copy to tiny, against compact", 2, False, reason="tiny multiplies every final row by the head, in float32")
ENCODING = {
    "q8": Bar("encode q8, row statistics included", 1.5, form="{:.2f} GB/s"),
    "q4": Bar("encode q4, row statistics included", 1.2, form="{:.2f} GB/s"),
}
ONE_LAYER = Bar("one layer of four, against reading all", 3.5, reason="a short read is mostly opening and finding")
RATIOS = (
    *(
        Ratio(replace(bar, claim=f"{order} {bar.claim}"), "read", order, ours, peer)
        for order in READ
        for bar, ours, peer in READING
    ),
    *(
        Ratio(Bar(f"random bf16, every chunk checked, against {name}", 1), "loaders", "random", "Ours", name)
        for name in ("Mds", "LitData", "Lance")
    ),
    *(Ratio(bar, "lossless", "sequential", "OursLossless", peer) for bar, peer in LOSSLESS_READING),
    *(Ratio(bar, "write", "write", ours, peer) for bar, ours, peer in WRITING),
    Ratio(COPY, "copy", "copy", "CopyTiny", "CopyCompact"),
    Ratio(ONE_LAYER, "read", "layer", "Ours", "Ours", "random"),
)
SIZES = (
    ("lossless", "all", 1.4),
    ("lossless", "supervised", 1.55),
    ("safe", "supervised", 2.2),
    ("compact", "supervised", 3.5),
    ("tiny", "supervised", 4.6),
)
"""(recipe, final rows, how many times smaller than a .pt file of bf16)."""
STORED_SHARE = Bar("lossless stored share of bf16", 0.70, is_least=False, form="{:.3f}")
FIRST_BATCH = Bar("first batch after start, 10,000 samples, D=64", 1.0, is_least=False, form="{:.2f} s")
READER_MEMORY = Bar("peak memory of the reader over its budget", 100, is_least=False, form="{:+.0f} MB")
