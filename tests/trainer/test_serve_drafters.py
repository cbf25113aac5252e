"""Which drafter a folder holds and whether an engine serves it to this target: refusals, warnings, versions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, NotFoundError
from hiddenstore.targets.folder import code_sha256
from hiddenstore.targets.identity import config_sha256
from tests.trainer.export_cases import case, make
from tests.trainer.serve_cases import TARGET_CONFIG, asked, planned, published, write_exports
from trainer.export.support import target_differences
from trainer.export.write import export
from trainer.formats.base import is_within
from trainer.formats.base import parse_version as parse


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_exports(tmp_path_factory.mktemp("exports"), "eagle3", "dflash", "medusa")


@pytest.mark.parametrize(
    ("engine", "words", "kind", "said", "fix"),
    [
        (
            "sglang",
            {"drafter": "eagle3 for vllm"},
            "serve-engine",
            "exported for vllm",
            "hiddenstore export RUN --engine sglang -o DIR",
        ),
        ("trtllm", {"drafter": "dflash for sglang"}, "serve-engine", "exported for sglang", "--engine trtllm"),
        (
            "vllm",
            {"drafter": "medusa for vllm", "version": "0.33.0"},
            "serve-unsupported",
            "removed Medusa",
            "--engine-version 0.32",
        ),
        (
            "trtllm",
            {"drafter": "dflash for trtllm", "version": "1.2.1"},
            "serve-unsupported",
            "DFlash came with 1.3",
            "--engine-version 1.3",
        ),
        (
            "sglang",
            {"drafter": "eagle3 for sglang", "version": "0.5.0"},
            "serve-engine",
            "another layout",
            "--engine-version 0.5.0",
        ),
        ("vllm", {"drafter": "dflash for vllm", "draft_len": 4}, "serve-setting", "drafts at most 3", "--draft-len 3"),
        (
            "vllm",
            {"drafter": "eagle3 for vllm", "method": "medusa"},
            "serve-setting",
            "is eagle3, not medusa",
            "leave --method out",
        ),
        (
            "vllm",
            {"method": "user-provided", "drafter": "a:B"},
            "serve-unsupported",
            "does not draft with user-provided",
            "--method draft",
        ),
        (
            "vllm",
            {"method": "draft-target"},
            "serve-setting",
            "needs a small model",
            "hiddenstore serve DIR --method draft-target",
        ),
        (
            "vllm",
            {"method": "ngram", "drafter": "eagle3 for vllm"},
            "serve-setting",
            "takes no drafter",
            "leave the folder out",
        ),
        ("vllm", {"method": "ngrams"}, "serve-unsupported", "no method 'ngrams'", "--method ngram"),
        ("vllm", {}, "serve-unsupported", "nothing says what drafts", "--method ngram"),
        (
            "trtllm",
            {"method": "ngram", "version": "new"},
            "engine-version",
            "'new' is no version",
            "--engine-version 1.3.0rc12",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(
    exports: dict[str, str], engine: str, words: dict[str, Any], kind: str, said: str, fix: str
) -> None:
    words = {key: exports.get(value, value) if key == "drafter" else value for key, value in words.items()}
    with pytest.raises(HiddenstoreError) as raised:
        planned(engine, **words)
    assert raised.value.kind == kind
    assert said in raised.value.message
    assert fix in str(raised.value.hint)


def test_a_local_target_is_compared_with_the_one_drafted_for(exports: dict[str, str], tmp_path: Path) -> None:
    drafter = exports["eagle3 for vllm"]
    assert asked("vllm", drafter=drafter, target=exports["target"])[0].warnings == []
    other = published(tmp_path / "other", **{**TARGET_CONFIG, "num_hidden_layers": 9})
    with pytest.raises(FormatError, match="num_layers: 8 expected, 9 found") as raised:
        asked("vllm", drafter=drafter, target=other)
    assert raised.value.kind == "target-mismatch"
    assert "--target maker/target, or hiddenstore export" in str(raised.value.hint)
    same_sizes = published(tmp_path / "same", **TARGET_CONFIG, rope_theta=7.0)
    with pytest.raises(FormatError, match=r"config\.json differs"):
        asked("vllm", drafter=drafter, target=same_sizes)
    quantised = published(tmp_path / "fp4", **TARGET_CONFIG, quantization_config={"quant_method": "modelopt"})
    assert asked("vllm", drafter=drafter, target=quantised)[0].warnings == []
    assert "was trained for maker/target" in asked("vllm", drafter=drafter, target="maker/target-fp4")[0].warnings[0]


def test_the_fix_for_another_target_runs_nothing_that_a_stranger_s_drafter_says(
    exports: dict[str, str], tmp_path: Path
) -> None:
    drafter = shutil.copytree(exports["eagle3 for vllm"], tmp_path / "drafter")
    about = json.loads((drafter / "hiddenstore.json").read_text())
    about["target"]["name"] = "maker/a; touch pwned #"
    (drafter / "hiddenstore.json").write_text(json.dumps(about))
    other = published(tmp_path / "other", **{**TARGET_CONFIG, "num_hidden_layers": 9})
    with pytest.raises(FormatError) as raised:
        asked("vllm", drafter=str(drafter), target=other)
    assert str(raised.value.hint).startswith("--target 'maker/a; touch pwned #', or hiddenstore export ")


@pytest.mark.parametrize("digest", [1, 1e308, True, {"a": {}}, ["a"]])
@pytest.mark.parametrize("member", ["checkpoint_sha256", "config_sha256", "tokenizer_rules_sha256"])
def test_a_drafter_whose_target_has_digests_of_another_type_is_refused(
    exports: dict[str, str], tmp_path: Path, member: str, digest: Any
) -> None:
    drafter = shutil.copytree(exports["eagle3 for vllm"], tmp_path / "drafter")
    about = json.loads((drafter / "hiddenstore.json").read_text())
    about["target"][member] = digest
    (drafter / "hiddenstore.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"expected .* an object whose name and digests are text") as raised:
        asked("vllm", drafter=str(drafter), target=exports["target"])
    assert raised.value.kind == "serve-setting"


def test_a_target_s_own_code_and_a_merged_adapter_are_told_from_another_target(tmp_path: Path) -> None:
    config = {**TARGET_CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    target = Path(published(tmp_path / "own", **config))
    (target / "modeling_own.py").write_text("a = 1\n")
    digest = code_sha256(str(target), [config], lambda name: target / name)
    expected: dict[str, Any] = {"name": "maker/own", "config_sha256": config_sha256({**config, "code_sha256": digest})}
    assert target_differences(expected, target, config) == []
    assert target_differences({**expected, "config_sha256": config_sha256(config)}, target, config) == []
    (target / "modeling_own.py").write_text("a = 2\n")
    assert "own code differs" in target_differences(expected, target, config)[0]
    merged = {"name": "maker/target+lora", "config_sha256": "f" * 64, "num_layers": 8}
    assert target_differences(merged, target, TARGET_CONFIG) == []
    assert target_differences({**merged, "num_layers": 9}, target, TARGET_CONFIG)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", {"flags": ("--trust-remote-code",)}),
        ("sglang", {"flags": ("--trust-remote-code",)}),
        ("trtllm", {"flags": ("--trust_remote_code",)}),
        ("trtllm", {"settings": ("trust_remote_code=true",)}),
    ],
)
def test_an_engine_that_may_run_the_target_s_own_python_is_given_no_drafter_that_brings_some(
    exports: dict[str, str], tmp_path: Path, engine: str, words: dict[str, Any], file: str
) -> None:
    words = {"target": exports["target"], "drafter": str(tmp_path / "drafter"), **words}
    config = {"architectures": ["LlamaForCausalLMEagle3"]}
    folder = Path(published(tmp_path / "drafter", **config))
    assert planned(engine, **words).command
    document = {**(config if file == "config.json" else {}), "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / file).write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"auto_map of .*{file} names some") as raised:
        planned(engine, **words)
    assert raised.value.kind == "code-unpinned"
    assert planned(engine, **{**words, "flags": (), "settings": ()}).command
    with pytest.raises(ConfigError, match="is no folder here to look into") as raised:
        planned(engine, **{**words, "drafter": "maker/drafter", "method": "eagle3"})
    assert raised.value.hint == "hf download maker/drafter --local-dir DRAFTER, then DRAFTER in its place"


def test_an_engine_runs_a_target_s_own_python_of_a_folder_or_of_a_commit(exports: dict[str, str]) -> None:
    def command(target: str, *flags: str) -> tuple[str, ...]:
        return planned("vllm", method="ngram", target=target, flags=("--trust-remote-code", *flags)).command

    assert command(exports["target"])
    assert command("maker/target", f"--revision={'a1' * 20}")
    for flags in ((), ("--revision", "main")):
        with pytest.raises(ConfigError, match="may be other code tomorrow") as raised:
            command("maker/target", *flags)
        assert raised.value.kind == "code-unpinned"


def test_longer_drafts_than_trained_are_served_with_a_warning(exports: dict[str, str]) -> None:
    resolved, _ = asked("vllm", drafter=exports["eagle3 for vllm"], draft_len=9)
    assert resolved.request.draft_len == 9
    assert resolved.warnings == ["the drafter was exported to draft 5; further tokens are accepted less"]


@pytest.mark.parametrize(
    ("config", "method", "draft_len"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}, "eagle3", 3),
        ({"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True}, "eagle3.1", 3),
        ({"architectures": ["LlamaForCausalLM"], "eagle_config": {"use_aux_hidden_state": True}}, "eagle3", 3),
        (
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]},
            },
            "eagle3",
            5,
        ),
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "dflash", 15),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle1", 3),
        ({"model_type": "medusa", "medusa_num_heads": 4}, "medusa", 4),
    ],
)
def test_a_published_drafter_is_told_by_its_config(
    tmp_path: Path, config: dict[str, Any], method: str, draft_len: int
) -> None:
    resolved, plan = asked("vllm", drafter=published(tmp_path / "drafter", **config))
    assert (resolved.request.method, resolved.request.draft_len) == (method, draft_len)
    assert json.loads(plan.command[4])["num_speculative_tokens"] == draft_len


def test_a_published_drafter_of_another_width_or_unknown_kind_is_refused(
    tmp_path: Path, exports: dict[str, str]
) -> None:
    wide = published(tmp_path / "wide", architectures=["LlamaForCausalLMEagle3"], hidden_size=64, vocab_size=99)
    with pytest.raises(FormatError, match="hidden_size: 64 expected, 32 found") as raised:
        asked("vllm", drafter=wide, target=exports["target"])
    assert "vocab_size: 99 expected, 50 found" in raised.value.message
    plain = published(tmp_path / "plain", architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="does not say which drafter it is"):
        asked("vllm", drafter=plain)
    assert asked("vllm", drafter=plain, method="draft-target")[0].request.method == "draft-target"
    assert asked("vllm", drafter="maker/eagle", method="eagle3")[0].request.drafter == "maker/eagle"
    with pytest.raises(NotFoundError, match="does not exist"):
        asked("vllm", drafter=str(tmp_path / "absent"))


def heads(projector_type: str, **more: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 7, "projector_type": projector_type, "shift_label": True, **more}}


MODELOPT = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8}


@pytest.mark.parametrize(
    ("engine", "config", "said", "fix"),
    [
        ("vllm", heads("dspark", markov_rank=256), "a DSpark under DFlash's class", "export RUN --engine vllm -o OUT"),
        ("sglang", heads("dspark", markov_rank=256), "a DSpark under DFlash's class", "import-drafter DIR -o RUN"),
        ("vllm", heads("domino", gru_hidden_dim=1024, emb_dim=256), "has no Domino", "--engine sglang"),
        ("trtllm", heads("domino", gru_hidden_dim=1024, emb_dim=256), "has no Domino", "--engine sglang"),
        ("sglang", heads("other"), "projector_type is other", "a DFlash drafter"),
    ],
)
def test_a_head_that_modelopt_exports_under_dflash_s_class_is_no_plain_dflash(
    tmp_path: Path, engine: str, config: dict[str, Any], said: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        asked(engine, drafter=published(tmp_path / "drafter", **MODELOPT, **config))
    assert raised.value.kind == "serve-unsupported"
    assert fix in str(raised.value.hint)


BEYOND = {
    "xpress": {"architectures": ["Qwen3XPressModel"], "xpress_rank": 8},
    "lilicorr": {"architectures": ["LiLiCorrDraftModel"], **heads("lilicorr", lilicorr_enabled=True)},
    "lilicorr without a projector": {"architectures": ["LiLiCorrDraftModel"]},
    "lilicorr under dflash": {"dflash_config": {"mask_token_id": 7, "lilicorr_candidate_topk": 4}},
    "dflare": {"architectures": ["QwenDFlareDraftModel"]},
}


@pytest.mark.parametrize(
    ("name", "engine", "version", "said", "fix"),
    [
        ("xpress", "vllm", None, r"first vLLM known to read this format is 0\.33", "--engine-version 0.33"),
        ("xpress", "vllm", "0.33", None, None),
        ("xpress", "sglang", None, "has no XPress", "--engine vllm --engine-version 0.33"),
        ("xpress", "trtllm", None, "has no XPress", "--engine vllm --engine-version 0.33"),
        ("lilicorr", "vllm", None, None, None),
        ("lilicorr", "sglang", None, None, None),
        ("lilicorr", "trtllm", None, "projector_type is lilicorr", "0.32 or --engine sglang --engine-version 0.5.23"),
        ("lilicorr without a projector", "vllm", None, None, None),
        ("lilicorr without a projector", "trtllm", None, "class is LiLiCorrDraftModel", "--engine sglang"),
        ("lilicorr under dflash", "sglang", None, "config.json has lilicorr_candidate_topk", "a DFlash drafter"),
        ("dflare", "vllm", None, "class is QwenDFlareDraftModel", "a DFlash drafter"),
        ("dflare", "trtllm", None, "class is QwenDFlareDraftModel", "a DFlash drafter"),
    ],
)
def test_what_has_more_than_a_dflash_is_served_by_engines_that_have_its_class(
    tmp_path: Path, name: str, engine: str, version: str | None, said: str | None, fix: str | None
) -> None:
    words = {**MODELOPT, "dflash_config": {"mask_token_id": 7}, **BEYOND[name]}
    drafter = published(tmp_path / "drafter", **words)
    if said is None:
        assert asked(engine, drafter=drafter, version=version)[0].request.draft_len == 7
        return
    with pytest.raises(ConfigError, match=said) as raised:
        asked(engine, drafter=drafter, version=version)
    assert raised.value.kind == "serve-unsupported"
    assert str(fix) in str(raised.value.hint)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_drafter_of_jetspec_s_own_trainer_is_served_where_engines_find_its_causal_block(
    tmp_path: Path, engine: str
) -> None:
    said = {"mask_token_id": 7, "causal_head": True}
    with pytest.raises(ConfigError, match=r"dflash_config\.causal_head, which the engine does not read") as raised:
        asked(engine, drafter=published(tmp_path / "own", **MODELOPT, dflash_config=said))
    assert raised.value.kind == "serve-unsupported"
    hint = f"hiddenstore import-drafter DIR -o RUN --store STORE, then hiddenstore export RUN --engine {engine} -o OUT"
    assert raised.value.hint == hint
    told = published(tmp_path / "told", **MODELOPT, is_causal=True, dflash_config={**said, "causal": True})
    assert asked(engine, drafter=told)[0].request.method == "jetspec"
    either = published(tmp_path / "either", **MODELOPT, dflash_config={**said, "causal_head": False})
    assert asked(engine, drafter=either)[0].request.method == "dflash"


def test_a_causal_block_by_vllm_s_word_alone_is_served_by_vllm_alone(tmp_path: Path) -> None:
    drafter = published(tmp_path / "vllm", **MODELOPT, dflash_config={"mask_token_id": 7, "causal": True})
    assert asked("vllm", drafter=drafter)[0].request.method == "jetspec"
    with pytest.raises(ConfigError, match=r"dflash_config\.causal, which the engine does not read"):
        asked("sglang", drafter=drafter)


def test_sglang_s_dflash_serves_a_domino_and_a_dspark_of_its_own_class_is_served(tmp_path: Path) -> None:
    domino = published(tmp_path / "domino", **MODELOPT, **heads("domino", gru_hidden_dim=1024, emb_dim=256))
    assert asked("sglang", drafter=domino)[0].request.draft_len == 7
    words = {**MODELOPT, "architectures": ["Qwen3DSparkModel"], "markov_rank": 256, **heads("dspark")}
    assert asked("vllm", drafter=published(tmp_path / "dspark", **words))[0].request.draft_len == 8


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ({}, 8),
        ({"sample_from_anchor": True}, 8),
        ({"sample_from_anchor": False}, 7),
        ({"dflash_config": {"sample_from_anchor": False}}, 7),
        ({"aux_hidden_state_layer_ids": [2, 4]}, 8),
        ({"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [2, 4]}, 8),
        ({"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [2, 4], "sample_from_anchor": False}, 7),
    ],
)
def test_a_dspark_whose_newest_token_proposes_nothing_drafts_one_token_less_than_its_slots(
    tmp_path: Path, words: dict[str, Any], length: int
) -> None:
    config = {**MODELOPT, "architectures": ["Qwen3DSparkModel"], "markov_rank": 256, **words}
    resolved, plan = asked("sglang", drafter=published(tmp_path / "drafter", **config))
    assert resolved.request.draft_len == length
    assert plan.command[plan.command.index("--speculative-dspark-block-size") + 1] == str(length)


def test_vllm_serves_an_xpress_from_0_33_on_and_whole_blocks_alone(tmp_path: Path) -> None:
    ours = str(tmp_path / "ours")
    export(make("xpress", draft_len=2), "vllm", Path(ours), version="0.33")
    resolved, plan = asked("vllm", drafter=ours)
    assert json.loads(plan.command[4]) == {"method": "dflash", "model": ours, "num_speculative_tokens": 3}
    assert "whole blocks alone, 3 tokens" in resolved.warnings[1]
    assert "--set xpress_topc=0" in resolved.warnings[0]
    with pytest.raises(ConfigError, match=r"whole blocks of .* alone, 3 tokens, not 2") as raised:
        asked("vllm", drafter=ours, draft_len=2)
    assert raised.value.hint == "--draft-len 3"
    with pytest.raises(ConfigError, match=r"first vLLM known to read this format is 0\.33"):
        asked("vllm", drafter=ours, version="0.32")
    published_one = published(tmp_path / "published", architectures=["Qwen3XPressModel"], num_speculative_steps=7)
    assert asked("vllm", drafter=published_one, version="0.33")[0].request.draft_len == 7
    with pytest.raises(ConfigError, match="has no XPress"):
        asked("sglang", drafter=published_one)


def test_vllm_does_not_serve_an_xpress_in_speculators_layout(tmp_path: Path) -> None:
    """0.33's ``configs/speculators`` knows no ``xpress``."""
    export(make("xpress"), "speculators", tmp_path / "ours")
    for folder, written in (("ours", True), ("published", False)):
        if not written:
            (tmp_path / "ours").rename(tmp_path / folder)
            (tmp_path / folder / "hiddenstore.json").unlink()
        with pytest.raises(ConfigError, match="this is speculators' layout") as raised:
            asked("vllm", drafter=str(tmp_path / folder), version="0.33")
        assert raised.value.kind == "serve-unsupported"
        assert "hiddenstore export RUN --engine vllm" in str(raised.value.hint)


