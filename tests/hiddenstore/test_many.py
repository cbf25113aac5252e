"""Small samples read together are those read one by one, bit for bit, and say as much where they are damaged."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenstore.codecs.affine import Q4, Q8
from hiddenstore.codecs.base import Codec, rows_at
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.codecs.verbatim import BF16
from hiddenstore.data import SampleView, TokenBatches
from hiddenstore.errors import CorruptionError, NotFoundError
from hiddenstore.records import Record
from hiddenstore.segments.many import decode_states, joined_states, mixes
from hiddenstore.segments.segment import SegmentReader, read_together
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from tests.plugin.other_house.codec import FP8

CONTAINERS = ("zarr", "webdataset")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each call read together."""
    counts: list[int] = []

    def counted(parts: Sequence[tuple[SegmentReader, np.ndarray]], *arguments: object) -> object:
        many = read_together(parts, *arguments)  # type: ignore[arg-type]
        counts.append(0 if many is None else sum(len(indices) for _, indices in parts))
        return many

    for module in ("segments.segment", "data.read"):
        monkeypatch.setattr(f"hiddenstore.{module}.read_together", counted)
    return counts


def bits(record: Record) -> Iterator[tuple[str, object]]:
    for name in ("input_ids", "loss_mask", "spans"):
        array = getattr(record.sample, name)
        yield name, (array.dtype, array.tolist())
    for name in ("aux", "final"):
        states = getattr(record, name)
        assert states.is_contiguous()
        yield name, (states.shape, states.view(torch.int16).tolist())
    yield "final_rows", (record.final_rows.dtype, record.final_rows.tolist())
    yield "topk", record.topk and [getattr(record.topk, name).tolist() for name in ("ids", "log_probs", "lse")]
    yield "sample", (record.sample.id, record.sample.split)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_an_iteration_gives_the_records_that_reading_by_id_gives(
    tmp_path: Path, recipe: str, container: str, together: list[int]
) -> None:
    store = make_store(tmp_path, samples=12, codec=recipe, container=container)
    for record, name in zip(store, store.sample_ids, strict=True):
        assert dict(bits(record)) == dict(bits(store.read(name)))
        assert record.aux.untyped_storage().nbytes() == record.aux.nbytes
    # Top tokens, and states that are rebuilt, are read sample by sample; others of small units in one go.
    is_together = RECIPES[recipe][1] not in ("topk", "rebuilt")
    assert (max(together, default=0) > 1) == is_together
    assert not is_together or container == "zarr" or len(together) < len(store.commits())


def test_the_units_of_many_samples_are_those_of_each(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=12)
    names = sorted(store.sample_ids)
    units = list(store.readers_of(names))
    assert len(units) > 1
    assert sorted(number for *_, numbers in units for number in numbers) == list(range(len(names)))
    for reader, indices, numbers in units:
        assert indices.tolist() == sorted(indices.tolist())
        for index, number in zip(indices.tolist(), numbers, strict=True):
            assert (reader, index) == store.reader_of(names[number])
    assert list(store.readers_of([])) == []
    for absent in ("0" * 32, "not-packed", "é"):
        with pytest.raises(NotFoundError) as error:
            list(store.readers_of([*names, absent]))
        assert (error.value.kind, absent in error.value.message) == ("sample-missing", True)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("gap", "codec"), [(0, "compact"), (1 << 20, "compact"), (1 << 20, "raw"), (0, "q4q3")])
