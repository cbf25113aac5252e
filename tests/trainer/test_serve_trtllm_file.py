"""TensorRT-LLM's file: every published example passes, every misspelling of it fails with what was meant."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hiddenstore.errors import ConfigError, NotFoundError
from trainer.serve.fields import Field
from trainer.serve.trtllm_check import check_file, file_problems
from trainer.serve.trtllm_fields import DECODING_TYPES, FILE, SOURCES

PUBLISHED = yaml.safe_load((Path(__file__).parent / "trtllm_published.yaml").read_text())
BY_SOURCE = [pytest.param(example, id=example["source"]) for example in PUBLISHED]


def problems(settings: dict[str, Any], version: str | None = None) -> list[str]:
    return [str(problem) for problem in file_problems(settings, version)]


def key_paths(settings: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in settings.items():
        yield (*path, key)
        if isinstance(value, dict) and key not in ("load_balancer", "triton_config"):
            yield from key_paths(value, (*path, key))


def misspelt(settings: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The same settings with one letter of the key at ``path`` left out."""
    changed = copy.deepcopy(settings)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    name = path[-1]
    inner[name[:-3] + name[-2:]] = inner.pop(name)
    return changed


def every_field(table: tuple[Field, ...]) -> Iterator[Field]:
    for field in table:
        yield field
        yield from every_field(field.fields)


@pytest.mark.parametrize("example", BY_SOURCE)
def test_a_published_file_has_nothing_wrong_at_its_version(example: dict[str, Any]) -> None:
    assert problems(example["file"], example["version"]) == []
    assert problems(example["file"]) == []


@pytest.mark.parametrize("example", BY_SOURCE)
def test_a_misspelling_anywhere_in_a_published_file_is_found_and_corrected(example: dict[str, Any]) -> None:
    for path in key_paths(example["file"]):
        found = list(file_problems(misspelt(example["file"], path)))
        close = [problem.meant for problem in found if problem.meant]
        assert ".".join(path) in close, (path, [str(problem) for problem in found])


@pytest.mark.parametrize("kind", DECODING_TYPES)
def test_a_misspelt_decoding_type_names_the_one_that_was_meant(kind: str) -> None:
    found = list(file_problems({"speculative_config": {"decoding_type": kind + "x", "max_draft_len": 1}}))
    assert any(problem.meant == f"decoding_type: {kind}" for problem in found)


def test_every_field_names_a_document_and_every_document_its_version() -> None:
    fields = [*every_field(FILE), *(inner for kind in DECODING_TYPES.values() for inner in every_field((kind,)))]
    assert {field.source for field in fields} == set(SOURCES)
    assert all(source.where and source.version for source in SOURCES.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cuda_graph_config": {"max_batch_size": "8"}}, "should be a whole number, found '8'"),
        ({"enable_attention_dp": "no way"}, "should be true or false"),
        ({"kv_cache_config": 0.9}, "should be a section of settings"),
        ({"kv_cache_config": {"max_attention_window": [1, "a"]}}, "should be a list of whole numbers"),
        ({"moe_config": {"backend": "TRTLM"}}, "did you mean backend: TRTLLM?"),
        ({"cuda_graph_config": {"batch_sizes": [1, 2], "max_batch_size": 4}}, "the largest of batch_sizes"),
        ({"max_draft_len": 3}, "did you mean speculative_config.max_draft_len?"),
        ({"speculative_config": {"max_draft_len": 3}}, "speculative_config.decoding_type: is missing"),
        ({"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3}}, "Eagle3 needs the drafter's folder"),
        ({"speculative_config": {"decoding_type": "NGram"}}, "NGram needs how many tokens to draft"),
        ({"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "relaxed_topk": 1}}, "unknown setting"),
        ({"speculative_config": {"decoding_type": "User_Provided"}}, "given in Python, not in YAML"),
        (
            {"speculative_config": {"decoding_type": "MTP", "max_concurrency": 4, "draft_len_schedule": {1: 3}}},
            "excludes max_concurrency",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(settings: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in problems(settings)), problems(settings)


def test_a_dynamic_tree_wants_its_branches_and_a_total_that_they_can_make() -> None:
    tree = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "d", "use_dynamic_tree": True}
    assert any("dynamic_tree_max_topK" in line for line in problems({"speculative_config": tree}))
    tree |= {"dynamic_tree_max_topK": 2, "max_total_draft_tokens": 7}
    assert any("should be from 3 to 6, found 7" in line for line in problems({"speculative_config": tree}))
    assert problems({"speculative_config": tree | {"max_total_draft_tokens": 6}}) == []


@pytest.mark.parametrize(
    ("settings", "version", "said"),
    [
        (
            {"speculative_config": {"decoding_type": "DFlash", "max_draft_len": 3, "speculative_model": "d"}},
            "1.2.1",
            "1.3",
        ),
        (
            {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "d"}},
            "1.1",
            "1.2",
        ),
        ({"use_torch_sampler": True}, "1.3.0rc12", "before 1.2"),
        ({"use_cuda_graph": True}, "1.0", "before 1.0"),
        ({"sampler_type": "TorchSampler"}, "1.0.0", "since 1.1"),
    ],
)
def test_a_setting_of_another_version_is_refused_with_its_versions(
    settings: dict[str, Any], version: str, said: str
) -> None:
    assert problems(settings) == []
    assert any(said in line and version in line for line in problems(settings, version))


def test_a_file_is_read_and_all_its_problems_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable_atention_dp: true\nkv_cache_config:\n  free_gpu_memory_fracton: 0.9\n")
    with pytest.raises(ConfigError, match="2 settings are wrong") as raised:
        check_file(file)
    assert "did you mean enable_attention_dp?" in raised.value.message
    assert "did you mean kv_cache_config.free_gpu_memory_fraction?" in raised.value.message
    file.write_text("enable_attention_dp: true\n")
    assert check_file(file, "1.2.0") == {"enable_attention_dp": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "is no YAML"),
        ("- a\n- b\n", "should hold key: value lines"),
        ("", "should hold key: value lines"),
        ("enable_attention_dp: true\nenable_attention_dp: false\n", "is set twice"),
        ("backend: !!python/object/apply:os.system ['true']\n", "is no YAML"),
    ],
)
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        check_file(file)
    with pytest.raises(NotFoundError, match="does not exist"):
        check_file(tmp_path / "absent.yaml")
