"""Ends of answers that the header of the next turn is, as GLM-4 has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_templates import CHATML, CHATML_TAGGED, chat, tiny_tokenizer, write_rows

from collectors.tokenize.prepare import PrepareOptions, prepare
from collectors.tokenize.template import ChatTemplate, Tokenised
from hiddenstore.conversation import Conversation
from hiddenstore.targets.folder import open_target
from schemas.manifest import ROLES

GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>\n{{ m['content'] }}"
    "{% elif m['role'] == 'system' %}<|system|>\n{{ m['content'] }}"
    "{% elif m['role'] == 'tool' %}<|observation|>\n<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% else %}<|assistant|>\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM-4.5's, without its thoughts and its list of tools."""
GLM_TAGGED = GLM.replace(
    "<|assistant|>\n{{ m['content'] }}", "<|assistant|>{% generation %}{{ '\\n' }}{{ m['content'] }}"
)
GLM_TAGGED = GLM_TAGGED.replace(
    "</tool_call>{% endfor %}{% endif %}", "</tool_call>{% endfor %}{% endgeneration %}{% endif %}"
)
NAMES = ["[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
CALL = {"type": "function", "function": {"name": "adder", "arguments": {"a": 5}}}
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "five?"},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "five"},
    {"role": "user", "content": "so?"},
]


def glm_tokenizer(template: str) -> Any:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": NAMES})
    return tokenizer


def glm_target(folder: Path, template: str = GLM) -> str:
    tokenizer = glm_tokenizer(template)
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    config = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(folder)


def sample_of(folder: Path, template: str, messages: list[dict[str, Any]], cut: frozenset[int] = frozenset()) -> Any:
    target = open_target(glm_target(folder, template))
    chat_template = ChatTemplate(target.tokenizer, end_ids=target.end_ids)
    (sample,) = chat_template.tokenise([Conversation("f:1", messages, cut=cut)])
    assert isinstance(sample, Tokenised), sample
    return target.tokenizer, sample


