"""The trainer's peak memory does not know how deep the target is: growth for an 8- and a 24-layer target of one width.

Each depth trains in a process of its own on a store of random states; growth is peak resident memory less that after
the imports. Usage: python benchmarks/trainer_memory.py [--json] [--repeat N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, SAMPLES, TOKENS = 256, 48, 512
DEPTHS = {8: (1, 3, 4), 24: (1, 11, 20)}
WORDS = [
    "data.batch_tokens=2048", "data.pack_tokens=2048", "data.prefetch_mb=8", "drafter.num_heads=4",
    "drafter.num_kv_heads=2", "drafter.head_dim=64", "drafter.intermediate_size=512", "loss.steps=3",
    "train.max_steps=8", "train.validate_every=0",
]  # fmt: skip

CHILD = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from trainer.run import loop
from trainer.drafters import eagle3
import torch._dynamo  # what the first optimizer step would import
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
loop.train(sys.argv[1], sys.argv[2], words=sys.argv[3:])
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))
"""


def make_store(folder: Path, depth: int) -> str:
    """A store of random states, as if captured from a target of ``depth`` layers."""
    import numpy as np

    from hiddenstore.records import Sample, sample_id
    from hiddenstore.registered import input_digest
    from hiddenstore.testing import builders
    from hiddenstore.writer import create_store, write_unit

    capture = builders.capture_spec(width=WIDTH)
    target = capture.target.model_copy(update={"num_layers": depth})
    capture = capture.model_copy(update={"target": target, "aux_layers": DEPTHS[depth]})
    store = create_store(folder / f"store-{depth}", capture, builders.HEAD, "safe", builders.target_files(WIDTH))
    rng = np.random.default_rng(0)
    samples = []
    for index in range(SAMPLES):
        ids = rng.integers(0, builders.VOCAB, TOKENS).astype(np.int32)
        mask = (np.arange(TOKENS) >= 128).astype(np.uint8)
        spans = np.array([[2, 128, TOKENS]], np.int32)
        samples.append(Sample(sample_id(ids, mask), ids, mask, spans, "train", f"random:{index}"))
    digest = input_digest((sample.id, sample.split) for sample in samples)
    for begin in range(0, SAMPLES, 16):
        records = builders.random_records(samples[begin : begin + 16], capture)
        write_unit(store, f"{digest[:12]}-{begin:06d}", digest, records, (), builders.ENGINE)
    return str(store.path)


def growth(store: str, run: Path) -> int:
    """Bytes a short training run adds to a process that has imported everything."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, store, str(run), *WORDS], capture_output=True, text=True, check=True
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


def measure(repeat: int) -> dict[str, object]:
    """Median growth per depth and how far apart they are."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stores = {depth: make_store(folder, depth) for depth in DEPTHS}
        found: dict[int, list[int]] = {depth: [] for depth in DEPTHS}
        for turn in range(repeat):
            for depth, store in stores.items():
                found[depth].append(growth(store, folder / f"run-{depth}-{turn}"))
    median = {depth: sorted(values)[len(values) // 2] for depth, values in found.items()}
    shallow, deep = median[8], median[24]
    return {"growth_bytes": {str(d): v for d, v in found.items()}, "difference": abs(deep - shallow) / shallow}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    result = measure(options.repeat)
    if options.json:
        print(json.dumps(result))
        return
    for depth, values in result["growth_bytes"].items():  # type: ignore[attr-defined]
        print(f"{depth:>3} layers   growth {', '.join(f'{v / 1e6:.1f}' for v in values)} MB")
    print(f"difference of the medians: {result['difference']:.2%}")


if __name__ == "__main__":
    main()
