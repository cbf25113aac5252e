"""What was exported for an engine, and what others publish, comes back as the same drafter: settings and weights."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiddenstore.errors import ConfigError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from tests.trainer.export_cases import KINDS, LAYERS, D, F, V, case, make, make_head
from tests.trainer.gguf_target import write_target
from trainer.config import DrafterConfig
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.simulate import evaluate
from trainer.export.published import import_drafter, read_published
from trainer.export.support import ENGINES, required
from trainer.export.write import export
from trainer.formats.base import Checkpoint
from trainer.train.run_folder import load_drafter

VERSIONS = {
    "vllm": ("0.33", "0.32"),
    "sglang": ("0.5.23",),
    "trtllm": ("1.3",),
    "llamacpp": ("11434",),
    "speculators": ("0.9",),
}


def served() -> list[tuple[str, str, str]]:
    """(engine, version, case) of the newest version of each engine that takes it."""
    found = {}
    for engine in ENGINES:
        for version, name in product(VERSIONS[engine], KINDS):
            try:
                required(case(name), ENGINES[engine], version)
            except ConfigError:
                continue
            found.setdefault((engine, name), version)
    return [(engine, version, name) for (engine, name), version in found.items()]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def attention_aside(config: DrafterConfig) -> dict[str, object]:
    """Settings; of Medusa, without those of an attention it does not have."""
    said = config.model_dump()
    if config.name == "medusa":
        without = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "max_position")
        said = {key: value for key, value in said.items() if key not in (*without, "rms_norm_eps")}
    return said


@pytest.mark.parametrize(("engine", "version", "name"), served())
def test_an_export_reads_back_as_the_very_settings_and_weights(
    engine: str, version: str, name: str, tmp_path: Path
) -> None:
    before = case(name)
    is_part = (engine, before.config.name) == ("llamacpp", "mtp")
    target = write_target(tmp_path / "target.gguf", architecture="qwen35" if is_part else "llama")
    export(replace(before, target_name=target), engine, tmp_path / "out", "float32", version)
    after = read_published(tmp_path / "out", before.head, LAYERS)
    # That file holds what a norm multiplies by, 1 + weight, of which the weight is read to the last bit of the sum.
    added = {name: 1.0 if is_part and tensor.ndim == 1 else 0.0 for name, tensor in after.weights.items()}
    found, expected = (
        {name: tensor + added[name] for name, tensor in weights.items()}
        for weights in (after.weights, before.model.state_dict())
    )
    assert_same(found, expected)
    assert attention_aside(after.config) == attention_aside(before.config)
    assert torch.equal(after.vocab.target_ids, before.vocab.target_ids)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_ambiguous_layer_ids_of_our_own_export_are_not_asked_for(engine: str, tmp_path: Path) -> None:
    before = make("eagle3", aux_layers=(2, 4, 6))
    export(before, engine, tmp_path / "out")
    assert read_published(tmp_path / "out", before.head, LAYERS).config.aux_layers == (2, 4, 6)
    (tmp_path / "out" / "hiddenstore.json").unlink()
    with pytest.raises(ConfigError, match="ambiguous") as caught:
        read_published(tmp_path / "out", before.head, LAYERS)
    assert caught.value.kind == "drafter-unfit"


def test_layers_out_of_order_are_written_ascending_as_states_are_stored(tmp_path: Path) -> None:
    done = export(make("eagle3", aux_layers=(4, 1, 3)), "vllm", tmp_path / "out")
    assert done.layer_ids == [2, 4, 5]


def publish(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    folder.mkdir()
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def faster_decoding(checkpoint: Checkpoint, prefix: str = "") -> dict[str, Tensor]:
    """Names of FasterDecoding's Sequential of blocks and one linear layer; with a prefix, those of ModelOpt."""
    layers = checkpoint.config.medusa_layers  # type: ignore[attr-defined]
    named = {}
    for name, tensor in checkpoint.model.state_dict().items():
        part = name.split(".")
        ours = f"{part[1]}.{part[3]}.linear.{part[4]}" if part[0] == "blocks" else f"{part[1]}.{layers}.weight"
        named[prefix + ours] = tensor
    return named


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "model.medusa_heads."])
@pytest.mark.parametrize("name", ["medusa", "medusa of two blocks"])
def test_medusa_under_its_first_names_and_an_empty_config(prefix: str, name: str, tmp_path: Path) -> None:
    checkpoint = case(name)
    folder = publish(tmp_path / "a", faster_decoding(checkpoint, prefix), {"medusa_num_heads": 3})
    found = read_published(folder, checkpoint.head, LAYERS)
    assert_same(found.weights, checkpoint.model.state_dict())
    assert attention_aside(found.config) == attention_aside(checkpoint.config)


