"""Which text of an answer is a thought: channels of harmony, and tags that a sentence only speaks of."""

import numpy as np
import pytest
from tiny_templates import CHATML, CHATML_TAGGED, HARMONY, MARKS, chat, tiny_tokenizer

from collectors.tokenize.template import ChatTemplate, Tokenised
from collectors.tokenize.thoughts import reasoning_ranges, stated_reasoning_ranges
from hiddenstore.conversation import Conversation
from hiddenstore.conversation.messages import Message, with_known_reasoning


def test_the_analysis_channel_of_harmony_is_thoughts() -> None:
    tokenizer = tiny_tokenizer(HARMONY)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    asked, said = chat("two?", "Four.")
    conversation = Conversation("f:1", [asked, said | {"thinking": "Two and two."}])
    template = ChatTemplate(tokenizer, "last-turn", think_loss=False)
    (sample,) = template.tokenise([conversation])
    assert isinstance(sample, Tokenised), sample
    supervised = tokenizer.decode(sample.input_ids[sample.loss_mask == 1])
    assert supervised == "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    (whole,) = ChatTemplate(tokenizer, "last-turn").tokenise([conversation])
    assert isinstance(whole, Tokenised), whole
    first = "<|channel|>analysis<|message|>Two and two.<|end|>"
    assert tokenizer.decode(whole.input_ids[whole.loss_mask == 1]) == first + supervised


def test_channels_of_harmony_that_are_no_analysis_are_not_thoughts() -> None:
    final = "<|channel|>final<|message|>Four.<|end|>"
    call = "<|channel|>commentary to=functions.adder <|constrain|>json<|message|>{}<|call|>"
    for text in (final, call):
        assert reasoning_ranges(text, [(0, len(text))]) == []
    cut = "<|channel|>analysis<|message|>Two and"
    assert reasoning_ranges(cut, [(0, len(cut))]) == [(0, len(cut))]
    two = f"<|channel|>analysis<|message|>a<|end|>{call}"
    assert reasoning_ranges(two, [(0, len(two))]) == [(0, len(two) - len(call))]


SPOKEN_OF = [
    "The <think> tag begins a thought, and more follows.",
    "Use `<think>` and `</think>` around it.",
    "It is written <think> and </think> in Qwen3.",
    'Close it with "</think>" in the end.',
    "End it with </think> and go on.",
    "**<think>** is a tag.",
    "Models have tags:\n- `<think>`\n- `</think>`\nand others.",
    "Tags:\n<think> is one.",
]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED])
@pytest.mark.parametrize("answer", SPOKEN_OF)
def test_a_tag_that_a_sentence_speaks_of_is_a_word(template: str, answer: str) -> None:
    chosen = ChatTemplate(tiny_tokenizer(template), think_loss=False)
    (sample,) = chosen.tokenise([Conversation("f:1", chat("Which tags?", answer))])
    assert isinstance(sample, Tokenised), sample
    assert chosen.tokenizer.decode(sample.input_ids[np.asarray(sample.loss_mask) == 1]) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("<think>I close it with `</think>`", "`"),
        ("<think>\nwell\n</think>\n\nWrite `<think>` first.", "\n\nWrite `<think>` first."),
        ("Yes. <think>\nhm\n</think>\nNo.", "Yes. \nNo."),
        ("a\n<think>\nb</think>c\n<think>\nd", "a\nc\n"),
        ("so, well</think>Yes.", "Yes."),
        ("so, well. </think>\nYes.", "\nYes."),
        ("<think> is a word here", ""),
        ("[THINK]hm[/THINK]Say [THINK] and [/THINK] then.", "Say [THINK] and [/THINK] then."),
    ],
)
def test_thoughts_are_still_found_beside_words_about_them(answer: str, left: str) -> None:
    kept = list(answer)
    for start, end in reasoning_ranges(answer, [(0, len(answer))]):
        kept[start:end] = [""] * (end - start)
    assert "".join(kept) == left


def test_a_thought_that_the_prompt_opened_may_speak_of_tags() -> None:
    text = "<think>\nHe means `<think>` tags.\n</think>\nYes."
    start = text.index("He")
    assert reasoning_ranges(text, [(start, len(text))]) == [(start, text.index("\nYes"))]


READS = CHATML.replace("{{ m['content'] }}", "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}{{ m['content'] }}")


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_the_name_that_it_reads(given: str, read: str) -> None:
    asked, said = chat("two?", "Four.")
    template = ChatTemplate(tiny_tokenizer(READS.replace("NAME", read)))
    (sample,) = template.tokenise([Conversation("f:1", [asked, said | {given: "Two and two."}])])
    assert isinstance(sample, Tokenised), sample
    supervised = template.tokenizer.decode(sample.input_ids[np.asarray(sample.loss_mask) == 1])
    assert supervised == "<think>Two and two.</think>Four.<|im_end|>"
    assert not sample.is_reasoning_lost


