"""Exported checkpoints: exact names, shapes and config, and the same drafter when read back."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError
from tests.trainer.export_cases import D, E, F, G, N, U, V, make
from trainer.drafters.blocks import Rotary
from trainer.export import write
from trainer.export.write import export, prove_equal, read_back, stretched
from trainer.formats.base import Files


def make_eagle3(width=D, **flags):
    return make("eagle3", U, hidden_size=width, **flags)


NAMES = {
    "fc.weight": [D, 3 * D],
    "midlayer.input_layernorm.weight": [D],
    "midlayer.hidden_norm.weight": [D],
    "midlayer.post_attention_layernorm.weight": [D],
    "midlayer.self_attn.q_proj.weight": [N * E, 2 * D],
    "midlayer.self_attn.k_proj.weight": [G * E, 2 * D],
    "midlayer.self_attn.v_proj.weight": [G * E, 2 * D],
    "midlayer.self_attn.o_proj.weight": [D, N * E],
    "midlayer.mlp.gate_proj.weight": [F, D],
    "midlayer.mlp.up_proj.weight": [F, D],
    "midlayer.mlp.down_proj.weight": [D, F],
    "norm.weight": [D],
    "lm_head.weight": [U, D],
    "d2t": [U],
    "t2d": [V],
}


def test_the_files_hold_exactly_the_tensors_engines_load(tmp_path):
    checkpoint = make_eagle3()
    report = export(checkpoint, "vllm", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == NAMES
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    ids = torch.arange(U) + tensors["d2t"]
    assert torch.equal(ids, checkpoint.vocab.target_ids)
    assert torch.equal(torch.nonzero(tensors["t2d"])[:, 0], ids)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["config.json", "hiddenstore.json", "model.safetensors"]
    assert {name: shape for name, (_, shape) in report.tensors.items()} == NAMES
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    # Whoever may read one of them, a server under another user, may read them all.
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1


def test_the_config_says_everything_an_engine_would_otherwise_guess(tmp_path):
    export(make_eagle3(), "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert (config["vocab_size"], config["draft_vocab_size"]) == (V, U)
    assert (config["hidden_size"], config["head_dim"], config["num_attention_heads"]) == (D, E, N)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["max_position_embeddings"] == 777
    assert config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False
    assert "target_hidden_size" not in config
    assert "fc_norm" not in config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True},
        {"num_layers": 2},
        {"train_embeddings": True},
        {"width": 24},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_an_exported_drafter_of_any_kind_reads_back_as_itself(tmp_path, dtype, options):
    checkpoint = make_eagle3(**options)
    export(checkpoint, "vllm", tmp_path / "out", dtype)
    model, vocab = read_back(tmp_path / "out", checkpoint)
    assert model.config.aux_layers == (1, 3, 4)
    assert torch.equal(vocab.d2t, checkpoint.vocab.d2t)
    flags = ("fc_norm", "norm_output", "norm_before_residual", "rope_theta", "rms_norm_eps", "hidden_size")
    assert all(getattr(model.config, flag) == getattr(checkpoint.model.config, flag) for flag in flags)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("target_hidden_size") == (D if "width" in options else None)
    if options.get("fc_norm"):
        assert config["fc_norm"] is config["norm_output"] is True
        assert [list(load_file(tmp_path / "out" / "model.safetensors")[f"fc_norm.{k}.weight"].shape) for k in range(3)]


def test_embeddings_are_written_only_where_the_target_s_cannot_be_shared(tmp_path):
    checkpoint = make_eagle3(train_embeddings=True)
    export(checkpoint, "vllm", tmp_path / "same")
    assert "embed_tokens.weight" not in load_file(tmp_path / "same" / "model.safetensors")
    with torch.no_grad():
        checkpoint.model.embed_tokens.weight[3] += 1
    export(checkpoint, "vllm", tmp_path / "trained")
    assert load_file(tmp_path / "trained" / "model.safetensors")["embed_tokens.weight"].shape == (V, D)
    export(make_eagle3(width=24), "vllm", tmp_path / "narrow")
    assert load_file(tmp_path / "narrow" / "model.safetensors")["embed_tokens.weight"].shape == (V, 24)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"t2d"}))
def test_the_proof_sees_a_change_of_any_tensor(tmp_path, name):
    checkpoint = make_eagle3()
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    flat = tensors[name].view(-1)
    flat[-1] = flat[-1] + 1 if name == "d2t" else flat[-1] + 0.5
    if name == "d2t":
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
        tensors["t2d"][torch.arange(U) + tensors["d2t"]] = True
    save_file(tensors, file)
    with pytest.raises(CorruptionError) as caught:
        prove_equal(checkpoint, tmp_path / "out", torch.float32)
    assert caught.value.kind == "export-differs"


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_the_proof_sees_a_wrong_number_in_the_config(tmp_path, key):
    checkpoint = make_eagle3()
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    for section in (config, config["rope_parameters"]):
        if key in section:
            section[key] = 7.0
    file.write_text(json.dumps(config))
    with pytest.raises(CorruptionError) as caught:
        prove_equal(checkpoint, tmp_path / "out", torch.float32)
    assert caught.value.kind == "export-differs"


def test_the_proof_sees_a_config_that_lacks_a_number(tmp_path):
    checkpoint = make_eagle3()
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    del config["rms_norm_eps"]
    file.write_text(json.dumps(config))
    with pytest.raises(CorruptionError, match=r"is no drafter: .*rms_norm_eps") as caught:
        prove_equal(checkpoint, tmp_path / "out", torch.float32)
    assert caught.value.kind == "export-unreadable"


def test_a_failed_proof_leaves_no_folder(tmp_path, monkeypatch):
    files = write.engine_files

    def wrong(*args):
        made = files(*args)
        return Files(made.config | {"rms_norm_eps": 1.0}, made.tensors)

    monkeypatch.setattr(write, "engine_files", wrong)
    with pytest.raises(CorruptionError) as caught:
        export(make_eagle3(), "vllm", tmp_path / "out")
    assert caught.value.kind == "export-differs"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine_and_an_existing_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="vllm") as caught:
        export(make_eagle3(), "sglang2", tmp_path / "out")
    assert caught.value.kind == "name-unknown"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConflictError):
        export(make_eagle3(), "vllm", tmp_path / "out")


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def test_a_rope_scaling_is_written_in_the_old_and_the_new_form_and_read_by_transformers(tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    checkpoint = make_eagle3(rope_scaling=LLAMA3)
    export(checkpoint, "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == LLAMA3
    assert config["rope_parameters"] == {**LLAMA3, "rope_theta": 5000.0}
    model, _ = read_back(tmp_path / "out", checkpoint)
    assert model.config.rope_scaling == checkpoint.model.config.rope_scaling
    positions = torch.arange(300)
    cos, _sin = Rotary.of(model.config).at(positions)
    for form in ({"rope_scaling": LLAMA3, "rope_theta": 5000.0}, {"rope_parameters": config["rope_parameters"]}):
        theirs = LlamaConfig(hidden_size=D, num_attention_heads=N, head_dim=E, max_position_embeddings=777, **form)
        expected, _ = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
        torch.testing.assert_close(cos[:, 0], expected[0, :, : E // 2], rtol=0, atol=5e-5)


def test_yarn_can_be_put_on_at_export_and_only_once(tmp_path):
    checkpoint = stretched(make_eagle3(), 32.0, 2048)
    export(checkpoint, "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    assert config["rope_scaling"] == yarn
    assert config["max_position_embeddings"] == 65536
    with pytest.raises(ConfigError, match="trained with rope_scaling yarn") as caught:
        stretched(checkpoint, 2.0, 2048)
    assert caught.value.kind == "rope-scaling"


@pytest.mark.parametrize("more", [{}, {"mscale": 0.7, "mscale_all_dim": 0.9}])
def test_an_attention_factor_of_its_own_is_written_as_sglang_reads_it_and_not_for_trtllm(tmp_path, more):
    """SGLang's ``rotary_embedding/yarn.py`` multiplies cos and sin by its own factor and by ``attn_factor``."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, **more}
    checkpoint = make_eagle3(rope_scaling={**yarn, "attention_factor": 1.5})
    export(checkpoint, "sglang", tmp_path / "out", version="0.5.23")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    own, shared = (0.1 * more.get(name, at) * math.log(4) + 1 for name, at in (("mscale", 1), ("mscale_all_dim", 0)))
    for place in ("rope_parameters", "rope_scaling"):
        assert config[place]["attn_factor"] * own / shared == pytest.approx(1.5)
    assert read_back(tmp_path / "out", checkpoint)[0].config == checkpoint.config
    with pytest.raises(ConfigError, match="reads no attention factor"):
        export(checkpoint, "trtllm", tmp_path / "trtllm", version="1.3")
    as_derived = make_eagle3(rope_scaling={**yarn, "attention_factor": own / shared})
    export(as_derived, "trtllm", tmp_path / "derived", version="1.3")


