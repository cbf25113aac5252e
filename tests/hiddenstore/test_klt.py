"""``klt``: rows turned by a transform that is fitted to the store's own states, and that no other is taken for."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.gc import gc
from hiddenstore.codecs import CODECS, FITTED, fitted, get_codec, get_layout, kind_of, klt
from hiddenstore.codecs.base import RAW_INDEX, Encoded, rows_at
from hiddenstore.codecs.fitted import fit, is_unfitted
from hiddenstore.codecs.klt import KLT, KltCodec, allocation, code_bytes
from hiddenstore.codecs.masked import Q3
from hiddenstore.codecs.recipes import get_recipe, recipe_name
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, FormatError
from hiddenstore.files.documents import canonical, sha256_hex
from hiddenstore.store import Store
from hiddenstore.testing.builders import HEAD, capture_spec, make_store, target_files
from hiddenstore.verify import verify
from hiddenstore.writer import create_store
from schemas.capture import Codecs
from schemas.manifest import CommitRecord, SampleEntry
from tests.hiddenstore.test_codecs import same_bits

# webdataset 1.0 leaves the file it iterates to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

RECIPE = "aux=klt,final=q8"
WIDTH = 96


def correlated(layers: int, tokens: int, width: int = WIDTH, seed: int = 0) -> Tensor:
    """States whose channels follow few directions, about an offset, with a loud first row."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(layers, width, width, generator=torch.Generator().manual_seed(99))
    mixing *= torch.exp(-torch.arange(width) / width * 5)[None, :, None]
    values = torch.randn(layers, tokens, width, generator=generator) @ mixing + 3 * mixing[:, :1]
    values[:, 0] *= 300
    return values.bfloat16()


@pytest.fixture(scope="module")
def codec() -> KltCodec:
    data = KLT.fit(list(correlated(2, 4000, seed=1)))
    return KLT.of("klt-test", lambda: data)


def forget_codecs() -> None:
    """As a process that has opened no store."""
    for table in (CODECS._loaded, CODECS._bound, fitted._READERS):
        for name in [name for name in table if kind_of(name) != name]:
            table.pop(name)  # type: ignore[attr-defined]


def is_long(_record: CommitRecord, entry: SampleEntry) -> bool:
    return entry.tokens > 20


def relative_error(states: Tensor, decoded: Tensor) -> float:
    centred = states.float() - states.float().median(1, keepdim=True).values
    return float(((decoded.float() - states.float()).norm(dim=2) / centred.norm(dim=2)).median())


def test_correlated_states_lose_less_than_in_three_bits_though_the_codes_take_hardly_more(codec: KltCodec) -> None:
    states = correlated(2, 1500, seed=2)
    three = Q3.encode_layers([[layer] for layer in states], fine=np.zeros(1500, dtype=bool)).joined()
    assert relative_error(states, codec.decode(codec.encode(states))) < relative_error(states, Q3.decode(three)) / 2
    assert codec.row_bits(4096) / 4096 == pytest.approx(3.40, abs=0.01)


def test_a_row_decodes_to_the_same_bits_alone_and_among_others_and_is_coded_alike_in_any_parts(codec: KltCodec) -> None:
    states = correlated(2, 700, seed=3)
    encoded = codec.encode(states)
    decoded = codec.decode(encoded)
    for rows in ([3], [0, 17, 699], list(range(100, 165))):
        part = rows_at(codec.small, encoded, np.array(rows))
        assert same_bits(codec.decode(part), decoded[:, rows])
    parts = codec.encode_layers([[layer[:1], layer[1:333], layer[333:]] for layer in states]).joined()
    assert all(torch.equal(one, other) for one, other in zip(parts.codes, encoded.codes, strict=True))


def test_rows_of_one_layer_alone_are_decoded_by_its_own_transform(codec: KltCodec) -> None:
    states = correlated(2, 50, seed=4)
    encoded = codec.encode(states)
    small = {
        name: values[1:2] if codec.small[name].axes[0] == "L" else values for name, values in encoded.small.items()
    }
    kept = small[RAW_INDEX][:, 0] == 1
    small |= {RAW_INDEX: small[RAW_INDEX][kept] - [1, 0], "raw_rows": small["raw_rows"][kept]}
    assert same_bits(codec.decode(Encoded(encoded.codes[1:], small))[0], codec.decode(encoded)[1])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38, 1e25])
