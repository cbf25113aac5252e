"""Requests and client CPU time of a store on object storage beside the same store on a local disk.

``AWS_ENDPOINT_URL=… python -m benchmarks.object_storage s3://BUCKET/PREFIX FOLDER`` on any S3 server, with
credentials from the environment. FOLDER gets the local stores and the cache.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.workers import timed
from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.data import TokenBatches
from hiddenstore.files.layout import SEGMENTS_DIR
from hiddenstore.fs.cache import CachedFilesystem
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.records import Sample, sample_id
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, HEAD, VOCAB, capture_spec, random_records, target_files
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, write_unit
from schemas.manifest import Container

UNITS, SAMPLES, TOKENS, WIDTH, LAYERS = 4, 16, 2048, 1024, (1, 3, 5)
GB = 1e9
T = TypeVar("T")
REQUESTS: Counter[str] = Counter()


class Counting(ObjectFilesystem):
    def _ask(self, path: str, action: Callable[[Any, str], T], is_put: bool = False) -> T:
        REQUESTS["requests"] += 1
        return super()._ask(path, action, is_put)


class CountingCached(Counting, CachedFilesystem):
    pass


def write(fs: Filesystem, container: Container) -> Store:
    capture = capture_spec(LAYERS, WIDTH, "q8", "all")
    store = create_store(fs, capture, HEAD, recipe_name(capture.codecs), target_files(WIDTH), container)
    rng, mask = np.random.default_rng(0), np.ones(TOKENS, np.uint8)
    spans = np.array([[2, 0, TOKENS]], np.int32)
    for unit in range(UNITS):
        rows = [rng.integers(0, VOCAB, TOKENS).astype(np.int32) for _ in range(SAMPLES)]
        samples = [Sample(sample_id(ids, mask), ids, mask, spans, "train", "random") for ids in rows]
        records = random_records(samples, capture)
        WRITES.update(measured(partial(write_unit, store, f"unit-{unit:06d}", "0" * 64, records, (), ENGINE)))
    return Store.open(fs)


WRITES: Counter[str] = Counter()


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Wall seconds, CPU seconds and requests of it."""
    requests, answer = REQUESTS["requests"], timed(work)
    return {"seconds": answer["wall"], "cpu_seconds": answer["cpu"], "requests": REQUESTS["requests"] - requests}


def train(fs: Filesystem) -> None:
    for _ in TokenBatches(Store.open(fs), batch_tokens=16_384, epochs=1):
        pass


def main() -> None:
    address, folder = sys.argv[1], Path(sys.argv[2])
    shutil.rmtree(folder / "cache", ignore_errors=True)
    rows = {}
    places: dict[str, tuple[Any, Container]] = {
        "local, zarr": (lambda: LocalFilesystem(folder / "zarr"), "zarr"),
        "local, webdataset": (lambda: LocalFilesystem(folder / "webdataset"), "webdataset"),
        "objects, zarr": (lambda: Counting(f"{address}/zarr"), "zarr"),
        "objects, webdataset": (lambda: Counting(f"{address}/webdataset"), "webdataset"),
    }
    for name, (make, container) in places.items():
        WRITES.clear()
        store = write(make(), container)
        stored = sum(record.bytes_stored for record in store.commits()) / GB
        rows[name, "write"] = per_gb(WRITES, stored)
        rows[name, "train"] = per_gb(measured(lambda make=make: train(make())), stored)
        rows[name, "verify --full"] = per_gb(measured(lambda make=make: verify(make(), "bytes")), stored)
    cached = CountingCached(f"{address}/webdataset", folder / "cache", 8 << 30, SEGMENTS_DIR)
    for name in ("train, cache empty", "train, cache full"):
        rows["objects, webdataset", name] = per_gb(measured(lambda: train(cached)), stored)
    document = {f"{place}: {what}": row for (place, what), row in rows.items()}
    print(json.dumps(document | {"GB": round(stored, 3)}, indent=1))


def per_gb(figures: Mapping[str, float], stored: float) -> dict[str, float]:
    return {f"{name}_per_GB": round(value / stored, 2) for name, value in figures.items()}


if __name__ == "__main__":
    main()
