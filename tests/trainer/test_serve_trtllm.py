"""The configuration file TensorRT-LLM gets: its values, spellings by version, and settings in their sections."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hiddenstore.errors import ConfigError
from tests.trainer.export_cases import case, make
from tests.trainer.serve_cases import planned, published, the_file, write_exports
from trainer.export.support import ENGINES
from trainer.export.write import export
from trainer.serve.trtllm import SPELLINGS, file_problems


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_exports(tmp_path_factory.mktemp("exports"), "eagle3")


def test_the_default_trtllm_file_has_the_playbook_s_values(exports: dict[str, str]) -> None:
    folder = exports["eagle3 for trtllm"]
    plan = planned("trtllm", drafter=folder, draft_len=5)
    assert the_file(plan) == {
        "enable_attention_dp": False,
        "disable_overlap_scheduler": False,
        "enable_autotuner": False,
        "cuda_graph_config": {"max_batch_size": 1},
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": False},
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": 5,
            "speculative_model": folder,
            "eagle3_layers_to_capture": [1, 3, 4],
        },
    }
    assert plan.command == (
        *("trtllm-serve", "maker/target", "--backend", "pytorch", "--max_batch_size", "1"),
        *("--config", "extra-llm-api-config.yml"),
    )


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_the_file_names_the_layers_an_eagle_3_was_trained_on_in_every_form(version: str, tmp_path: Path) -> None:
    drafter = str(tmp_path / "drafter")
    export(make("eagle3", aux_layers=(2, 5)), "trtllm", Path(drafter), version=version)
    for form in ("command", "container", "bench"):
        settings = the_file(planned("trtllm", drafter=drafter, form=form, version=version))
        assert settings["speculative_config"]["eagle3_layers_to_capture"] == [2, 5]
    assert "eagle3_layers_to_capture=[2, 5]" in planned("trtllm", drafter=drafter, form="python").program
    own = planned("trtllm", drafter=drafter, settings=("eagle3_layers_to_capture=[0, 7]",))
    assert the_file(own)["speculative_config"]["eagle3_layers_to_capture"] == [0, 7]
    assert own.notes == ()


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0"])
def test_a_release_that_cannot_be_told_layers_gets_none_in_its_file_and_the_user_is_told(
    version: str, tmp_path: Path
) -> None:
    drafter = str(tmp_path / "drafter")
    export(make("eagle3", aux_layers=(2, 5)), "trtllm", Path(drafter), version=version)
    plan = planned("trtllm", drafter=drafter)
    assert "eagle3_layers_to_capture" not in the_file(plan)["speculative_config"]
    assert "(this one: 2, 5): --engine-version 1.1" in plan.notes[0]
    with pytest.raises(ConfigError, match=rf"eagle3_layers_to_capture: is not in version {version} \(since 1.1\)"):
        planned("trtllm", drafter=drafter, settings=("eagle3_layers_to_capture=[2, 5]",))
    told = the_file(planned("trtllm", drafter=drafter, version="1.1.0"))["speculative_config"]
    assert told["eagle3_layers_to_capture"] == [2, 5]


def test_layers_of_an_eagle_3_that_nobody_exported_for_it_are_left_to_trtllm_and_said(tmp_path: Path) -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [5, 12, 30]}
    local = published(tmp_path / "published", architectures=["LlamaForCausalLMEagle3"], eagle_config=nested)
    for drafter in (local, "maker/eagle3"):
        plan = planned("trtllm", drafter=drafter, method="eagle3")
        assert "eagle3_layers_to_capture" not in the_file(plan)["speculative_config"]
        assert "--set eagle3_layers_to_capture=" in plan.notes[0]


@pytest.mark.parametrize(
    ("method", "version", "expected"),
    [
        ("draft-target", None, {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "small"}),
        (
            "draft-target",
            "1.2.0rc6",
            {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model_dir": "small"},
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
    plan = planned("trtllm", method="draft-target", drafter="small", settings=("decoding_type=DraftTarget",))
    assert the_file(plan)["speculative_config"] == {
        "decoding_type": "DraftTarget",
        "max_draft_len": 3,
        "speculative_model": "small",
    }
    assert "decoding_type=DraftTarget" in plan.notes[0]
    assert (
        "decoding_type=Draft_Target"
        in planned("trtllm", method="draft-target", drafter="small", version="1.2").notes[0]
    )


def test_an_export_is_served_by_the_version_it_was_written_for(tmp_path: Path) -> None:
    export(case("eagle3"), "trtllm", tmp_path / "d")
    version = ENGINES["trtllm"].version
    plan = planned("trtllm", drafter=str(tmp_path / "d"))
    assert version == "1.2.1"
    assert the_file(plan)["speculative_config"]["speculative_model_dir"] == str(tmp_path / "d")
    assert "--extra_llm_api_options" in plan.command
    assert "--config" in planned("trtllm", drafter=str(tmp_path / "d"), version="1.3.0").command


def test_gpt_oss_gets_the_folder_of_its_encodings_in_the_container_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned("trtllm", method="ngram", target="openai/gpt-oss-120b")
    assert plan.variables["TIKTOKEN_ENCODINGS_BASE"] == "harmony-reqs"
    assert any("o200k_base.tiktoken" in note for note in plan.notes)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    local = published(tmp_path / "local", model_type="gpt_oss")
    command = " ".join(planned("trtllm", method="ngram", target=local, form="container").command)
    inside = "/models/folders/TIKTOKEN_ENCODINGS_BASE"
    assert f"-v {tmp_path}:{inside}:ro -e TIKTOKEN_ENCODINGS_BASE={inside}" in command
    other = planned("trtllm", method="ngram", target=published(tmp_path / "other", model_type="llama"))
    assert "TIKTOKEN_ENCODINGS_BASE" not in other.variables


def test_mtp_for_a_hub_id_says_that_nobody_looked_for_its_layers() -> None:
    assert "num_nextn_predict_layers" in planned("trtllm", method="mtp", target="Qwen/Qwen3-8B").notes[0]


def test_a_container_without_a_registry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NGC_REGISTRY", raising=False)
    assert any("NGC_REGISTRY" in note for note in planned("trtllm", method="ngram", form="container").notes)
    monkeypatch.setenv("NGC_REGISTRY", "registry.example")
    assert planned("trtllm", method="ngram", form="container").notes == ()


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
    deep = the_file(planned("trtllm", method="none", settings=("a.b.c=1", "a.b.d=[2, x]")))
    assert deep["a"] == {"b": {"c": 1, "d": [2, "x"]}}
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
    graphs = planned("trtllm", method="mtp", settings=("cuda_graph_config.max_batch_size=8",)).command
    assert graphs[graphs.index("--max_batch_size") + 1] == "8"
    own = planned("trtllm", method="mtp", settings=("profile=throughput",), flags=("--max_batch_size", "8")).command
    assert own.count("--max_batch_size") == 1
    assert own[-1] == "8"