def supervised(tokenizer: Any, sample: Tokenised) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
    return [tokenizer.decode(sample.input_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", [GLM, GLM_TAGGED])
def test_the_header_that_ends_an_answer_of_the_target_is_learned(tmp_path: Path, template: str) -> None:
    tokenizer, sample = sample_of(tmp_path, template, WITH_TOOLS)
    assert supervised(tokenizer, sample) == [
        "\nI add.<tool_call>adder</tool_call><|observation|>",
        "\nfive<|user|>",
    ]
    spans = [(ROLES[role], tokenizer.decode(sample.input_ids[a:b].tolist())) for role, a, b in sample.spans]
    assert [words for role, words in spans if role == "assistant"] == supervised(tokenizer, sample)
    assert spans[-1] == ("user", "\nso?")
    assert not sample.is_end_unlearned
    expected = tokenizer.apply_chat_template(WITH_TOOLS, return_dict=False)
    assert sample.input_ids.tolist() == expected


@pytest.mark.parametrize("template", [GLM, GLM_TAGGED])
def test_a_last_answer_that_nothing_follows_gets_no_end_of_ours_and_is_counted(tmp_path: Path, template: str) -> None:
    messages = WITH_TOOLS[:-1]
    tokenizer, sample = sample_of(tmp_path, template, messages)
    assert supervised(tokenizer, sample)[-1] == "\nfive"
    assert sample.is_end_unlearned
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)


def test_an_answer_that_the_limit_cut_does_not_learn_the_next_header(tmp_path: Path) -> None:
    tokenizer, sample = sample_of(tmp_path, GLM, chat("a", "b", "c", "d"), cut=frozenset({1, 3}))
    assert supervised(tokenizer, sample) == ["\nb", "\nd"]
    assert not sample.is_end_unlearned


@pytest.mark.parametrize("text", [CHATML, CHATML_TAGGED])
def test_ends_inside_the_answers_are_what_they_were(text: str) -> None:
    tokenizer = tiny_tokenizer(text)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    conversation = [Conversation("f:1", chat("a", "b", "c", "d"))]
    plain, other = (ChatTemplate(tokenizer, end_ids=ids).tokenise(conversation)[0] for ids in ((), (start,)))
    assert isinstance(plain, Tokenised)
    assert isinstance(other, Tokenised)
    assert plain.loss_mask.tolist() == other.loss_mask.tolist()
    assert plain.spans.tolist() == other.spans.tolist()
    assert not plain.is_end_unlearned


def test_prepare_counts_last_answers_without_an_end(tmp_path: Path) -> None:
    rows = [{"messages": WITH_TOOLS}, {"messages": chat("a", "b")}, {"messages": chat("a", "b", "c", "d")}]
    target = glm_target(tmp_path / "target")
    document = prepare(
        [write_rows(tmp_path / "c.jsonl", rows)], tmp_path / "data", target, PrepareOptions(validation=0)
    )
    assert document.samples == 3
    assert document.ends_unlearned == 2
    plain = json.loads((tmp_path / "data" / "data.json").read_bytes())
    assert plain["ends_unlearned"] == 2


COMMAND_A = (
    "{% for m in messages %}<|START_OF_TURN|>{% if m['role'] == 'assistant' %}<|CHATBOT|>"
    "{% if m.tool_calls %}<|START_ACTION|>{{ m.tool_calls[0].function.name }}<|END_ACTION|>"
    "{% else %}<|START_RESPONSE|>{{ m['content'] }}<|END_RESPONSE|>{% endif %}"
    "{% else %}<|USER|>{{ m['content'] }}{% endif %}<|END_OF_TURN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN|><|CHATBOT|>{% endif %}"
)
"""Command A's, without its preamble: an answer ends with two special tokens, and the target writes both."""
PHI = (
    "{% for m in messages %}<|USER|>{{ m['content'] }}<|END_RESPONSE|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|USER|>{% else %}<|END_OF_TURN|>{% endif %}"
)
"""Phi-3.5's: the end of the text stands behind that of the turn."""
PARTS = (
    "START_OF_TURN",
    "END_OF_TURN",
    "CHATBOT",
    "USER",
    "START_RESPONSE",
    "END_RESPONSE",
    "START_ACTION",
    "END_ACTION",
)


def supervised_by(folder: Path, template: str, messages: list[dict[str, Any]], ends: Any) -> list[str]:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{part}|>" for part in PARTS]})
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    named = {"eos_token_id": tokenizer.convert_tokens_to_ids(ends)}
    (folder / "generation_config.json").write_text(json.dumps(named))
    target = open_target(str(folder))
    chat_template = ChatTemplate(target.tokenizer, end_ids=target.end_ids)
    (sample,) = chat_template.tokenise([Conversation("f:1", messages)])
    assert isinstance(sample, Tokenised), sample
    return supervised(target.tokenizer, sample)


def test_an_end_of_turn_behind_the_end_of_the_response_is_learned(tmp_path: Path) -> None:
    messages = [*WITH_TOOLS[:2], {"role": "user", "content": "5"}, WITH_TOOLS[3]]
    assert supervised_by(tmp_path, COMMAND_A, messages, "<|END_OF_TURN|>") == [
        "<|START_ACTION|>adder<|END_ACTION|><|END_OF_TURN|>",
        "<|START_RESPONSE|>five<|END_RESPONSE|><|END_OF_TURN|>",
    ]


@pytest.mark.parametrize("ends", ["<|END_OF_TURN|>", ["<|END_OF_TURN|>", "<|END_RESPONSE|>"]])
def test_an_end_of_the_text_behind_that_of_the_turn_is_not_learned(tmp_path: Path, ends: Any) -> None:
    assert supervised_by(tmp_path, PHI, chat("a", "b"), ends) == ["b<|END_RESPONSE|>"]
    both = chat("a", "b", "c", "d")
    assert supervised_by(tmp_path / "both", PHI, both, ends) == ["b<|END_RESPONSE|>", "d<|END_RESPONSE|>"]
