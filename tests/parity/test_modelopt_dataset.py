"""A store in ModelOpt's offline trainer: the items of its own dataset over files, bit for bit, its own collator, and a
step of its own model."""

import pickle
from pathlib import Path
from typing import Any

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


def both(store: Store, split: str, files: Path) -> tuple[ModelOptDataset, Any]:
    """The store as its dataset, as a loader's worker gets it, and its own dataset over an export."""
    export_samples(store, files, MODELOPT)
    ours = pickle.loads(pickle.dumps(ModelOptDataset(str(store.path), split)))  # type: ignore[arg-type]
    assert len(ours) > 0
    named = [str(files / f"{sample_id}.pt") for sample_id in ours.sample_ids]
    return ours, utils.OfflineSupervisedDataset(named, answer_only_loss=True)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_its_items_are_those_of_their_dataset_over_an_export(store: Store, split: str, tmp_path: Path) -> None:
    ours, theirs = both(store, split, tmp_path / "files")
    for index in range(len(theirs)):
        mine, other = ours[index], theirs[index]
        assert set(mine) == set(other)
        for name, value in other.items():
            same = torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value
            assert same, name
    batch = utils.EagleOfflineDataCollator(train_len=64)([ours[i] for i in range(len(ours))])
    assert batch["input_ids"].shape == (len(ours), 64)


def eagle_model() -> Any:
    """A tiny Llama of the store's width and vocabulary that ModelOpt gave an EAGLE-3 drafter."""
    import modelopt.torch.speculative as speculative
    from modelopt.torch.speculative.config import eagle3_default_config
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=8, pad_token_id=None, **shape)
    model = LlamaForCausalLM(config)
    architecture = {**eagle3_default_config, **shape, "draft_vocab_size": 64, "torch_dtype": "float32"}
    how = {"eagle_offline": True, "eagle_use_torch_compile": False, "eagle_ttt_steps": 2}
    speculative.convert(model, [("eagle", {**how, "eagle_architecture_config": architecture})])
    return model.train()


def stepped(dataset: Any) -> tuple[float, list[torch.Tensor]]:
    """The loss and the drafter's gradients of one step over a whole split."""
    items = [dataset[index] for index in range(len(dataset))]
    model, batch = eagle_model(), utils.EagleOfflineDataCollator(train_len=64)(items)
    states = batch["base_model_outputs"]
    states |= {name: states[name].float() for name in ("base_model_hidden_states", "aux_hidden_states")}
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), [weight.grad for weight in model.eagle_module.parameters() if weight.grad is not None]


def test_a_step_of_its_model_from_a_store_is_the_step_from_its_own_files(store: Store, tmp_path: Path) -> None:
    (our_loss, ours), (loss, theirs) = (stepped(one) for one in both(store, "train", tmp_path / "files"))
    assert our_loss == loss > 0
    assert len(ours) == len(theirs) > 5
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert any(bool(gradient.any()) for gradient in theirs)


def test_rows_of_zeros_in_files_are_taught_without_the_word_that_an_export_names_and_not_with_it(
    tmp_path: Path,
) -> None:
    name, value = MODELOPT.masks_by.removeprefix("training.").split("=")
    held = make_store(tmp_path / "store", samples=4, layers=(1, 3, 5), codec="bf16", final="supervised")
    export_samples(held, tmp_path / "files", MODELOPT, missing_final="zeros")
    files = sorted(map(str, (tmp_path / "files").glob("*.pt")))

    def taught_zeros(**how: bool) -> int:
        items = utils.OfflineSupervisedDataset(files, **how)
        return sum(int((x["loss_mask"].bool() & (x["base_model_hidden_states"] == 0).all(-1)).sum()) for x in items)

    assert taught_zeros() > 0
    assert taught_zeros(**{name: value == "true"}) == 0


def test_a_store_without_every_final_row_is_refused_unless_zeros_are_asked_for(tmp_path: Path) -> None:
    """Its loss is masked by ``loss_mask``, so rows of zeros teach nothing there."""
    held = make_store(tmp_path, samples=4, layers=(1, 3, 5), codec="bf16", final="supervised")
    with pytest.raises(FormatError, match="only around supervised tokens"):
        ModelOptDataset(str(held.path))
    item = ModelOptDataset(str(held.path), missing_final="zeros")[0]
    absent = item["base_model_hidden_states"].eq(0).all(dim=1)
    assert absent.any()
    assert not (absent & item["loss_mask"].bool()).any()
