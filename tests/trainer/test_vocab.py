"""Draft vocabularies: choosing, files, peers' forms."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenstore.cli import main
from hiddenstore.data import WHOLE
from hiddenstore.errors import ConfigError, CorruptionError, NotFoundError
from hiddenstore.records import Sample, sample_id
from hiddenstore.testing import builders
from hiddenstore.testing.builders import make_store
from tests.trainer.runs import store_of
from trainer import settings
from trainer.vocab import DraftVocab, count_store, count_tokens, coverage, coverage_curve, curve_sizes


def test_most_frequent_tokens_win_and_ids_ascend() -> None:
    vocab = DraftVocab.of_counts(np.array([5, 0, 9, 5, 1]), 3)
    assert vocab.target_ids.tolist() == [0, 2, 3]
    assert vocab.d2t.tolist() == [0, 1, 1]
    assert vocab.t2d.tolist() == [True, False, True, True, False]
    assert vocab.draft_ids().tolist() == [0, -1, 1, 2, -1]


def test_coverage_counts_supervised_tokens() -> None:
    counts = count_tokens([(np.array([1, 2, 2, 4]), np.array([0, 1, 1, 1]))], 5)
    assert counts.tolist() == [0, 0, 2, 0, 1]
    assert coverage(DraftVocab.of_ids(torch.tensor([2]), 5), counts) == pytest.approx(2 / 3)


def test_store_counts_use_the_training_split_only(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    chosen = [store.sample(i) for i in store.sample_ids]
    expected = sum(s.supervised for s in chosen if s.split == "train")
    assert count_store(store, 64).sum() == expected
    assert count_store(store, 64, view=WHOLE) is count_store(store, 64), "counted twice"


@pytest.mark.parametrize("form", ["safetensors", "pt", "pt-mapping", "npy"])
def test_reads_what_it_and_peers_write(tmp_path: Path, form: str) -> None:
    vocab = DraftVocab.of_ids(torch.tensor([1, 4, 7]), 9)
    path = tmp_path / {"safetensors": "v.safetensors", "npy": "d2t.npy"}.get(form, "d2t.pt")
    if form == "safetensors":
        path.write_bytes(vocab.save_bytes())
    elif form == "npy":
        np.save(path, vocab.d2t.numpy())
    else:
        torch.save(vocab.d2t if form == "pt" else {"d2t": vocab.d2t, "t2d": vocab.t2d}, path)
    assert torch.equal(DraftVocab.load(path, 9).t2d, vocab.t2d)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d2t.pt"
    with pytest.raises(NotFoundError, match=r"d2t\.pt"):
        DraftVocab.load(path, 9)
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CorruptionError, match=r"d2t\.pt"):
        DraftVocab.load(path, 9)


@pytest.mark.parametrize(
    "d2t",
    [
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.int64).to_sparse(),
        torch.zeros(3, dtype=torch.int64, device="meta"),
        torch.zeros(1, dtype=torch.int64).expand(1 << 40),
        torch.zeros(1, dtype=torch.int64).expand(3),
        torch.zeros(10, dtype=torch.int64),
        torch.zeros(3, 1, dtype=torch.int64),
        "d2t",
    ],
    ids=["complex", "float", "sparse", "meta", "terabytes", "repeated", "longer", "matrix", "text"],
)
def test_a_torch_file_whose_d2t_is_no_list_of_whole_numbers_is_refused(tmp_path: Path, d2t: object) -> None:
    torch.save({"d2t": d2t}, tmp_path / "d2t.pt")
    with pytest.raises(ConfigError, match=r"d2t\.pt holds no tensor d2t \[U\] of at most 9 whole numbers"):
        DraftVocab.load(tmp_path / "d2t.pt", 9)


@pytest.mark.parametrize("shape", ["(1099511627776,)", "(" * 3000, "(-1,)", "(2, True)"])
def test_a_npy_file_whose_header_lies_is_refused(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    path = tmp_path / "d2t.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(80))
    with pytest.raises((CorruptionError, ConfigError), match=r"d2t\.npy"):
        DraftVocab.load(path, 9)


def test_a_torch_that_may_run_code_of_a_file_opens_no_vocabulary_of_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = DraftVocab.of_ids(torch.tensor([1, 4, 7]), 9)
    torch.save(vocab.d2t, tmp_path / "d2t.pt")
    (tmp_path / "vocab.safetensors").write_bytes(vocab.save_bytes())
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr(torch, "load", lambda *_words, **_more: pytest.fail("it was opened"))
    with pytest.raises(ConfigError, match="cannot read torch files of strangers safely") as caught:
        DraftVocab.load(tmp_path / "d2t.pt", 9)
    assert caught.value.kind == "pickle-refused"
    assert DraftVocab.load(tmp_path / "vocab.safetensors", 9).size == 3


def test_a_flipped_bit_of_a_vocabulary_is_damage_and_never_another_vocabulary(tmp_path: Path) -> None:
    vocab, path = DraftVocab.of_ids(torch.tensor([1, 4, 7]), 9), tmp_path / "vocab.safetensors"
    data = vocab.save_bytes()
    for place in range(8 * 8, 8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        with suppress(CorruptionError, ConfigError):
            assert torch.equal(DraftVocab.load(path, 9).d2t, vocab.d2t), place
    path.write_bytes(data.replace((1).to_bytes(8, "little"), (2).to_bytes(8, "little"), 1))
    with pytest.raises(CorruptionError, match="name different target tokens"):
        DraftVocab.load(path, 9)


@pytest.mark.parametrize("ids", [[1, 1], [-1, 2], [3, 9]])
def test_ids_outside_the_target_or_twice_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftVocab.of_ids(torch.tensor(ids), 9)
    assert caught.value.kind == "vocab-invalid"
    with pytest.raises(ConfigError, match="asked for"):
        DraftVocab.of_counts(np.zeros(4), 5)


def test_the_curve_is_the_coverage_of_every_vocabulary_it_names() -> None:
    counts = np.random.default_rng(0).zipf(1.5, size=50)
    counts[7:11] = 0
    curve = coverage_curve(counts, [1, 8, 8, 50, 99, 3])
    assert [size for size, _ in curve] == [1, 3, 8, 50]
    for size, share in curve:
        assert share == pytest.approx(coverage(DraftVocab.of_counts(counts, size), counts))
    assert curve[-1][1] == 1.0
    assert coverage_curve(np.zeros(4, dtype=np.int64), [2]) == [(2, 1.0)]


def test_the_sizes_worth_a_look_end_where_everything_is_covered() -> None:
    assert curve_sizes(152_000, 50_000) == [1 << power for power in range(6, 15)] + [32000, 32768, 50_000]
    assert curve_sizes(300, 90) == [64, 90]


def test_the_command_shows_and_draws_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path, samples=6)
    words = ["vocab", store.path, "--size", "9", "--curve", "--plot", str(tmp_path / "c.png")]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--json"])
    assert caught.value.code == 0
    document = json.loads(capsys.readouterr().out)
    counts = count_store(store, document["target_size"])
    assert {point["size"] for point in document["curve"]} >= {9, document["distinct_tokens"]}
    assert document["coverage"] == pytest.approx(np.sort(counts)[::-1][:9].sum() / counts.sum())
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main(words)
    shown = capsys.readouterr().out
    assert "█" in shown
    assert "100.00%" in shown


def test_prepared_data_gives_the_vocabulary_of_the_store_made_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path, samples=12)
    found = []
    for place in ("store", "data"):
        out = str(tmp_path / f"{place}.safetensors")
        with pytest.raises(SystemExit) as caught:
            main(["vocab", str(tmp_path / place), "--size", "9", "-o", out, "--json"])
        assert caught.value.code == 0
        found.append({**json.loads(capsys.readouterr().out), "path": None})
    assert found[0] == found[1]
    assert (tmp_path / "store.safetensors").read_bytes() == (tmp_path / "data.safetensors").read_bytes()


def test_a_curve_is_not_drawn_without_matplotlib_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hiddenstore.cli import main

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as caught:
        main(["vocab", make_store(tmp_path, samples=6).path, "--size", "9", "--plot", str(tmp_path / "c.png")])
    assert caught.value.code == ConfigError.exit_code
    message = capsys.readouterr().err
    assert "--plot needs matplotlib, which is not installed  [not-installed]" in message
    assert "fix: pip install" in message


@pytest.mark.parametrize("words", [(), ("data.loss_on=all",), ("data.loss_on=all", "data.max_tokens=90")])
def test_the_derived_vocabulary_covers_98_percent_of_what_the_settings_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Questions of any of 40,000 tokens, answers of 64."""
    monkeypatch.setattr(builders, "VOCAB", 40000)
    monkeypatch.setattr(settings, "FEWEST_VOCAB", 64)
    dice, samples = np.random.default_rng(0), list[Sample]()
    for number in range(8):
        ids = np.concatenate([dice.integers(0, 40000, 200), dice.integers(0, 64, 20)]).astype(np.int32)
        mask = (np.arange(220) >= 200).astype(np.uint8)
        spans = np.array([[1, 0, 200], [2, 200, 220]], dtype=np.int32)
        samples.append(Sample(sample_id(ids, mask), ids, mask, spans, "train", f"made:{number}"))
    store = store_of(tmp_path, samples)
    config = settings.load_config(store, "eagle3", words=words)
    counts, size = count_store(store, 40000, settings.view_of(config)), config.drafter.vocab_size
    fewer = coverage(DraftVocab.of_counts(counts, size - 64), counts) if size > 64 else 0
    assert fewer < 0.98 <= coverage(DraftVocab.of_counts(counts, size), counts)
