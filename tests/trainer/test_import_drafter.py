"""Published checkpoints become runs that every command takes."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, HiddenstoreError, NotFoundError
from hiddenstore.store import Store
from hiddenstore.testing.builders import NUM_LAYERS, VOCAB, make_store
from schemas.layers import default_aux_layers
from tests.trainer.export_cases import LAYERS, make
from trainer.cli.export import import_drafter as command
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.simulate import evaluate
from trainer.export.published import import_drafter, read_published
from trainer.export.write import export
from trainer.formats.base import Checkpoint
from trainer.train.loop import train
from trainer.train.run_folder import load_drafter

D, F, N, G, E, U = 32, 48, 2, 1, 16, 40
EAGLE3 = tuple(default_aux_layers("eagle3", NUM_LAYERS))
DFLASH = tuple(default_aux_layers("dflash", NUM_LAYERS, 3))
SMALL = ["data.batch_tokens=160", "data.pack_tokens=80", "train.max_steps=2", "train.validate_every=0"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    held = sorted({*EAGLE3, *DFLASH})
    return make_store(tmp_path_factory.mktemp("store"), samples=15, layers=held)


def randoms(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def layer(prefix: str, width_in: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (N * E, width_in),
        f"{prefix}.self_attn.k_proj.weight": (G * E, width_in),
        f"{prefix}.self_attn.v_proj.weight": (G * E, width_in),
        f"{prefix}.self_attn.o_proj.weight": (D, N * E),
        f"{prefix}.mlp.gate_proj.weight": (F, D),
        f"{prefix}.mlp.up_proj.weight": (F, D),
        f"{prefix}.mlp.down_proj.weight": (D, F),
        f"{prefix}.input_layernorm.weight": (D,),
        f"{prefix}.post_attention_layernorm.weight": (D,),
    }


def eagle3_tensors(prefix: str = "midlayer", ids: Tensor | None = None) -> dict[str, Tensor]:
    """As SafeAILab and SpecForge (``midlayer``) or speculators and ModelOpt (``layers.0``) name them."""
    ids = torch.arange(0, U) + 7 if ids is None else ids
    shapes = {
        "fc.weight": (D, 3 * D),
        **layer(prefix, 2 * D),
        f"{prefix}.hidden_norm.weight": (D,),
        "norm.weight": (D,),
        "lm_head.weight": (U, D),
    }
    return {**randoms(shapes), "d2t": ids - torch.arange(U), "t2d": torch.isin(torch.arange(VOCAB), ids)}


def eagle3_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": D, "intermediate_size": F,
        "num_attention_heads": N, "num_key_value_heads": G, "head_dim": E, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "draft_vocab_size": U, "max_position_embeddings": 2048, "rope_theta": 500000.0, **changes,
    }  # fmt: skip


def dflash_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 3 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for index in range(2):
        shapes |= layer(f"layers.{index}", D)
        shapes |= {f"layers.{index}.self_attn.{name}_norm.weight": (E,) for name in "qk"}
    return randoms(shapes)


def dflash_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "num_target_layers": NUM_LAYERS,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": list(DFLASH)}, "hidden_size": D,
        "intermediate_size": F, "num_attention_heads": N, "num_key_value_heads": G, "head_dim": E,
        "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "rope_theta": 1000000.0, **changes,
    }  # fmt: skip


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_our_own_export_comes_back_as_the_same_drafter(store: Store, tmp_path: Path) -> None:
    train(store.path, tmp_path / "run", words=[*SMALL, f"drafter.vocab_size={U}"])
    before = load_drafter(tmp_path / "run")
    export(Checkpoint(before.model, before.vocab, before.head, before.identity), "vllm", tmp_path / "out", "float32")  # type: ignore[arg-type]
    done = import_drafter(tmp_path / "out", tmp_path / "back", store.path)
    after = load_drafter(tmp_path / "back")
    assert (done.aux_layers, after.step) == (EAGLE3, 0)
    assert after.config == before.config.model_copy(update={"vocab_size": U})
    assert torch.equal(after.vocab.d2t, before.vocab.d2t)
    theirs = after.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in before.model.state_dict().items())


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0", "model.layers.0"])
def test_eagle_3_under_either_name_gives_the_same_drafter(prefix: str, store: Store, tmp_path: Path) -> None:
    tensors = eagle3_tensors(prefix)
    write(tmp_path / "published", tensors, eagle3_config())
    import_drafter(tmp_path / "published", tmp_path / "run", store.path)
    loaded = load_drafter(tmp_path / "run")
    expected = {name: tensor for name, tensor in eagle3_tensors().items() if name not in ("d2t", "t2d")}
    assert loaded.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    assert loaded.vocab.target_ids.tolist() == list(range(7, 7 + U))
    assert (loaded.config.rope_theta, loaded.config.rms_norm_eps, loaded.config.max_position) == (5e5, 1e-6, 2048)


def test_speculators_layout_is_read_with_its_nested_config_and_its_own_layer_ids(store: Store, tmp_path: Path) -> None:
    inner = eagle3_config()
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_config": {"algorithm": "eagle3"}, "draft_vocab_size": U,
        "transformer_layer_config": {key: inner[key] for key in inner if key != "architectures"},
        "eagle_aux_hidden_state_layer_ids": [3, 4, 6], "norm_before_residual": True,
    }  # fmt: skip
    write(tmp_path / "published", eagle3_tensors("layers.0"), config)
    folder = make_store(tmp_path, samples=6, layers=(2, 3, 5)).path
    done = import_drafter(tmp_path / "published", tmp_path / "run", folder)
    assert done.aux_layers == (2, 3, 5)
    assert load_drafter(tmp_path / "run").config.norm_before_residual is True  # type: ignore[attr-defined]


def test_speculators_norm_before_fc_is_folded_into_it_where_hidden_norm_takes_its_size_away(
    store: Store, tmp_path: Path
) -> None:
    head = store.head()
    tensors = {**eagle3_tensors("layers.0"), "input_norm.weight": torch.rand(3 * D) + 0.5}
    flags = {"eagle_aux_hidden_state_layer_ids": [3, 4, 6], "speculators_version": "0.9.0", "norm_before_fc": True}
    config = eagle3_config(norm_before_residual=True, **flags)
    found = read_published(write(tmp_path / "published", tensors, config), head, NUM_LAYERS)
    states = torch.randn(5, 3 * D) * 4
    normed = states * states.square().mean(-1, keepdim=True).rsqrt() * tensors["input_norm.weight"]
    ours, theirs = states @ found.weights["fc.weight"].T, normed @ tensors["fc.weight"].T
    assert torch.allclose(torch.nn.functional.normalize(ours), torch.nn.functional.normalize(theirs), atol=1e-6)
    assert found.config.norm_before_residual
    assert "input_norm.weight" not in found.weights
    write(tmp_path / "plain residual", tensors, eagle3_config(**flags))
    with pytest.raises(ConfigError, match="norm_before_fc without norm_before_residual"):
        read_published(tmp_path / "plain residual", head, NUM_LAYERS)


def test_rows_of_a_vocabulary_out_of_order_keep_their_tokens(store: Store, tmp_path: Path) -> None:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:U]
    tensors = eagle3_tensors(ids=ids)
    write(tmp_path / "published", tensors, eagle3_config())
    import_drafter(tmp_path / "published", tmp_path / "run", store.path)
    loaded = load_drafter(tmp_path / "run")
    rows = dict(zip(loaded.vocab.target_ids.tolist(), loaded.model.state_dict()["lm_head.weight"], strict=True))
    assert all(torch.equal(rows[int(token)], row) for token, row in zip(ids, tensors["lm_head.weight"], strict=True))


def test_rows_of_every_head_of_the_draft_vocabulary_follow_its_ids(tmp_path: Path) -> None:
    checkpoint = make("dspark", known=20, train_head=True)
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    file, order = tmp_path / "out" / "model.safetensors", torch.arange(20).flip(0)
    tensors = load_file(file)
    ids = tensors["d2t"] + torch.arange(20)
    tensors |= {
        name: tensor[order] for name, tensor in tensors.items() if name.endswith(("lm_head.weight", "w2.weight"))
    }
    save_file({**tensors, "d2t": ids[order] - torch.arange(20)}, file)
    found = read_published(tmp_path / "out", checkpoint.head, LAYERS).weights
    ours = checkpoint.model.state_dict()
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        assert torch.equal(found[name], ours[name])


def test_embeddings_and_a_head_that_are_the_target_s_are_shared_with_it(store: Store, tmp_path: Path) -> None:
    head = store.head()
    tensors = {name: t for name, t in eagle3_tensors().items() if name not in ("d2t", "t2d", "lm_head.weight")}
    write(
        tmp_path / "published", {**tensors, "embed_tokens.weight": head.embed_tokens.half().bfloat16()}, eagle3_config()
    )
    import_drafter(tmp_path / "published", tmp_path / "run", store.path)
    loaded = load_drafter(tmp_path / "run")
    assert loaded.vocab.is_full
    assert "embed_tokens.weight" not in loaded.model.state_dict()
    assert torch.equal(loaded.model.state_dict()["lm_head.weight"], head.output_weight.float())


def test_dflash_is_evaluated_and_started_from(store: Store, tmp_path: Path) -> None:
    tensors = dflash_tensors()
    write(tmp_path / "published", tensors, dflash_config())
    done = import_drafter(tmp_path / "published", tmp_path / "run", store.path)
    assert (done.drafter, done.aux_layers, done.vocab_coverage) == ("dflash", DFLASH, 1.0)
    loaded = load_drafter(tmp_path / "run")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.model.state_dict().items())
    assert (loaded.config.block_size, loaded.config.mask_token_id) == (8, 5)  # type: ignore[attr-defined]
    assert evaluate([loaded], store, "validation", [DraftShape(3)])[0].tally.drafts > 0
    assert train(store.path, tmp_path / "next", words=[*SMALL, f"train.init_from={tmp_path / 'run'}"]).steps == 2


@pytest.mark.parametrize(
    ("words", "causal"),
    [
        ({"causal_head": True}, True),
        ({"causal_head": False}, False),
        ({"causal_head": True, "causal": False}, False),
    ],
)
def test_a_drafter_of_jetspec_s_own_trainer_is_causal_as_its_word_says(
    words: dict[str, bool], causal: bool, store: Store, tmp_path: Path
) -> None:
    said = {"mask_token_id": 5, "target_layer_ids": list(DFLASH), **words}
    folder = write(tmp_path / "published", dflash_tensors(), dflash_config(dflash_config=said))
    assert read_published(folder, store.head(), NUM_LAYERS).config.causal is causal  # type: ignore[attr-defined]


def test_dflash2_as_z_lab_publishes_it_keeps_its_windows_and_refuses_what_is_scaled(tmp_path: Path) -> None:
    checkpoint = make("dflash2", sliding_window=5, sliding_causal=True)
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    (tmp_path / "out" / "hiddenstore.json").unlink()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["draft_vocab_size"], config["block_size"]
    for name, value, refused in (
        ("output_multiplier", 1.0, None),
        ("input_embedding_scale", 5.7, "input_embedding_scale is 5.7"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0"),
    ):
        said = {**config, "dflash_config": {**config["dflash_config"], name: value}}
        (tmp_path / "out" / "config.json").write_text(json.dumps(said))
        if refused is None:
            found = read_published(tmp_path / "out", checkpoint.head, LAYERS)
            assert found.config.model_dump() == checkpoint.config.model_dump()
        else:
            with pytest.raises(ConfigError, match=refused):
                read_published(tmp_path / "out", checkpoint.head, LAYERS)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlashDraftModel"])
def test_domino_as_specforge_and_modelopt_publish_it_is_read_and_refused_where_it_is_another(
    architecture: str, shifted: bool, tmp_path: Path
) -> None:
    checkpoint = make("domino", shift_label=shifted)
    export(checkpoint, "sglang", tmp_path / "out", "float32")
    (tmp_path / "out" / "hiddenstore.json").unlink()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["draft_vocab_size"]
    config["architectures"] = [architecture]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    found, ours = read_published(tmp_path / "out", checkpoint.head, LAYERS), checkpoint.model.state_dict()
    assert found.config.model_dump() == checkpoint.config.model_dump()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in ours.items())
    for name, value in (("pure_draft_prefix_len", 0), ("shift_label", None)):
        said = {**config, "dflash_config": {**config["dflash_config"], name: value}}
        (tmp_path / "out" / "config.json").write_text(json.dumps(said))
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            read_published(tmp_path / "out", checkpoint.head, LAYERS)


def test_xpress_in_a_config_of_its_own_is_read_and_refused_where_it_is_another(tmp_path: Path) -> None:
    """As vLLM's ``qwen3_xpress.py`` takes it where little is said."""
    checkpoint = make("xpress", num_jacobi_passes=6)
    export(checkpoint, "vllm", tmp_path / "out", "float32", "0.33")
    (tmp_path / "out" / "hiddenstore.json").unlink()
    file, weights = tmp_path / "out" / "config.json", tmp_path / "out" / "model.safetensors"
    config, tensors = json.loads(file.read_text()), load_file(weights)
    for name in ("draft_vocab_size", "block_size", "xpress_num_passes", "xpress_block_size", "xpress_rank"):
        del config[name]
    del config["dflash_config"]["block_size"]
    for architecture in ("Qwen3XPressModel", "DFlashQwen3XPressModel", "DFlashDraftModel"):
        file.write_text(json.dumps({**config, "architectures": [architecture]}))
        found, ours = read_published(tmp_path / "out", checkpoint.head, LAYERS), checkpoint.model.state_dict()
        assert found.config.model_dump() == checkpoint.config.model_dump()
        assert all(torch.equal(found.weights[name], tensor) for name, tensor in ours.items())
    file.write_text(json.dumps({**config, "sample_from_anchor": True}))
    with pytest.raises(ConfigError, match="sample_from_anchor is set"):
        read_published(tmp_path / "out", checkpoint.head, LAYERS)
    file.write_text(json.dumps(config))
    for name in ("gate_proj", "up_proj"):
        tensors[f"xpress_head.mlp.{name}.weight"] = tensors[f"xpress_head.mlp.{name}.weight"][:40].clone()
    save_file(tensors, weights)
    with pytest.raises(ConfigError, match="MLP is 40 wide, which is no multiple of its rank, 32"):
        read_published(tmp_path / "out", checkpoint.head, LAYERS)


