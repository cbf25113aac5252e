"""The tree digest against another implementation of crc32c and the text of docs/format.md."""

import hashlib
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from pydantic import ValidationError

from hiddenstore.care.stored_unit import copy_verbatim
from hiddenstore.errors import CorruptionError
from hiddenstore.files.digests import PIECE_BYTES, TreeDigest, content_mismatch
from hiddenstore.files.documents import sha256_hex
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.verify.bytes import unit_damage
from schemas.manifest import FileEntry


def tree_of(data: bytes) -> str:
    """As docs/format.md says, without ours."""
    digest = hashlib.sha256()
    for offset in range(0, len(data), 1 << 20):
        piece = data[offset : offset + (1 << 20)]
        digest.update(struct.pack("<QQI", offset, len(piece), google_crc32c.value(piece)))
    return digest.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 511, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 77])
@pytest.mark.parametrize("step", [100_003, PIECE_BYTES // 2, 5 * PIECE_BYTES])
def test_a_tree_is_that_of_the_page_however_the_bytes_arrive(size: int, step: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    digest = TreeDigest()
    for start in range(0, size, step):
        piece = data[start : start + step]
        assert digest.update(piece) == google_crc32c.value(piece)
        digest.hexdigest()
    assert digest.hexdigest() == tree_of(data)


@pytest.mark.parametrize("size", [PIECE_BYTES - 64, PIECE_BYTES - 30, PIECE_BYTES, 2 * PIECE_BYTES, 1000])
def test_a_few_bytes_between_pieces_count_wherever_they_fall(size: int) -> None:
    random = np.random.default_rng(size)
    digest, whole = TreeDigest(), b""
    for _ in range(4):
        body, few = random.bytes(size), random.bytes(64)
        assert digest.update(body) == google_crc32c.value(body)
        digest.extend(few)
        whole += body + few
    assert digest.hexdigest() == tree_of(whole)


def test_zeros_in_another_number_and_swapped_pieces_have_another_tree() -> None:
    one, other = bytes([1]) * PIECE_BYTES, bytes([2]) * PIECE_BYTES
    trees = {tree_of(data) for data in (one + other, other + one, bytes(5), bytes(6), bytes(PIECE_BYTES), b"")}
    assert len(trees) == 6


def test_an_entry_names_one_digest_and_says_only_that() -> None:
    for digests in ({}, {"sha256": "a", "tree": "b"}):
        with pytest.raises(ValidationError, match="not exactly one of sha256 and tree"):
            FileEntry(path="x", size=1, **digests)
    assert FileEntry(path="x", size=1, tree="b").model_dump() == {"path": "x", "size": 1, "tree": "b"}
    assert FileEntry(path="x", size=1, sha256="a").model_dump() == {"path": "x", "size": 1, "sha256": "a"}


def test_readers_check_the_digest_that_is_named() -> None:
    data = b"hidden"
    for entry in (
        FileEntry(path="x", size=6, tree=tree_of(data)),
        FileEntry(path="x", size=6, sha256=sha256_hex(data)),
    ):
        assert content_mismatch(entry, data) is None
        kind = "tree" if entry.tree else "sha256"
        fault = content_mismatch(entry, b"hiddem")
        assert fault is not None
        assert fault.startswith(f"expected {kind} {entry.digest[:16]}…, found ")


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_writers_name_trees_of_shards_and_tars_and_any_other_byte_is_damage(tmp_path: Path, container: str) -> None:
    store = make_store(tmp_path / "store", container=container)
    (record, *_) = store.commits()
    trees = [file for file in record.files if file.tree is not None]
    assert {"zarr": "layer_1/c/0/0", "webdataset": "samples.tar"}[container] in {file.path for file in trees}
    assert not any(file.path.endswith(".json") for file in trees)
    for file in record.files:
        data = Path(store.path, record.segment, file.path).read_bytes()
        assert file.digest == (tree_of(data) if file.tree else sha256_hex(data)), file.path
    # The last byte of a tar is padding that no reader of ours looks at.
    path = Path(store.path, record.segment, trees[0].path)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    damage = unit_damage(Store.open(store.path), record)
    assert [finding.detail.partition(" ")[2][:5] for finding in damage.files.values()] == ["tree "]
    with pytest.raises(CorruptionError, match="expected tree"):
        copy_verbatim(store, record, make_store(tmp_path / "other", container=container))
