"""Dumps that the installed peers' own functions wrote, imported and trained on like our own capture.

SpecForge 0.2 names and saves the features (``OfflineCaptureLayout.materialize``, its padding, ``LocalFeatureStore``);
speculators 0.9 makes the rows (``build_speculator_training_dataset``) and its FP8 connector writes states. States are
those of a plain Hugging Face forward, one conversation at a time. ``HIDDENSTORE_IMPORT_SAMPLES`` asks for more of them.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files as packaged
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from collectors.capture.import_job import ImportOptions, ImportReport, import_dump
from collectors.capture.job import collect
from collectors.capture.options import CollectOptions
from collectors.demo.corpus import conversations
from collectors.tokenize.prepare import PrepareOptions, prepare
from hiddenstore.dumps import get_layout
from hiddenstore.dumps.common import export_samples
from hiddenstore.inputs import PreparedInput
from hiddenstore.store import Store
from hiddenstore.targets.matmul import widen_bf16
from trainer.train.loop import train

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SAMPLES = int(os.environ.get("HIDDENSTORE_IMPORT_SAMPLES", "12"))
STEPS = max(8, SAMPLES // 10)
LAYERS = (1, 3, 4)
TARGET = str(packaged("collectors.demo") / "target")


@dataclass(frozen=True, eq=False)
class Spoken:
    """ids and mask int64 [T]; aux bf16 [T, 3·D]; before and after the final norm bf16 [T, D]."""

    ids: Tensor
    mask: Tensor
    aux: Tensor
    before: Tensor
    after: Tensor


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in conversations()[:SAMPLES]))
    prepare([str(chats)], folder / "data", TARGET, PrepareOptions(max_tokens=256, validation=0.0))
    return folder / "data"


@pytest.fixture(scope="module")
def capture(data: Path) -> Store:
    """Our own capture; one conversation a forward, as the dumps are made."""
    options = CollectOptions(
        data, data.parent / "own", TARGET, layers="1,3,4", final="all", recipe="raw", batch_tokens=1, check="none"
    )
    collect(options, note=lambda _text: None)
    return Store.open(data.parent / "own")


@pytest.fixture(scope="module")
def spoken(data: Path) -> list[Spoken]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto").eval()
    # As a capture multiplies on a CPU without bf16 products: states are then equal to the bit.
    widen_bf16(model)
    found = []
    for sample in PreparedInput.open(data).samples():
        ids = torch.from_numpy(sample.input_ids).long()
        last: list[Tensor] = []
        handle = model.model.norm.register_forward_pre_hook(lambda _m, args, kept=last: kept.append(args[0][0]))
        with torch.no_grad():
            states = model.model(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
        handle.remove()
        aux = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
        mask = torch.from_numpy(sample.loss_mask).long()
        found.append(Spoken(ids, mask, *(x.bfloat16() for x in (aux, last[0], states[-1][0]))))
    return found


Importer = Callable[..., ImportReport]


@pytest.fixture
def bring(tmp_path: Path) -> Importer:
    def run(folder: Path, peer: str, store: str, **more: Any) -> ImportReport:
        asked: dict[str, Any] = {"recipe": "raw", "check": "hf", "validation": 0.0} | more
        options = ImportOptions(folder, peer, tmp_path / store, TARGET, **asked)
        return import_dump(options, None, lambda _text: None)

    return run


def specforge_dump(folder: Path, spoken: list[Spoken], strategy: str) -> None:
    """Batches of four, padded, named and saved by SpecForge."""
    pytest.importorskip("specforge")
    from specforge.algorithms.builtin import builtin_algorithm_registry
    from specforge.algorithms.common.collation import pad_and_concatenate_features
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    layout = builtin_algorithm_registry().resolve(strategy).providers.offline_for("text").capture_layout
    rows = folder / "rows_0-2000"
    rows.mkdir(parents=True)
    store = LocalFeatureStore(dump_dir=str(rows))
    axes = {"input_ids": 1, "loss_mask": 1, "aux_hidden_states": 1, "last_hidden_states": 1}
    for first in range(0, len(spoken), 4):
        features = [
            {
                "input_ids": one.ids[None],
                "loss_mask": one.mask[None],
                "aux_hidden_states": one.aux[None],
                "last_hidden_states": one.after[None],
            }
            for one in spoken[first : first + 4]
        ]
        batch = pad_and_concatenate_features(features, sequence_axes=axes, required_keys=tuple(axes))
        for index in range(len(features)):
            source = {
                name: rows[index] if name in ("input_ids", "loss_mask") else rows[index : index + 1]
                for name, rows in batch.items()
            }
            # A slice of a batch would be saved with the whole batch behind it.
            record = layout.materialize({name: tensor.clone() for name, tensor in source.items()})
            store.put(record, sample_id=f"data_{first + index}", metadata={})


def speculators_rows(folder: Path, spoken: list[Spoken]) -> None:
    pytest.importorskip("speculators")
    from datasets import Dataset
    from speculators.data_generation.preprocessing import build_speculator_training_dataset

    rows = {"input_ids": [one.ids.tolist() for one in spoken], "loss_mask": [one.mask.tolist() for one in spoken]}
    build_speculator_training_dataset(Dataset.from_dict(rows), None, 4096, num_proc=1).save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()


def connector_tensors(one: Spoken) -> dict[str, Tensor]:
    states = torch.cat([one.aux.unflatten(1, (3, -1)), one.before[:, None]], dim=1)
    return {"hidden_states": states.contiguous(), "token_ids": one.ids}


def speculators_dump(folder: Path, spoken: list[Spoken]) -> None:
    from safetensors.torch import save_file

    speculators_rows(folder, spoken)
    for row, one in enumerate(spoken):
        save_file(connector_tensors(one), folder / "hidden_states" / f"hs_{row}.safetensors")


def losses(store: Path | str, run: Path) -> list[float]:
    words = (
        "data.batch_tokens=512", "data.pack_tokens=256", f"train.max_steps={STEPS}", "train.validate_every=0",
        "loss.steps=3", "drafter.vocab_size=512", "drafter.intermediate_size=96",
    )  # fmt: skip
    train(store, run, drafter="eagle3", words=words)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_losses_on_both_peers_dumps_are_those_of_our_own_capture(
    bring: Importer,
    tmp_path: Path,
    data: Path,
    capture: Store,
    spoken: list[Spoken],
    record_property: Callable[[str, object], None],
) -> None:
    """speculators keeps what we keep: equal losses. SpecForge keeps states after the norm, rounded once more."""
    specforge_dump(tmp_path / "sf", spoken, "eagle3")
    speculators_dump(tmp_path / "sp", spoken)
    padded = bring(tmp_path / "sf", "specforge-eagle3", "sf-store", tokens_from=data)
    bring(tmp_path / "sp", "speculators", "sp-store", tokens_from=data)
    assert padded.samples == len(capture)
    assert padded.padding > 0
    own = losses(capture.path, tmp_path / "own-run")
    theirs = losses(tmp_path / "sp-store", tmp_path / "sp-run")
    rounded = losses(tmp_path / "sf-store", tmp_path / "sf-run")
    apart = max(abs(a - b) / a for a, b in zip(own, rounded, strict=True))
    record_property("losses", f"{own[0]:.4f} to {own[-1]:.4f} in {STEPS} steps on {len(capture)} samples")
    record_property("specforge_relative", f"{apart:.1e}")
    assert theirs == own
    assert apart < 1e-4
    assert own[-1] < own[0]


@pytest.mark.parametrize("strategy", ["eagle3", "dflash", "dspark"])
def test_what_specforge_saves_comes_back_without_its_padding(
    strategy: str, bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    specforge_dump(tmp_path / "dump", spoken[:6], strategy)
    bring(tmp_path / "dump", f"specforge-{strategy}", "store", layers="1,3,4")
    store = Store.open(tmp_path / "store")
    records = {tuple(store.sample(name).input_ids.tolist()): store[name] for name in store.sample_ids}
    assert len(records) == 6
    for one in spoken[:6]:
        record = records[tuple(one.ids.tolist())]
        assert torch.equal(record.aux.transpose(0, 1).flatten(1), one.aux)
        if strategy != "dflash":
            assert torch.equal(record.final, one.after)


@pytest.fixture
def fp8_connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """speculators' own FP8 writer; the connector of vLLM that it extends is not installed here and not used."""
    pytest.importorskip("hs_connectors")
    name = "vllm.distributed.kv_transfer.kv_connector.v1"
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    base = ModuleType(f"{name}.example_hidden_states_connector")
    base.ExampleHiddenStatesConnector = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    sys.modules[name].example_hidden_states_connector = base  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "hs_connectors.fp8_hidden_states_connector", raising=False)
    from hs_connectors.fp8_hidden_states_connector import FP8HiddenStatesConnector

    return FP8HiddenStatesConnector


