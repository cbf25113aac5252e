"""The advisor's numbers beside plain restatements, its choice, and the command as a person and a script meet it."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.cli import main
from hiddenstore.codecs import CODECS
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.codecs.topk import top_tokens
from hiddenstore.errors import ConfigError
from hiddenstore.inspect.advise import (
    advise_store,
    channel_error,
    clipped_values,
    distribution_change,
    fp8_per_token,
    table_lines,
    through_codec,
    truncation_change,
    write_advice,
)
from hiddenstore.inspect.choice import FP8, RecipeLimits
from hiddenstore.inspect.facts import advice_numbers, read_advice
from hiddenstore.store import Store
from hiddenstore.targets.calibration import take_slice, write_slice
from hiddenstore.targets.head import HeadBundle
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
from schemas.manifest import Container


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("raw"), samples=20, codec="raw", width=96)


def probabilities(head: HeadBundle, final: Tensor) -> np.ndarray:
    """softmax(W norm(h)) in float64, from the tensors of an RMS head without scale or softcap."""
    h = final.double().numpy()
    h = h / np.sqrt(np.square(h).mean(1, keepdims=True) + head.spec.norm_eps) * head.norm_weight.double().numpy()
    logits = h @ head.output_weight.double().numpy().T
    logits -= logits.max(1, keepdims=True)
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def int8_per_token(layer: Tensor) -> Tensor:
    scale = layer.float().abs().amax(1, keepdim=True) / 127
    return ((layer.float() / scale).round() * scale).bfloat16()


def outlier_channels() -> Tensor:
    """256 tokens of 128 channels, two of which are 90 times as large as the others."""
    layer = torch.randn(256, 128)
    layer[:, 5] *= 90
    layer[:, 77] *= 90
    return layer.bfloat16()


def test_kl_overlap_and_flips_are_those_of_the_two_distributions(raw: Store) -> None:
    head = raw.head()
    final = raw.read(raw.sample_ids[0]).final
    decoded = (final.float() + 0.2 * torch.randn(final.shape)).bfloat16()
    p, q = probabilities(head, final), probabilities(head, decoded)
    found = distribution_change(head.to("cpu"), final, decoded, "pre_norm")
    assert found is not None
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=2e-2)
    assert found.overlap == pytest.approx(np.minimum(p, q).sum(1).mean(), rel=2e-3)
    assert found.top1_flips == pytest.approx((p.argmax(1) != q.argmax(1)).mean())
    assert found.kl > 1e-3


def test_top_tokens_lose_the_mass_they_leave_out(raw: Store) -> None:
    head = raw.head()
    final = raw.read(raw.sample_ids[0]).final
    kept = np.sort(probabilities(head, final), axis=1)[:, -12:].sum(1)
    found = truncation_change(head, final, top_tokens(head, final, "pre_norm", 12), "pre_norm")
    assert found is not None
    assert found.overlap == pytest.approx(kept.mean(), rel=2e-3)
    assert found.kl == pytest.approx(-np.log(kept).mean(), rel=2e-2)
    assert found.top1_flips == 0


def test_rows_whose_logits_overflow_say_nothing_and_decoded_ones_are_no_agreement(raw: Store) -> None:
    head = raw.head()
    final = raw.read(raw.sample_ids[0]).final
    huge = final.clone()
    huge[0] = 3e38
    assert distribution_change(head, huge, huge, "post_norm") == distribution_change(
        head, final[1:], final[1:], "post_norm"
    )
    assert distribution_change(head, final, huge, "post_norm") is None
    assert distribution_change(head, huge[:1], huge[:1], "post_norm") is None


def test_channel_error_lets_every_channel_and_every_token_count_alike() -> None:
    original = torch.randn(200, 64).mul(torch.logspace(-0.5, 2, 64)).add(3).bfloat16()
    original[7] *= 1000
    decoded = original + 0.05 * original * torch.randn(200, 64)
    h, g = original.double().numpy(), decoded.bfloat16().double().numpy()
    mu = np.sort(h, axis=0)[99]
    size = np.abs(h - mu)
    token = np.sort(size, axis=1)[:, 31]
    c = 1.4826 * np.sort(size / token[:, None], axis=0)[99]
    per_token = np.square((g - h) / c).sum(1) / np.square((h - mu) / c).sum(1)
    assert channel_error(original, decoded.bfloat16()) == pytest.approx(math.sqrt(per_token.mean()), rel=1e-2)
    assert channel_error(original, original) == 0


def test_outlier_channels_ruin_int8_per_token_where_no_plain_relative_error_shows_it() -> None:
    layer = outlier_channels()
    spoilt = int8_per_token(layer)
    plain = float((spoilt.float() - layer.float()).norm() / layer.float().norm())
    assert plain < 0.03
    assert channel_error(layer, spoilt) > 0.2
    assert channel_error(layer, through_codec("q8")(layer).decoded) < 0.01
    assert 0.02 < channel_error(layer, fp8_per_token(layer).decoded) < 0.035
    assert 0.07 < channel_error(layer, through_codec("q4")(layer).decoded) < 0.11


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_an_attention_sink_is_a_raw_row_and_weighs_as_one(name: str) -> None:
    layer = torch.randn(256, 64).bfloat16()
    plain = through_codec(name)(layer)
    layer[0] *= 1500
    trial = through_codec(name)(layer)
    assert (plain.raw_rows, trial.raw_rows) == (0, 1)
    assert torch.equal(trial.decoded[0], layer[0])
    assert trial.row_bytes - plain.row_bytes == pytest.approx((64 * 2 + 8) / 256)


def test_values_beyond_the_reach_of_their_codes_are_counted() -> None:
    layer = torch.randn(256, 64).bfloat16()
    encoded = CODECS["q8"].encode([layer])
    assert clipped_values(layer, encoded, 127.5) == 0
    scale, offset = (
        torch.from_numpy(encoded.small[name][0].copy()).view(torch.bfloat16).float()
        for name in ("channel_scale", "channel_offset")
    )
    y = ((layer.float() - offset) / scale).abs()
    token = torch.from_numpy(encoded.small["token_scale"][0].copy()).view(torch.bfloat16).float()
    assert clipped_values(layer, encoded, 64.0) == int((y > 64 * token[:, None]).sum()) > 256
    assert through_codec("q4")(layer).clipped == 0


def test_fp8_per_token_rounds_to_e4m3_steps_and_keeps_the_scale_of_every_token() -> None:
    layer = torch.tensor([[448.0, 13.0, 0.0, -27.0], [0.0, 0.0, 0.0, 0.0]]).bfloat16()
    trial = fp8_per_token(layer)
    # E4M3 has four significant bits: 13 is held, 27 lies between 26 and 28 and goes to the even one.
    assert trial.decoded.tolist() == [[448.0, 13.0, 0.0, -28.0], [0.0, 0.0, 0.0, 0.0]]
    assert (trial.row_bytes, trial.clipped) == (6.0, 0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-38, 1e-39, 1e-40])
def test_a_row_near_zero_leaves_every_number_of_the_advice_finite(magnitude: float) -> None:
    layer = torch.randn(24, 32)
    layer[2] *= magnitude
    decoded = fp8_per_token(layer.bfloat16()).decoded
    assert decoded.isfinite().all()
    assert torch.equal(decoded[3:], fp8_per_token(layer[3:].bfloat16()).decoded)
    assert math.isfinite(channel_error(layer.bfloat16(), decoded))


def test_a_token_that_decodes_to_nan_is_the_largest_error() -> None:
    layer = torch.randn(24, 32).bfloat16()
    decoded = layer.clone()
    decoded[2, 3] = torch.nan
    assert channel_error(layer, decoded) == sys.float_info.max


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_bytes_per_token_are_those_a_copy_then_takes(tmp_path: Path, container: Container) -> None:
    # One unit, so that metadata files do not weigh.
    capture = capture_spec(width=256, codec="raw")
    made = create_store(tmp_path / "made", capture, HEAD, "raw", target_files(256), container)
    write_unit(made, "only-000000", "0" * 64, random_records(make_samples(120), capture), (), ENGINE)
    store = Store.open(made.path)
    advice = advise_store(store, RecipeLimits())
    for name in ("lossless", "safe", "compact", "tiny"):
        run_copy(open_copy([store], tmp_path / name, name))
        copied = Store.open(tmp_path / name)
        tokens = sum(record.tokens for record in copied.commits())
        stored = sum(record.bytes_stored for record in copied.commits())
        row = next(row for row in advice.rows if row.recipe == name)
        assert row.bytes_per_token == pytest.approx(stored / tokens, rel=0.04), name


def test_the_smallest_recipe_within_both_limits_is_chosen_and_top_tokens_never_are(raw: Store) -> None:
    def chosen(kl: float, error: float) -> str:
        return advise_store(raw, RecipeLimits(kl, error)).chosen

    assert chosen(0.0, 0.0) == "lossless"
    assert chosen(1e-2, 0.03) == "safe"
    assert chosen(1e-2, 0.2) == "compact"
    assert chosen(1e-9, 0.2) == "lossless"
    assert chosen(100.0, 100.0) == "compact"


def test_fp8_is_measured_and_never_chosen(raw: Store) -> None:
    advice = advise_store(raw, RecipeLimits(100.0, 0.05))
    row = next(row for row in advice.rows if row.recipe == FP8)
    assert row.within
    assert not row.chosen
    assert row.channel_error == pytest.approx(0.026, abs=0.006)


def test_a_rounded_store_is_advised_from_its_slice_alone(tmp_path: Path, raw: Store) -> None:
    store = make_store(tmp_path, samples=20, width=96)
    with pytest.raises(
        ConfigError, match="no calibration slice, and its aux layers and final rows are rounded"
    ) as caught:
        advise_store(store, RecipeLimits())
    assert caught.value.kind == "calibration-missing"
    capture = capture_spec(codec="raw", width=96)
    taken = take_slice(random_records(make_samples(20), capture), capture)
    assert taken is not None
    write_slice(store.fs, taken, store.capture)
    assert (
        advise_store(store, RecipeLimits()).rows[2].channel_error
        == advise_store(raw, RecipeLimits()).rows[2].channel_error
    )


def test_a_slice_without_final_rows_lets_no_rounding_of_them_pass(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="raw")
    taken = take_slice([store.read(store.sample_ids[0])], store.capture)
    assert taken is not None
    samples = tuple(sample.model_copy(update={"final_rows": 0}) for sample in taken.samples)
    write_slice(store.fs, type(taken)(samples, taken.aux, taken.final[:0]), store.capture)
    advice = advise_store(store, RecipeLimits(100.0, 100.0))
    assert [row.recipe for row in advice.rows if row.within] == ["raw", "lossless"]


def test_captures_without_aux_layers_or_without_finals_are_advised_too(tmp_path: Path) -> None:
    finals = advise_store(make_store(tmp_path / "f", layers=(), final="all", codec="raw"), RecipeLimits(1.0, 0.03))
    assert [row.recipe for row in finals.rows] == ["raw", "lossless", "safe", "compact", FP8]
    assert finals.rows[2].channel_errors.keys() == {"final"}
    layers = advise_store(make_store(tmp_path / "l", final="none", codec="raw"), RecipeLimits())
    assert {row.kl for row in layers.rows} == {None}
    assert layers.chosen == "safe"


def test_advice_is_numbered_and_the_same_advice_is_kept_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="raw")
    one, other = advise_store(store, RecipeLimits()), advise_store(store, RecipeLimits(0.0, 0.0))
    assert [write_advice(store.fs, advice) for advice in (one, one, other)] == [
        "advice/1.json", "advice/1.json", "advice/2.json",
    ]  # fmt: skip
    assert read_advice(store.fs) == other
    path = Path(store.path) / "advice/1.json"
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    assert [finding.path for finding in verify(store.path, "bytes").findings] == [str(path)]
    assert advice_numbers(store.fs) == [1, 2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="hiddenstore")


def test_the_command_answers_a_script_and_info_shows_the_table(raw: Store) -> None:
    result = run("advise", raw.path, "--max-kl", "0.01", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "hiddenstore.advise/1"
    assert [row["recipe"] for row in document["rows"]] == ["raw", "lossless", "safe", "compact", "tiny", FP8]
    for row in document["rows"]:
        assert {"bytes_per_token", "kl", "overlap", "channel_error", "chosen", "raw_rows", "clipped"} <= set(row)
    assert [row["recipe"] for row in document["rows"] if row["chosen"]] == ["safe"]
    info = json.loads(run("info", raw.path, "--json").stdout)["advice"]
    assert info["chosen"] == "safe"
    shown = run("info", raw.path).stdout
    assert "safe (chosen)" in shown
    assert run("advise", raw.path, "--max-kl", "0.01", "-q").stdout == "safe\n"


def test_what_was_measured_is_shown_where_the_store_cannot_be_written(raw: Store, tmp_path: Path) -> None:
    shutil.copytree(raw.path, tmp_path / "store", ignore=shutil.ignore_patterns("advice"))
    (tmp_path / "store" / "advice").write_text("a file, where a folder cannot be made then")
    result = run("advise", str(tmp_path / "store"), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["advice"] is None
    assert "the table is not kept" in result.stderr


def test_a_person_reads_the_table_within_80_columns_and_how_to_ask_for_less(raw: Store) -> None:
    result = run("advise", raw.path, "--max-kl", "0.01")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("→")).split()[1] == "safe"
    asked = result.stderr[result.stderr.index("--max-channel-error") :].split()[:2]
    again = run("advise", raw.path, "--max-kl", "0.01", *asked, "-q")
    assert again.stdout == "compact\n"


def test_figures_stand_under_their_heading_beside_the_longest_name_of_a_recipe(raw: Store) -> None:
    advice = advise_store(raw, RecipeLimits())
    longest = max(RECIPES, key=len)
    rows = [row.model_copy(update={"recipe": longest} if row.recipe == "tiny" else {}) for row in advice.rows]
    lines = table_lines(advice.model_copy(update={"rows": tuple(rows)}), 1000.0)
    assert {len(line) for line in lines} == {len(lines[0])}


def test_settings_without_paired_are_refused(raw: Store) -> None:
    result = run("advise", raw.path, "optim.lr=1e-3")
    assert result.exit_code == 2
    assert "--paired" in result.stderr
