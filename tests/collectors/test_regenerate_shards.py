"""Shards that end at the same time: one writes the output, whatever the others see of it."""

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_double import ChatDouble, expected, options, texts

from collectors.regenerate import job
from collectors.regenerate.answers import AnswersFolder
from collectors.regenerate.job import regenerate
from collectors.regenerate.options import RegenerateReport
from hiddenstore.errors import ConfigError


def once_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: Callable[[], object]) -> None:
    """Have the next call of a function of ``owner`` run ``step`` first."""
    real = getattr(owner, name)

    def call(*given: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        step()
        return real(*given)

    monkeypatch.setattr(owner, name, call)


def test_of_two_shards_that_have_ended_one_writes_and_the_other_says_so(
    tmp_path: Path, double: ChatDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = options(tmp_path, double, shard=(1, 2))
    second = replace(first, shard=(2, 2))
    assert regenerate(second).waiting == [1]
    others: list[RegenerateReport] = []
    once_before(monkeypatch, job, "_write", lambda: others.extend(map(regenerate, (first, second))))
    assert regenerate(first).written == 12
    assert [(other.waiting, other.written_by_another) for other in others] == [([], True)] * 2
    assert texts(first.out) == expected(12)
    assert not Path(f"{first.out}.answers").exists()


def test_on_a_filesystem_without_locks_answers_are_written_with_a_warning(
    tmp_path: Path, double: ChatDouble, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    chosen = options(tmp_path, double)
    double.fault = lambda _asked, _tries: "401"
    with pytest.raises(ConfigError, match="fault 401"):
        regenerate(chosen)
    assert Path(f"{chosen.out}.answers").exists(), "another may wait in it"
    double.fault = lambda _asked, _tries: None
    assert regenerate(chosen).written == 12
    assert texts(chosen.out) == expected(12)
    assert f"{chosen.out}.answers lies on a filesystem without locks" in capsys.readouterr().err


def test_a_shard_that_ends_when_another_has_written_waits_for_none(
    tmp_path: Path, double: ChatDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = options(tmp_path, double, shard=(1, 2))
    once_before(monkeypatch, AnswersFolder, "unfinished", lambda: regenerate(first))
    report = regenerate(replace(first, shard=(2, 2)))
    assert (report.waiting, report.written_by_another) == ([], True)
    assert texts(first.out) == expected(12)