def test_odd_rows_are_kept_bit_for_bit(codec: KltCodec, odd: float) -> None:
    states = correlated(2, 60, seed=5)
    states[1, 31, 7] = odd
    encoded = codec.encode(states)
    assert [1, 31] in encoded.small[RAW_INDEX].tolist()
    decoded = codec.decode(encoded)
    assert same_bits(decoded[1, 31], states[1, 31])
    assert decoded[0].isfinite().all()


def test_a_row_unlike_those_it_was_fitted_to_is_kept_raw_or_loses_less_than_a_third(codec: KltCodec) -> None:
    states = correlated(2, 400, seed=6)
    states[:, 5::9] = (20 * torch.randn(2, 44, WIDTH, generator=torch.Generator().manual_seed(7))).bfloat16()
    encoded = codec.encode(states)
    scale, offset = (
        torch.from_numpy(encoded.small[name]).view(torch.bfloat16).float()[:, None]
        for name in ("channel_scale", "channel_offset")
    )
    normal, error = (states.float() - offset) / scale, (codec.decode(encoded).float() - states.float()) / scale
    assert float((error.norm(dim=2) / normal.norm(dim=2)).max()) < 0.33
    assert 40 < len(encoded.small[RAW_INDEX]) < 100


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_mixed_precision_of_whoever_reads_or_writes_changes_no_bit(codec: KltCodec, precision: torch.dtype) -> None:
    states = correlated(2, 200, seed=8)
    encoded, data = codec.encode(states), KLT.fit(list(states))
    decoded = codec.decode(encoded)
    with torch.autocast("cpu", dtype=precision):
        assert codec.read is not None
        assert same_bits(KLT.of("klt-test", codec.read).decode(encoded), decoded)
        again = codec.encode(states)
        assert KLT.fit(list(states)) == data
    assert all(torch.equal(one, other) for one, other in zip(again.codes, encoded.codes, strict=True))
    assert all(np.array_equal(again.small[name], encoded.small[name]) for name in encoded.small)


def test_reading_and_writing_in_a_thread_leaves_the_weights_that_another_one_has_cast(codec: KltCodec) -> None:
    states, layer = correlated(2, 200, seed=8), torch.nn.Linear(8, 8, bias=False)

    def cast_by_a_product() -> object:
        return layer(torch.randn(4, 8)).grad_fn.next_functions[1][0].next_functions[0][0]

    with torch.autocast("cpu", dtype=torch.bfloat16), ThreadPoolExecutor(1) as pool:
        cast = cast_by_a_product()
        pool.submit(lambda: codec.decode(codec.encode(states))).result()
        pool.submit(KLT.fit, list(states)).result()
        assert cast_by_a_product() is cast


def test_a_constant_layer_and_a_narrow_one_can_be_fitted() -> None:
    for rows in (torch.ones(300, 24).bfloat16(), correlated(1, 300, 7)[0], correlated(1, 5, 40)[0]):
        data = KLT.fit([rows])
        codec = KLT.of("klt-test", lambda data=data: data)  # type: ignore[misc]
        decoded = codec.decode(codec.encode([rows]))
        assert decoded.isfinite().all()
        assert float((decoded[0].float() - rows.float()).abs().max()) < 0.5 * float(rows.float().abs().max())


def test_bits_go_where_one_lowers_the_error_most_one_at_least_and_seven_at_most() -> None:
    assert allocation([100.0, 10.0, 1.0, 1e-9], 12) == [5, 4, 2, 1]
    assert allocation([1e12, 1.0], 10) == [7, 3]
    assert (code_bytes(4096), code_bytes(576), code_bytes(9)) == (1740, 244, 6)


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize("recipe", [RECIPE, "rebuilt-klt"])
def test_a_store_is_sound_to_us_and_to_stock_software_and_a_copy_keeps_its_codes(
    tmp_path: Path, container: str, recipe: str
) -> None:
    store = make_store(tmp_path, codec=recipe, container=container, layers=(1, 3, 6))  # type: ignore[arg-type]
    name = store.capture.codecs.aux
    assert kind_of(name) == "klt" != name
    assert (store.manifest.recipe, recipe_name(store.capture.codecs)) == (recipe, recipe)
    report = verify(store.path, "bytes", also_stock=True)
    assert (report.findings, report.stock_samples) == ([], 6)
    copy = open_copy([store], tmp_path / "copy", container="webdataset" if container == "zarr" else "zarr")
    run_copy(copy)
    other = Store.open(tmp_path / "copy")
    assert other.capture == store.capture
    for record in store:
        assert same_bits(other.read(record.sample.id).aux, record.aux)
    again = open_copy([store], tmp_path / "same", recipe)
    assert again.verbatim == len(again.units) > 1