def test_reasoning_stays_as_it_is_where_the_template_reads_it_or_none() -> None:
    asked, said = chat("two?", "Four.")
    messages = [asked, said | {"reasoning": "a", "thinking": "b"}]
    both = READS.replace("NAME", "reasoning") + READS.replace("NAME", "thinking")
    for template in (both, READS.replace("NAME", "thinking"), CHATML, "{% if enable_thinking %}{% endif %}thinking"):
        assert with_known_reasoning(messages, template) == messages


SEAM = CHATML.replace(
    "{{ m['content'] }}", "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m['content'] }}"
)


@pytest.mark.parametrize(
    ("template", "thought", "words", "supervised"),
    [
        (SEAM, "So.", "Four.", "<think>\nSo.\n</think>\n\nFour."),
        (SEAM, "So.", "\n\nFour.", "<think>\nSo.\n</think>\n\nFour."),
        (SEAM, "So.\n", "\n\nFour.", "<think>\nSo.\n</think>\n\nFour."),
        (SEAM, "So.\n", "Four.", "<think>\nSo.\n</think>\n\nFour."),
        (SEAM, "So.\n\n", "\n\n\tFour.", "<think>\nSo.\n\n</think>\n\n\tFour."),
        (SEAM, "So.", "    four()", "<think>\nSo.\n</think>\n\n    four()"),
        (READS.replace("NAME", "reasoning"), "So.\n", "\n\nFour.", "<think>So.\n</think>\n\nFour."),
        (CHATML, "So.\n", "\n\nFour.", "\n\nFour."),
    ],
)
def test_white_space_that_a_parser_left_beside_the_end_of_a_thought_is_not_written_twice(
    template: str, thought: str, words: str, supervised: str
) -> None:
    """The second pair is what vLLM 0.32 makes of ``So.\\n</think>\\n\\nFour.`` by its parser ``minimax_m2``."""
    chosen = ChatTemplate(tiny_tokenizer(template))
    asked, said = chat("two?", words)
    for cut, end in ((frozenset[int](), "<|im_end|>"), (frozenset({1}), "")):
        conversation = Conversation("f:1", [asked, said | {"reasoning_content": thought}], cut=cut)
        (sample,) = chosen.tokenise([conversation])
        assert isinstance(sample, Tokenised), sample
        assert chosen.tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == f"{supervised}{end}"


def test_what_stands_beside_a_thought_follows_what_the_row_gives_its_template() -> None:
    only_then = SEAM.replace("m.reasoning %}", "m.reasoning and enable_thinking %}")
    chosen = ChatTemplate(tiny_tokenizer(only_then))
    asked, said = chat("two?", "\n\nFour.")
    for is_on, supervised in ((True, "<think>\nSo.\n</think>\n\nFour."), (False, "\n\nFour.")):
        kwargs = {"enable_thinking": is_on}
        conversation = Conversation("f:1", [asked, said | {"reasoning": "So."}], template_kwargs=kwargs)
        (sample,) = chosen.tokenise([conversation])
        assert isinstance(sample, Tokenised), sample
        assert chosen.tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == f"{supervised}<|im_end|>"


AT_FOUR = [{"function": {"arguments": {"at": "4."}}}]
OWN_TAGS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<own>{{ m.reasoning_content | trim }}"
    "</own>\n{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.at }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({"reasoning_content": " 2 and 2.\n", "content": "Four."}, "Four.<|im_end|>"),
        ({"reasoning_content": "Four.", "content": "Four."}, "Four.<|im_end|>"),
        (
            {"reasoning_content": "x", "content": "", "tool_calls": [{"function": {"arguments": {"at": "y"}}}]},
            "</own>\ny<|im_end|>",
        ),
        ({"content": "Four."}, "Four.<|im_end|>"),
        ({"reasoning_content": "So 4.", "content": "4.", "tool_calls": AT_FOUR}, "4.4.<|im_end|>"),
    ],
)
def test_thoughts_in_a_member_of_their_own_are_found_between_tags_that_nobody_knows(said: Message, left: str) -> None:
    tokenizer = tiny_tokenizer(OWN_TAGS)
    messages = [{"role": "user", "content": "two?"}, {"role": "assistant", **said}]
    (sample,) = ChatTemplate(tokenizer, think_loss=False).tokenise([Conversation("f:1", messages)])
    assert isinstance(sample, Tokenised), sample
    assert tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == left


def test_thoughts_that_the_template_leaves_out_take_no_word_of_the_answer_with_them() -> None:
    for said in ({"content": "Four it is."}, {"content": "", "tool_calls": [{"function": {"arguments": "Four"}}]}):
        messages = [{"role": "assistant", "reasoning_content": "Four", **said}]
        text = f"<a>{said['content']}{said.get('tool_calls', '')}</a>"
        assert stated_reasoning_ranges(messages, text, {0: (3, len(text))}, []) == []
