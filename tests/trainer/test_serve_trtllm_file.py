"""TensorRT-LLM's file: every published example passes, and settings that contradict each other are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hiddenstore.errors import ConfigError, NotFoundError
from tests.trainer.serve_cases import planned, published
from trainer.serve.trtllm import SINCE, check_file, file_problems

PUBLISHED = yaml.safe_load((Path(__file__).parent / "trtllm_published.yaml").read_text())
BY_SOURCE = [pytest.param(example, id=example["source"]) for example in PUBLISHED]


def problems(settings: dict[str, Any], version: str | None = None) -> list[str]:
    return list(file_problems(settings, version))


@pytest.mark.parametrize("example", BY_SOURCE)
def test_a_published_file_has_nothing_wrong_at_its_version(example: dict[str, Any]) -> None:
    assert problems(example["file"], example["version"]) == []
    assert problems(example["file"]) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cuda_graph_config": {"batch_sizes": [1, 2], "max_batch_size": 4}}, "the largest of batch_sizes"),
        ({"speculative_config": {"max_draft_len": 3}}, "speculative_config.decoding_type: is missing"),
        ({"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3}}, "Eagle3 needs the drafter's folder"),
        ({"speculative_config": {"decoding_type": "NGram"}}, "NGram needs how many tokens to draft"),
        ({"speculative_config": {"decoding_type": "User_Provided"}}, "given in Python, not in YAML"),
        (
            {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1, "max_draft_len": 3}},
            "num_nextn_predict_layers: must match max_draft_len, 3: found 1",
        ),
        (
            {"speculative_config": {"decoding_type": "MTP", "max_concurrency": 4, "draft_len_schedule": {1: 3}}},
            "excludes max_concurrency",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(settings: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems(settings)), problems(settings)


def test_a_second_length_of_mtp_is_none_of_newer_versions_business() -> None:
    """``llm_args.py`` of 1.4 warns of ``num_nextn_predict_layers`` and drops it."""
    settings = {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1, "max_draft_len": 3}}
    assert problems(settings, "1.4.0rc1") == []
    assert len(problems(settings, "1.3.0")) == len(problems(settings)) == 1


def test_a_dynamic_tree_wants_its_branches_and_a_total_that_they_can_make_and_no_fixed_tree() -> None:
    tree = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "d", "use_dynamic_tree": True}
    assert any("dynamic_tree_max_topK" in line for line in problems({"speculative_config": tree}))
    tree |= {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 7}
    assert any("should be from 3 to 2 times that, found 7" in line for line in problems({"speculative_config": tree}))
    tree |= {"max_total_draft_tokens": 6}
    assert problems({"speculative_config": tree}) == []
    assert any("excludes" in line for line in problems({"speculative_config": tree | {"eagle_choices": [[0]]}}))
    with pytest.raises(ConfigError, match="max_total_draft_tokens cannot be compared"):
        problems({"speculative_config": tree | {"max_total_draft_tokens": "six"}})


@pytest.mark.parametrize(
    ("kind", "version", "said"),
    [
        ("DFlash", "1.2.1", "since 1.3"),
        ("DSpark", "1.2.1", "since 1.3"),
        ("Eagle3", "1.1", "since 1.2"),
        ("Draft_Target", "1.1.0", "since 1.2"),
    ],
)
def test_a_decoding_type_of_another_version_is_refused_with_its_versions(kind: str, version: str, said: str) -> None:
    settings = {"speculative_config": {"decoding_type": kind, "max_draft_len": 3, "speculative_model": "d"}}
    assert problems(settings) == []
    assert any(said in line and version in line for line in problems(settings, version))
    assert problems(settings, SINCE.get(kind, "1.1")) == []


def test_mtp_wants_a_target_with_such_layers(tmp_path: Path) -> None:
    without = published(tmp_path / "without", model_type="llama", num_hidden_layers=4)
    with pytest.raises(ConfigError, match="has no num_nextn_predict_layers") as raised:
        planned("trtllm", method="mtp", target=without)
    assert raised.value.kind == "serve-setting"
    for words in (
        {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}},
        {"model_type": "qwen3_next"},
    ):
        able = published(tmp_path / words["model_type"], **words)
        assert planned("trtllm", method="mtp", target=able).command[1] == able
    assert planned("trtllm", method="ngram", target=without).command[1] == without


def test_a_file_is_read_and_all_its_problems_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative_config:\n  decoding_type: Eagle3\n")
    with pytest.raises(ConfigError, match="2 settings are wrong") as raised:
        check_file(file)
    assert "speculative_config.speculative_model: is missing" in raised.value.message
    assert "speculative_config.max_draft_len: is missing" in raised.value.message
    file.write_text("enable_attention_dp: true\n")
    assert check_file(file, "1.2.0") == {"enable_attention_dp": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "is no YAML"),
        ("- a\n- b\n", "should hold key: value lines"),
        ("", "should hold key: value lines"),
        ("enable_attention_dp: true\nenable_attention_dp: false\n", "is set twice"),
        ("speculative_config: Eagle3\n", "speculative_config: should hold key: value lines, found 'Eagle3'"),
        ("backend: !!python/object/apply:os.system ['true']\n", "is no YAML"),
        ("backend: &a [x]\nmoe_config: *a\n", r"is no YAML: line 2: aliases \(\*name\) are not supported"),
        ("backend: \x01\n", "is no YAML"),
        ('backend: "\\UFFFFFFFF"\n', "is no YAML"),
    ],
)
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        check_file(file)
    with pytest.raises(NotFoundError, match="does not exist"):
        check_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize("method", ["ngram", "user-provided", "none"])
def test_a_word_for_a_whole_section_is_refused(method: str) -> None:
    more = {"drafter": "mine:Drafter", "form": "python"} if method == "user-provided" else {}
    with pytest.raises(ConfigError, match=r"speculative_config.*should") as raised:
        planned("trtllm", method=method, settings=("speculative_config=eagle",), **more)
    assert raised.value.kind == "serve-setting"