def test_a_folder_says_what_it_is_and_whom_it_drafts_for_and_names_no_path(tmp_path):
    export(make("eagle3", U, draft_len=5), "sglang", tmp_path / "a", version="0.5.23")
    about = json.loads((tmp_path / "a" / "hiddenstore.json").read_text())
    target = about.pop("target")
    assert about == {
        "schema": "hiddenstore.export/1",
        "drafter": "eagle3",
        "engine": "sglang",
        "engine_version": "0.5.23",
        "layer_convention": "output",
        "draft_len": 5,
    }
    assert (target["name"], target["weights_sha256"]) == ("maker/target", "4" * 64)
    assert str(tmp_path) not in (tmp_path / "a" / "hiddenstore.json").read_text()
    lengths = {"dflash": 3, "medusa": 3, "eagle1": 3}
    for drafter, expected in lengths.items():
        export(make(drafter), "vllm", tmp_path / drafter)
        assert json.loads((tmp_path / drafter / "hiddenstore.json").read_text())["draft_len"] == expected


def test_yarn_stretches_every_drafter_that_has_positions(tmp_path):
    for drafter in ("eagle1", "dflash"):
        export(stretched(make(drafter), 4.0, 512), "vllm", tmp_path / drafter)
        config = json.loads((tmp_path / drafter / "config.json").read_text())
        assert (config["rope_parameters"]["rope_type"], config["max_position_embeddings"]) == ("yarn", 2048)
    with pytest.raises(ConfigError, match="no positions") as caught:
        stretched(make("medusa"), 4.0, 512)
    assert caught.value.kind == "rope-scaling"
