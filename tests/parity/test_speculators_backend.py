"""speculators 0.9 trains from a store through its own backend seam: the same rows, drafters equal to the last bit."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

speculators = pytest.importorskip("speculators")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from hiddenstore.dumps.common import ExportedData, export_samples  # noqa: E402
from hiddenstore.dumps.speculators import LAYOUT, STORE_LAYOUT, train_command  # noqa: E402
from hiddenstore.dumps.speculators_backend import StoreTransfer  # noqa: E402
from hiddenstore.store import Store  # noqa: E402
from hiddenstore.testing.builders import make_store  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default"), pytest.mark.timeout(700)]

LAYERS = (1, 3, 5)
ON_A_CPU = (
    *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"),
    *("--num-workers", "0", "--max-steps", "3", "--total-seq-len", "128", "--seed", "1", "--no-resume-from-checkpoint"),
    *("--mask-token-id", "1"),
)
LAUNCHER = """
import sys
from hiddenstore.dumps.speculators_backend import register
register()
from benchmarks.speculators_on_cpu import main
main()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("store"), samples=11, layers=LAYERS, codec="bf16", final="all")


@pytest.fixture(scope="module")
def rows(store: Store, tmp_path_factory: pytest.TempPathFactory) -> ExportedData:
    return export_samples(store, tmp_path_factory.mktemp("rows") / "out", STORE_LAYOUT)


@pytest.fixture(scope="module")
def files(store: Store, tmp_path_factory: pytest.TempPathFactory) -> ExportedData:
    return export_samples(store, tmp_path_factory.mktemp("files") / "out", LAYOUT)


def test_the_rows_hold_no_states_and_the_same_facts(rows: ExportedData, files: ExportedData) -> None:
    assert not (rows.path / "hidden_states").exists()
    assert rows.bytes < files.bytes / 2
    assert (rows.samples, rows.layer_ids, rows.train_data_ratio) == (files.samples, [2, 4, 6], files.train_data_ratio)


@pytest.mark.parametrize("split", ["train", "val"])
def test_their_dataset_reads_from_a_store_what_it_reads_from_files(
    store: Store, rows: ExportedData, files: ExportedData, split: str
) -> None:
    from speculators.train.data import ArrowDataset

    sample_ids = [row["sample_id"] for row in _table(rows)]
    # Loaders spawn their workers, which get the transfer as a pickle.
    transfer = pickle.loads(pickle.dumps(StoreTransfer(str(store.path), sample_ids, list(LAYERS), "refuse")))
    options = {"max_len": 64, "on_missing": "raise", "train_ratio": files.train_data_ratio, "split": split}
    ours = ArrowDataset(datapath=str(rows.path), transfer=transfer, **options)
    theirs = ArrowDataset(datapath=str(files.path), **options)
    assert len(ours) == len(theirs) > 0
    for index in range(len(theirs)):
        mine, other = ours[index], theirs[index]
        assert set(mine) == set(other)
        assert all(torch.equal(mine[name], other[name]) for name in other)


def _table(rows: ExportedData) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(rows.path / "hiddenstore-samples.parquet").to_pylist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def trained(
    arguments: list[str], target: Path, kind: str, out: Path
) -> tuple[tuple[float, float], dict[str, torch.Tensor]]:
    """Its first and last loss, and its weights."""
    words = [*arguments, *ON_A_CPU, "--verifier-name-or-path", str(target), "--speculator-type", kind]
    if kind == "dflash":
        words += ["--block-size", "4"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *words, "--save-path", str(out)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return (said["first_loss"], said["last_loss"]), load_file(Path(said["checkpoint"], "model.safetensors"))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_their_trainer_makes_the_same_drafter_from_a_store_as_from_its_own_files(
    store: Store, rows: ExportedData, files: ExportedData, target: Path, tmp_path: Path, kind: str
) -> None:
    """The command is the one that ``export-data`` prints, less the program's name."""
    from_store = train_command(rows, str(store.path))
    assert from_store[:3] == ["python", "-m", "hiddenstore.dumps.speculators_backend"]
    our_losses, ours = trained(from_store[3:], target, kind, tmp_path / "ours")
    losses, theirs = trained(train_command(files, str(store.path))[2:], target, kind, tmp_path / "theirs")
    assert our_losses == losses
    assert losses[0] != losses[1]
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_launcher_offers_the_flags_and_refuses_what_is_missing_in_one_line(
    rows: ExportedData, target: Path, tmp_path: Path
) -> None:
    words = ["--hidden-states-backend", "hiddenstore", "--store", str(tmp_path / "none"), "--data-path", str(rows.path)]
    words += ["--target-layer-ids", "2", "4", "6", "--verifier-name-or-path", str(target)]
    words += [*ON_A_CPU, "--save-path", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "hiddenstore.dumps.speculators_backend", *words],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert str(tmp_path / "none") in done.stderr
    assert "Traceback" not in done.stderr