def test_layers_in_another_engine_s_numbering_are_warned_about(tmp_path: Path, exports: dict[str, str]) -> None:
    def warnings(name: str, ids: list[int], engine: str) -> list[str]:
        words = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": ids}
        drafter = published(tmp_path / name, **words)
        return asked(engine, drafter=drafter, target=exports["target"])[0].warnings

    assert warnings("a", [2, 4, 5], "vllm") == []
    assert "a layer off" in warnings("b", [1, 3, 4], "vllm")[0]
    assert warnings("c", [1, 3, 4], "sglang") == []
    assert "a layer off" in warnings("d", [2, 4, 5], "sglang")[0]
    assert warnings("d for TensorRT-LLM, which reads none", [2, 4, 5], "trtllm") == []
    assert warnings("e", [0, 3, 6], "vllm") == []


def test_layers_under_a_word_that_no_engine_reads_are_warned_about(tmp_path: Path, exports: dict[str, str]) -> None:
    """As AngelSlim names them."""

    def warnings(name: str, engine: str, ids: list[int], target: str = exports["target"], **more: Any) -> list[str]:
        words = {"architectures": ["Eagle3LlamaForCausalLM"], "aux_hidden_states_layer_ids": ids, **more}
        return asked(engine, drafter=published(tmp_path / name, **words), target=target)[0].warnings

    for engine in ("vllm", "sglang", "trtllm"):
        said = warnings(engine, engine, [2, 5, 6])[0]
        assert "layers [2, 5, 6] under aux_hidden_states_layer_ids" in said
        assert f"hiddenstore export RUN --engine {engine} -o DIR" in said
    assert "aux_hidden_states_layer_ids" in warnings("unknown depth", "vllm", [2, 5, 6], "maker/target")[0]
    assert warnings("the usual ones, which engines take", "vllm", [1, 3, 4]) == []
    assert warnings("both", "vllm", [2, 5, 6], eagle_aux_hidden_state_layer_ids=[3, 6, 7]) == []


