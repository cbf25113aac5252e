"""What each codec costs and saves, from bf16 states in memory to a committed-size segment and back.

    python benchmarks/storage_codecs.py [--tokens 16384] [--width 4096] [--layers 2] [--rounds 5] [--folder DIR]

Columns: stored bytes as a share of bf16; codec = ``Codec.encode`` alone and ``Codec.decode`` into memory already there;
encode = joining the samples, row statistics and codec; write = chunks, checksums, sha256, files and fsync; read =
``SegmentReader.read`` of samples in random order from the page cache, decoded to bf16. GB are 10^9 bytes of bf16 states
(logical). CPU seconds are those of all threads of this process and repeat within about 15 % on a shared machine; wall
figures do not. The states are synthetic with a fixed seed: lognormal channel scales, massive channels, heavy-tailed
token norms, correlated tokens, sinks.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hiddenstore.codecs import CODECS
from hiddenstore.fs_local import LocalFilesystem
from hiddenstore.records import Record, Sample
from hiddenstore.segment import SegmentReader, SegmentWritten, encode_records, write_encoded
from hiddenstore.testing.builders import capture_spec
from schemas import CaptureSpec, CommitRecord, Engine

FOLDER = "segments/u-00000000"
STAGES = ("codec_encode", "codec_decode", "encode", "write", "read")
RESULTS = Path(__file__).parent / "results"


def synthetic_states(layers: int, tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 [L, T, D] shaped like an LLM's residual stream."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(0.6 * torch.randn(width, generator=generator))
    channels[:: max(1, width // 6)] *= 60
    states = torch.empty(layers, tokens, width, dtype=torch.bfloat16)
    for layer in range(layers):
        noise = torch.randn(tokens, width, generator=generator)
        noise[1:] += 0.5 * noise[:-1].clone()
        norms = torch.exp(0.3 * torch.randn(tokens, 1, generator=generator))
        norms[::1000] *= 1500
        states[layer] = (noise * channels * norms).bfloat16()
    return states


def make_records(states: torch.Tensor, sample_tokens: int) -> list[Record]:
    """Records of ``sample_tokens`` tokens each; no final hidden."""
    width, records = states.shape[2], []
    for start in range(0, states.shape[1], sample_tokens):
        part = states[:, start : start + sample_tokens]
        tokens = part.shape[1]
        ids = np.full(tokens, start, dtype=np.int32)
        sample = Sample(f"{start:032x}", ids, np.ones(tokens, np.uint8), np.array([[2, 0, tokens]], np.int32))
        nothing = torch.empty((0, width), dtype=torch.bfloat16)
        records.append(Record(sample, part, nothing, np.zeros(0, np.int32)))
    return records


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def one_round(
    root: Path, capture: CaptureSpec, records: Sequence[Record], states: torch.Tensor, out: torch.Tensor
) -> dict[str, tuple[float, float]]:
    """(wall, CPU) of every stage over the whole unit; the segment is left at ``root``, decoded states in ``out``."""
    shutil.rmtree(root, ignore_errors=True)
    fs, codec = LocalFilesystem(root), CODECS[capture.codecs.aux]
    wall, cpu, alone = timed(lambda: codec.encode(states))
    times = {"codec_encode": (wall, cpu)}
    wall, cpu, _ = timed(partial(codec.decode, alone, out))
    times["codec_decode"] = (wall, cpu)
    del alone
    wall, cpu, encoded = timed(lambda: encode_records("u", records, capture))
    times["encode"] = (wall, cpu)
    wall, cpu, written = timed(lambda: write_encoded(fs, FOLDER, encoded, capture))
    times["write"] = (wall, cpu)
    reader = SegmentReader(fs, FOLDER, commit(written), capture)
    order = np.random.default_rng(0).permutation(len(records)).tolist()
    reader.read(0)
    wall, cpu, _ = timed(lambda: [reader.read(index) is None for index in order])
    times["read"] = (wall, cpu)
    return times


def commit(written: SegmentWritten) -> CommitRecord:
    return CommitRecord(
        unit="u",
        input="i",
        segment=FOLDER,
        engine=Engine(name="synthetic", version="1"),
        files=written.files,
        samples=written.samples,
        stats=written.stats,
    )


def measure(arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    """One row per codec; rounds of the codecs interleave so that load on the machine falls on all of them."""
    states = synthetic_states(arguments.layers, arguments.tokens, arguments.width)
    records, out = make_records(states, arguments.sample_tokens), torch.zeros_like(states)
    logical = states.numel() * 2
    rounds: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in CODECS}
    stored: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(arguments.rounds + 1):
            for name in CODECS:
                capture = capture_spec(range(arguments.layers), arguments.width, name, "none")
                rounds[name].append(one_round(Path(folder) / name, capture, records, states, out))
                files = (path for path in (Path(folder) / name).rglob("*") if path.is_file())
                stored[name] = sum(path.stat().st_size for path in files)
                shutil.rmtree(Path(folder) / name)
    rows: list[dict[str, float | str]] = []
    for name, results in rounds.items():
        row: dict[str, float | str] = {"codec": name, "stored_share": stored[name] / logical}
        for stage in STAGES:
            # The first round pays for imports, pages and caches.
            walls, cpus = zip(*(result[stage] for result in results[1:]), strict=True)
            row[f"{stage}_wall_gb_per_s"] = logical / 1e9 / statistics.median(walls)
            row[f"{stage}_cpu_s_per_gb"] = statistics.median(cpus) / (logical / 1e9)
            row[f"{stage}_cpu_s_per_gb_best"] = min(cpus) / (logical / 1e9)
        rows.append(row)
    return rows


def machine() -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def print_table(rows: Sequence[dict[str, float | str]]) -> None:
    heads = ("codec: encode", "codec: decode", "encode", "write", "read + decode")
    print(f"{'codec':<10}{'stored':>8}   " + "".join(f"{head:^22}" for head in heads))
    print(f"{'':<10}{'share':>8}   " + f"{'GB/s wall':>11}{'CPU s/GB':>10} " * len(STAGES))
    for row in rows:
        cells = "".join(
            f"{row[f'{stage}_wall_gb_per_s']:>11.2f}{row[f'{stage}_cpu_s_per_gb']:>10.2f} " for stage in STAGES
        )
        print(f"{row['codec']:<10}{row['stored_share']:>8.3f}   {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sample-tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the segments (default: temporary)")
    parser.add_argument("--no-result", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments)
    print_table(rows)
    if arguments.no_result:
        return
    facts = {name: value for name, value in vars(arguments).items() if name not in ("folder", "no_result")}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    result = {"benchmark": "storage_codecs", "date": date, "settings": facts, "machine": machine(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"storage_codecs_{facts['width']}_{date}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
