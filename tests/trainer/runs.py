"""A tiny store and the settings that train it in a second, shared by the loop's tests and the processes they start."""

from pathlib import Path

from hiddenstore.inputs import input_digest
from hiddenstore.records import Sample
from hiddenstore.store import Store
from hiddenstore.testing import builders
from hiddenstore.testing.builders import make_store
from hiddenstore.writer import create_store, write_unit

WORDS = [
    "data.batch_tokens=160", "data.pack_tokens=80", "drafter.hidden_size=32", "drafter.intermediate_size=32",
    "drafter.num_heads=2", "drafter.num_kv_heads=1", "drafter.head_dim=8", "drafter.vocab_size=40", "loss.steps=3",
    "train.max_steps=12", "train.checkpoint_every=4", "train.validate_every=6", "train.keep=2",
]  # fmt: skip
ON_CPU = [*WORDS, "train.device=cpu"]
"""For two processes, which would share a GPU, and for bounds closer than the rounding of a GPU's bf16."""


def store_of(folder: Path, samples: list[Sample]) -> Store:
    """A store of these samples, with random states."""
    capture = builders.capture_spec((1, 3, 4))
    made = create_store(folder / "store", capture, builders.HEAD, "safe", builders.target_files())
    digest = input_digest((sample.id, sample.split) for sample in samples)
    write_unit(made, f"{digest[:12]}-000000", digest, builders.random_records(samples, capture), (), builders.ENGINE)
    return Store.open(made.path)


def tiny_store(folder: Path, samples: int = 30) -> Store:
    return make_store(folder, samples=samples, layers=(1, 3, 4))
