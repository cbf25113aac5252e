"""Exporting a store as speculators' offline data: exact rows, honest refusals, nothing half-written."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hiddenstore.dumps.common import ExportedData, export_samples
from hiddenstore.dumps.speculators import LAYOUT, train_command
from hiddenstore.errors import ConfigError, ConflictError, FormatError, StorageError
from hiddenstore.testing.builders import make_store
from tests.forked import Forked, command
from tests.tiny_world import tree


def export_speculators(store, out, on_sample=None, **options):
    return export_samples(store, out, LAYOUT, **options, on_sample=on_sample)


def rows_of(folder):
    from datasets import load_from_disk

    return load_from_disk(str(folder))


def test_every_row_holds_the_store_s_own_states_layers_ascending_and_the_final_last(tmp_path):
    store = make_store(tmp_path, samples=7, layers=(1, 3, 5), codec="bf16", final="all")
    report = export_speculators(store, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == report.samples == 7
    by_tokens = {tuple(store.sample(i).input_ids.tolist()): store[i] for i in store.sample_ids}
    for index, row in enumerate(rows):
        record = by_tokens[tuple(row["input_ids"].tolist())]
        tensors = load_file(tmp_path / "out" / "hidden_states" / f"hs_{index}.safetensors")
        assert tensors["hidden_states"].dtype == torch.bfloat16
        assert tensors["hidden_states"].shape == (record.sample.tokens, 4, 32)
        assert torch.equal(tensors["hidden_states"][:, :3], record.aux.transpose(0, 1))
        assert torch.equal(tensors["hidden_states"][:, 3], record.final)
        assert torch.equal(tensors["token_ids"], row["input_ids"])
        assert tensors["token_ids"].dtype == torch.int64
        assert np.array_equal(row["loss_mask"].numpy(), record.sample.loss_mask)
        assert row["seq_len"] == record.sample.tokens
    assert report.layer_ids == [2, 4, 6]
    assert report.bytes == sum(f.stat().st_size for f in (tmp_path / "out").rglob("*") if f.is_file())


def test_training_samples_come_first_and_the_ratio_cuts_exactly_there(tmp_path):
    for samples in (5, 6, 14, 23):
        store = make_store(tmp_path / str(samples), samples=samples, codec="bf16", final="all")
        report = export_speculators(store, tmp_path / str(samples) / "out")
        split = {store.sample(entry.id).input_ids.tobytes(): entry.split for _, entry in store.entries}
        order = [split[row["input_ids"].numpy().astype(np.int32).tobytes()] for row in rows_of(report.path)]
        cut = int(samples * report.train_data_ratio)
        assert order == ["train"] * cut + ["validation"] * (samples - cut)
        assert samples - cut == report.validation_samples


@pytest.mark.parametrize(("train", "rows"), [(1, 3), (2_999_998, 3_000_007), (7_000_000, 21_000_000)])
def test_the_ratio_of_the_command_cuts_where_the_export_does_however_many_rows_there_are(train, rows):
    ratio = (train + 0.5) / rows
    report = ExportedData(Path("out"), "speculators", rows, rows - train, 0, 0, [1], [2], ratio, 0, False)
    words = train_command(report, "store")
    said = float(words[words.index("--train-data-ratio") + 1])
    assert (said, int(rows * said)) == (ratio, train)


def test_only_the_asked_layers_are_written(tmp_path):
    store = make_store(tmp_path, layers=(1, 3, 5), codec="bf16", final="all")
    report = export_speculators(store, tmp_path / "out", layers=[5, 1])
    assert report.layer_ids == [2, 6]
    tensors = load_file(tmp_path / "out" / "hidden_states" / "hs_0.safetensors")
    assert tensors["hidden_states"].shape[1] == 3
    with pytest.raises(ConfigError, match=r"not \[2\]"):
        export_speculators(store, tmp_path / "other", layers=[1, 2])


def test_a_store_with_final_only_around_supervised_tokens_is_refused_with_the_collect_command(tmp_path):
    store = make_store(tmp_path)
    with pytest.raises(FormatError) as caught:
        export_speculators(store, tmp_path / "out")
    assert caught.value.kind == "final-missing"
    assert "--layers 1,3 --final all" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_zeros_on_request_are_counted_and_never_replace_a_held_row(tmp_path):
    store = make_store(tmp_path, samples=3, codec="bf16")
    report = export_speculators(store, tmp_path / "out", missing_final="zeros")
    missing = 0
    for index, row in enumerate(rows_of(tmp_path / "out")):
        record = next(store[i] for i in store.sample_ids if store.sample(i).tokens == row["seq_len"])
        final = load_file(tmp_path / "out" / "hidden_states" / f"hs_{index}.safetensors")["hidden_states"][:, -1]
        held = np.zeros(record.sample.tokens, dtype=bool)
        held[record.final_rows] = True
        assert torch.equal(final[torch.from_numpy(held)], record.final)
        assert not final[torch.from_numpy(~held)].any()
        missing += int((~held).sum())
    assert report.zero_rows == missing > 0
    assert json.loads((tmp_path / "out" / "hiddenstore.json").read_text())["final_rows_of_zeros"] == missing


def test_a_store_without_final_is_refused_even_when_zeros_are_asked_for(tmp_path):
    store = make_store(tmp_path, final="none")
    with pytest.raises(FormatError, match="no final hidden"):
        export_speculators(store, tmp_path / "out", missing_final="zeros")


def test_an_existing_folder_with_something_in_it_is_left_alone(tmp_path):
    store = make_store(tmp_path, final="all")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConflictError):
        export_speculators(store, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_interrupted_export_leaves_no_folder(tmp_path):
    store = make_store(tmp_path, final="all")

    def stop(_tokens):
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        export_speculators(store, tmp_path / "out", on_sample=stop)
    assert set(tmp_path.iterdir()) == before


def test_a16_an_export_killed_in_the_middle_leaves_no_name_and_the_next_one_sweeps_it(tmp_path):
    store = make_store(tmp_path, samples=150, layers=(1, 3, 5), codec="bf16", final="all")
    words = ("export-data", store.path, "--to", "speculators", "-q", "-o")
    for name in ("straight", "killed"):
        process = Forked(command, *words, str(tmp_path / name))
        if name == "killed":
            while not list(tmp_path.glob(".killed.writing-*/hidden_states/hs_3.safetensors")):
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
            assert not (tmp_path / name).exists()
            process = Forked(command, *words, str(tmp_path / name))
        assert process.wait(120) == 0
    assert not list(tmp_path.glob(".*"))
    killed, straight = tree(tmp_path / "killed"), tree(tmp_path / "straight")
    # `datasets` draws a fingerprint of its own for every save.
    killed["state.json"] = straight["state.json"]
    assert killed == straight


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    store = make_store(tmp_path, final="all")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 10})())
    with pytest.raises(StorageError) as caught:
        export_speculators(store, tmp_path / "out")
    assert caught.value.kind == "disk-full"
    assert not (tmp_path / "out").exists()


def test_the_launcher_says_what_its_environment_lacks() -> None:
    """Where speculators is: tests/parity/test_speculators_backend.py."""
    launcher = [sys.executable, "-m", "hiddenstore.dumps.speculators_backend", "--help"]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: speculators is not in this environment\n  try: pip install 'speculators>=0.9'\n"