def test_packs_of_scattered_samples_hold_the_bits_of_single_records(
    tmp_path: Path, container: str, gap: int, codec: str, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hiddenstore.segments.{'zarr' if container == 'zarr' else 'tar_members'}._GAP_BYTES", gap)
    store = make_store(tmp_path, samples=40, codec=codec, container=container)
    for view in (SampleView(), SampleView(max_tokens=20), SampleView(loss_on="last-turn")):
        together.clear()
        seen = 0
        for batch in TokenBatches(store, batch_tokens=600, pack_tokens=300, layers=[3], epochs=1, view=view):
            for pack in batch.packs:
                records = [view.cut(store.read(name, layers=[3])) for name in pack.sample_ids]
                starts = np.cumsum([0, *(len(record.sample.input_ids) for record in records)])
                assert torch.equal(
                    pack.aux.view(torch.int16), torch.cat([r.aux for r in records], dim=1).view(torch.int16)
                )
                assert torch.equal(
                    pack.final.view(torch.int16), torch.cat([r.final for r in records]).view(torch.int16)
                )
                assert pack.input_ids.tolist() == [t for r in records for t in r.sample.input_ids.tolist()]
                rows = [r.final_rows + start for r, start in zip(records, starts, strict=False)]
                assert pack.final_rows.tolist() == np.concatenate(rows).tolist()
                assert pack.positions.tolist() == [p for r in records for p in range(len(r.sample.input_ids))]
                seen += len(records)
        assert seen == 32
        assert (max(together, default=0) > 1) == (view.loss_on == "stored")


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_damaged_sample_is_named_and_those_before_it_are_given_out(tmp_path: Path, container: str) -> None:
    store = make_store(tmp_path, samples=12, container=container, codec="raw")
    record = max(store.commits(), key=lambda record: len(record.samples))
    place = len(record.samples) - 1
    name = {"zarr": "layer_1/c/0/0", "webdataset": "samples.tar"}[container]
    path = Path(store.path, record.segment, name)
    data, states = bytearray(path.read_bytes()), store.read(record.samples[place].id).aux[0]
    at = bytes(data).index(states[3].view(torch.int16).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    fresh = Store.open(store.path)
    with pytest.raises(CorruptionError) as alone:
        fresh.read(record.samples[place].id)
    given = []
    with pytest.raises(CorruptionError) as error:
        given.extend(sample.sample.id for sample in Store.open(store.path))
    assert error.value.kind == alone.value.kind == "chunk-corrupt"
    assert name in error.value.message
    assert error.value.samples
    before = list(store.sample_ids)[: len(given)]
    assert given == before
    with pytest.raises(CorruptionError, match=name):
        list(TokenBatches(fresh, batch_tokens=600, epochs=1))


@pytest.mark.parametrize("few_rows", [1, 256])
@pytest.mark.parametrize("codec", [BF16, Q8, Q4, FP8])
def test_rows_of_several_units_decode_to_the_bits_they_have_alone(
    codec: Codec, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.codecs.affine._ROWS_OF_THEIR_OWN", few_rows)
    states = torch.randn((3, 2, 90, 64), generator=torch.Generator().manual_seed(7)).bfloat16()
    states[:, :, 20:23] *= 1000
    rows = [np.array([0, 20, 21, 89]), np.zeros(0, dtype=np.int64), np.array([22, 50])]
    units = [codec.encode(unit) for unit in states]
    joined = joined_states(codec.small, [rows_at(codec.small, *pair) for pair in zip(units, rows, strict=True)])
    out = torch.empty((2, 6, 64), dtype=torch.bfloat16)
    decode_states(codec, joined, out)
    alone = torch.cat([codec.decode(unit)[:, at] for unit, at in zip(units, rows, strict=True)], dim=1)
    assert torch.equal(out.view(torch.int16), alone.view(torch.int16))
    assert mixes(codec)
    assert codec not in (Q8, Q4) or len(joined.part.small["raw_index"]) >= 6


def test_units_that_are_open_at_once_are_few_however_many_a_pack_takes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: list[int]
) -> None:
    monkeypatch.setattr("hiddenstore.data.read.UNITS_TOGETHER", 2)
    store = make_store(tmp_path, samples=24, container="webdataset")
    assert len(store.commits()) > 4
    (batch,) = TokenBatches(store, batch_tokens=1 << 14, epochs=1)
    (pack,) = batch.packs
    assert torch.equal(pack.aux, torch.cat([store.read(name).aux for name in pack.sample_ids], dim=1))
    assert len(together) >= len(store.commits()) // 2 - 1
    assert max(together) > 1
