"""What a store costs by its number of samples: opening, one sample, an epoch's order, structure check, append, resume.

``python -m benchmarks.scale --container webdataset --units 1000 --samples 100`` writes a store and measures it; give
several sizes to see the exponents. Files are written without fsync, and the segments of all units are hard links to
one that was written: ids, commit records, index files, folders and sizes are those of a real store, its states are one
unit's over and over. ``--read`` writes and reads every unit of its own instead, samples of 8 tokens at D=192. Every
figure comes from a process of its own; memory is its peak.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import hiddenstore
from benchmarks.workers import resident
from hiddenstore.commit import read_commit
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, sha256_hex
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.index.publish import IndexWriter
from hiddenstore.inputs import REGISTERED, encode_registered, table_digest
from hiddenstore.records import Record, Sample, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.writer import create_store, pending_units, write_unit
from schemas.manifest import Engine

TOKENS, WIDTH, LAYERS = 8, 192, (1, 3, 5)
ENGINE = Engine(name="random", version="1")
LINKS = 60_000
"""ext4 has at most 65,000 names for a file."""


class NoSync(PosixDisk):
    """A disk that leaves durability to the system: a benchmark's store may die with its machine."""

    def sync_file(self, handle: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


def records_of(unit: int, samples: int) -> list[Record]:
    import torch

    rng = np.random.default_rng(unit)
    states = torch.from_numpy(rng.standard_normal((samples, len(LAYERS) + 1, TOKENS, WIDTH), np.float32)).bfloat16()
    mask = (np.arange(TOKENS) >= 4).astype(np.uint8)
    spans = np.array([[1, 0, 4], [2, 4, TOKENS]], np.int32)
    rows = final_row_positions(mask, "supervised")
    records = []
    for number in range(samples):
        ids = rng.integers(0, 64, TOKENS).astype(np.int32)
        sample = Sample(sample_id(ids, mask), ids, mask, spans)
        records.append(Record(sample, states[number, :-1], states[number, -1][rows], rows))
    return records


def ids_of(unit: int, samples: int) -> list[str]:
    digits = b"".join(hashlib.blake2b(b"%d-%d" % (unit, n), digest_size=16).digest() for n in range(samples)).hex()
    return [digits[start : start + 32] for start in range(0, len(digits), 32)]


def new_store(folder: Path, container: str) -> Store:
    from hiddenstore.testing.builders import HEAD, capture_spec, target_files

    fs = LocalFilesystem(folder, NoSync())
    return create_store(fs, capture_spec(LAYERS, WIDTH), HEAD, "safe", target_files(WIDTH), container)


def write_linked(folder: Path, container: str, units: int, samples: int) -> float:
    """A store of ``units`` units; seconds that publishing the index took."""
    store, indexing = new_store(folder, container), 0.0
    digest = _register(store, units, samples)
    writer = IndexWriter(store.fs, store.catalog)
    for unit in range(units):
        if unit % LINKS == 0:
            template = write_unit(store, "template", digest, records_of(0, samples), (), ENGINE)
            assert template is not None
            (folder / layout.commit_path("template")).unlink()
            document = template.model_dump(mode="json")
        name = layout.unit_name(digest, unit)
        segment = layout.segment_path(name, f"{unit:08x}")
        _link(folder / template.segment, folder / segment)
        document |= {"unit": name, "segment": segment}
        for entry, sample in zip(document["samples"], ids_of(unit, samples), strict=True):
            entry["id"] = sample
        body = canonical(document)
        record = b'%s,"sha256":"%s"}\n' % (body[:-1], sha256_hex(body).encode())
        (folder / layout.commit_path(name)).write_bytes(record)
        begun = time.perf_counter()
        writer.add(name)
        indexing += time.perf_counter() - begun
    writer.close()
    return indexing


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        new = target / path.relative_to(source)
        new.mkdir() if path.is_dir() else os.link(path, new)


def _register(store: Store, units: int, samples: int) -> str:
    """The input of all units, and of one more that is left to do; its digest."""
    ids = pa.chunked_array([pa.array(ids_of(unit, samples)) for unit in range(units + 1)]).combine_chunks()
    splits = pa.array(["train"]).take(np.zeros(len(ids), int))
    digest = table_digest(pa.table({"sample_id": ids, "split": splits}))
    names = pa.array([layout.unit_name(digest, unit) for unit in range(units + 1)])
    names = names.take(np.repeat(np.arange(units + 1), samples))
    table = pa.table([ids, names, pa.array(np.full(len(ids), TOKENS, np.int32)), splits], schema=REGISTERED)
    store.fs.put_if_absent(layout.input_path(digest), encode_registered(table))
    return digest


def open_store(folder: Path) -> dict[str, float]:
    store = hiddenstore.open(folder)
    return {"units": len(store.commits())}


def show(folder: Path) -> dict[str, float]:
    """One sample of an open store by id, and by the start of one."""
    hiddenstore.open(folder)[0]  # loads what reading needs
    store = hiddenstore.open(folder)
    wanted = read_commit(store.fs, store.catalog.names[-1]).record.samples[0].id
    begun = time.perf_counter()
    store.read(wanted)
    by_id = time.perf_counter() - begun
    begun = time.perf_counter()
    assert store.id_starting(wanted[:12]) == wanted
    return {"seconds": by_id, "by_prefix": time.perf_counter() - begun}


def epoch(folder: Path) -> dict[str, float]:
    """From an open store to the thousandth pack of an epoch."""
    from hiddenstore.data import TokenBatches

    store = hiddenstore.open(folder)
    begun = time.perf_counter()
    packs, plan = 0, TokenBatches(store, batch_tokens=1024, pack_tokens=256).plan(0)
    while packs < 1000:
        batch = next(plan, None)
        if batch is None:
            break
        packs += len(batch[0].packs)
    return {"seconds": time.perf_counter() - begun, "packs": packs}


def check(folder: Path) -> dict[str, float]:
    from hiddenstore.verify import verify

    report = verify(folder)
    assert set(report.kinds) <= {"incomplete"}, report.kinds
    return {"findings": len(report.findings)}


def append(folder: Path) -> dict[str, float]:
    """One unit into an open store with its index, less the same into an empty one: neither is fsynced."""
    import pyarrow.parquet  # noqa: F401  # the first use is not what is measured

    seconds = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as empty:
        # A process writes its first index file into the store that is measured: twice there, and the second counts.
        for place in (Path(empty, "first"), folder, folder, Path(empty, "store")):
            store, unit = new_store(place, Store.open(folder).manifest.container), f"zz-{layout.new_attempt()}"
            writer, records = IndexWriter(store.fs, store.catalog), records_of(7, 100)
            begun = time.perf_counter()
            assert write_unit(store, unit, "ab" * 32, records, (), ENGINE)
            writer.add(unit)
            writer.close()
            seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds[2] - seconds[3]}


