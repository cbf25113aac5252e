"""Fingerprints: equal for one target however it was loaded, different for any other."""

import pytest
import torch

from hiddenstore.targets.identity import (
    chat_template_sha256,
    config_sha256,
    identity_differences,
    tokenizer_sha256,
    weights_sha256,
)
from hiddenstore.testing.builders import capture_spec


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


def test_no_template_and_an_empty_template_are_the_same():
    assert chat_template_sha256(None) == chat_template_sha256("")
    assert chat_template_sha256("{{ x }}") != chat_template_sha256("{{ y }}")


def test_identities_differ_only_in_what_decides_the_states():
    one = capture_spec().target
    assert identity_differences(one, one.model_copy(update={"name": "n", "revision": "r", "dtype": "float32"})) == []
    found = identity_differences(one, one.model_copy(update={"weights_sha256": "f" * 64, "num_layers": 9}))
    assert found == ["num_layers: 8 expected, 9 found", "weights_sha256: 44444444… expected, ffffffff… found"]
