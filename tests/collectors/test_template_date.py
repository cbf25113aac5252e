"""Chat templates that write today's date, as those of Llama 3.1 and gpt-oss do."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_templates import CHATML, chat, tiny_target, tiny_tokenizer, write_rows
from transformers.utils import chat_template_utils

from collectors.tokenize.prepare import PrepareOptions, prepare
from collectors.tokenize.template import ChatTemplate, Tokenised
from hiddenstore.cli import main
from hiddenstore.conversation import Conversation
from hiddenstore.errors import ConfigError
from trainer.evaluate.prompts import prompt_ids

DATED = (
    "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}{% set day = 'never' %}"
    "{% endif %}"
    "<|im_start|>system\nToday Date: {{ day }}<|im_end|>\n" + CHATML
)


class NextYear(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "NextYear":
        return cls(2031, 3, 4)


def test_the_same_rows_are_the_same_samples_on_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path / "target", DATED)
    rows = write_rows(tmp_path / "c.jsonl", [{"messages": chat("a", "b")}])
    today = prepare([rows], tmp_path / "today", target, PrepareOptions(validation=0))
    monkeypatch.setattr(chat_template_utils, "datetime", NextYear)
    later = prepare([rows], tmp_path / "later", target, PrepareOptions(validation=0))
    assert later.digest == today.digest
    assert later.template_date == "2024-07-26"


def test_prepare_and_decode_write_the_same_date() -> None:
    tokenizer = tiny_tokenizer(DATED)
    (sample,) = ChatTemplate(tokenizer).tokenise([Conversation("f:1", chat("a", "b"))])
    assert isinstance(sample, Tokenised)
    ids = prompt_ids(tokenizer, chat("a"), "f:1", "")
    assert sample.input_ids[: len(ids)].tolist() == ids
    assert "Today Date: 26 Jul 2024<|im_end|>" in tokenizer.decode(ids)


@pytest.mark.parametrize(("template", "date"), [(DATED, "2024-07-26"), (CHATML, None)])
def test_prepare_says_which_date_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, date: str | None
) -> None:
    target = tiny_target(tmp_path / "target", template)
    rows = write_rows(tmp_path / "c.jsonl", [{"messages": chat("a", "b")}])
    with pytest.raises(SystemExit):
        main(["prepare", rows, "-o", str(tmp_path / "data"), "--target", target, "--val", "0"])
    assert ("every sample says 2024-07-26" in " ".join(capsys.readouterr().err.split())) == (date is not None)
    assert json.loads((tmp_path / "data" / "data.json").read_bytes()).get("template_date") == date


def test_a_date_that_nothing_pins_is_refused() -> None:
    for text in ("{{ strftime_now(m or '%Y') }}", "{% set now = strftime_now %}{{ now('%Y') }}"):
        with pytest.raises(ConfigError, match="change every day") as caught:
            ChatTemplate(tiny_tokenizer(text + CHATML))
        assert caught.value.kind == "template-invalid"
    assert ChatTemplate(tiny_tokenizer("{# strftime_now of today #}" + CHATML)).date is None