def test_medusa_without_biases_with_a_token_map_and_with_one_head_for_all(tmp_path: Path) -> None:
    checkpoint = make("medusa", 20)
    state = {key: value for key, value in checkpoint.model.state_dict().items() if not key.endswith("bias")}
    backwards = checkpoint.vocab.target_ids.flip(0)
    mapped = {key: value.flip(0) if key.startswith("lm_heads") else value for key, value in state.items()}
    folder = publish(tmp_path / "map", mapped | {"token_map": backwards}, {"architectures": ["MedusaModel"]})
    found = read_published(folder, checkpoint.head, LAYERS)
    assert torch.equal(found.vocab.target_ids, checkpoint.vocab.target_ids)
    assert torch.equal(found.weights["lm_heads.2.weight"], state["lm_heads.2.weight"])
    assert not found.weights["blocks.1.layers.0.bias"].any()

    one = make("medusa").model.state_dict()
    shared = {key: value for key, value in one.items() if key in ("lm_heads.0.weight",) or key.startswith("blocks.")}
    folder = publish(tmp_path / "one", shared, {"architectures": ["MedusaModel"], "original_lm_head": True})
    found = read_published(folder, checkpoint.head, LAYERS)
    assert found.config.original_head is False  # type: ignore[attr-defined]
    assert torch.equal(found.weights["lm_heads.2.weight"], one["lm_heads.0.weight"])


EAGLE1_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": F,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
    "vocab_size": V, "max_position_embeddings": 777, "rope_theta": 5000.0,
}  # fmt: skip


def test_eagle_1_as_safeailab_publishes_it(tmp_path: Path) -> None:
    checkpoint = make("eagle1")
    state = checkpoint.model.state_dict()
    theirs = state | {"embed_tokens.weight": checkpoint.head.embed_tokens, "fc.bias": torch.zeros(D)}
    folder = publish(tmp_path / "a", theirs, EAGLE1_CONFIG)
    found = read_published(folder, checkpoint.head, LAYERS)
    assert_same(found.weights, state)
    assert found.config == checkpoint.config
    folder = publish(tmp_path / "b", theirs | {"fc.bias": torch.ones(D)}, EAGLE1_CONFIG)
    with pytest.raises(ConfigError, match=r"fc\.bias is not zero"):
        read_published(folder, checkpoint.head, LAYERS)
    folder = publish(tmp_path / "c", state | {"embed_tokens.weight": make_head(3).embed_tokens}, EAGLE1_CONFIG)
    with pytest.raises(ConfigError, match="differs from the target's"):
        read_published(folder, checkpoint.head, LAYERS)


@pytest.fixture(scope="module", name="store")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("store"), samples=8, layers=(1, 3), final="all")


@pytest.mark.parametrize("drafter", ["eagle1", "medusa"])
def test_imported_eagle_1_and_medusa_are_evaluated_and_exported_again(
    drafter: str, store: Store, tmp_path: Path
) -> None:
    head = store.head()
    size = {"vocab_size": head.vocab_size}
    from trainer.drafters import drafter_kind
    from trainer.losses.teacher import TargetInterface
    from trainer.vocab import DraftVocab

    kind = drafter_kind(drafter)
    vocab = DraftVocab.full(head.vocab_size)
    config = kind.config.model_validate({**case(drafter).config.model_dump(), **size})
    model = kind.build(config, TargetInterface(head, vocab), 0).eval()
    export(Checkpoint(model, vocab, head, store.capture.target), "vllm", tmp_path / "out", "float32")
    done = import_drafter(tmp_path / "out", tmp_path / "run", store.path)
    assert (done.drafter, done.aux_layers) == (drafter, ())
    loaded = load_drafter(tmp_path / "run")
    assert_same(loaded.model.state_dict(), model.state_dict())
    assert evaluate([loaded], store, "validation", [DraftShape(2)])[0].tally.drafts > 0
    again = Checkpoint(loaded.model, loaded.vocab, loaded.head, loaded.identity)
    export(again, "vllm", tmp_path / "again", "float32")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert_same(second, first)