def resume(folder: Path) -> dict[str, float]:
    """From nothing to the list of units that are left."""
    store = hiddenstore.open(folder)
    return {"pending": sum(len(pending_units(store, digest)) for digest in store.inputs())}


def read_in_order(folder: Path) -> dict[str, float]:
    store = hiddenstore.open(folder)
    return _rate(lambda: (1 for _ in store))


def read_shuffled(folder: Path) -> dict[str, float]:
    from hiddenstore.data import TokenBatches

    batches = TokenBatches(hiddenstore.open(folder), batch_tokens=2048, epochs=1)
    return _rate(lambda: (batch.samples for batch in batches))


def _rate(read: Callable[[], Iterator[int]]) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    samples = sum(read())
    cpu = time.process_time() - cpu
    return {"seconds": time.perf_counter() - begun, "samples": samples, "per_cpu_second": samples / cpu}


MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {
    "open": open_store, "show": show, "epoch": epoch, "check": check, "resume": resume, "append": append,
    "read in order": read_in_order, "read shuffled": read_shuffled,
}  # fmt: skip


def measured(name: str, folder: Path) -> dict[str, Any]:
    """One measure in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.scale", "--measure", name, "--store", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def run_one(name: str, folder: Path) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    answer = MEASURES[name](folder)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    # ru_maxrss would be that of the process which started this one, where it is more.
    peak_mb = round(resident("VmHWM") / (1 << 20))
    return {"seconds": round(answer.pop("seconds", seconds), 4), "cpu_s": round(cpu, 3), "peak_mb": peak_mb, **answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--container", default="webdataset", choices=("webdataset", "zarr"))
    parser.add_argument("--units", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--samples", type=int, default=100, help="of a unit")
    parser.add_argument("--read", action="store_true", help="read every sample of units that are all written")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir(), "hiddenstore-scale"))
    parser.add_argument("--measure", choices=MEASURES)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(run_one(options.measure, options.store)))
        return
    reads = [name for name in MEASURES if name.startswith("read")]
    names = reads if options.read else [name for name in MEASURES if name not in reads]
    rows = []
    for units in options.units:
        shutil.rmtree(options.store, ignore_errors=True)
        begun, row = time.perf_counter(), {"container": options.container, "samples": units * options.samples}
        if options.read:
            store = new_store(options.store, options.container)
            for unit in range(units):
                write_unit(store, f"u-{unit:06d}", "ab" * 32, records_of(unit, options.samples), (), ENGINE)
        else:
            row["index_s"] = round(write_linked(options.store, options.container, units, options.samples), 2)
            row["index_mb"] = round(sum(f.stat().st_size for f in (options.store / "index").glob("*")) / 1e6, 1)
        row |= {"written_s": round(time.perf_counter() - begun, 1)}
        row |= {name: measured(name, options.store) for name in names}
        rows.append(row)
        print(json.dumps(row), flush=True)
    for name in names if len(rows) > 1 and not options.read else []:
        growth = math.log(max(1e-3, rows[-1][name]["seconds"]) / max(1e-3, rows[0][name]["seconds"]))
        print(f"{name}: exponent {growth / math.log(rows[-1]['samples'] / rows[0]['samples']):.2f}")
    shutil.rmtree(options.store, ignore_errors=True)


if __name__ == "__main__":
    main()
