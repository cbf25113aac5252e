"""A store in ModelOpt's offline trainer: the items of its own dataset over files, bit for bit, and its own collator."""

import pickle
from pathlib import Path

import pytest

utils = pytest.importorskip("modelopt.torch.speculative.eagle.utils")

import torch  # noqa: E402

from hiddenstore.dumps.common import export_samples  # noqa: E402
from hiddenstore.dumps.modelopt_dataset import ModelOptDataset  # noqa: E402
from hiddenstore.dumps.torch_files import MODELOPT  # noqa: E402
from hiddenstore.errors import FormatError  # noqa: E402
from hiddenstore.store import Store  # noqa: E402
from hiddenstore.testing.builders import make_store  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("store"), samples=9, layers=(1, 3, 5), codec="bf16", final="all")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_its_items_are_those_of_their_dataset_over_an_export(store: Store, split: str, tmp_path: Path) -> None:
    export_samples(store, tmp_path / "files", MODELOPT)
    ours = pickle.loads(pickle.dumps(ModelOptDataset(str(store.path), split)))  # type: ignore[arg-type]
    assert len(ours) > 0
    files = [str(tmp_path / "files" / f"{sample_id}.pt") for sample_id in ours.sample_ids]
    theirs = utils.OfflineSupervisedDataset(files, answer_only_loss=True)
    for index in range(len(theirs)):
        mine, other = ours[index], theirs[index]
        assert set(mine) == set(other)
        for name, value in other.items():
            same = torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value
            assert same, name
    batch = utils.EagleOfflineDataCollator(train_len=64)([ours[i] for i in range(len(ours))])
    assert batch["input_ids"].shape == (len(ours), 64)


def test_a_store_without_every_final_row_is_refused_unless_zeros_are_asked_for(tmp_path: Path) -> None:
    """Its loss is masked by ``loss_mask``, so rows of zeros teach nothing there."""
    held = make_store(tmp_path, samples=4, layers=(1, 3, 5), codec="bf16", final="supervised")
    with pytest.raises(FormatError, match="only around supervised tokens"):
        ModelOptDataset(str(held.path))
    item = ModelOptDataset(str(held.path), missing_final="zeros")[0]
    absent = item["base_model_hidden_states"].eq(0).all(dim=1)
    assert absent.any()
    assert not (absent & item["loss_mask"].bool()).any()
