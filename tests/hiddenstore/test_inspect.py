"""What a store says about itself, against what was put in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.inspect import facts as inspect
from hiddenstore.inspect.compare import FieldError, compare, schema_differences, spread
from hiddenstore.inspect.samples import (
    PROFILE_BINS,
    find_sample,
    layer_norms,
    load_tokenizer,
    parse_where,
    pieces,
    samples,
    view,
)
from hiddenstore.records import Sample
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    make_samples,
    make_store,
    random_records,
    target_files,
)
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, write_unit
from schemas.manifest import Reject


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("inspect"), samples=12, layers=(1, 3, 6), width=32)


def test_info_counts_what_was_stored(store: Store) -> None:
    samples = make_samples(12)
    document = inspect.info(store)
    tokens = sum(sample.tokens for sample in samples)
    assert document["samples"] == 12
    assert document["tokens"] == tokens
    assert document["supervised_tokens"] == sum(sample.supervised for sample in samples)
    assert document["bytes_raw"] == tokens * 4 * 32 * 2
    assert document["bytes_stored"] == sum(
        path.stat().st_size for path in Path(store.path, "segments").rglob("*") if path.is_file()
    )
    assert document["units"] == document["segments"] == len(store.commits())
    assert document["splits"] == {"train": 10, "validation": 2}
    assert (document["layers"], document["final"], document["final_norm"]) == ([1, 3, 6], "supervised", "pre_norm")
    assert (document["recipe"], document["codecs"]) == ("safe", {"aux": "q8", "final": "q8"})
    assert document["target"]["model_type"] == "llama"
    assert document["engine"] == {
        "name": "random",
        "version": "1",
        "versions": {},
        "settings": {},
        "units": len(store.commits()),
    }
    assert document["rejects"] == 0


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"gguf.json": b'{"file": "a.gguf", "tensors": {"F32": 61, "Q4_1": 210}}'}, "GGUF of 210 Q4_1, 61 F32"),
        (
            {"config.json": b'{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}'},
            "modelopt FP8",
        ),
        ({"gguf.json": b"[]"}, None),
        ({}, None),
    ],
)
def test_info_says_how_the_target_was_quantised_where_its_files_do(
    tmp_path: Path, files: dict[str, bytes], said: str | None
) -> None:
    store = create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files() | files)
    document = inspect.info(store)
    assert document["quantisation"] == said
    shown = CliRunner().invoke(main, ["info", store.path], catch_exceptions=False).output
    assert (f"quantised: {said}" in " ".join(shown.split())) == (said is not None)


def test_info_of_a_store_without_a_commit_is_all_zero(tmp_path: Path) -> None:
    empty = create_store(tmp_path / "s", capture_spec(), HEAD, "safe", target_files())
    document = inspect.info(empty)
    assert (document["samples"], document["tokens"], document["bytes_raw"], document["units"]) == (0, 0, 0, 0)
    assert document["engine"] is None
    assert inspect.stats(empty)["layers"][0]["rms_mean"] is None


def test_info_counts_rejects_by_reason_and_final_none_holds_no_final_bytes(tmp_path: Path) -> None:
    capture = capture_spec(final="none")
    store = create_store(tmp_path / "s", capture, HEAD, "safe", target_files())
    samples = make_samples(2)
    rejects = [Reject(id=f"r{i}", tokens=5, reason=reason, detail="") for i, reason in enumerate(["a", "b", "a"])]
    write_unit(store, "u-000000", "0" * 64, random_records(samples, capture), rejects, ENGINE)
    document = inspect.info(Store.open(store.fs))
    assert document["rejects"] == 3
    assert document["rejects_by_reason"] == {"a": 2, "b": 1}
    assert document["bytes_raw"] == sum(sample.tokens for sample in samples) * 2 * 32 * 2


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], list(range(1, 1001)), [1, 100_000], [12] * 3 + [24]])
def test_length_histograms_hold_every_sample(lengths: list[int]) -> None:
    summary = inspect.length_summary(lengths)
    counts, edges = summary["histogram"]["counts"], summary["histogram"]["edges"]
    assert sum(counts) == len(lengths)
    assert len(edges) == len(counts) + 1 <= inspect.HISTOGRAM_BINS + 1
    assert edges[-1] >= summary["max"] == max(lengths)
    for low, high, number in zip(edges[:-1], edges[1:], counts, strict=True):
        assert number == sum(low < length <= high for length in lengths)


def test_samples_are_listed_in_commit_order_with_their_index(store: Store) -> None:
    rows, passed = samples(store, limit=4)
    assert passed == 12
    assert [row["id"] for row in rows] == store.sample_ids[:4]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]


def test_where_filters_by_numbers_and_words(store: Store) -> None:
    lengths = {entry.id: entry.tokens for _, entry in store.entries}
    rows, passed = samples(store, parse_where(["tokens>=20, split=train", "tokens != 25"]))
    assert passed == len(rows)
    assert all(row["tokens"] >= 20 and row["split"] == "train" and row["tokens"] != 25 for row in rows)
    kept = {row["id"] for row in rows}
    for row in samples(store)[0]:
        assert (row["id"] in kept) == (lengths[row["id"]] >= 20 and row["split"] == "train" and row["tokens"] != 25)


@pytest.mark.parametrize("text", ["tokens", "tokens>many", "toknes>3", "split>train", ">3", "tokens=>3"])
def test_a_condition_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--where") as caught:
        parse_where([text])
    assert caught.value.kind == "option-invalid"
    assert "fields: tokens" in (caught.value.hint or "")


def test_samples_are_found_by_index_id_and_start_of_id(store: Store) -> None:
    ids = store.sample_ids
    assert find_sample(store, "3") == ids[3]
    assert find_sample(store, "-1") == ids[-1]
    assert find_sample(store, ids[5]) == ids[5]
    assert find_sample(store, ids[5][:10].upper()) == ids[5]
    with pytest.raises(NotFoundError, match="12 samples"):
        find_sample(store, "zz")
    for odd in ("--1", "²", "9" * 5000):
        with pytest.raises(NotFoundError):
            find_sample(store, odd)
    with pytest.raises(NotFoundError):
        find_sample(store, "")


def test_an_index_past_the_end_is_never_taken_for_an_id(tmp_path: Path) -> None:
    many = make_store(tmp_path, samples=40)
    starts = {sample_id[:2] for sample_id in many.sample_ids if sample_id[:2].isdigit() and int(sample_id[:2]) >= 40}
    assert starts, "no id starts with the digits this is about"
    for key in (*starts, "99999", "-41", "-99999"):
        with pytest.raises(NotFoundError, match=f"0 to 39: there is none at {key}"):
            find_sample(many, key)


def test_an_ambiguous_start_of_an_id_lists_the_candidates(tmp_path: Path) -> None:
    many = make_store(tmp_path, samples=40)
    first = next(c for c in "abcdef" if sum(s.startswith(c) for s in many.sample_ids) > 1)
    with pytest.raises(ConfigError, match="samples start with") as caught:
        find_sample(many, first)
    assert caught.value.kind == "sample-ambiguous"


def test_stats_merge_units_as_if_they_were_one(store: Store) -> None:
    document = inspect.stats(store)
    layer = next(row for row in document["layers"] if row["field"] == "layer_3")
    rms = torch.cat([store.read(s, layers=[3]).aux[0].float().square().mean(-1).sqrt() for s in store.sample_ids])
    assert layer["rows"] == len(rms)
    assert layer["rms_mean"] == pytest.approx(float(rms.mean()), rel=0.02)
    assert layer["rms_max"] == pytest.approx(float(rms.max()), rel=0.02)
    assert layer["rms_median"] == pytest.approx(float(rms.median()), rel=0.1)
    assert sum(document["bytes"].values()) == inspect.info(store)["bytes_stored"]
    assert sum(part["tokens"] for part in document["splits"].values()) == inspect.info(store)["tokens"]


def array_bytes(store: Store, *names: str) -> int:
    return sum(file.size for record in store.commits() for file in record.files if file.path.split("/")[0] in names)


def test_stats_say_which_array_the_bytes_of_a_store_are_of(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="q4")
    scales = [
        f"{group}_{name}" for group in ("aux", "final") for name in ("channel_offset", "channel_scale", "token_scale")
    ]
    expected = {
        "layer_1": array_bytes(store, "layer_1"),
        "layer_3": array_bytes(store, "layer_3"),
        "final": array_bytes(store, "final"),
        "scales": array_bytes(store, *scales),
        "raw rows": array_bytes(store, "aux_raw_index", "aux_raw_rows", "final_raw_index", "final_raw_rows"),
        "tokens and index": array_bytes(store, "input_ids", "loss_mask", "spans", "zarr.json"),
        "final_rows": array_bytes(store, "final_rows"),
    }
    assert inspect.stats(store)["bytes"] == expected
    assert sum(expected.values()) == inspect.info(store)["bytes_stored"]


def test_stats_of_tars_call_their_bytes_neither_tokens_nor_index(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="q4", container="webdataset")
    expected = {
        "tar of all fields": array_bytes(store, "samples.tar"),
        "index of the tar": array_bytes(store, "index.json"),
    }
    assert inspect.stats(store)["bytes"] == expected
    assert sum(expected.values()) == inspect.info(store)["bytes_stored"]


def word_tokenizer() -> Tokenizer:
    words = {f"Ġw{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_pieces_cover_the_sample_and_break_where_role_or_mask_change() -> None:
    mask = np.array([0, 0, 0, 0, 0, 1, 1, 0, 1, 1], np.uint8)
    spans = np.array([[1, 1, 4], [2, 5, 10]], np.int32)
    sample = Sample("x", np.arange(10, dtype=np.int32), mask, spans)
    found = pieces(sample, word_tokenizer())
    assert [(p.start, p.end, p.role, p.supervised) for p in found] == [
        (0, 1, None, False),
        (1, 4, "user", False),
        (4, 5, None, False),
        (5, 7, "assistant", True),
        (7, 8, "assistant", False),
        (8, 10, "assistant", True),
    ]
    assert "".join(piece.text for piece in found) == "".join(f" w{i}" for i in range(10))


def test_text_of_the_bundled_tokenizer_is_shown_and_ids_without_one(tmp_path: Path, store: Store) -> None:
    files = {**target_files(), "tokenizer.json": word_tokenizer().to_str().encode()}
    capture = capture_spec()
    with_text = create_store(tmp_path / "s", capture, HEAD, "safe", files)
    (sample,) = make_samples(1)
    write_unit(with_text, "u-000000", "0" * 64, random_records([sample], capture), (), ENGINE)
    document = view(Store.open(with_text.fs), sample.id)
    words = "".join(piece["text"] for piece in document["pieces"]).split()
    assert words == [f"w{token}" for token in sample.input_ids.tolist()]
    assert load_tokenizer(store) is None
    ids = "".join(piece["text"] for piece in view(store, store.sample_ids[0])["pieces"]).split()
    assert [int(word) for word in ids] == store.sample(store.sample_ids[0]).input_ids.tolist()


def test_a_tokenizer_that_this_release_cannot_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    later = word_tokenizer().to_str().replace('"WordLevel"', '"OfALaterRelease"').encode()
    store = create_store(tmp_path / "s", capture_spec(), HEAD, "safe", {**target_files(), "tokenizer.json": later})
    write_unit(store, "u-000000", "0" * 64, random_records(make_samples(1), store.capture), (), ENGINE)
    shown = CliRunner().invoke(main, ["show", store.path], prog_name="hiddenstore")
    assert shown.exit_code == 2
    assert "target/tokenizer.json cannot be loaded" in shown.stderr
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        _ = Store.open(store.fs).tokenizer
    assert caught.value.kind == "target-unreadable"
    assert verify(store.fs, "meaning").kinds["tokenizer-unreadable"] == 1


def test_norms_leave_the_sink_out_of_the_profile(store: Store) -> None:
    record = store[store.sample_ids[0]]
    norms = layer_norms(record, store.capture.aux_fields)
    assert [row.field for row in norms] == ["layer_1", "layer_3", "layer_6", "final"]
    for row in norms[:3]:
        assert row.rms_first > 10 * row.rms_median
        assert max(row.profile) < row.rms_first / 5
        assert len(row.profile) == min(PROFILE_BINS, record.sample.tokens - 1)


def test_a_store_equals_itself_in_every_bit(store: Store) -> None:
    found = compare(store, store)
    assert not found.different
    assert found.top1_share == 1.0
    for error in found.fields:
        assert (error.different_rows, error.max_abs, error.document()["relative"]) == (0, 0.0, 0.0)
        assert error.document()["cosine"] == 1.0


def test_two_codecs_differ_in_schema_and_by_a_small_error(tmp_path: Path) -> None:
    raw = make_store(tmp_path / "raw", codec="bf16")
    q8 = make_store(tmp_path / "q8", codec="q8")
    found = compare(raw, q8)
    names = [item["field"] for item in found.schema]
    assert names == ["recipe", "capture.codecs.aux", "capture.codecs.final"]
    assert found.different
    assert (len(found.only_a), len(found.both), len(found.only_b)) == (0, 6, 0)
    for error in found.fields:
        document = error.document()
        assert 0 < document["relative"] < 0.02
        assert document["cosine"] > 0.9995
    assert found.top1_share is not None
    assert found.top1_share > 0.9


def test_two_codecs_are_the_same_thing_within_the_error_of_the_codec(tmp_path: Path) -> None:
    found = compare(make_store(tmp_path / "raw", codec="bf16"), make_store(tmp_path / "q8", codec="q8"))
    worst = max(error.worst for error in found.fields)
    assert found.beyond(worst) == []
    [reason] = found.beyond(0.999 * worst)
    assert reason.endswith(f"a row differs by {worst:.2g} of its length, more than {0.999 * worst:g}")


def test_no_tolerance_covers_other_samples_other_layers_or_one_wrong_row(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", samples=4, codec="bf16")
    more = compare(one, make_store(tmp_path / "more", samples=5, codec="bf16"))
    assert "1 samples are only in B" in more.beyond(10.0)
    layers = compare(one, make_store(tmp_path / "layers", samples=4, layers=(1, 2), codec="bf16"))
    assert "capture.aux_layers differs" in layers.beyond(10.0)
    a = torch.randn(1000, 8).bfloat16()
    b = a.clone()
    b[7] = a[8]
    error = FieldError("layer_1")
    error.add(a, b)
    assert error.document()["relative"] < 0.01
    assert len(list(error.beyond(0.1))) == 1


def test_coverage_and_common_final_rows_are_found_across_stores(tmp_path: Path) -> None:
    few = make_store(tmp_path / "few", samples=4, final="supervised", layers=(1, 3))
    more = make_store(tmp_path / "more", samples=7, final="all", layers=(3, 5))
    found = compare(few, more)
    assert (len(found.only_a), len(found.both), len(found.only_b)) == (0, 4, 3)
    assert [error.field for error in found.fields] == ["layer_3", "final"]
    assert found.fields[1].rows == sum(entry.final_rows for _, entry in few.entries)


def test_stores_of_different_width_or_without_a_common_sample_say_why_they_are_not_compared(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", width=32)
    assert compare(one, make_store(tmp_path / "wide", width=48)).not_compared == "the targets have different widths"
    assert compare(one, make_store(tmp_path / "other", seed=9)).not_compared == "no sample is held by both"


def test_two_stores_without_a_sample_are_equal_within_any_tolerance(tmp_path: Path) -> None:
    places = [str(create_store(tmp_path / name, capture_spec(), HEAD, "safe", target_files()).path) for name in "ab"]
    said = CliRunner().invoke(main, ["diff", *places, "--tolerance", "0.01"], prog_name="hiddenstore")
    assert "  equal\n" in said.stdout
    assert said.exit_code == 0


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    a, b = torch.ones(4, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    a[0, 0] = b[0, 0] = float("nan")
    b[1, 0] = float("inf")
    b[2] = -1
    error = FieldError("x")
    error.add(a, b)
    document = error.document()
    assert (document["rows"], document["different_rows"], document["nonfinite_rows"]) == (4, 2, 1)
    assert (document["max_abs"], document["relative"]) == (2.0, pytest.approx(2 / 3))
    assert document["cosine"] == pytest.approx((1 + 1 - 1) / 3)


def test_target_files_belong_to_the_schema(tmp_path: Path) -> None:
    one = make_store(tmp_path / "a", seed=0)
    other = make_store(tmp_path / "b", seed=1)
    assert [item["field"] for item in schema_differences(one, other)] == ["target/head.safetensors"]


def test_samples_to_compare_are_spread_evenly() -> None:
    assert spread([str(i) for i in range(10)], 5) == ["0", "2", "4", "6", "8"]
    assert spread(["a", "b"], None) == ["a", "b"]