def test_mixed_attention_layers_are_warned_about_in_vllm(tmp_path: Path) -> None:
    drafter = published(
        tmp_path / "d", architectures=["DFlashDraftModel"], layer_types=["full_attention", "sliding_attention"]
    )
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in asked("vllm", drafter=drafter)[0].warnings[0]
    ours = tmp_path / "ours"
    export(case("dflash of two kinds of layers"), "vllm", ours)
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in asked("vllm", drafter=str(ours))[0].warnings[0]


def test_a_dspark_without_a_confidence_head_is_served_by_sglang_with_the_mode_that_needs_none(tmp_path: Path) -> None:
    for has_one in (True, False):
        out = tmp_path / str(has_one)
        export(make("dspark", confidence_head=has_one), "sglang", out)
        warned = [text for text in asked("sglang", drafter=str(out))[0].warnings if "RAGGED_VERIFY_MODE" in text]
        assert len(warned) == (not has_one)
        assert all("asks for one and does not start, whatever enable_confidence_head says" in text for text in warned)


@pytest.mark.parametrize(
    ("version", "since", "before", "expected"),
    [
        ("1.3.0rc12", "1.3", None, True),
        ("1.2.1", "1.3", None, False),
        ("0.32.0", None, "0.33", True),
        ("0.33.0", None, "0.33", False),
        ("v0.5.23", "0.5.3", None, True),
        ("1.2.0.post1", "1.2", "1.3", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, since: str, before: str, expected: bool) -> None:
    assert is_within(version, since, before) is expected


def test_candidates_come_before_their_release() -> None:
    assert parse("1.3.0rc2") < parse("1.3.0rc12") < parse("1.3.0") < parse("1.3.1rc1")
