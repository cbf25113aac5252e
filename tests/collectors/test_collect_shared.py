"""Prefixes that conversations have in common stand once in a ``zarr-shared`` store, and all samples read as before."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from awscrt.checksums import crc32c

from collectors.capture.job import CollectOptions, collect
from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.data import TokenBatches
from hiddenstore.errors import CorruptionError, FormatError
from hiddenstore.records import Record, Sample, sample_id
from hiddenstore.segments.prefixes import BLOCK
from hiddenstore.segments.zarr_shared import SHARED_ROWS
from hiddenstore.store import Store
from hiddenstore.verify import verify
from schemas.manifest import ROLES
from tests.accepting import repair_all
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import VOCAB, save_target
from tests.golden.reading import answer, command

RECIPES = ("raw", "lossless", "compact", "aux=q4q3,final=q8", "rebuilt-q3-all", "rebuilt-klt")


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 700)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def conversation(parts: list[tuple[str, np.ndarray]]) -> Sample:
    """Turns by role; the last answer is supervised."""
    ends = np.cumsum([0, *(len(ids) for _, ids in parts)])
    spans = [(ROLES.index(role), a, b) for (role, _), a, b in zip(parts, ends[:-1], ends[1:], strict=True)]
    input_ids = np.concatenate([ids for _, ids in parts]).astype(np.int32)
    mask = (np.arange(len(input_ids)) >= ends[-2]).astype(np.uint8)
    return Sample(sample_id(input_ids, mask), input_ids, mask, np.array(spans, np.int32), "train")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """A system prompt that all begin with, six conversations of three turns, each turn a sample; and some alone."""
    rng = np.random.default_rng(3)

    def words(count: int) -> np.ndarray:
        return rng.integers(3, VOCAB, count)

    system, made = words(40), []
    for _ in range(6):
        turns = [("system", system)]
        for _ in range(3):
            turns += [("user", words(int(rng.integers(3, 20)))), ("assistant", words(int(rng.integers(4, 24))))]
            made.append(conversation(list(turns)))
        made.append(conversation([("user", words(30)), ("assistant", words(9))]))
    return made


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, target: Path, samples: list[Sample]) -> CollectOptions:
    data = data_for_tiny(tmp_path_factory.mktemp("data") / "data", samples=samples)
    return CollectOptions(data, "", str(target), layers="-1,1,2", batch_tokens=200, dtype="fp32")


Collected = Callable[..., Store]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, options: CollectOptions) -> Collected:
    """Stores by recipe and container, each captured once: not to be written to."""
    places = tmp_path_factory.mktemp("stores")

    @cache
    def collected(recipe: str, container: str = "zarr-shared") -> Store:
        place = places / f"{recipe}-{container}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hiddenstore.inputs.UNIT_TOKENS", 700)
            collect(replace(options, store=place, recipe=recipe, container=container), note=lambda _text: None)
        return Store.open(place)

    return collected


def own_copy(store: Store, place: Path) -> Store:
    """One that may be written to."""
    shutil.copytree(store.path, place)
    return Store.open(place)


def longest_common(store: Store) -> dict[str, int]:
    """Restated without a tree: the most leading tokens that a sample has in common with one before it in its unit."""
    common = {}
    for record in store.commits():
        tokens = [store.read(entry.id).sample.input_ids.tolist() for entry in record.samples]
        for number, ids in enumerate(tokens):
            lengths = [
                next((n for n in range(len(ids)) if ids[: n + 1] != o[: n + 1]), len(ids)) for o in tokens[:number]
            ]
            longest = max(lengths, default=0)
            common[record.samples[number].id] = longest if longest >= BLOCK else 0
    return common


def bits(record: Record) -> list[object]:
    arrays = (record.aux.view(torch.int16), record.final.view(torch.int16), record.final_rows)
    parts = (record.sample.input_ids, record.sample.loss_mask, record.sample.spans)
    return [array.tolist() for array in (*arrays, *parts)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_sample_reads_as_in_a_store_of_its_own_rows(once: Collected, recipe: str) -> None:
    own, shared = once(recipe, "zarr"), once(recipe)
    aux = [f"layer_{layer}" for layer in shared.capture.stored_layers if layer >= 0]
    sizes = [
        sum(file.size for record in store.commits() for file in record.files if file.path.split("/")[0] in aux)
        for store in (own, shared)
    ]
    # An answer that only the sample before learns has its rows in more bits there.
    assert sizes[1] < (0.75 if "q4q3" in recipe else 0.6) * sizes[0]
    exact = {False: 0, True: 0}
    for name in own.sample_ids:
        one, other = own.read(name), shared.read(name)
        assert bits(one)[2:] == bits(other)[2:] or recipe.startswith("rebuilt")
        # Batches of other lengths round the same prefix otherwise, in float32 by less than bf16 shows.
        torch.testing.assert_close(one.aux.float(), other.aux.float(), rtol=0.15, atol=0.1)
        exact[torch.equal(one.aux, other.aux)] += 1
    assert exact[True] > exact[False]


def test_the_rows_that_stand_elsewhere_are_the_longest_common_prefixes(once: Collected) -> None:
    store = once("raw")
    common, rows = longest_common(store), {}
    for record in store.commits():
        array = store.zarr(record.unit)[SHARED_ROWS][...]
        rows |= {entry.id: int(n) for entry, (_, n) in zip(record.samples, array, strict=True)}
        stands = record.tokens - int(array[:, 1].sum())
        assert store.zarr(record.unit)["layer_1"].shape[0] == stands < 0.6 * record.tokens
    assert rows == common


def test_plan_counts_what_stands_once(once: Collected, options: CollectOptions) -> None:
    store = once("compact")
    words = ("plan", options.data, "--target", options.target, "--layers", options.layers, "--recipe", "compact")
    own, shared = (command(*words, "--container", container) for container in ("zarr", "zarr-shared"))
    # With units of the default size more conversations share.
    assert 0.4 < sum(longest_common(store).values()) / store.totals["tokens"] <= own["shared_prefixes"] < 0.8
    sizes = [next(r["bytes_stored"] for r in plan["recipes"] if r["recipe"] == "compact") for plan in (own, shared)]
    assert sizes[1] < 0.8 * sizes[0]
    code, _printed, said = answer(*words)
    assert (code, "--container zarr-shared keeps their states once" in " ".join(said.split())) == (0, True)


def test_collect_warns_of_a_full_disk_by_what_stands_once(
    tmp_path: Path, options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def warned(container: str, free: int) -> bool:
        monkeypatch.setattr("hiddenstore.fs.local.LocalFilesystem.free_bytes", lambda _fs: free)
        said.clear()
        place = tmp_path / f"{container}-{free}"
        collect(replace(options, store=place, recipe="compact", container=container), note=said.append)
        return any("what is left takes about" in line for line in said)

    words = ("plan", options.data, "--target", options.target, "--layers", options.layers, "--recipe", "compact")
    plans = (command(*words, "--container", container) for container in ("zarr", "zarr-shared"))
    own, shared = (next(r["bytes_stored"] for r in plan["recipes"] if r["recipe"] == "compact") for plan in plans)
    between = (own + shared) // 2
    assert (warned("zarr", between), warned("zarr-shared", between)) == (True, False)
    assert warned("zarr-shared", shared - 1)


@pytest.mark.parametrize("recipe", ["compact", "aux=q4q3,final=q8"])
def test_checks_copies_and_stock_readers_take_it(tmp_path: Path, once: Collected, recipe: str) -> None:
    store = once(recipe)
    report = verify(store.path, "bytes", also_stock=True)
    assert report.ok, report.findings
    assert report.stock_samples == len(store.sample_ids)
    # Of a random target meaning finds what is true of it, and no more than in a store of own rows.
    own, shared = (
        {(one.kind, one.samples) for one in verify(each.path, "meaning", 1.0).findings}
        for each in (once(recipe, "zarr"), store)
    )
    assert own == shared
    for container in ("zarr", "webdataset", "zarr-shared"):
        run_copy(open_copy([store], tmp_path / container, container=container))
        copied = Store.open(tmp_path / container)
        assert [bits(copied.read(name)) for name in store.sample_ids] == [bits(store.read(n)) for n in store.sample_ids]
    run_copy(open_copy([Store.open(tmp_path / "webdataset")], tmp_path / "back", container="zarr-shared"))
    assert segment_bytes(tmp_path / "back") == segment_bytes(store.path)


@pytest.mark.parametrize("recipe", ["compact", "raw", "aux=q4q3,final=q8"])
def test_packs_hold_the_rows_of_single_records(once: Collected, recipe: str) -> None:
    store = once(recipe)
    seen = 0
    for batch in TokenBatches(store, batch_tokens=600, pack_tokens=300, epochs=1):
        for pack in batch.packs:
            aux = torch.cat([store.read(name).aux for name in pack.sample_ids], dim=1)
            assert torch.equal(pack.aux.view(torch.int16), aux.view(torch.int16))
            seen += len(pack.sample_ids)
    assert seen == len(store.sample_ids)
    assert [bits(record) for record in store] == [bits(store.read(name)) for name in store.sample_ids]
    reader = store.open_unit(store.commits()[0])
    for index in range(len(reader)):
        encoded = reader.read_encoded(index)[:2]
        room = tuple([np.empty_like(codes.numpy()) for codes in part.codes] for part in encoded)
        reader.read_encoded(index, out=room)
        assert all(map(np.array_equal, (*room[0], *room[1]), (*encoded[0].codes, *encoded[1].codes)))


def test_damage_in_a_shared_row_names_every_sample_that_has_it_and_is_captured_again(
    tmp_path: Path, options: CollectOptions, once: Collected
) -> None:
    store = own_copy(once("raw"), tmp_path / "store")
    before = {name: store.read(name).aux for name in store.sample_ids}
    record = store.commits()[0]
    path = Path(store.path, record.segment, "layer_1/c/0/0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    fresh = Store.open(store.path)
    begin = [entry.id for entry in record.samples if fresh.sample(entry.id).spans[0, 0] == ROLES.index("system")]
    for name in begin:
        with pytest.raises(CorruptionError):
            fresh.read(name)
    repair_all(store.path)
    repaired = Store.open(store.path)
    assert set(begin) <= set(before) - set(repaired.sample_ids)
    assert verify(store.path, "bytes").ok
    collect(replace(options, store=store.path, recipe="raw", container="zarr-shared"), note=lambda _text: None)
    again = Store.open(store.path)
    assert set(again.sample_ids) == set(before)
    for name, aux in before.items():
        torch.testing.assert_close(again.read(name).aux.float(), aux.float(), rtol=0.02, atol=0.02)


def test_a_sample_that_is_captured_again_changes_none_that_stayed(
    tmp_path: Path, options: CollectOptions, once: Collected
) -> None:
    store = own_copy(once("raw"), tmp_path / "store")
    before = {name: bits(store.read(name)) for name in store.sample_ids}
    record = store.commits()[0]
    path = Path(store.path, record.segment, "final/c/0/0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    repair_all(store.path)
    stayed = set(Store.open(store.path).sample_ids)
    assert record.samples[0].id in set(before) - stayed
    again = replace(options, store=store.path, recipe="raw", container="zarr-shared", batch_tokens=90, dtype="bf16")
    collect(again, note=lambda _text: None)
    whole = Store.open(store.path)
    assert set(whole.sample_ids) == set(before)
    assert all(bits(whole.read(name)) == before[name] for name in stayed)
    assert any(bits(whole.read(name)) != before[name] for name in set(before) - stayed)


def test_a_copy_of_codes_into_it_changes_no_bit(tmp_path: Path, once: Collected) -> None:
    for recipe in ("raw", "compact"):
        source = once(recipe, "zarr")
        run_copy(open_copy([source], tmp_path / recipe, container="zarr-shared"))
        copied = Store.open(tmp_path / recipe)
        assert [bits(copied.read(n)) for n in source.sample_ids] == [bits(source.read(n)) for n in source.sample_ids]
    opened = open_copy([once("raw")], tmp_path / "back", container="zarr")
    expected = opened.bytes_to_write()
    assert run_copy(opened).bytes_written < 1.1 * expected


def test_drafters_of_the_final_hidden_alone_have_nothing_to_share(tmp_path: Path, options: CollectOptions) -> None:
    options = replace(options, store=tmp_path / "store", layers="medusa", container="zarr-shared")
    collect(options, note=lambda _text: None)
    assert verify(options.store, "bytes", also_stock=True).ok


def test_a_lost_record_is_made_again_from_its_segment(tmp_path: Path, once: Collected) -> None:
    store = own_copy(once("compact"), tmp_path / "store")
    before = {name: bits(store.read(name)) for name in store.sample_ids}
    for path in Path(store.path, "commits").glob("*.json"):
        path.write_bytes(path.read_bytes()[:4097])
    repair_all(store.path)
    repaired = Store.open(store.path)
    assert {name: bits(repaired.read(name)) for name in repaired.sample_ids} == before


def rewritten(store: Store, place: Path, array: np.ndarray) -> Store:
    """The store with another ``shared_rows`` in its first unit, under digests that fit it."""
    from hiddenstore.files.documents import seal, sha256_hex, unseal
    from schemas.manifest import CommitRecord

    run_copy(open_copy([store], place))
    path = Path(place, "commits", f"{store.commits()[0].unit}.json")
    record = unseal(path.read_bytes(), CommitRecord, str(path))
    folder = Path(place, record.segment)
    chunk = folder / SHARED_ROWS / "c/0/0"
    data = array.astype("<i4").tobytes()
    chunk.write_bytes(data + crc32c(data).to_bytes(4, "little"))
    entries = [
        file.model_copy(update={"size": chunk.stat().st_size, "sha256": sha256_hex(chunk.read_bytes()), "tree": None})
        if file.path == f"{SHARED_ROWS}/c/0/0"
        else file
        for file in record.files
    ]
    path.write_bytes(seal(record.model_copy(update={"files": tuple(entries)})))
    return Store.open(place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.__setitem__((0, 1), 20), "do not come before"),
        (lambda a: a.__setitem__((1, 0), 5), "that its samples do not have"),
        (lambda a: a.__setitem__((1, 1), -1), "that its samples do not have"),
        (lambda a: a.__setitem__((1, 1), 1 << 20), "that its samples do not have"),
        (lambda a: a.__setitem__((3, slice(None)), (0, 16)), "has other tokens, or rows in other bits"),
    ],
)
def test_shared_rows_that_cannot_be_are_refused(tmp_path: Path, once: Collected, change: object, message: str) -> None:
    store = once("compact")
    record = Store.open(store.path).commits()[0]
    array = store.zarr(record.unit)[SHARED_ROWS][...]
    change(array)  # type: ignore[operator]
    broken = rewritten(store, tmp_path / "broken", array)
    with pytest.raises(FormatError, match=message):
        broken.read(record.samples[1].id)
    assert not verify(broken.path, "bytes").ok
