"""How long an answer may be: what is cut is shown early, and a larger limit answers only that again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_double import Asked, ChatDouble, options, plain_answer, write

from collectors.regenerate.job import regenerate
from collectors.regenerate.options import RegenerateOptions
from hiddenstore.console.progress import Progress
from hiddenstore.errors import CaptureError, ConflictError, InterruptError

BUNDLED = Path(__file__).parents[2] / "collectors" / "demo" / "target"


def test_answers_that_meet_the_limit_are_shown_while_they_come_and_warned_of_early(
    tmp_path: Path, double: ChatDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    warned: list[str] = []
    monkeypatch.setattr("collectors.regenerate.job.output", lambda: SimpleNamespace(warn=warned.append))
    monkeypatch.setattr(Progress, "advance", lambda _self, _count, **fields: shown.append(fields["cut"]))
    monkeypatch.setattr("collectors.regenerate.job.LOOKED_AT", 40)
    many = [[("user", f"question {number}")] for number in range(52)]
    for every, is_warned in ((9, True), (11, False)):

        def answer(asked: Asked, every: int = every) -> Asked:
            number = int(asked["messages"][-1]["content"].split()[1])
            return {**plain_answer(asked), "finish_reason": "stop" if number % every else "length"}

        double.answer = answer
        report = regenerate(options(tmp_path, double, many, out=f"every-{every}.jsonl", concurrency=1))
        assert report.cut == len(range(0, 52, every))
        assert len(warned) == is_warned
        assert all("5 of the first 37 answers met --max-new-tokens 2048 and are cut" in line for line in warned)
        assert all(line.endswith(f"rm -r {tmp_path}/every-{every}.jsonl.answers") for line in warned)
        warned.clear()
        assert {*range(1, report.cut + 1)} <= {*shown}
    double.answer = cutting({f"question {number}" for number in range(5)})
    regenerate(options(tmp_path, double, many, out="greedy.jsonl", concurrency=1, temperature=0.0, max_new_tokens=100))
    assert "--max-new-tokens 400 say, has those alone answered anew" in warned[0]


def cutting(long: set[str]) -> Callable[[Asked], Asked]:
    """Answers to these questions take 500 tokens, all others 7."""

    def answer(asked: Asked) -> Asked:
        is_cut = asked["messages"][-1]["content"] in long and asked["max_tokens"] < 500
        said = plain_answer(asked)
        text = said["message"]["content"] + (" cut" if is_cut else "")
        return {"message": {"role": "assistant", "content": text}, "finish_reason": "length" if is_cut else "stop"}

    return answer


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8}], ids=str)
def test_under_a_larger_limit_a_stopped_run_answers_again_only_what_was_cut(
    tmp_path: Path, double: ChatDouble, more: dict[str, Any]
) -> None:
    double.answer = cutting({"first 3", "second 5"})
    straight = options(tmp_path, double, out="straight.jsonl", max_new_tokens=600, **more)
    regenerate(straight)
    chosen = options(tmp_path, double, max_new_tokens=100, concurrency=1, **more)
    before = len(double.asked)
    with pytest.raises(InterruptError):
        regenerate(chosen, lambda: len(double.asked) >= before + 20)
    kept = Path(f"{chosen.out}.answers/answers-1-of-1.jsonl").read_bytes().count(b"\n")
    before = len(double.asked)
    larger = replace(chosen, max_new_tokens=600)
    if more == {"temperature": 0.8}:
        with pytest.raises(ConflictError, match="max_new_tokens 100"):
            regenerate(larger)
        return
    report = regenerate(larger)
    # Both turns of one conversation and the second of another.
    assert (report.resumed, len(double.asked) - before) == (kept - 3, 24 - kept + 3)
    assert Path(chosen.out).read_bytes() == Path(straight.out).read_bytes()


def test_a_limit_grows_over_every_shard_and_never_shrinks(tmp_path: Path, double: ChatDouble) -> None:
    double.answer = cutting({"first 3", "second 6"})
    straight = options(tmp_path, double, out="straight.jsonl", max_new_tokens=600, temperature=0.0)
    regenerate(straight)
    chosen = options(tmp_path, double, max_new_tokens=100, temperature=0.0, shard=(2, 2))
    assert regenerate(chosen).waiting == [1]
    larger = replace(chosen, max_new_tokens=600)
    assert regenerate(replace(larger, shard=(1, 2))).waiting == [2]
    with pytest.raises(ConflictError, match="max_new_tokens 600"):
        regenerate(chosen)
    assert not Path(chosen.out).exists()
    before = len(double.asked)
    assert regenerate(larger).written == 12
    assert len(double.asked) - before == 2
    assert Path(chosen.out).read_bytes() == Path(straight.out).read_bytes()


def test_a_server_is_asked_for_longer_answers_than_this_process_where_nobody_says(
    tmp_path: Path, double: ChatDouble
) -> None:
    regenerate(options(tmp_path, double, [[("user", "hi")]]))
    assert [asked["max_tokens"] for asked in double.asked] == [2048]
    assert RegenerateOptions(("x",), "y", target="t").limit == 256


def test_prompts_that_leave_no_room_for_an_answer_ask_for_a_smaller_limit(tmp_path: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", [[("user", "hi")], [("user", "and?")]])
    chosen = RegenerateOptions((chats,), tmp_path / "out.jsonl", str(BUNDLED), max_new_tokens=1024)
    with pytest.raises(CaptureError, match=r"2 prompt-too-long; conversation 1: \d+ tokens of 1,024 leave") as caught:
        regenerate(chosen)
    folder = f"{chosen.out}.answers"
    assert str(caught.value.hint).startswith(f"rm -r {folder} ")
    assert "--max-new-tokens 512 say" in str(caught.value.hint)
