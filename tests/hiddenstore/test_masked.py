"""Rows of two classes: ``q4q3`` stores what no loss is taken at in 3 bits, ``q3`` all but a sample's first rows, and
every reader gives the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from pydantic import ValidationError

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.codecs import CODECS, get_codec
from hiddenstore.codecs.affine import Q4
from hiddenstore.codecs.base import MaskedCodec, mean_row_bits
from hiddenstore.codecs.masked import Q3, Q4Q3
from hiddenstore.codecs.recipes import get_recipe
from hiddenstore.data import SampleDataset, SampleView, TokenBatches, batches
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.records import Record, Sample, sample_id
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.segment import write_encoded
from hiddenstore.store import Store
from hiddenstore.testing import builders
from hiddenstore.testing.builders import ENGINE, VOCAB, capture_spec, make_store, random_records
from hiddenstore.testing.workload import Sweep
from hiddenstore.verify import verify
from hiddenstore.writer import pending_units
from schemas.capture import Codecs
from tests.accepting import repair_all
from tests.hiddenstore.test_codecs import KINDS, as_float, make_states, same_bits, step_sizes, ulp

WIDTH = 40
PAIR = "aux=q4q3,final=q8"


def conversation(number: int) -> Sample:
    """One answer of three tokens, or two, between questions that have rows of both classes."""
    turns, mask = list[list[int]](), list[int]()
    for _ in range(1 + (number % 4 == 3)):
        start, question, rest = len(mask), 22 + number % 3, 3 + number % 2
        mask += [0] * question + [1] * 3 + [0] * rest
        ends = start + question, start + question + 3, len(mask)
        turns += [[1, start, ends[0]], [2, ends[0], ends[1]], [1, ends[1], ends[2]]]
    ids = np.random.default_rng(number).integers(0, VOCAB, len(mask)).astype(np.int32)
    taught = np.array(mask, dtype=np.uint8)
    return Sample(sample_id(ids, taught), ids, taught, np.array(turns, dtype=np.int32), "train", f"c{number}")


@pytest.fixture(autouse=True)
def conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builders, "make_samples", lambda count, seed=0: list(map(conversation, range(count))))


def plain_classes(mask: np.ndarray, codec: str = "q4q3") -> list[bool]:
    if codec == "q3":
        return [t < 16 for t in range(len(mask))]
    return [t < 4 or bool(mask[max(0, t - 1) : t + 17].any()) for t in range(len(mask))]


def plain_row(stored: bytes, groups: int) -> list[int]:
    """The codes of a coarse row, channel by channel, as the format page says."""
    codes = []
    for channel in range(32 * groups):
        byte, shift = channel % (16 * groups), 3 * (channel >= 16 * groups)
        if byte < 12 * groups:
            pair = stored[byte] & 63
        else:
            parts = [stored[byte - 12 * groups + part * 4 * groups] >> 6 for part in range(3)]
            pair = parts[0] + 4 * parts[1] + 16 * parts[2]
        code = (pair >> shift) & 7
        codes.append(code - 8 * (code >= 4))
    return codes


def test_rows_are_fine_at_the_start_of_a_sample_up_to_16_before_what_is_taught_and_one_behind() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        masks = [(rng.random(length) < 0.02).astype(np.uint8) for length in rng.integers(0, 90, rng.integers(0, 5))]
        expected = [is_fine for mask in masks for is_fine in plain_classes(mask)]
        joined = np.concatenate([np.zeros(0, dtype=np.uint8), *masks])
        assert Q4Q3.fine_rows(joined, [len(mask) for mask in masks]).tolist() == expected


def test_every_row_of_q3_is_coarse_but_the_first_16_of_a_sample() -> None:
    masks = [(np.random.default_rng(n).random(n) < 0.3).astype(np.uint8) for n in (0, 3, 16, 17, 90, 1)]
    expected = [is_fine for mask in masks for is_fine in plain_classes(mask, "q3")]
    assert Q3.fine_rows(np.concatenate(masks), [len(mask) for mask in masks]).tolist() == expected
    bits = mean_row_bits(Q3, 4096, 1000, 600, 1)
    assert (Q3.row_bits(4096) - bits) / 4096 == pytest.approx(0.984, abs=1e-3)


@pytest.mark.parametrize("width", [1, 33, 64])
def test_stored_rows_hold_the_codes_that_the_format_says(width: int) -> None:
    states, fine = make_states("scaled", 1, 50, width, 3), np.arange(50) % 3 == 0
    encoded, groups = Q4Q3.encode_layers([[states[0]]], fine=fine).joined(), -(-width // 32)
    everywhere = Q4.encode(states)
    stored = Q4Q3.to_pieces(encoded.codes[0].numpy(), fine)
    assert stored.shape == (17 * 17 + 33 * 13, groups)
    data, at, seen = stored.tobytes(), 0, set()
    for row, is_fine in enumerate(fine):
        size = (17 if is_fine else 13) * groups
        part, codes = data[at : at + size], encoded.codes[0][row].numpy()
        at += size
        if is_fine:
            assert part == codes.tobytes() == everywhere.codes[0][row].numpy().tobytes()
            continue
        nibbles = np.concatenate([codes[: 16 * groups] & 15, codes[: 16 * groups] >> 4]).astype(int)
        assert plain_row(part, groups) == (nibbles - 16 * (nibbles >= 8)).tolist()
        assert part[12 * groups :] == codes[16 * groups :].tobytes()
        seen |= set(plain_row(part, groups))
    assert at == len(data)
    assert seen == set(range(-4, 4)) or width == 1
    again = np.empty_like(encoded.codes[0].numpy())
    Q4Q3.from_pieces(stored, fine, again)
    assert np.array_equal(again, encoded.codes[0].numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_coarse_rows_hold_the_bound_of_their_own_step(kind: str) -> None:
    states, fine = make_states(kind, 2, 40, 96, 5), np.arange(40) < 10
    encoded = Q4Q3.encode_layers(([layer] for layer in states), fine=fine).joined()
    decoded = Q4Q3.decode(encoded)
    raw = torch.zeros(2, 40, dtype=torch.bool)
    raw[tuple(torch.from_numpy(encoded.small["raw_index"].astype(np.int64)).T)] = True
    assert same_bits(decoded[raw], states[raw])
    step = step_sizes("q4", encoded, 96) * as_float(encoded.small["channel_scale"])[:, None, :]
    bound = step / 2 + torch.maximum(ulp(states), ulp(decoded))
    assert ((decoded.double() - states.double()).abs() <= bound)[~raw].all()


def test_a_coarse_row_with_a_code_of_a_fine_one_is_never_written() -> None:
    (codes,) = Q4.encode(make_states("normal", 1, 9, 64, 1)).codes
    with pytest.raises(ValueError, match=r"code outside -4 … 3"):
        Q4Q3.to_pieces(codes.numpy(), np.arange(9) < 4)


def test_where_all_is_taught_the_bytes_are_those_of_q4(tmp_path: Path) -> None:
    samples = [replace(conversation(n), loss_mask=np.ones_like(conversation(n).loss_mask)) for n in range(3)]
    digests = []
    for codec in ("compact", PAIR):
        capture = capture_spec(codec=codec, width=WIDTH)
        unit = encode_records("unit", random_records(samples, capture), capture)
        files = write_encoded(LocalFilesystem(tmp_path / codec), "segment", unit, capture)
        digests.append({file.path: file.digest for file in files if not file.path.endswith("zarr.json")})
    assert digests[0] == digests[1]


RECIPES = (PAIR, "rebuilt-q3", "rebuilt-q3-all")


@pytest.fixture(params=[(container, recipe) for recipe in RECIPES for container in ("zarr", "webdataset")])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    container, recipe = request.param
    return make_store(tmp_path, codec=recipe, container=container, width=WIDTH)


def test_a_store_gives_what_the_codec_makes_of_its_units(store: Store) -> None:
    name = store.capture.codecs.aux
    codec, layers = get_codec(name), [store.capture.aux_layers.index(k) for k in store.capture.stored_layers]
    assert isinstance(codec, MaskedCodec)
    assert any(len(record.samples) > 1 for record in store.commits())
    for record in store.commits():
        samples = [store.sample(entry.id) for entry in record.samples]
        states = torch.cat([one.aux[layers] for one in random_records(samples, store.capture)], dim=1)
        fine = np.concatenate([plain_classes(sample.loss_mask, name) for sample in samples])
        assert 0.2 < fine.mean() < 0.9
        decoded = codec.decode(codec.encode_layers(([layer] for layer in states), fine=fine).joined())
        error = ((decoded.float() - states.float()).norm(dim=2) / states.float().norm(dim=2)).mean(dim=0).numpy()
        assert error[fine].mean() < 0.1 < error[~fine].mean() < 0.25
        at = 0
        for entry in record.samples:
            assert same_bits(store[entry.id].aux[layers], decoded[:, at : at + entry.tokens])
            at += entry.tokens


def test_every_way_of_reading_gives_the_same_bits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for record in store:
        assert same_bits(record.aux, store[record.sample.id].aux)
    decoded = [pack for batch in TokenBatches(store, batch_tokens=300, epochs=1) for pack in batch.packs]
    monkeypatch.setattr(batches, "DecodedFiller", batches.EncodedFiller)
    encoded = [pack for batch in TokenBatches(store, batch_tokens=300, epochs=1) for pack in batch.packs]
    top = [pack for batch in TokenBatches(store, batch_tokens=300, epochs=1, layers=[3]) for pack in batch.packs]
    for one, other, third in zip(decoded, encoded, top, strict=True):
        assert same_bits(one.aux, torch.cat([store[name].aux for name in one.sample_ids], dim=1))
        assert same_bits(one.aux, other.aux)
        assert same_bits(one.aux[1:], third.aux)
        assert same_bits(one.final, other.final)


# webdataset 1.0 leaves the file it iterates to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_copy_keeps_the_codes_in_any_container_and_verifies(store: Store, tmp_path: Path) -> None:
    other = "webdataset" if store.manifest.container == "zarr" else "zarr"
    there, back = tmp_path / "there", tmp_path / "back"
    run_copy(open_copy([store], there, container=other))
    run_copy(open_copy([Store.open(there)], back, container=store.manifest.container))
    for place in (there, back):
        copied = Store.open(place)
        assert all(same_bits(copied[name].aux, store[name].aux) for name in store.sample_ids)
        report = verify(place, "bytes", also_stock=True)
        assert report.findings == []
        assert report.stock_samples == len(store)
    assert [{f.path: f.digest for f in one.files} for one in Store.open(back).commits()] == [
        {f.path: f.digest for f in one.files} for one in store.commits()
    ]


def test_a_copy_of_exact_states_is_what_a_capture_would_hold(tmp_path: Path) -> None:
    raw = make_store(tmp_path / "raw", codec="raw", width=WIDTH)
    made = make_store(tmp_path / "made", codec=PAIR, width=WIDTH)
    run_copy(open_copy([raw], tmp_path / "copy", PAIR))
    copied = Store.open(tmp_path / "copy")
    assert all(same_bits(copied[name].aux, made[name].aux) for name in made.sample_ids)


def test_a_copy_in_which_nothing_says_which_rows_are_coarse_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made", codec=PAIR, width=WIDTH)
    other = make_store(tmp_path / "other", codec="raw", width=WIDTH)
    for sources, recipe in (([store], "compact"), ([other, store], "raw")):
        with pytest.raises(ConfigError, match=r"rows in fewer bits .* \(q4q3\)") as refused:
            open_copy(sources, tmp_path / "more", recipe)
        assert refused.value.kind == "store-lacks-states"
        assert "--recipe aux=q4q3" in str(refused.value.hint)
    assert not (tmp_path / "more").exists()


def test_rows_of_q3_are_copied_into_any_codec_and_serve_any_mask(tmp_path: Path) -> None:
    store = make_store(tmp_path / "made", codec="aux=q3,final=q8", final="all", width=WIDTH)
    run_copy(open_copy([store], tmp_path / "copy", "raw"))
    copied = Store.open(tmp_path / "copy")
    assert all(same_bits(copied[name].aux, store[name].aux) for name in store.sample_ids)
    batch = next(iter(TokenBatches(store, batch_tokens=300, view=SampleView(loss_on="all"))))
    assert bool(batch.packs[0].loss_mask.all())


def test_a_repair_keeps_codes_and_a_recapture_joins_them(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec=PAIR, width=WIDTH, container="webdataset")
    before = {name: store[name].aux for name in store.sample_ids}
    record = max(store.commits(), key=lambda one: len(one.samples))
    folder, lost = Path(store.path, record.segment), record.samples[1].id
    data = bytearray((folder / "samples.tar").read_bytes())
    index = json.loads((folder / "index.json").read_text())
    data[index["fields"]["layer_3.npy"]["offset"][1] + 200] ^= 1
    (folder / "samples.tar").write_bytes(data)
    repair_all(store.fs)
    repaired = Store.open(store.path)
    assert set(before) - set(repaired.sample_ids) == {lost}
    assert all(same_bits(repaired[name].aux, before[name]) for name in repaired.sample_ids)
    (pending,) = pending_units(repaired, record.input).values()
    (again,) = random_records([s for s in map(conversation, range(6)) if s.id == lost], store.capture)
    assert recapture_unit(repaired, pending, [again], (), ENGINE)
    whole = Store.open(store.path)
    assert all(same_bits(whole[name].aux, before[name]) for name in before)
    assert verify(whole.path, "bytes").findings == []


@pytest.mark.parametrize(
    ("final", "recipe", "options"),
    [
        ("all", PAIR, "--final all --recipe compact"),
        ("supervised", PAIR, "--final all --recipe compact"),
        ("all", "rebuilt-q3", "--final all --recipe rebuilt"),
    ],
)
def test_a_mask_wider_than_the_stored_one_is_refused(tmp_path: Path, final: Any, recipe: str, options: str) -> None:
    store, wide = make_store(tmp_path, codec=recipe, final=final, width=WIDTH), SampleView(loss_on="all")
    for read in (lambda: TokenBatches(store, batch_tokens=300, view=wide), lambda: SampleDataset(store, view=wide)[0]):
        with pytest.raises(ConfigError, match=r"data\.loss_on=all teaches .* q4q3 stores in fewer bits") as refused:
            read()
        assert refused.value.kind == "store-lacks-states"
        assert f"--target T {options}, or data.loss_on=stored" in str(refused.value.hint)
    narrow = TokenBatches(store, batch_tokens=300, epochs=1, view=SampleView(loss_on="last-turn"))
    assert all(int(pack.loss_mask.sum()) == 3 * len(pack.sample_ids) for batch in narrow for pack in batch.packs)


def test_a_wider_mask_reads_what_is_no_aux_layer_and_what_was_all_taught(tmp_path: Path) -> None:
    store, wide = make_store(tmp_path, codec=PAIR, final="all", width=WIDTH), SampleView(loss_on="all")
    batch = next(iter(TokenBatches(store, batch_tokens=300, layers=[], view=wide)))
    assert bool(batch.packs[0].loss_mask.all())
    sample = conversation(0)
    taught = replace(sample, loss_mask=np.ones_like(sample.loss_mask))
    wide.require_rows(taught, store.capture, (1, 3), True)


def test_a_reader_without_the_codec_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path, codec=PAIR).path
    monkeypatch.delitem(CODECS.rows, "q4q3")
    with pytest.raises(FormatError, match="codec 'q4q3', which is not installed") as refused:
        Store.open(path)
    assert refused.value.kind == "plugin-missing"


def test_final_rows_have_no_classes() -> None:
    for codec in ("q4q3", "q3"):
        with pytest.raises(ValidationError, match=f"{codec} has classes .* final rows are those a loss needs"):
            Codecs(aux="q4", final=codec)
        with pytest.raises(ConfigError, match=f"final: unknown codec '{codec}'"):
            get_recipe(f"final={codec}")


def test_damage_is_an_error_and_never_other_states(tmp_path: Path) -> None:
    sweep = Sweep(lambda name: LocalFilesystem(tmp_path / name), "q4q3")
    for number, (_where, changes) in enumerate(sweep.cuts()):
        if number % 13 == 0:
            sweep.check(changes)
    assert sweep.by_reader > 5


def test_at_a_width_of_4096_and_60_percent_taught_a_token_takes_less_than_an_eighth_of_bf16(tmp_path: Path) -> None:
    capture, tokens = capture_spec(layers=(1, 3, 4), width=4096, codec="rebuilt-q3", final="all"), 900
    places = np.arange(tokens, dtype=np.int32)
    ids, mask = places % VOCAB, ((places >= 359) & (places < 899)).astype(np.uint8)
    sample = replace(conversation(0), input_ids=ids, loss_mask=mask)
    states = torch.randn(3, tokens, 4096).bfloat16()
    unit = encode_records("unit", [Record(sample, states, states[0], np.arange(tokens))], capture)
    write_encoded(LocalFilesystem(tmp_path), "segment", unit, capture)
    sizes = [zarr.open_array(tmp_path / "segment" / name, mode="r").size for name in ("layer_3", "layer_4")]
    assert sizes == [round(tokens * (mean_row_bits(Q4Q3, 4096, tokens, 540, 1) - 16) / 8)] * 2
    ids_mask_and_scales = 4 + 1 + 2 * 2
    assert 4 * 2 * 4096 / (sum(sizes) / tokens + ids_mask_and_scales) > 8.2
