"""What ``hiddenstore serve`` would run: commands, files and refusals for real exports and published drafters."""

import ast
import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, NotFoundError
from hiddenstore.identity import config_sha256
from tests.trainer.export_cases import case
from trainer.export import export
from trainer.serve import ENGINES, serving_engine
from trainer.serve.plan import ServePlan, shell_lines, smoke_test
from trainer.serve.resolve import Asked, Resolved, plan_of, resolve
from trainer.serve.trtllm import SPELLINGS
from trainer.serve.trtllm_check import file_problems
from trainer.serve.versions import is_within, parse
from trainer.serve.vllm import speculative_config

TARGET_CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 50}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Real exports, by "drafter for engine"; their target is the folder "target"."""
    root = tmp_path_factory.mktemp("exports")
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps(TARGET_CONFIG))
    found = {"target": str(root / "target")}
    for name, engine, version in (
        ("eagle1", "vllm", None),
        ("eagle3", "vllm", None),
        ("eagle3.1", "vllm", None),
        ("dflash", "vllm", None),
        ("medusa", "vllm", None),
        ("eagle3", "sglang", None),
        ("dflash", "sglang", None),
        ("eagle1", "sglang", None),
        ("eagle3", "trtllm", None),
        ("dflash", "trtllm", "1.3.0"),
    ):
        identity = case(name).identity.model_copy(update={"config_sha256": config_sha256(TARGET_CONFIG)})
        out = root / f"{name} {engine}"
        export(replace(case(name), identity=identity, draft_len=5), engine, out, version=version)
        found[f"{name} for {engine}"] = str(out)
    return found


def asked(engine: str, **words: Any) -> tuple[Resolved, ServePlan]:
    resolved = resolve(serving_engine(engine), Asked(**{"target": "maker/target", **words}))
    return resolved, plan_of(serving_engine(engine), resolved.request)


def planned(engine: str, **words: Any) -> ServePlan:
    return asked(engine, **words)[1]


def the_file(plan: ServePlan) -> dict[str, Any]:
    (text,) = plan.files.values()
    settings = yaml.safe_load(text)
    assert list(file_problems(settings)) == []
    return settings


def published(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("drafter", "method", "draft_len"),
    [
        ("eagle1", "eagle", 5),
        ("eagle3", "eagle3", 5),
        ("eagle3.1", "eagle3", 5),
        ("dflash", "dflash", 3),
        ("medusa", "medusa", 3),
    ],
)
def test_vllm_serves_each_export_with_its_own_method_and_length(
    exports: dict[str, str], drafter: str, method: str, draft_len: int
) -> None:
    folder = exports[f"{drafter} for vllm"]
    command = planned("vllm", drafter=folder).command
    assert command[:4] == ("vllm", "serve", "maker/target", "--speculative-config")
    assert json.loads(command[4]) == {"method": method, "model": folder, "num_speculative_tokens": draft_len}


def test_vllm_methods_without_training_have_their_published_settings() -> None:
    assert speculative_config("ngram", draft_len=4) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    assert speculative_config("draft-target", "small", 2) == {
        "method": "draft_model",
        "model": "small",
        "num_speculative_tokens": 2,
    }
    assert speculative_config("mtp", draft_len=1) == {"method": "mtp", "num_speculative_tokens": 1}
    assert speculative_config("none") == {}
    assert planned("vllm", method="none", flags=("--tensor-parallel-size", "2")).command == (
        *("vllm", "serve", "maker/target"),
        *("--tensor-parallel-size", "2"),
    )


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ({"drafter": "eagle3 for sglang"}, "EAGLE3 draft-model-path num-steps=5 eagle-topk=1 num-draft-tokens=6"),
        (
            {"drafter": "eagle1 for sglang", "draft_len": 2},
            "EAGLE draft-model-path num-steps=2 eagle-topk=1 num-draft-tokens=3",
        ),
        ({"drafter": "dflash for sglang"}, "DFLASH draft-model-path dflash-block-size=4"),
        ({"method": "ngram", "draft_len": 7}, "NGRAM num-draft-tokens=8"),
        ({"method": "mtp"}, "NEXTN num-steps=3 eagle-topk=1 num-draft-tokens=4"),
    ],
)
def test_sglang_flags_say_algorithm_and_lengths(exports: dict[str, str], words: dict[str, Any], flags: str) -> None:
    folder = exports.get(words.get("drafter", ""))
    command = list(planned("sglang", **{**words, **({"drafter": folder} if folder else {})}).command)
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "maker/target"]
    algorithm, *rest = flags.split()
    expected = ["--speculative-algorithm", algorithm]
    for word in rest:
        name, _, value = word.partition("=")
        expected += [f"--speculative-{name}", value or str(folder)]
    assert command[5:] == expected


def test_sglang_takes_a_small_model_and_a_tree_whose_size_is_said() -> None:
    small = {"drafter": "maker/small", "method": "draft-target"}
    assert "STANDALONE" in planned("sglang", **small).command
    with pytest.raises(ConfigError, match="drafts a tree"):
        planned("sglang", **small, settings=("eagle-topk=4",))
    command = planned("sglang", **small, settings=("eagle_topk=4", "num-draft-tokens=16")).command
    assert command[-4:] == ("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16")


def test_the_default_trtllm_file_has_the_playbook_s_values(exports: dict[str, str]) -> None:
    folder = exports["eagle3 for trtllm"]
    plan = planned("trtllm", drafter=folder, draft_len=5)
    assert the_file(plan) == {
        "enable_attention_dp": False,
        "disable_overlap_scheduler": False,
        "enable_autotuner": False,
        "cuda_graph_config": {"max_batch_size": 1},
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": False},
        "speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": folder},
    }
    assert plan.command == (
        *("trtllm-serve", "maker/target", "--backend", "pytorch", "--max_batch_size", "1"),
        *("--config", "extra-llm-api-config.yml"),
    )


@pytest.mark.parametrize(
    ("method", "version", "expected"),
    [
        ("draft-target", None, {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "small"}),
        (
            "draft-target",
            "1.2.1",
            {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model_dir": "small"},
        ),
        (
            "draft-target",
            "1.1.0",
            {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model_dir": "small"},
        ),
        ("mtp", None, {"decoding_type": "MTP", "max_draft_len": 3}),
        ("mtp", "1.2.1", {"decoding_type": "MTP", "num_nextn_predict_layers": 3}),
    ],
)
def test_older_trtllm_versions_get_the_older_spellings(
    method: str, version: str | None, expected: dict[str, Any]
) -> None:
    plan = planned("trtllm", method=method, drafter="small" if method == "draft-target" else None, version=version)
    assert the_file(plan)["speculative_config"] == expected
    assert ("--config" if version is None else "--extra_llm_api_options") in plan.command


def test_an_older_trtllm_calls_eagle3_eagle_and_gets_no_overlap_before_1_2(exports: dict[str, str]) -> None:
    folder = exports["eagle3 for trtllm"]
    for version, without_overlap in (("1.2.1", False), ("1.1.0", True)):
        settings = the_file(planned("trtllm", drafter=folder, version=version))
        assert settings["speculative_config"]["decoding_type"] == "Eagle"
        assert settings["speculative_config"]["speculative_model_dir"] == folder
        assert settings["disable_overlap_scheduler"] is without_overlap


def test_the_other_spelling_of_a_draft_model_can_be_chosen() -> None:
    plan = planned("trtllm", method="draft-target", drafter="small", settings=("decoding_type=Draft_Target",))
    assert the_file(plan)["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "small",
    }
    assert "Draft_Target" in plan.notes[0]


@pytest.mark.parametrize("version", [row.since if row.since != "0" else "1.0" for row in SPELLINGS])
@pytest.mark.parametrize("profile", ["latency", "throughput"])
@pytest.mark.parametrize("method", ["ngram", "mtp", "draft-target", "none"])
def test_every_trtllm_file_we_write_passes_our_own_check_at_its_version(
    method: str, profile: str, version: str
) -> None:
    drafter = "small" if method == "draft-target" else None
    plan = planned("trtllm", method=method, drafter=drafter, settings=(f"profile={profile}",), version=version)
    (text,) = plan.files.values()
    assert list(file_problems(yaml.safe_load(text), version)) == []


def test_ngram_has_its_pool_and_settings_reach_the_section_they_belong_to() -> None:
    words = ("max_matching_ngram_size=2", "is_public_pool=false", "kv_cache_config.free_gpu_memory_fraction=0.7")
    settings = the_file(planned("trtllm", method="ngram", settings=(*words, "print_iter_log=true")))
    assert settings["speculative_config"] == {
        "decoding_type": "NGram",
        "max_draft_len": 3,
        "max_matching_ngram_size": 2,
        "is_keep_all": True,
        "is_use_oldest": True,
        "is_public_pool": False,
    }
    assert settings["kv_cache_config"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.7}
    assert settings["print_iter_log"] is True
    assert settings["disable_overlap_scheduler"] is True


def test_relaxed_acceptance_brings_the_published_candidates_which_a_user_may_change() -> None:
    relaxed = ("use_relaxed_acceptance_for_thinking=true",)
    found = the_file(planned("trtllm", method="mtp", settings=relaxed))["speculative_config"]
    assert (found["relaxed_topk"], found["relaxed_delta"]) == (10, 0.6)
    found = the_file(planned("trtllm", method="mtp", settings=(*relaxed, "relaxed_topk=5")))["speculative_config"]
    assert (found["relaxed_topk"], found["relaxed_delta"]) == (5, 0.6)


def test_the_throughput_file_turns_attention_dp_on_and_batches() -> None:
    plan = planned("trtllm", method="mtp", draft_len=1, settings=("profile=throughput",))
    settings = the_file(plan)
    assert settings["enable_attention_dp"] is True
    assert settings["cuda_graph_config"] == {"enable_padding": True, "max_batch_size": 128}
    assert "128" in plan.command
    own = planned("trtllm", method="mtp", settings=("profile=throughput",), flags=("--max_batch_size", "8")).command
    assert own.count("--max_batch_size") == 1
    assert own[-1] == "8"


@pytest.mark.parametrize(
    ("engine", "word", "said"),
    [
        ("vllm", "prompt_lokup_max=5", "did you mean prompt_lookup_max?"),
        ("vllm", "prompt_lookup_max=0", "should be at least 1"),
        ("sglang", "ngram-capcity=5", "did you mean ngram-capacity?"),
        ("sglang", "ngram-match-type=DFS", "did you mean ngram-match-type: BFS?"),
        ("trtllm", "is_public_pol=true", "did you mean speculative_config.is_public_pool?"),
        ("trtllm", "kv_cache_config.dtyp=fp8", "did you mean kv_cache_config.dtype?"),
        ("trtllm", "is_public_pool", "should be key=value"),
        ("trtllm", "profile=fast", "there is latency, throughput"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_meant(engine: str, word: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(engine, method="ngram", settings=(word,))
    assert said in raised.value.message


def test_the_python_forms_are_programs_with_the_same_settings(exports: dict[str, str]) -> None:
    folder = exports["eagle3 for trtllm"]
    calls = calls_of(planned("trtllm", drafter=folder, form="python").program)
    assert calls["Eagle3DecodingConfig"] == {"max_draft_len": 5, "speculative_model": folder}
    assert calls["KvCacheConfig"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9}
    assert calls["LLM"]["disable_overlap_scheduler"] is False
    assert calls_of(planned("trtllm", drafter=folder, form="python", version="1.1").program)["EagleDecodingConfig"] == {
        "max_draft_len": 5,
        "speculative_model_dir": folder,
    }
    calls = calls_of(planned("vllm", drafter=exports["dflash for vllm"], form="python").program)
    assert calls["LLM"]["model"] == "maker/target"
    assert calls["LLM"]["speculative_config"]["method"] == "dflash"


def calls_of(program: str) -> dict[str, dict[str, Any]]:
    """The keyword arguments that are plain values, by the name called."""
    found = {}
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = {}
            for keyword in node.keywords:
                try:
                    words[str(keyword.arg)] = ast.literal_eval(keyword.value)
                except ValueError:
                    continue
            found[node.func.id] = words
    return found


def test_a_user_s_own_drafter_class_is_pointed_at_in_python_only() -> None:
    own = {"drafter": "my.drafters:Mine", "method": "user-provided"}
    program = planned("trtllm", **own, form="python").program
    assert "from my.drafters import Mine" in program
    assert "UserProvidedDecodingConfig(max_draft_len=3, drafter=Mine())" in program
    ast.parse(program)
    with pytest.raises(ConfigError, match="no YAML file can hold") as raised:
        planned("trtllm", **own)
    assert raised.value.hint == "--form python"
    with pytest.raises(ConfigError, match="wants module:Class"):
        planned("trtllm", drafter="mine", method="user-provided", form="python")


def test_a_container_mounts_what_is_local_and_sees_only_its_own_paths(
    exports: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGC_REGISTRY", "registry.example")
    plan = planned(
        "trtllm", drafter=exports["eagle3 for trtllm"], target=exports["target"], form="container", config_file="x.yaml"
    )
    command = list(plan.command)
    at = command.index("registry.example/nvidia/tensorrt-llm/release:1.3.0rc12")
    assert command[:2] == ["docker", "run"]
    assert command[at + 1 : at + 3] == ["trtllm-serve", "/models/target"]
    assert command[command.index("--config") + 1] == "/config/x.yaml"
    mounts = [command[i + 1] for i, word in enumerate(command) if word == "-v"][1:]
    assert mounts == [
        f"{exports['target']}:/models/target:ro",
        f"{exports['eagle3 for trtllm']}:/models/drafter:ro",
        f"{Path('x.yaml').absolute()}:/config/x.yaml:ro",
    ]
    assert list(plan.files) == ["x.yaml"]
    assert the_file(plan)["speculative_config"]["speculative_model"] == "/models/drafter"
    vllm = list(planned("vllm", method="ngram", form="container", flags=("--port", "9000")).command)
    image = vllm.index("vllm/vllm-openai:v0.32.0")
    assert vllm[image - 2 : image + 3] == ["--entrypoint", "vllm", "vllm/vllm-openai:v0.32.0", "serve", "maker/target"]
    assert "9000:9000" in vllm


def test_the_bench_form_measures_with_the_same_file() -> None:
    serve, bench = (planned("trtllm", method="mtp", form=form) for form in ("command", "bench"))
    assert serve.files == bench.files
    assert bench.command[:4] == ("trtllm-bench", "--model", "maker/target", "throughput")
    assert bench.command[-2:] == ("--config", "extra-llm-api-config.yml")
    with pytest.raises(ConfigError, match="has no form 'bench'"):
        planned("sglang", method="mtp", form="bench")


@pytest.mark.parametrize(
    ("engine", "words", "said", "fix"),
    [
        (
            "sglang",
            {"drafter": "eagle3 for vllm"},
            "exported for vllm",
            "hiddenstore export RUN --engine sglang -o DIR",
        ),
        ("trtllm", {"drafter": "dflash for sglang"}, "exported for sglang", "--engine trtllm"),
        ("vllm", {"drafter": "medusa for vllm", "version": "0.33.0"}, "removed Medusa", "--engine-version 0.32"),
        (
            "trtllm",
            {"drafter": "dflash for trtllm", "version": "1.2.1"},
            "DFlash came with 1.3",
            "--engine-version 1.3",
        ),
        ("sglang", {"drafter": "eagle3 for sglang", "version": "0.5.0"}, "another layout", "--engine-version 0.5.0"),
        ("vllm", {"drafter": "dflash for vllm", "draft_len": 4}, "drafts at most 3", "--draft-len 3"),
        ("vllm", {"drafter": "eagle3 for vllm", "method": "medusa"}, "is eagle3, not medusa", "leave --method out"),
        ("vllm", {"method": "user-provided", "drafter": "a:B"}, "does not draft with user-provided", "--method draft"),
        ("vllm", {"method": "draft-target"}, "needs a small model", "hiddenstore serve DIR --method draft-target"),
        ("vllm", {"method": "ngram", "drafter": "eagle3 for vllm"}, "takes no drafter", "leave the folder out"),
        ("vllm", {"method": "ngrams"}, "no method 'ngrams'", "--method ngram"),
        ("vllm", {}, "nothing says what drafts", "--method ngram"),
        ("trtllm", {"method": "ngram", "version": "new"}, "'new' is no version", "--engine-version 1.3.0rc12"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(
    exports: dict[str, str], engine: str, words: dict[str, Any], said: str, fix: str
) -> None:
    words = {key: exports.get(value, value) if key == "drafter" else value for key, value in words.items()}
    with pytest.raises(HiddenstoreError) as raised:
        planned(engine, **words)
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


def test_longer_drafts_than_trained_are_served_with_a_warning(exports: dict[str, str]) -> None:
    resolved, _ = asked("vllm", drafter=exports["eagle3 for vllm"], draft_len=9)
    assert resolved.request.draft_len == 9
    assert resolved.warnings == ["the drafter was trained to draft 5; further tokens are accepted less"]


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


def test_layers_in_another_engine_s_numbering_are_warned_about(tmp_path: Path, exports: dict[str, str]) -> None:
    def warnings(name: str, ids: list[int], engine: str) -> list[str]:
        words = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": ids}
        drafter = published(tmp_path / name, **words)
        return asked(engine, drafter=drafter, target=exports["target"])[0].warnings

    assert warnings("a", [2, 4, 5], "vllm") == []
    assert "a layer off" in warnings("b", [1, 3, 4], "vllm")[0]
    assert warnings("c", [1, 3, 4], "sglang") == []
    assert "a layer off" in warnings("d", [2, 4, 5], "trtllm")[0]
    assert warnings("e", [0, 3, 6], "vllm") == []


def test_mixed_attention_layers_are_warned_about_in_vllm(tmp_path: Path) -> None:
    drafter = published(
        tmp_path / "d", architectures=["DFlashDraftModel"], layer_types=["full_attention", "sliding_attention"]
    )
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in asked("vllm", drafter=drafter)[0].warnings[0]


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


def test_every_engine_of_the_table_can_be_served_without_speculation() -> None:
    for name in ENGINES:
        assert serving_engine(name).name == name
        assert planned(name, method="none").command
    with pytest.raises(ConfigError, match="no engine 'ollama'"):
        serving_engine("ollama")


def test_the_smoke_test_calls_the_port_and_name_that_flags_chose() -> None:
    plan = planned("sglang", method="mtp", flags=("--port", "31000", "--served-model-name=it's"))
    words = shlex.split("\n".join(shell_lines(smoke_test(plan))))
    assert words[1] == "http://localhost:31000/v1/completions"
    assert json.loads(words[-1])["model"] == "it's"
    assert planned("sglang", method="mtp").port == 30000


def run(*words: str) -> Any:
    return CliRunner().invoke(main, ["serve", *words], prog_name="hiddenstore")


def test_print_only_prints_a_script_that_runs_exactly_the_documented_command(tmp_path: Path) -> None:
    words = ["--method", "ngram", "--target", "maker/target", "--engine", "trtllm", "--print-only"]
    printed = run(*words, "--", "--tp_size", "2")
    document = json.loads(run(*words, "--json", "--", "--tp_size", "2").stdout)
    assert (printed.exit_code, document["schema"], document["engine"]) == (0, "hiddenstore.serve/1", "trtllm")
    assert document["command"][-2:] == ["--tp_size", "2"]
    (file,) = document["files"]
    fake_program(tmp_path, "trtllm-serve")
    script = tmp_path / "script.sh"
    script.write_text(printed.stdout)
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=path_with(tmp_path), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"argv": document["command"][1:], "env": document["env"]["TRTLLM_ENABLE_PDL"]}
    assert (tmp_path / file).read_text() == document["files"][file]


def test_running_writes_the_file_and_becomes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--method", "ngram", "--target", "maker/target", "--engine", "trtllm", "-o", "serve.yaml", "-q"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = run(*words)
    assert absent.exit_code == 2
    assert "trtllm-serve is not installed here" in absent.stderr
    assert "--form container" in absent.stderr
    assert not (tmp_path / "serve.yaml").exists()
    fake_program(tmp_path, "trtllm-serve")
    command = [sys.executable, "-m", "hiddenstore.cli", "serve", *words, "--", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ran = json.loads(done.stdout.splitlines()[-1])
    assert ran["argv"][-4:] == ["--config", "serve.yaml", "--host", "0.0.0.0"]
    assert yaml.safe_load((tmp_path / "serve.yaml").read_text())["speculative_config"]["decoding_type"] == "NGram"
    (tmp_path / "serve.yaml").write_text("enable_attention_dp: true\n")
    refused = run(*words)
    assert refused.exit_code == 6
    assert "says something else" in refused.stderr


def fake_program(folder: Path, name: str) -> None:
    """A program of that name that prints what it was called with."""
    program = folder / name
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps({'argv': sys.argv[1:], 'env': os.environ.get('TRTLLM_ENABLE_PDL')}))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def path_with(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_printing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom hiddenstore.cli import main\n"
        "words = ['serve', '--method', 'ngram', '--target', 'T', '--engine', 'trtllm', '--print-only']\n"
        "assert CliRunner().invoke(main, words).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'zarr'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_check_command_answers_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    assert run("--method", "mtp", "--target", "T", "--engine", "trtllm", "--print-only", "-o", str(file)).exit_code == 0
    good = run("--check", str(file), "--json")
    assert json.loads(good.stdout)["decoding_type"] == "MTP"
    file.write_text(file.read_text().replace("max_draft_len", "max_draft_length"))
    bad = run("--check", str(file))
    assert bad.exit_code == 2
    assert "did you mean speculative_config.max_draft_len?" in bad.stderr


def test_what_is_left_out_of_the_command_line_is_asked_for() -> None:
    result = run("--method", "ngram")
    assert result.exit_code == 2
    assert "serve needs --target and --engine" in result.stderr


PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
DOCUMENTED = [line.strip() for line in PAGE.read_text().splitlines() if line.strip().startswith("hiddenstore serve ")]


@pytest.mark.parametrize("line", DOCUMENTED)
def test_every_command_of_the_page_prints(
    line: str, exports: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)[2:]
    monkeypatch.chdir(tmp_path)
    if words[0] == "drafter":
        Path("drafter").symlink_to(exports[f"eagle3 for {words[words.index('--engine') + 1]}"])
    if "--print-only" not in words:
        words.insert(1, "--print-only")
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert "Qwen/Qwen3-8B" in result.stdout or "deepseek-ai/DeepSeek-R1" in result.stdout