MODELOPT_HEADS = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
"""How our names begin, and what ModelOpt's have instead."""


def as_modelopt(folder: Path, **head: Any) -> Path:
    """A DSpark of ours in the form of ModelOpt 0.47's ``DSparkExporter``: DFlash's class, settings in
    ``dflash_config``, heads beside the layers, no word of slots."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "hiddenstore.json").unlink()
    nested = config["dflash_config"]
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    kept += ("num_hidden_layers", "rms_norm_eps", "vocab_size", "max_position_embeddings", "block_size", "layer_types")
    said = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "rope_scaling": None,
        "tie_word_embeddings": False, "num_target_layers": LAYERS, **{name: config[name] for name in kept},
        "dflash_config": {
            "mask_token_id": nested["mask_token_id"], "target_layer_ids": nested["target_layer_ids"], "causal": False,
            "projector_type": "dspark", "shift_label": True, "markov_rank": 8, "markov_head_type": "vanilla", **head,
        },
    }  # fmt: skip
    for ours, theirs in MODELOPT_HEADS.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(said))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("confidence", "causal"), [(True, False), (False, False), (True, True)])
def test_a_dspark_of_modelopt_comes_back_as_it_was_trained(confidence: bool, causal: bool, tmp_path: Path) -> None:
    checkpoint = make("dspark", confidence_head=confidence, causal=causal)
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    found = read_published(
        as_modelopt(tmp_path / "out", use_confidence_head=confidence, causal=causal), checkpoint.head, LAYERS
    )
    assert found.config.model_dump() == checkpoint.config.model_dump()
    ours = checkpoint.model.state_dict()
    assert found.weights.keys() == ours.keys()
    assert all(torch.equal(found.weights[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ({"projector_type": "other", "markov_rank": 0}, "projector_type is other, a head after DFlash's states"),
    ],
)
def test_what_modelopt_puts_after_dflash_s_states_and_we_do_not_is_refused(
    head: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    checkpoint = make("dspark")
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_published(as_modelopt(tmp_path / "out", **head), checkpoint.head, LAYERS)
    assert caught.value.kind == "drafter-unfit"


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("eagle3", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ("peagle", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("dflash", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 128}, "sliding_attention"),
    ("dflash", {"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale is 0.5"),
    ("dflash", {"is_neox_style": False}, "is_neox_style is false"),
    ("dflash", {"rope_is_neox_style": False}, "rope_is_neox_style is false"),
    ("dflash2", {"use_gemma_norm": True}, "use_gemma_norm is set"),
    ("dflash", {"rope_parameters": {"rope_dim": 8}}, "rope_dim is 8"),
    ("dflash", {"hidden_act": "swigluoai"}, "hidden_act is swigluoai"),
    ("eagle3", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is gelu_pytorch_tanh"),
)


@pytest.mark.parametrize(("drafter", "changes", "reason"), REFUSED)
def test_a_published_drafter_that_computes_otherwise_than_ours_is_refused(
    drafter: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    checkpoint = make(drafter)
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        read_published(tmp_path / "out", checkpoint.head, LAYERS)


def test_a_dspark_that_does_not_say_which_slots_propose_is_refused_in_speculators_words_alone(tmp_path: Path) -> None:
    checkpoint = make("dspark")
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    silent = {key: value for key, value in config.items() if key not in ("sample_from_anchor", "dspark_bonus_anchor")}
    ids = {"aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]]}
    for said in ({}, {**ids, "speculators_model_type": "dspark"}, {**ids, "sample_from_anchor": True}):
        file.write_text(json.dumps({**silent, **said}))
        assert read_published(file.parent, checkpoint.head, LAYERS).config.sample_from_anchor  # type: ignore[attr-defined]
    file.write_text(json.dumps({**silent, **ids}))
    with pytest.raises(ConfigError, match="does not say sample_from_anchor") as caught:
        read_published(file.parent, checkpoint.head, LAYERS)
    assert caught.value.kind == "drafter-unfit"


def test_a_dflash_with_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    checkpoint = make("dflash")
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    torch.save(torch.ones(4), tmp_path / "out" / "mask_embedding.pt")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt"):
        read_published(tmp_path / "out", checkpoint.head, LAYERS)


AMBIGUOUS = {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}


@pytest.mark.parametrize(
    ("ids", "layers"),
    [
        ({}, EAGLE3),
        ({"eagle_aux_hidden_state_layer_ids": list(EAGLE3)}, EAGLE3),
        ({"eagle_aux_hidden_state_layer_ids": [k + 1 for k in EAGLE3]}, EAGLE3),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [k + 1 for k in EAGLE3]}}, EAGLE3),
        ({**AMBIGUOUS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, (1, 2, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}, (1, 4, 7)),
        ({"aux_hidden_states_layer_ids": [1, 2, 5]}, (1, 2, 5)),
        ({**AMBIGUOUS, "aux_hidden_states_layer_ids": [1, 2, 5]}, (1, 2, 5)),
        ({**AMBIGUOUS, "aux_hidden_states_layer_ids": [2, 3, 6]}, (2, 3, 6)),
    ],
)
def test_layer_ids_that_can_mean_only_one_thing_are_taken(
    ids: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path / "published", eagle3_tensors(), eagle3_config(**ids))
    store = make_store(tmp_path, samples=6, layers=layers)
    assert import_drafter(tmp_path / "published", tmp_path / "run", store.path).aux_layers == layers


def test_ambiguous_layer_ids_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "published", eagle3_tensors(), eagle3_config(**AMBIGUOUS))
    store = make_store(tmp_path, samples=6, layers=(1, 2, 3, 5, 6))
    with pytest.raises(ConfigError, match=r"\[1, 2, 5\] in vLLM's convention, \[2, 3, 6\] in that of SGLang") as caught:
        import_drafter(tmp_path / "published", tmp_path / "run", store.path)
    assert caught.value.kind == "drafter-unfit"
    assert caught.value.hint == "--layer-convention vllm, or --layer-convention output"
    assert import_drafter(tmp_path / "published", tmp_path / "a", store.path, "vllm").aux_layers == (1, 2, 5)
    assert import_drafter(tmp_path / "published", tmp_path / "b", store.path, "output").aux_layers == (2, 3, 6)


def broken(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, config = eagle3_tensors(), eagle3_config()
    if name == "bias":
        tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(N * E)
    elif name == "shape":
        tensors["fc.weight"] = torch.zeros(D, 2 * D)
    elif name == "vocabulary":
        tensors["t2d"][[3, 7]] = tensors["t2d"][[7, 3]]
    elif name == "missing":
        del tensors["norm.weight"]
    elif name == "nan":
        tensors["norm.weight"][0] = torch.nan
    elif name == "rope":
        config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    elif name == "incomplete":
        del config["rms_norm_eps"]
    elif name == "other":
        tensors, config = {"layers.0.linear.weight": torch.zeros(2)}, {**config, "architectures": ["MLPSpeculator"]}
    elif name == "order":
        config["eagle_aux_hidden_state_layer_ids"] = [8, 2, 5]
    elif name == "listed":
        tensors, config = dflash_tensors(), dflash_config()
        config["dflash_config"]["target_layer_ids"].reverse()
    elif name == "causal":
        tensors, config = dflash_tensors(), dflash_config(layer_types=["sliding_attention", "full_attention"])
    return tensors, config


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bias", "q_proj.bias: not a tensor of this drafter"),
        ("shape", r"fc\.weight: \[32, 96\] expected, \[32, 64\] found"),
        ("vocabulary", "t2d marks other tokens than d2t names"),
        ("missing", r"norm\.weight: missing"),
        ("nan", r"norm\.weight: NaN or infinity"),
        ("rope", "rope_type"),
        ("incomplete", "lack 'rms_norm_eps'"),
        ("other", "is no checkpoint of eagle1, eagle3, dflash, medusa, peagle.*: architectures is MLPSpeculator"),
        ("order", r"it reads the layers \[7, 1, 4\] in this order"),
        ("listed", rf"it reads the layers \[{', '.join(map(str, reversed(DFLASH)))}\] in this order"),
        ("causal", "layer_types has sliding_attention, but there is no sliding_window"),
    ],
)
def test_what_is_no_drafter_of_ours_is_refused_and_leaves_no_run(
    name: str, said: str, store: Store, tmp_path: Path
) -> None:
    write(tmp_path / "published", *broken(name))
    with pytest.raises(HiddenstoreError, match=said):
        import_drafter(tmp_path / "published", tmp_path / "run", store.path)
    assert not (tmp_path / "run").exists()


def test_tensors_of_a_torch_file_are_read_and_code_in_one_is_not_run(store: Store, tmp_path: Path) -> None:
    folder = write(tmp_path / "published", eagle3_tensors(), eagle3_config())
    plain = import_drafter(folder, tmp_path / "plain", store.path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    read = import_drafter(folder, tmp_path / "read", store.path)
    (folder / "pytorch_model.bin").rename(folder / "drafter.pt")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (folder / name).write_bytes(pickle.dumps(_Touch(tmp_path / "ran"), protocol=2))
    beside = import_drafter(folder, tmp_path / "beside", store.path)
    weights = [(one.checkpoint / "drafter.safetensors").read_bytes() for one in (plain, read, beside)]
    assert weights[0] == weights[1] == weights[2]
    (folder / "drafter.pt").rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "ran"), protocol=2))
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle that holds more than tensors") as caught:
        import_drafter(folder, tmp_path / "run", store.path)
    assert caught.value.kind == "pickle-refused"
    assert not (tmp_path / "ran").exists()


class _Touch:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_hub_id_is_taken_from_the_cache_of_the_hub(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = "a" * 40
    cached = tmp_path / "models--maker--drafter"
    write(cached / "snapshots" / revision, eagle3_tensors(), eagle3_config())
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert import_drafter("maker/drafter", tmp_path / "run", store.path).drafter == "eagle3"
    for name, said in (("maker/other", "can be reached"), ("nowhere", "no folder and no hub id")):
        with pytest.raises(NotFoundError, match=said):
            import_drafter(name, tmp_path / "other", store.path)


def test_the_command_answers_and_its_run_is_evaluated_and_exported(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "published", eagle3_tensors(), eagle3_config())
    run = str(tmp_path / "run")
    done = CliRunner().invoke(command, [str(tmp_path / "published"), "-o", run, "--store", store.path, "--json"])
    assert done.exit_code == 0
    document = json.loads(done.output)
    assert (document["schema"], document["aux_layers"]) == ("hiddenstore.import-drafter/1", list(EAGLE3))
    for words in (["eval", run, store.path], ["export", run, "--engine", "vllm", "-o", str(tmp_path / "out")]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--json"])
        assert ended.value.code == 0
    assert train(store.path, run, resume=True, words=["train.max_steps=1"]).steps == 1
    capsys.readouterr()
