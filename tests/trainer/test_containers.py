"""A drafter trains the same from every container."""

import json
from pathlib import Path

import pytest

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.testing.builders import make_store
from tests.trainer.runs import WORDS
from trainer.train.loop import train


def numbers(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, and of every validation its losses."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line] + [
        line["validation"] for line in lines if "validation" in line
    ]


@pytest.mark.parametrize("codec", ["q8", "lossless"])
def test_losses_on_a_webdataset_copy_are_those_on_the_zarr_store(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, samples=20, layers=(1, 3, 4), codec=codec)
    run_copy(open_copy([store], tmp_path / "tars", container="webdataset"))
    words = [*WORDS, "train.max_steps=4", "train.validate_every=2"]
    train(store.path, tmp_path / "zarr-run", words=words)
    train(tmp_path / "tars", tmp_path / "tar-run", words=words)
    found = numbers(tmp_path / "zarr-run")
    assert len(found) > 4
    assert numbers(tmp_path / "tar-run") == found
