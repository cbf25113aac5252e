"""Records read as columns say what records say, and refuse what they refuse, whatever their bytes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hiddenstore.commit import Commit, read_many
from hiddenstore.errors import HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.documents import checked_body, sha256_hex
from hiddenstore.index.listed import Listed, list_records
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store

Change = Callable[[bytes], bytes]


def swapped(old: bytes, new: bytes, count: int = 1) -> Change:
    def change(body: bytes) -> bytes:
        assert old in body
        return body.replace(old, new, count)

    return change


CHANGES: dict[str, Change] = {
    "nothing": lambda body: body,
    "no samples": lambda body: body[: body.index(b'"samples":[') + 11] + body[body.index(b'],"segment"') :],
    "a sample twice": lambda body: body.replace(b'"samples":[', b'"samples":[' + first(body) + b","),
    "a comma too much": swapped(b'"samples":[', b'"samples":[,'),
    "a comma at the end": swapped(b'],"segment"', b',],"segment"'),
    "no comma": swapped(b"},{", b"}{"),
    "a blank": swapped(b'"start":0', b'"start": 0'),
    "a blank for a comma": swapped(b"},{", b"} {"),
    "a leading zero": swapped(b'"start":0', b'"start":00'),
    "a number in quotes": swapped(b'"start":0', b'"start":"0"'),
    "a fraction": swapped(b'"start":0', b'"start":0.0'),
    "a negative start": swapped(b'"start":0', b'"start":-1'),
    "a start elsewhere": swapped(b'"start":0', b'"start":1'),
    "a final start elsewhere": swapped(b'"final_start":0', b'"final_start":1'),
    "no tokens": swapped(b'"tokens":', b'"tokens":0,"x":'),
    "a key twice": swapped(b'"start":0', b'"start":0,"start":0'),
    "a split nobody has": swapped(b'"split":"train"', b'"split":"test"'),
    "validation": swapped(b'"split":"train"', b'"split":"validation"'),
    "an unknown member": swapped(b'"start":0', b'"start":0,"stop":1'),
    "members in another order": swapped(b'"split":"train","start":0', b'"start":0,"split":"train"'),
    "a start beyond 64 bits": swapped(b'"start":0', b'"start":99999999999999999999'),
    "a start of 15 digits": swapped(b'"start":0', b'"start":999999999999999'),
    "samples twice": swapped(b'"samples":[', b'"samples":[],"samples":['),
    "samples in the engine": swapped(b'"settings":{}', b'"settings":{"samples":[],"segment":""}'),
    "rejects": swapped(b'"rejects":[]', b'"rejects":[{"detail":"","id":"a/b","reason":"x","tokens":1}]'),
    "sound rejects": swapped(b'"rejects":[]', b'"rejects":[{"detail":"","id":"ab","reason":"x","tokens":1}]'),
    "no files": lambda body: body[: body.index(b'"files":[') + 9] + body[body.index(b'],"format"') :],
    "another unit": swapped(b'"unit":"', b'"unit":"x'),
    "format of the future": swapped(b'"format":1', b'"format":2'),
    "an id that is no digest": lambda body: body.replace(first(body)[first(body).index(b'"id":"') + 6 :][:32], b"A-1"),
    "an id that leaves": lambda body: body.replace(first(body)[first(body).index(b'"id":"') + 6 :][:32], b"../a"),
}


def first(body: bytes) -> bytes:
    """The text of the first sample."""
    return body[body.index(b'"samples":[') + 11 :].partition(b"}")[0] + b"}"


def outcome(item: Listed | HiddenstoreError) -> tuple[object, ...]:
    if isinstance(item, HiddenstoreError):
        return item.kind, item.message, getattr(item, "samples", ())
    head = {name: value for name, value in dict(item.head).items() if name != "samples"}
    columns = {name: (column.dtype, column.tolist()) for name, column in item.samples.columns.items()}
    return item.name, item.sha256, head, item.samples.ids[:], columns, item.facts


def body_of(store: Store, number: int) -> bytes:
    name = store.catalog.names[number]
    return checked_body(Path(store.path, layout.COMMITS_DIR, name).read_bytes(), name)


@contextmanager
def records_of(store: Store, bodies: Mapping[int, bytes]) -> Iterator[None]:
    """Other records under the names of some, each with its digest."""
    paths = {Path(store.path, layout.COMMITS_DIR, store.catalog.names[number]): bodies[number] for number in bodies}
    sound = {path: path.read_bytes() for path in paths}
    for path, body in paths.items():
        path.write_bytes(b'%s,"sha256":"%s"}\n' % (body[:-1], sha256_hex(body).encode()))
    try:
        yield
    finally:
        for path, data in sound.items():
            path.write_bytes(data)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("listed") / "store", samples=6, container="webdataset")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_both_readers_of_a_record_agree(store: Store, change: Change) -> None:
    changed, name = change(body_of(store, 0)), store.catalog.names[0]
    for names in ([name], store.catalog.names, store.catalog.names[::-1], [name, name]):
        with records_of(store, {0: changed}):
            listed, read = list_records(store.fs, names), read_many(store.fs, names)
        assert [outcome(item) for item in listed] == [
            outcome(Listed.of(item) if isinstance(item, Commit) else item) for item in read
        ]


@pytest.mark.parametrize("border", [b'"final_start"', b'"id"', b'"supervised"', b"}"])
def test_a_sample_in_two_records_is_in_neither(store: Store, border: bytes) -> None:
    """The end of the first record's last sample moves to the beginning of the second's first."""
    first, second = body_of(store, 0), body_of(store, 1)
    end, opening = first.index(b'],"segment"'), b'"samples":['
    cut = first.rindex(border, 0, end)
    moved = opening + first[cut:end] + b","
    with records_of(store, {0: first[:cut].rstrip(b",") + first[end:], 1: second.replace(opening, moved, 1)}):
        assert all(isinstance(item, HiddenstoreError) for item in list_records(store.fs, store.catalog.names[:2]))


def test_what_this_package_writes_is_read_by_the_quick_way(store: Store) -> None:
    for item in list_records(store.fs, store.catalog.names):
        assert isinstance(item, Listed)
        assert not hasattr(item.head, "samples")
        assert np.array_equal(item.numbered(7).record, np.full(len(item.samples), 7))


def test_a_flipped_bit_of_a_record_is_damage(store: Store) -> None:
    name = store.catalog.names[0]
    path = Path(store.path, layout.COMMITS_DIR, name)
    sound = path.read_bytes()
    try:
        for place in range(0, len(sound), 97):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
            assert isinstance(list_records(store.fs, [name])[0], HiddenstoreError)
    finally:
        path.write_bytes(sound)
