"""The digest over every tensor of a checkpoint: equal however it is sharded, another after any change of its bytes."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiddenstore.errors import ConfigError, StorageError
from hiddenstore.targets.checkpoint import BLOCKS, WHOLE_BELOW_BYTES, checkpoint_sha256, files_sha256
from hiddenstore.targets.folder import open_target
from hiddenstore.targets.gguf import RECORD_FILE
from tests.collectors.tiny import WIDTH, save_target, tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGE = "model.layers.0.mlp.large"
Weights = dict[str, torch.Tensor]


def digest(folder: Path) -> str | None:
    return checkpoint_sha256(open_target(str(folder)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny target and one tensor of 4 MiB, of which blocks alone are read."""
    folder = save_target(tmp_path / "target")
    write(folder, load_file(folder / WEIGHTS) | {LARGE: torch.zeros(WHOLE_BELOW_BYTES)})
    return folder


def write(folder: Path, weights: Weights, name: str = WEIGHTS) -> None:
    # Weights of before may still be mapped.
    (folder / name).unlink(missing_ok=True)
    save_file(weights, folder / name, metadata={"format": "pt"})


def shard(folder: Path, count: int) -> None:
    weights = load_file(folder / WEIGHTS)
    places = {name: f"part-{index % count}.safetensors" for index, name in enumerate(weights)}
    for place in {*places.values()}:
        write(folder, {name: weight for name, weight in weights.items() if places[name] == place}, place)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("count", [1, 3])
def test_shards_do_not_matter(count: int, target: Path) -> None:
    whole = digest(target)
    shard(target, count)
    assert digest(target) == whole


def test_a_target_that_is_saved_again_is_the_same(tmp_path: Path) -> None:
    first = save_target(tmp_path / "first")
    tiny_model("llama").save_pretrained(tmp_path / "second", max_shard_size="50KB")
    assert (tmp_path / "second" / INDEX).exists()
    for file in first.iterdir():
        if file.name != WEIGHTS:
            (tmp_path / "second" / file.name).write_bytes(file.read_bytes())
    assert digest(tmp_path / "second") == digest(first)


def moved(weights: Weights, name: str, index: int) -> None:
    weights[name].view(-1)[index] += 1


CHANGES: dict[str, Callable[[Weights], object]] = {
    "last byte of a small tensor": lambda weights: moved(weights, "model.layers.3.mlp.down_proj.weight", -1),
    "first block of a large one": lambda weights: moved(weights, LARGE, 0),
    "last block of a large one": lambda weights: moved(weights, LARGE, -1),
    "seventh block of a large one": lambda weights: moved(
        weights, LARGE, 7 * (4 * WHOLE_BELOW_BYTES - 4096) // (BLOCKS - 1) // 4 + 1
    ),
    "a cast": lambda weights: weights.update(
        {"model.norm.weight": weights["model.norm.weight"].bfloat16().float().bfloat16()}
    ),
    "a shape": lambda weights: weights.update({LARGE: weights[LARGE].view(2, -1)}),
    "a name": lambda weights: weights.update({"model.layers.0.mlp.other": weights.pop(LARGE)}),
    "one more": lambda weights: weights.update({"model.extra": torch.ones(WIDTH)}),
    "one less": lambda weights: weights.pop(LARGE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_tensor_is_another_checkpoint(change: str, target: Path) -> None:
    before, weights = digest(target), load_file(target / WEIGHTS)
    CHANGES[change](weights)
    write(target, weights)
    assert digest(target) != before


def test_a_quantised_tensor_counts_as_it_is_stored(target: Path) -> None:
    weights = load_file(target / WEIGHTS)
    name, scale = "model.layers.0.mlp.up_proj.weight", torch.ones(1)
    write(target, weights | {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale": scale})
    before = digest(target)
    write(target, weights | {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale": 2 * scale})
    assert digest(target) != before


def test_what_was_converted_from_gguf_is_known_by_the_digest_of_that_file(target: Path) -> None:
    (target / RECORD_FILE).write_text(json.dumps({"file": "a.gguf", "sha256_of_blocks": "ab" * 32, "tensors": {}}))
    assert digest(target) == "ab" * 32


def test_a_checkpoint_without_safetensors_states_none(target: Path) -> None:
    torch.save(load_file(target / WEIGHTS), target / "pytorch_model.bin")
    (target / WEIGHTS).unlink()
    assert digest(target) is None


def test_where_one_file_and_an_index_are_there_the_one_file_counts_as_it_does_to_transformers(target: Path) -> None:
    whole = (target / WEIGHTS).read_bytes()
    before = digest(target)
    shard(target, 2)
    (target / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"part-1\.safetensors is named by the index"):
        digest(target)
    (target / WEIGHTS).write_bytes(whole)
    assert digest(target) == before


def test_a_target_that_runs_elsewhere_states_none_where_not_all_of_it_is_here(target: Path) -> None:
    folder = replace(open_target(str(target)), runs_elsewhere=True)
    shard(target, 2)
    assert checkpoint_sha256(folder) == digest(target)
    (target / "part-1.safetensors").unlink()
    assert checkpoint_sha256(folder) is None


def test_a_file_that_is_cut_is_damaged_and_has_no_digest(target: Path) -> None:
    data = (target / WEIGHTS).read_bytes()
    (target / WEIGHTS).write_bytes(data[:-1])
    with pytest.raises(ConfigError, match="a download that ended early") as caught:
        digest(target)
    assert caught.value.kind == "target-damaged"


def test_files_that_make_a_target_are_told_apart_in_every_form_and_others_beside_them_do_not_matter(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, large = tmp_path / "target.gguf", target / "pytorch_model.bin"
    for file in (gguf, large):
        file.touch()
        os.truncate(file, 65 << 20)
    before, of_file = files_sha256(target), files_sha256(gguf)
    for name in ("README.md", "chats.jsonl", "log.txt"):
        (target / name).write_text("beside it")
    (target / ".cache").mkdir()
    os.utime(large)
    monkeypatch.chdir(target)
    assert files_sha256(target) == files_sha256(Path()) == before
    # One byte in a block of each MiB, in a whole file, and in the header of safetensors.
    for file, offset in ((large, 7 << 20), (target / "tokenizer.json", 20), (target / WEIGHTS, 40)):
        whole = file.read_bytes()
        file.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert files_sha256(target) != before, file
        file.write_bytes(whole)
    assert files_sha256(target) == before
    os.truncate(gguf, 66 << 20)
    longer = files_sha256(gguf)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len({of_file, longer, files_sha256(gguf)}) == 3


def test_a_file_of_a_target_that_cannot_be_read_is_an_error_of_the_storage(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(StorageError):
        files_sha256(target)