def test_a_copy_fits_to_samples_of_the_whole_source_and_another_source_is_encoded_by_the_same(tmp_path: Path) -> None:
    first, second = make_store(tmp_path / "a", codec="bf16", seed=1), make_store(tmp_path / "b", codec=RECIPE, seed=2)
    run_copy(open_copy([first], tmp_path / "c", RECIPE))
    made = Store.open(tmp_path / "c")
    assert kind_of(made.capture.codecs.aux) == "klt"
    assert made.capture.codecs.aux != second.capture.codecs.aux
    with pytest.raises(ConflictError, match=r"capture\.codecs\.aux"):
        create_store(tmp_path / "c", second.capture, HEAD, RECIPE, target_files())
    run_copy(open_copy([second], tmp_path / "c", RECIPE))
    both = Store.open(tmp_path / "c")
    assert (len(both), both.capture) == (12, made.capture)
    assert verify(both.path, "bytes").findings == []


def test_a_damaged_or_missing_transform_is_named_and_no_other_is_taken(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec=RECIPE)
    file = Path(store.path, "target", f"{store.capture.codecs.aux}.safetensors")
    whole = file.read_bytes()
    forget_codecs()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptionError, match=r"klt-.* is damaged") as caught:
        _ = Store.open(store.path)[0].aux
    assert caught.value.kind == "target-file-corrupt"
    assert set(verify(store.path, "bytes").kinds) == {"file-corrupt"}
    file.write_bytes(whole)
    manifest = json.loads(Path(store.path, "store.json").read_bytes())
    assert file.name in [entry["path"] for entry in manifest["target_files"]]
    assert len(Store.open(store.path)[0].aux) == 2


def test_a_whole_store_is_read_after_one_that_names_the_same_codec_and_lost_its_transform(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec=RECIPE)
    other = shutil.copytree(store.path, tmp_path / "other")
    (other / "target" / f"{store.capture.codecs.aux}.safetensors").unlink()
    for first, second in ((store.path, other), (other, store.path)):
        forget_codecs()
        opened = [Store.open(first), Store.open(second)]
        assert same_bits(opened[0][0].aux, opened[1][0].aux)
    forget_codecs()
    with pytest.raises(CorruptionError, match="found no file"):
        _ = Store.open(other)[0].aux
    assert len(Store.open(store.path)[0].aux) == 2


def test_a_lost_transform_is_that_of_the_store_opened_last_and_costs_no_sample(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec=RECIPE)
    other = shutil.copytree(store.path, tmp_path / "other")
    for folder in (Path(store.path), other):
        (folder / "target" / f"{store.capture.codecs.aux}.safetensors").unlink()
    forget_codecs()
    *_, last = [Store.open(path) for path in (store.path, other, store.path)]
    for read in (lambda: last[0], lambda: list(last)):
        with pytest.raises(CorruptionError) as caught:
            read()
        assert caught.value.message.startswith(f"{store.path}/target/klt-")
        assert (caught.value.samples, caught.value.hint) == ((), f"hiddenstore verify {store.path} --full")


