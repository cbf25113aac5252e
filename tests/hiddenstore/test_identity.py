"""Fingerprints: equal for one target however it was loaded, different for any other."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from collectors.demo import TARGET_DIR
from hiddenstore.targets.folder import open_target
from hiddenstore.targets.identity import (
    captured_from,
    chat_template_sha256,
    config_sha256,
    identity_differences,
    target_argument,
    target_words,
    tokenizer_differences,
    tokenizer_rules_sha256,
    tokenizer_sha256,
    unstated_digests,
    weights_sha256,
)
from hiddenstore.testing.builders import capture_spec

WORDS, MERGES = ("T", "h", "Th", "q", "z", "qz"), [("T", "h"), ("q", "z")]


def make_tokenizer(words=("a", "b", "c"), merges=()):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<unk>", *words])}
    if merges:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    else:
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_weights_digest_is_that_of_the_bf16_values_whatever_the_dtype():
    embed, norm = torch.randn(7, 4), torch.randn(4)
    digest = weights_sha256(embed, norm, embed + 1)
    assert digest == weights_sha256(embed.bfloat16(), norm.bfloat16(), (embed + 1).bfloat16())
    assert digest != weights_sha256(embed, norm, None)
    assert digest != weights_sha256(embed, norm, embed)


@pytest.mark.parametrize("place", range(3))
def test_a_change_of_any_tensor_changes_the_weights_digest(place):
    tensors = [torch.randn(5, 4), torch.randn(4), torch.randn(5, 4)]
    digest = weights_sha256(*tensors)
    tensors[place].view(-1)[-1] += 1
    assert weights_sha256(*tensors) != digest


def test_config_digest_ignores_what_saving_changes_and_nothing_else():
    config = {
        "hidden_size": 4,
        "rope_parameters": {"rope_theta": 1e4},
        "transformers_version": "5.1",
        "dtype": "float32",
    }
    saved = {
        "rope_parameters": {"rope_theta": 10000.0},
        "hidden_size": 4,
        "_commit_hash": "x",
        "torch_dtype": "bfloat16",
    }
    assert config_sha256(config) == config_sha256(saved)
    assert config_sha256(config) != config_sha256(config | {"rope_parameters": {"rope_theta": 5e5}})


def test_tokenizer_digest_survives_saving_and_sees_another_vocabulary_or_rule(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_sha256(tmp_path) == tokenizer_sha256(tokenizer)
    assert tokenizer_sha256(make_tokenizer(("a", "c", "b"))) != tokenizer_sha256(tokenizer)
    words = ("T", "h", "e", "Th", "he", "The")
    first = make_tokenizer(words, [("T", "h"), ("Th", "e")])
    second = make_tokenizer(words, [("h", "e"), ("T", "he")])
    third = make_tokenizer(words, [("h", "e")])
    assert tokenizer_sha256(first) != tokenizer_sha256(third)
    assert first.get_vocab() == second.get_vocab() == third.get_vocab()


def tokenizer_json(merges=("T h", "Th e", "h e"), **more):
    words = ("T", "h", "e", "Th", "he", "The")
    document = json.loads(make_tokenizer(words, [("T", "h")]).backend_tokenizer.to_str())
    document["model"]["merges"] = list(merges)
    return document | more


def test_rules_digest_sees_a_merge_that_no_probe_needs_and_every_other_rule():
    digest = tokenizer_rules_sha256(json.dumps(tokenizer_json()))
    for other in (
        tokenizer_json(("T h", "Th e")),
        tokenizer_json(("Th e", "T h", "h e")),
        tokenizer_json(normalizer={"type": "Lowercase"}),
        tokenizer_json(pre_tokenizer={"type": "Whitespace"}),
        tokenizer_json(added_tokens=[{"id": 9, "content": "<x>", "special": True}]),
    ):
        assert tokenizer_rules_sha256(json.dumps(other)) != digest


def test_rules_digest_does_not_see_how_the_file_is_written():
    tokens = [{"id": 8, "content": "<y>", "special": True, "lstrip": False}, {"id": 9, "content": "<x>"}]
    document = tokenizer_json(added_tokens=tokens)
    digest = tokenizer_rules_sha256(json.dumps(document, indent=2))
    other = dict(reversed(tokenizer_json(("T h", ["Th", "e"], ["h", "e"])).items()))
    other |= {"version": "2.0", "truncation": {"max_length": 8}, "decoder": None}
    other["added_tokens"] = [{"content": "<x>", "id": 9}, {"special": True, "id": 8, "content": "<y>"}]
    other["model"].pop("dropout")
    assert tokenizer_rules_sha256(json.dumps(other)) == digest


def test_a_target_s_tokenizer_keeps_its_digest_when_it_is_saved_again_and_loses_it_with_one_merge(tmp_path):
    for name, merges in (("first", MERGES), ("second", MERGES), ("third", MERGES[:-1])):
        folder = tmp_path / name
        LlamaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
        make_tokenizer(WORDS, merges).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tmp_path / "second").save_pretrained(tmp_path / "second")
    first, second, third = (open_target(str(tmp_path / name)) for name in ("first", "second", "third"))
    assert first.tokenizer_rules_sha256 == second.tokenizer_rules_sha256 != third.tokenizer_rules_sha256
    assert first.tokenizer_sha256 == third.tokenizer_sha256
    assert tokenizer_differences(first, second) == []
    (line,) = tokenizer_differences(first, third)
    assert line.startswith("merges and rules of the tokenizer")


def test_no_template_and_an_empty_template_are_the_same():
    assert chat_template_sha256(None) == chat_template_sha256("")
    assert chat_template_sha256("{{ x }}") != chat_template_sha256("{{ y }}")


def test_identities_differ_only_in_what_decides_the_states():
    one = capture_spec().target
    assert identity_differences(one, one.model_copy(update={"name": "n", "revision": "r", "dtype": "float32"})) == []
    found = identity_differences(one, one.model_copy(update={"weights_sha256": "f" * 64, "num_layers": 9}))
    assert found == ["num_layers: 8 expected, 9 found", "weights_sha256: 44444444… expected, ffffffff… found"]


@pytest.mark.parametrize(
    ("name", "revision", "bare", "words"),
    [
        ("org/model", None, "org/model", ["org/model"]),
        ("gpt2", "abc", "gpt2", ["gpt2"]),
        ("folder", None, "TARGET", ["TARGET"]),
        ("folder+lora", None, "TARGET", ["TARGET", "--adapter", "DIR"]),
        ("org/model+lora", None, "TARGET", ["org/model", "--adapter", "DIR"]),
        ("gpt2+lora", "abc", "TARGET", ["gpt2", "--adapter", "DIR"]),
    ],
)
def test_no_command_is_told_a_hub_id_that_has_other_weights_or_a_path(name, revision, bare, words):
    identity = capture_spec().target.model_copy(update={"name": name, "revision": revision})
    assert target_argument(identity) == bare
    assert target_words(identity) == ["--target", *words]


def test_a_name_that_a_stranger_gave_a_target_is_quoted_where_a_command_is_told():
    identity = capture_spec().target.model_copy(update={"name": "org/a; touch pwned"})
    assert captured_from(identity) == "--target 'org/a; touch pwned': the one called 'org/a; touch pwned'"


def test_a_digest_that_one_side_does_not_state_is_no_difference_and_is_named():
    old = capture_spec().target
    one, other = (old.model_copy(update={"checkpoint_sha256": digit * 64}) for digit in "ab")
    assert identity_differences(old, one) == []
    assert unstated_digests(old, one) == ["checkpoint_sha256", "tokenizer_rules_sha256"]
    assert identity_differences(one, other) == ["checkpoint_sha256: aaaaaaaa… expected, bbbbbbbb… found"]
    assert identity_differences(one, other, same_target=True) == []


@pytest.mark.parametrize("written", ["[]", "7", "null", "{", ""])
def test_a_generation_config_that_is_no_object_names_no_end_and_stops_nobody(tmp_path, written):
    folder = tmp_path / "target"
    shutil.copytree(TARGET_DIR, folder)
    (folder / "generation_config.json").write_text(written)
    assert open_target(str(folder)).end_ids == (LlamaConfig.from_pretrained(folder).eos_token_id,)
