"""Exported files against each engine's loader, restated: every parameter is filled, and nothing of ours is dropped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hiddenstore.errors import ConfigError
from tests.trainer.engine_loaders import LOADERS
from tests.trainer.export_cases import KINDS, case, make, make_head
from trainer.export.support import ENGINES, checkpoint_word, drafter_export, refusal, required, support, words
from trainer.export.write import export

VERSIONS = {"vllm": ["0.32", "0.33"], "sglang": ["0.5.23"], "trtllm": ["1.2.1", "1.3"]}


def served() -> list[tuple[str, str, str]]:
    """(engine, version, case) of everything an engine takes."""
    found = []
    for engine, versions in VERSIONS.items():
        for version in versions:
            for name in KINDS:
                checkpoint = case(name)
                try:
                    required(checkpoint, ENGINES[engine], version)
                except ConfigError:
                    continue
                found.append((engine, version, name))
    return found


SERVED = served()


@pytest.mark.parametrize(("engine", "version", "name"), SERVED)
def test_a_loader_finds_every_parameter_in_the_file_and_leaves_nothing_in_it(
    engine: str, version: str, name: str, tmp_path: Path
) -> None:
    checkpoint = case(name)
    export(checkpoint, engine, tmp_path / "out", version=version)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    loader = LOADERS[engine, checkpoint.config.name]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {loader.renamed(key): list(tensor.shape) for key, tensor in tensors.items()}
    assert len(found) == len(tensors)
    wanted = loader.fills(config)
    assert {key: found[key] for key in found if key in wanted} == {
        key: shape for key, shape in wanted.items() if key in found
    }
    assert set(found) - set(wanted) <= loader.passed_over
    assert set(wanted) - set(found) <= loader.shared


def test_every_pair_of_the_table_that_is_served_was_compared() -> None:
    compared = {(engine, checkpoint_word(case(name))) for engine, _, name in SERVED}
    claimed = {
        (engine, drafter)
        for engine, versions in VERSIONS.items()
        for version in versions
        for drafter in words()
        if support(engine, version, drafter).ok
    }
    assert compared == claimed


@pytest.mark.parametrize(
    ("engine", "ids"), [("vllm", [2, 4, 5]), ("sglang", [1, 3, 4]), ("trtllm", [1, 3, 4]), ("speculators", [2, 4, 5])]
)
def test_layer_ids_are_written_in_the_engine_s_own_numbering(engine: str, ids: list[int], tmp_path: Path) -> None:
    done = export(make("eagle3", 20), engine, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert done.layer_ids == ids
    inner = config.get("eagle_config", config)
    assert inner["eagle_aux_hidden_state_layer_ids"] == ids
    # Read by vLLM, ids of another convention would select other layers in silence.
    assert ("eagle_aux_hidden_state_layer_ids" in config) is (engine in ("vllm", "speculators"))
    assert config["draft_vocab_size"] == 20


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.32"), ("sglang", "0.5.23"), ("trtllm", "1.3")])
def test_dflash_names_layer_outputs_everywhere_and_its_mask_and_block(
    engine: str, version: str, tmp_path: Path
) -> None:
    done = export(make("dflash"), engine, tmp_path / "out", version=version)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 4], "block_size": 4}
    assert (config["block_size"], config["layer_types"]) == (4, ["full_attention"] * 2)
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert done.draft_len == 3


def test_speculators_config_names_the_target_and_every_flag_vllm_would_guess(tmp_path: Path) -> None:
    export(make("eagle3", 20, draft_len=5), "speculators", tmp_path / "e3")
    config = json.loads((tmp_path / "e3" / "config.json").read_text())
    said = config["speculators_config"]
    assert said["verifier"]["name_or_path"] == "maker/target"
    assert said["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert config["norm_before_residual"] is config["norm_before_fc"] is config["fc_norm"] is False
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "e3" / "model.safetensors")
    export(make("dflash"), "speculators", tmp_path / "df")
    config = json.loads((tmp_path / "df" / "config.json").read_text())
    assert (config["aux_hidden_state_layer_ids"], config["mask_token_id"], config["block_size"]) == ([2, 4, 5], 7, 4)
    assert config["sliding_window_non_causal"] is True
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_speculators_is_not_told_the_base_of_a_target_with_an_adapter(tmp_path: Path) -> None:
    made = make("eagle3")
    adapted = replace(made, identity=made.identity.model_copy(update={"name": "maker/target+lora"}))
    with pytest.raises(ConfigError, match=r"nothing on the hub is maker/target\+lora") as error:
        export(adapted, "speculators", tmp_path / "out")
    assert (error.value.kind, "--target MERGED" in str(error.value.hint)) == ("option-invalid", True)
    assert not (tmp_path / "out").exists()
    export(replace(adapted, target_name="merged"), "speculators", tmp_path / "out")


@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "dspark"])
def test_a_causal_block_is_told_to_sglang_in_the_word_that_it_reads(drafter: str, tmp_path: Path) -> None:
    """0.5.23's ``dflash.py`` takes a top-level ``is_causal`` alone; vLLM takes it before its own word."""
    for causal in (True, False):
        out = tmp_path / str(causal)
        export(make(drafter, causal=causal), "sglang", out)
        config = json.loads((out / "config.json").read_text())
        assert config.get("is_causal", False) is causal
        assert "layer_types" in config, "it looks at is_causal only then"