def test_gc_sweeps_the_transform_of_a_writer_that_another_was_ahead_of(tmp_path: Path) -> None:
    store, other = (make_store(tmp_path / name, codec=RECIPE, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    lost = f"target/{other.capture.codecs.aux}.safetensors"
    shutil.copy(Path(other.path, lost), Path(store.path, lost))
    report = verify(store.path)
    assert (report.findings, [(note.kind, note.path) for note in report.notes]) == ([], [("orphan", lost)])
    assert [item.path for item in gc(store.path, dry_run=False, older_than_s=0).remove] == [lost]
    assert verify(store.path, "bytes").notes == []
    assert len(Store.open(store.path)[0].aux) == 2


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with a digest that fits, as somebody hostile would write it."""
    content = json.loads((folder / "store.json").read_bytes())
    del content["sha256"]
    change(content)
    body = canonical(content)
    (folder / "store.json").write_bytes(body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode())


def test_another_transform_under_the_name_of_a_codec_is_refused_though_the_manifest_agrees(tmp_path: Path) -> None:
    one, other = (make_store(tmp_path / name, codec=RECIPE, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    name = f"{one.capture.codecs.aux}.safetensors"
    data = other.target_file(f"{other.capture.codecs.aux}.safetensors")
    Path(one.path, "target", name).write_bytes(data)

    def agree(content: dict[str, Any]) -> None:
        entry = next(file for file in content["target_files"] if file["path"] == name)
        entry.update(size=len(data), sha256=sha256_hex(data))

    rewrite_manifest(Path(one.path), agree)
    with pytest.raises(FormatError, match=r"klt-\w+ is not decoded by a file with sha256 \w+") as caught:
        Store.open(one.path)
    assert caught.value.kind == "document-invalid"
    assert verify(one.path).kinds == {"document-invalid": 1}


@pytest.mark.parametrize("codec", ["klt", "klt-../../x", "klt-0123456789abcdef"])
def test_verify_names_a_codec_without_its_file(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, codec=RECIPE)
    rewrite_manifest(Path(store.path), lambda content: content["capture"]["codecs"].update(aux=codec))
    (finding,) = verify(store.path).findings
    assert (finding.kind, f"{codec}.safetensors: nothing can be decoded" in finding.detail) == ("codec-missing", True)


def test_nothing_is_written_by_a_codec_that_is_fitted_to_nothing(tmp_path: Path) -> None:
    capture = capture_spec((1, 3), 32, RECIPE)
    assert is_unfitted(capture)
    with pytest.raises(ConfigError, match="is fitted to states of the store's own mix, and was not") as caught:
        create_store(tmp_path / "store", capture, HEAD, RECIPE, target_files())
    assert (caught.value.kind, (tmp_path / "store").exists()) == ("codec-unfit", False)
    with pytest.raises(ConfigError, match="there is none") as caught:
        fit(capture, [])
    assert caught.value.kind == "codec-unfit"
    with pytest.raises(ConfigError, match="none of 9 rows is finite") as caught:
        fit(capture, [torch.full((2, 9, 32), torch.nan).bfloat16()])
    assert caught.value.kind == "codec-unfit"
    with pytest.raises(ConfigError, match="klt has no transform"):
        KLT.encode(correlated(1, 9))
    with pytest.raises(ConfigError, match="unknown codec 'klt-0123'"):
        get_codec("klt-0123")
    assert get_layout("klt").row_bits(64) == FITTED["klt"].row_bits(64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t | {"0.bits": t["0.bits"].flip(0)}, "bits that do not fill a row"),
        (lambda t: t | {"0.bits": t["0.bits"].int()}, "bits of torch.int32"),
        (lambda t: t | {"0.weight": t["0.weight"][:, :-9].contiguous()}, r"weights \[96, 87\]"),
        (lambda t: t | {"0.scale": torch.tensor([float("nan")])}, "sums are not exact"),
        (lambda t: {name: tensor for name, tensor in t.items() if name != "1.bits"}, "there is none at 1"),
        (lambda t: t | {"0.weight": t["0.weight"][0, 0]}, "weights"),
        (lambda t: t | {"0.scale": t["0.scale"].repeat(2)}, "cannot be read"),
        (lambda t: t | {"0.weight": t["0.weight"][:, :95].contiguous()}, "width 95, and these have 96"),
        (lambda t: t | {"0.bits": t["0.bits"].clamp(max=1).add(torch.eye(12)[0].byte() * 28)}, "do not fill a row"),
    ],
)
def test_a_file_that_holds_no_transforms_is_refused(
    codec: KltCodec, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], says: str
) -> None:
    assert codec.read is not None
    data = save_tensors(change(load_tensors(codec.read())))
    encoded = codec.encode(correlated(2, 30))
    with pytest.raises(ConfigError, match=says) as caught:
        KLT.of("klt-changed", lambda: data).decode(encoded)
    assert caught.value.kind == "codec-unfit"


def test_other_layers_than_it_was_fitted_to_are_not_written(codec: KltCodec) -> None:
    with pytest.raises(ConfigError, match="is fitted to 2 layers, and 1 are to be written") as caught:
        codec.encode(correlated(1, 20))
    assert caught.value.kind == "codec-unfit"


def test_it_is_for_aux_layers_alone() -> None:
    with pytest.raises(ConfigError, match="unknown codec 'klt'"):
        get_recipe("aux=q4,final=klt")
    with pytest.raises(ValidationError, match="is fitted to aux layers"):
        Codecs(aux="q4", final="klt-0123456789abcdef")


def test_a_copy_without_a_layer_keeps_the_codes_of_the_others(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec=RECIPE)
    run_copy(open_copy([store], tmp_path / "one", layers=[3]))
    one = Store.open(tmp_path / "one")
    assert one.capture.codecs == store.capture.codecs
    for record in store:
        assert same_bits(one.read(record.sample.id).aux[0], record.aux[1])
    run_copy(open_copy([store], tmp_path / "anew", "aux=klt,final=q4", layers=[3]))
    assert Store.open(tmp_path / "anew").capture.codecs.aux != store.capture.codecs.aux
    assert verify(tmp_path / "anew", "bytes").findings == []


def test_a_copy_of_some_samples_in_some_layers_keeps_the_codes_of_both_however_many_units_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.care.stored_unit.FEW_PIECES", 1)
    store = make_store(tmp_path, codec=RECIPE, layers=(1, 3, 6))
    run_copy(open_copy([store], tmp_path / "two", layers=[3, 6]))
    copies = (
        open_copy([Store.open(tmp_path / "two")], tmp_path / "layers-first", keep=is_long),
        open_copy([store], tmp_path / "at-once", keep=is_long, layers=[3, 6]),
        open_copy([store], tmp_path / "short-first", keep=lambda record, entry: not is_long(record, entry), layers=[3]),
    )
    run_copy(copies[-1])
    later = open_copy([store], tmp_path / "short-first", keep=is_long, layers=[3])
    for copy in (*copies[:2], later):
        assert len(copy.units) > 1
        assert all(copy.keeps_codes(unit) for unit in copy.units)
        assert "rounds" not in " ".join(copy.notes)
        run_copy(copy)
        part = Store.open(copy.destination.path)
        assert part.capture.codecs == store.capture.codecs
        slots = [store.capture.aux_layers.index(layer) for layer in part.capture.aux_layers]
        for record in part:
            assert same_bits(record.aux, store.read(record.sample.id).aux[slots])
        assert verify(part.path, "bytes").findings == []
    assert len(Store.open(later.destination.path)) == len(store)


def test_a_copy_of_one_layer_is_fitted_anew_where_its_units_are_coded_anew(tmp_path: Path) -> None:
    store = make_store(tmp_path / "all", codec=RECIPE, layers=(1, 3, 6))
    run_copy(open_copy([store], tmp_path / "two", layers=[3, 6]))
    two = Store.open(tmp_path / "two")
    other = make_store(tmp_path / "other", layers=(1, 3, 6), seed=1)
    copies = (
        open_copy([two], tmp_path / "smaller", "aux=klt,final=q4"),
        open_copy([two], tmp_path / "some", "aux=klt,final=q4", is_long),
        open_copy([two, other], tmp_path / "both", layers=[3, 6]),
    )
    for copy in copies:
        run_copy(copy)
        again = Store.open(copy.destination.path)
        assert kind_of(again.capture.codecs.aux) == "klt"
        assert again.capture.codecs.aux != two.capture.codecs.aux
        assert len(again) > 1
        assert verify(again.path, "bytes").findings == []


def test_a_copy_into_one_of_fewer_layers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store, other = make_store(tmp_path / "all", codec=RECIPE), make_store(tmp_path / "other", seed=1)
    run_copy(open_copy([store], tmp_path / "one", layers=[3]))
    before = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*"))
    with pytest.raises(ConfigError, match=r"klt-\w+ of .*one is fitted to more layers than the store holds") as caught:
        open_copy([other], tmp_path / "one", layers=[3])
    assert (caught.value.kind, "--recipe aux=klt,final=q8" in str(caught.value.hint)) == ("codec-unfit", True)
    assert sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*")) == before
    run_copy(open_copy([Store.open(tmp_path / "one")], tmp_path / "anew", RECIPE))
    run_copy(open_copy([other], tmp_path / "anew", layers=[3]))
    assert len(Store.open(tmp_path / "anew")) == 12


def test_rows_and_weights_cut_for_a_gpu_s_bf16_products_give_the_whole_numbers_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU has no bf16 product with fp32 sums: one that rounds its factors to bf16 stands in for it."""
    monkeypatch.setattr(
        torch, "mm", lambda one, other, out_dtype: (one.bfloat16().float() @ other.float()).to(out_dtype)
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-4096, 4097, (9, 64), generator=generator).float()
    halves = klt._halves(torch.randint(-16_000, 16_001, (64, 50), generator=generator).to(torch.int16))
    for half in halves:
        assert torch.equal(klt._sums(rows, half.bfloat16()), rows @ half)
        levels = (2 * torch.randint(-64, 64, (9, 64), generator=generator) + 1).float()
        assert torch.equal(klt._sums(levels.bfloat16(), half.bfloat16()), levels @ half)
