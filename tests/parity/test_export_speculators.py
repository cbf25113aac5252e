"""What we write for speculators, read by speculators 0.9 itself: its dataset, its collate, its loss, its converter."""

import json

import numpy as np
import pytest

speculators = pytest.importorskip("speculators")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from hiddenstore.dumps.common import export_samples  # noqa: E402
from hiddenstore.dumps.speculators import LAYOUT  # noqa: E402
from hiddenstore.records import final_row_positions  # noqa: E402
from hiddenstore.testing.builders import make_store  # noqa: E402
from schemas.capture import HeadSpec, TargetIdentity  # noqa: E402
from trainer.drafters.eagle3 import Eagle3, Eagle3Config  # noqa: E402
from trainer.export.write import export  # noqa: E402
from trainer.formats.base import Checkpoint  # noqa: E402
from trainer.vocab import DraftVocab  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]


def dataset(folder, split, ratio):
    from speculators.train.data import ArrowDataset

    options = {"on_missing": "raise", "train_ratio": ratio, "split": split}
    return ArrowDataset(max_len=64, datapath=str(folder), **options)


def test_speculators_own_dataset_reads_every_sample_with_our_states_mask_and_split(tmp_path):
    store = make_store(tmp_path, samples=11, layers=(1, 3, 5), codec="bf16", final="all")
    report = export_samples(store, tmp_path / "out", LAYOUT)
    by_tokens = {tuple(store.sample(i).input_ids.tolist()): i for i in store.sample_ids}
    seen = set()
    for split, ours in (("train", "train"), ("val", "validation")):
        rows = dataset(tmp_path / "out", split, report.train_data_ratio)
        for index in range(len(rows)):
            row = rows[index]
            sample_id = by_tokens[tuple(row["input_ids"].tolist())]
            record, (commit, place) = store[sample_id], store.locate(sample_id)
            assert commit.samples[place].split == ours
            assert torch.equal(row["hidden_states"], record.aux.transpose(0, 1).flatten(1))
            assert torch.equal(row["verifier_last_hidden_states"], record.final)
            assert np.array_equal(row["loss_mask"].numpy(), record.sample.loss_mask)
            seen.add(sample_id)
    assert seen == set(store.sample_ids)


def test_their_collate_packs_our_samples_shifted_as_their_eagle3_wants(tmp_path):
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    store = make_store(tmp_path, samples=4, layers=(1, 3, 5), codec="bf16", final="all")
    export_samples(store, tmp_path / "out", LAYOUT)
    rows = dataset(tmp_path / "out", "train", 1.0)
    batch = CollateFn(256, 32, 3, preprocess=shift_batch)([rows[i] for i in range(len(rows))])
    assert batch["hidden_states"].shape == (1, 256, 96)
    assert batch["input_ids"].shape == (1, 256)
    assert int((batch["document_ids"] >= 0).sum()) == report_tokens(store) - len(rows)


def report_tokens(store):
    return sum(entry.tokens for _, entry in store.entries)


def their_model():
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    shape._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=shape,
        draft_vocab_size=64,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.ndim == 1))
    return model.float()


def their_batch(rows, zero_where_unheld):
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    samples = []
    for index in range(len(rows)):
        row = rows[index]
        if zero_where_unheld:
            held = torch.zeros(len(row["input_ids"]), dtype=torch.bool)
            held[torch.from_numpy(final_row_positions(row["loss_mask"].numpy(), "supervised")).long()] = True
            assert not held.all()
            row["verifier_last_hidden_states"] = row["verifier_last_hidden_states"] * held[:, None]
        samples.append(row)
    batch = CollateFn(256, 32, 3, preprocess=shift_batch)(samples)
    batch.pop("error_records")
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def test_their_eagle3_takes_a_training_step_on_our_data_and_zero_rows_do_not_reach_its_loss(tmp_path):
    """So `--missing-final zeros` loses nothing for speculators: its EAGLE-3 loss reads masked rows only."""
    from speculators.losses import resolve_loss_config

    store = make_store(tmp_path, samples=4, layers=(1, 3, 5), codec="bf16", final="all")
    export_samples(store, tmp_path / "out", LAYOUT)
    rows, model, found = dataset(tmp_path / "out", "train", 1.0), their_model(), []
    for zeros in (False, True):
        model.zero_grad()
        loss_config = resolve_loss_config("kl_div", "eager")
        _, loss, _ = model(**their_batch(rows, zeros), ttt_steps=3, loss_config=loss_config)
        loss.backward()
        found.append((loss.item(), model.fc.weight.grad.clone()))
    assert 0 < found[0][0] < float("inf")
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].abs().max() > 0


def make_checkpoint(target_hidden=64):
    from hiddenstore.targets.head import HeadBundle

    config = Eagle3Config(
        aux_layers=(1, 3, 4),
        hidden_size=target_hidden,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=20,
    )
    vocab = DraftVocab.of_ids(torch.arange(0, 60, 3), 64)
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-5, tied=True)
    head = HeadBundle(spec, torch.randn(64, target_hidden), None, torch.rand(target_hidden))
    digest = "0" * 64
    identity = TargetIdentity(
        name="target",
        model_type="llama",
        hidden_size=target_hidden,
        num_layers=8,
        vocab_size=64,
        dtype="float32",
        config_sha256=digest,
        tokenizer_sha256=digest,
        chat_template_sha256=digest,
        weights_sha256=digest,
    )
    return Checkpoint(Eagle3.build(config, head, vocab, 0), vocab, head, identity)


def test_their_converter_accepts_our_checkpoint_offline_and_keeps_every_weight(tmp_path, monkeypatch):
    from speculators.convert.entrypoints import convert_model
    from transformers import LlamaConfig

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target = tmp_path / "target"
    LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=8, num_attention_heads=2, architectures=["LlamaForCausalLM"]
    ).save_pretrained(target)
    report = export(make_checkpoint(), "vllm", tmp_path / "ours")
    convert_model(
        model=str(tmp_path / "ours"),
        verifier=str(target),
        algorithm="eagle3",
        output_path=str(tmp_path / "theirs"),
        validate_device="cpu",
        eagle_aux_hidden_state_layer_ids=report.layer_ids,
    )
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in ours.items()}
    assert set(theirs) == set(renamed)
    for name, tensor in renamed.items():
        assert torch.equal(theirs[name], tensor), name
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["draft_vocab_size"] == 20
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
