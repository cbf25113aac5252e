"""Requests that a server refuses: each costs its own row, whenever it came, and all of them the run."""

from dataclasses import replace
from pathlib import Path

import pytest
from chat_double import ChatDouble, expected, options, texts, two_turns

from collectors.regenerate.job import regenerate
from hiddenstore.errors import ConfigError, StorageError

pytestmark = pytest.mark.usefixtures("short_waits")


def test_a_request_that_is_refused_drops_its_conversation_and_is_counted(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda asked, _tries: "400" if asked["messages"][-1]["content"] == "second 1" else None
    report = regenerate(options(tmp_path, double, two_turns(3)))
    assert texts(report.out) == [expected(3)[0], expected(3)[2]]
    assert report.dropped == {"refused": 1}
    assert report.examples["refused"] == f"conversation 2: fault 400 (HTTP 400 from {double.url}/v1/chat/completions)"


def test_conversations_that_begin_with_an_answer_cost_no_request_and_end_no_run(
    tmp_path: Path, double: ChatDouble
) -> None:
    greeted = [[("assistant", f"welcome {i}"), ("user", "hi"), ("assistant", "old")] for i in range(12)]
    double.fault = lambda asked, _tries: None if asked["messages"] else "400"
    report = regenerate(options(tmp_path, double, [*greeted, *two_turns(1)], concurrency=1))
    assert texts(report.out) == expected(1)
    assert report.dropped == {"refused": 12}
    assert report.examples["refused"].endswith("it begins with an answer, before which nothing was said")
    assert all(asked["messages"] for asked in double.asked)


def test_a_setting_that_every_request_fails_on_ends_the_run(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda _asked, _tries: "400"
    with pytest.raises(ConfigError, match="every request was refused"):
        regenerate(options(tmp_path, double, two_turns(40)))
    assert len(double.asked) < 20


def test_a9_a_request_refused_before_the_first_answer_is_one_dropped_row(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda asked, _tries: "400" if asked["messages"][-1]["content"] == "first 0" else None
    report = regenerate(options(tmp_path, double, two_turns(3), concurrency=1))
    assert report.dropped == {"refused": 1}
    assert texts(report.out) == expected(3)[1:]


def test_a_request_refused_before_the_answers_that_were_kept_says_so_of_its_row(
    tmp_path: Path, double: ChatDouble
) -> None:
    double.fault = lambda asked, _tries: "500" if asked["messages"][-1]["content"] == "first 0" else None
    chosen = options(tmp_path, double, two_turns(3), concurrency=1, retries=0, max_failure_share=0.0)
    with pytest.raises(StorageError):
        regenerate(chosen)
    double.fault = lambda _asked, _tries: "400"
    report = regenerate(chosen)
    assert (report.dropped, report.resumed) == ({"refused": 1}, 4)
    assert "fault 400" in report.examples["refused"]


def test_a_shard_of_refused_conversations_alone_ends_once_another_has_answers(
    tmp_path: Path, double: ChatDouble
) -> None:
    double.fault = lambda asked, _tries: "400" if asked["messages"][-1]["content"] == "first 1" else None
    second = options(tmp_path, double, two_turns(3), shard=(2, 2))
    with pytest.raises(ConfigError, match="every request was refused"):
        regenerate(second)
    assert regenerate(replace(second, shard=(1, 2))).waiting == [2]
    report = regenerate(second)
    assert report.dropped == {"refused": 1}
    assert texts(report.out) == [expected(3)[0], expected(3)[2]]


def test_shards_that_are_refused_everything_end_in_an_error_each(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda _asked, _tries: "400"
    for shard in ((1, 2), (2, 2), (1, 2)):
        with pytest.raises(ConfigError, match="every request was refused"):
            regenerate(options(tmp_path, double, two_turns(3), shard=shard))