class _Done:
    def synchronize(self) -> None:
        return


def test_fp8_states_are_those_that_speculators_own_transfer_reads(
    fp8_connector: Any, bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    from hs_connectors.transfer import FP8Transfer

    speculators_rows(tmp_path / "dump", spoken[:5])
    states = tmp_path / "dump" / "hidden_states"
    for row, one in enumerate(spoken[:5]):
        fp8_connector._write_tensors(connector_tensors(one), _Done(), str(states / f"hs_{row}.safetensors"), None)
    bring(tmp_path / "dump", "speculators", "store")
    store = Store.open(tmp_path / "store")
    records = {tuple(store.sample(name).input_ids.tolist()): store[name] for name in store.sample_ids}
    for row, one in enumerate(spoken[:5]):
        theirs = FP8Transfer(states).get_cached(row)
        assert theirs is not None
        record = records[tuple(one.ids.tolist())]
        assert torch.equal(record.aux.transpose(0, 1), theirs["hidden_states"][:, :-1])
        assert torch.equal(record.final, theirs["hidden_states"][:, -1])


@pytest.mark.parametrize("strategy", ["eagle3", "dflash"])
def test_specforge_itself_reads_what_we_write_for_it(strategy: str, tmp_path: Path, capture: Store) -> None:
    pytest.importorskip("specforge")
    from specforge.algorithms.builtin import builtin_algorithm_registry
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    export_samples(capture, tmp_path / "out", get_layout(f"specforge-{strategy}"))
    offline = builtin_algorithm_registry().resolve(strategy).providers.offline_for("text")
    keys = offline.capture_layout.output_names
    refs = list(OfflineManifestReader(str(tmp_path / "out"), feature_keys=keys, validate_files=True))
    assert len(refs) == len(capture)
    records = {tuple(capture.sample(name).input_ids.tolist()): capture[name] for name in capture.sample_ids}
    normalise = offline.build_normalizer(4096)
    for ref in refs:
        sample = normalise(load_feature_file(ref.feature_store_uri.removeprefix("file://")))
        record = records[tuple(sample["input_ids"][0].tolist())]
        aux = sample["hidden_state" if strategy == "eagle3" else "hidden_states"][0]
        assert torch.equal(aux, record.aux.transpose(0, 1).flatten(1))
