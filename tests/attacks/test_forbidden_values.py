"""Segments whose every checksum fits and whose numbers the format forbids: named by verify, refused by readers (A14).

Written as a faulty writer would: through the containers, from a unit that was changed after it was encoded.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.errors import FormatError
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import encode_records
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.verify import verify
from hiddenstore.writer import write_encoded_unit
from schemas.manifest import Container
from tests.accepting import repair_all
from tests.faults import FaultFilesystem

KINDS = ("array-invalid", "token-range")
NAN, INFINITY, ZERO, MINUS_ONE = 0x7FC0, 0x7F80, 0x0000, 0xBF80


def small(group: str, name: str, bits: int) -> Callable[[EncodedUnit], None]:
    def change(unit: EncodedUnit) -> None:
        array = getattr(unit, group).small[name]
        # A row that is not raw, in the middle.
        array[0, array.shape[1] // 2] = bits

    return change


def array(name: str, place: int, value: int) -> Callable[[EncodedUnit], None]:
    def change(unit: EncodedUnit) -> None:
        getattr(unit, name).reshape(-1)[place] = value

    return change


def group_scale(unit: EncodedUnit) -> None:
    unit.aux.codes[0][0][5, -1] = 0x7F


CHANGES = {
    **{f"{name} {word}": ("q8", small("aux", name, bits))
       for name in ("token_scale", "channel_scale")
       for word, bits in (("NaN", NAN), ("infinite", INFINITY), ("zero", ZERO), ("negative", MINUS_ONE))},
    "offset NaN": ("q4", small("final", "channel_offset", NAN)),
    "group scale NaN": ("q4", group_scale),
    "token negative": ("bf16", array("input_ids", 3, -1)),
    "token beyond the vocabulary": ("q8", array("input_ids", 3, 64)),
    "mask of 2": ("q8", array("loss_mask", 3, 2)),
    "final row beyond the sample": ("q8", array("final_rows", -1, 4000)),
    "final row negative": ("q8", array("final_rows", 0, -3)),
    "span end beyond the sample": ("q8", array("spans", 3, 4000)),
    "span start negative": ("q8", array("spans", 2, -1)),
    "span of no role": ("q8", array("spans", 1, 17)),
    "top token beyond the vocabulary": ("tiny", lambda unit: unit.final.codes[0][0][2, :4].fill_(0x7F)),
}  # fmt: skip


def faulty_store(container: Container, codec: str, change: Callable[[EncodedUnit], None]) -> Store:
    store = make_store(FaultFilesystem(), samples=3, codec=codec, container=container)
    records = random_records(make_samples(2, seed=7), store.capture)
    unit = encode_records("faulty-000000", records, store.capture)
    # Encoders may give views of what they were given.
    arrays = {name: getattr(unit, name).copy() for name in ("input_ids", "loss_mask", "final_rows", "spans")}
    unit = replace(unit, **arrays)
    change(unit)
    assert write_encoded_unit(store, unit.unit, "f" * 64, unit, (), ENGINE)
    return Store.open(store.fs)


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_format_forbids_is_named_and_never_read_a14(name: str, container: Container) -> None:
    codec, change = CHANGES[name]
    store = faulty_store(container, codec, change)
    faulty = next(record for record in store.commits() if record.unit == "faulty-000000")
    ids = {sample.id for sample in faulty.samples}
    for depth in ("bytes", "meaning"):
        report = verify(store.fs, depth)
        if name == "group scale NaN" and depth == "meaning":
            assert "non-finite" in report.kinds
            continue
        named = {sample for finding in report.findings if finding.kind in KINDS for sample in finding.samples}
        assert named
        assert named <= ids
    read = 0
    for sample in named:
        if name != "group scale NaN":
            with pytest.raises(FormatError, match=r"is not what the format allows|is not the array this store holds"):
                store.read(sample)
            read += 1
    assert read or name == "group scale NaN"
    repair_all(store.fs)
    assert verify(store.fs, "bytes").findings == []


def test_show_and_verify_name_a_turn_out_of_range_a14(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("faulty")
    store = make_store(folder, samples=3)
    unit = encode_records("faulty-000000", random_records(make_samples(2, seed=7), store.capture), store.capture)
    unit.spans[0, 3] = 4000
    write_encoded_unit(store, unit.unit, "f" * 64, unit, (), ENGINE)
    shown = CliRunner().invoke(main, ["show", store.path, unit.samples[0].id], prog_name="hiddenstore")
    assert shown.exit_code == 4
    assert "[array-invalid]" in shown.stderr
    assert CliRunner().invoke(main, ["verify", store.path, "--full"], prog_name="hiddenstore").exit_code == 3


def test_metadata_without_the_checksums_of_its_chunks_is_refused_a18(monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddenstore.segments import zarr_arrays

    store = make_store(FaultFilesystem(), samples=2)
    written = zarr_arrays.ArraySpec.metadata

    def without(spec: zarr_arrays.ArraySpec) -> dict[str, object]:
        document = written(spec)
        attributes = document["attributes"]
        return {**document, "attributes": dict.fromkeys(attributes) if "chunk_crc32c" in attributes else attributes}

    monkeypatch.setattr(zarr_arrays.ArraySpec, "metadata", without)
    unit = encode_records("faulty-000000", random_records(make_samples(1, seed=7), store.capture), store.capture)
    write_encoded_unit(store, unit.unit, "f" * 64, unit, (), ENGINE)
    monkeypatch.undo()
    again = Store.open(store.fs)
    with pytest.raises(FormatError, match="does not name the checksum of every chunk"):
        again.read(unit.samples[0].id)
    assert np.isfinite(again.read(store.sample_ids[0]).aux.float().numpy()).all()
