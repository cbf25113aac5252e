"""The chat server that answers by rule, and clients that hardly wait for it."""

from collections.abc import Iterator

import pytest
from chat_double import ChatDouble, chat_double

from hiddenstore.servers import http


@pytest.fixture
def double() -> Iterator[ChatDouble]:
    with chat_double() as server:
        yield server


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.001)