def test_the_rows_of_tokens_a_small_medusa_does_not_know_never_win(tmp_path: Path) -> None:
    import torch

    checkpoint = make("medusa", 20)
    export(checkpoint, "vllm", tmp_path / "out", "float32")
    heads = load_file(tmp_path / "out" / "model.safetensors")["lm_heads.1.weight"]
    states = torch.randn(4000, heads.shape[1], generator=torch.Generator().manual_seed(5))
    best = (states @ heads.T).argmax(-1)
    known = checkpoint.vocab.target_ids
    own = (states @ checkpoint.model.state_dict()["lm_heads.1.weight"].T).argmax(-1)
    assert torch.equal(best, known[own])


REFUSED: list[tuple[str, str | None, str, dict[str, Any], str, str]] = [
    ("vllm", "0.33", "medusa", {}, "removed Medusa", "--engine-version 0.32"),
    ("sglang", None, "medusa", {}, "has no Medusa", "--engine vllm --engine-version 0.32"),
    ("sglang", "0.5.20", "eagle3", {"fc_norm": True}, "without fc_norm", "--engine-version 0.5.23"),
    ("trtllm", None, "eagle1", {}, "no EAGLE-1", "--engine sglang"),
    ("trtllm", None, "dflash", {}, "came with 1.3", "--engine-version 1.3"),
    ("trtllm", "1.2", "eagle3", {"norm_output": True}, "since 1.3", "--engine-version 1.3"),
    ("speculators", None, "eagle1", {}, "has no EAGLE-1", "--engine vllm"),
    ("vllm", None, "eagle1", {"first_norm": True}, "no input_layernorm", "drafter.first_norm=false"),
    ("sglang", None, "eagle1", {"last_norm": True}, "no norm after", "drafter.last_norm=false"),
    ("sglang", None, "eagle3", {"norm_before_residual": True}, "before hidden_norm", "norm_before_residual=false"),
    ("sglang", "0.5.20", "eagle3", {"num_layers": 2}, "another function", "drafter.num_layers=1"),
    ("trtllm", None, "eagle3", {"aux_layers": (3,)}, "single aux layer", "several aux_layers"),
    ("sglang", None, "eagle3", {"aux_layers": (-1, 2, 5)}, "embedding output", "aux_layers from 0"),
    ("vllm", None, "dflash", {"sliding_window": 64}, "symmetric inside a block", "sliding_causal=true"),
    ("trtllm", "1.3", "dflash", {"sliding_window": 64, "sliding_causal": True}, "from each slot", "--engine vllm"),
    ("trtllm", "1.3", "dflash", {"causal": True}, "see later ones", "drafter.causal=false"),
    ("trtllm", "1.3", "dspark", {}, "no DSpark", "a DFlash drafter"),
    ("vllm", None, "dspark", {"sliding_window": 9}, "symmetric inside a block", "sliding_causal=true"),
    ("sglang", None, "dspark", {"sliding_window": 9}, "symmetric inside a block", "sliding_causal=true"),
    ("llamacpp", None, "dspark", {"sliding_window": 9, "sliding_causal": True}, "from each slot", "--engine vllm"),
    ("speculators", None, "dspark", {"causal": True}, "see their whole block", "drafter.causal=false"),
    ("trtllm", "1.3", "dflash2", {}, "no convolution and no selector", "a DFlash drafter"),
    ("sglang", None, "dflash2", {"train_head": True}, "target's head only", "train_head=false"),
    ("speculators", None, "dflash2", {"causal": True}, "see their whole block", "drafter.causal=false"),
    ("speculators", None, "dflash2", {"sliding_window": 9, "sliding_causal": True}, "from each slot", "--engine vllm"),
    ("vllm", None, "xpress", {}, "first vLLM known to read this format is 0.33", "--engine-version 0.33"),
    ("sglang", None, "xpress", {}, "has no XPress", "--engine vllm --engine-version 0.33"),
    ("trtllm", "1.3", "xpress", {}, "has no XPress", "a DFlash drafter"),
    ("llamacpp", None, "xpress", {}, "has no XPress", "--engine vllm --engine-version 0.33"),
    ("vllm", "0.33", "xpress", {"xpress_rank": 48}, "a power of two from 16 on", "drafter.xpress_rank=256"),
    ("vllm", "0.33", "xpress", {"xpress_mlp_ratio": 1}, "an MLP of whole 64s", "drafter.xpress_mlp_ratio=2"),
    ("vllm", "0.33", "xpress", {"sliding_window": 9}, "symmetric inside a block", "sliding_causal=true"),
    ("speculators", None, "xpress", {"train_head": True}, "whole vocabulary by the target's", "train_head=false"),
    ("sglang", None, "peagle", {}, "no loader for peagle", "--engine vllm"),
    ("speculators", None, "peagle", {"fc_norm": True}, "does not read fc_norm", "--engine vllm"),
    ("sglang", None, "dflash", {"train_head": True}, "target's head only", "train_head=false"),
    ("speculators", None, "eagle3", {"hidden_size": 24}, "as wide as the target", "drafter.hidden_size"),
]


@pytest.mark.parametrize(("engine", "version", "drafter", "flags", "reason", "nearest"), REFUSED)
def test_what_an_engine_cannot_run_is_refused_with_the_reason_and_what_works(
    engine: str, version: str | None, drafter: str, flags: dict[str, Any], reason: str, nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        export(make(drafter, **flags), engine, tmp_path / "out", version=version)
    assert caught.value.kind == "export-unsupported"
    assert nearest in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_a_head_with_a_bias_is_refused_only_where_the_engine_reads_states_with_it(tmp_path: Path) -> None:
    head = make_head(bias=True)
    for drafter, flags in (("eagle1", {}), ("medusa", {"original_head": True})):
        with pytest.raises(ConfigError, match="without its bias"):
            export(make(drafter, head=head, **flags), "vllm", tmp_path / drafter)
    for drafter in ("medusa", "dflash"):
        export(make(drafter, head=head), "vllm", tmp_path / drafter)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_refusal_of_the_table_says_why_and_what_works(engine: str) -> None:
    for drafter in words():
        said = support(engine, None, drafter)
        assert said.ok or (said.reason and said.nearest), said


def test_a_version_nobody_ran_is_not_called_ran() -> None:
    assert support("vllm", "0.32.1", "eagle3").proof == "ran"
    assert support("vllm", "0.33", "eagle3").proof == "names"
    assert support("trtllm", "1.3.0rc4", "dflash").ok
    with pytest.raises(ConfigError, match="no version"):
        support("vllm", "latest", "eagle3")
    with pytest.raises(ConfigError, match=r"eagle3\.1"):
        support("vllm", None, "eagle4")


def test_a_drafter_without_lacks_is_not_refused() -> None:
    checkpoint, engine = make("eagle1"), ENGINES["vllm"]
    assert refusal(checkpoint, engine, required(checkpoint, engine, "0.32")) is None


def test_a_drafter_that_an_engine_s_table_does_not_name_is_refused_with_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(drafter_export("eagle1").rows, ("trtllm", "eagle1"))  # type: ignore[arg-type]
    said = support("trtllm", None, "eagle1")
    assert (said.ok, said.reason, said.nearest) == (
        False,
        "TensorRT-LLM 1.2.1 has no loader for eagle1",
        "--engine vllm",
    )
