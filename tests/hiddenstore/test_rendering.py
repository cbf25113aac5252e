"""Finding A18: a chat template that loops for ever ends in a named error, in the main thread and in any other."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hiddenstore.errors import FormatError
from hiddenstore.targets import rendering
from hiddenstore.targets.rendering import limited_rendering
from tests.collectors.tiny import tiny_tokenizer

LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% if a > b + 99999 %}x{% endif %}{% endfor %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.2)


def in_main(call: Callable[[], Any]) -> Any:
    return call()


def in_another(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def rendered(template: str) -> str:
    tokenizer = tiny_tokenizer()
    with limited_rendering("prompt 7", "another template"):
        return str(tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False))


@pytest.mark.parametrize("where", [in_main, in_another])
@pytest.mark.parametrize("template", [LOOP, "{% macro m() %}" + LOOP + "{% endmacro %}{{ m() }}"])
def test_an_endless_template_is_a_named_error(template: str, where: Callable[[Callable[[], Any]], Any]) -> None:
    with pytest.raises(FormatError, match="prompt 7: the chat template has not rendered") as caught:
        where(lambda: rendered(template))
    assert (caught.value.kind, caught.value.hint) == ("template-endless", "another template")


@pytest.mark.parametrize("where", [in_main, in_another])
def test_a_rendering_after_one_that_was_ended_has_its_own_time(where: Callable[[Callable[[], Any]], Any]) -> None:
    def both() -> str:
        with pytest.raises(FormatError):
            rendered(LOOP)
        assert sys.gettrace() is before
        return rendered("{{ messages[0].content }}")

    before = where(sys.gettrace)
    assert where(both) == "hi"


def test_time_spent_elsewhere_is_not_that_of_a_rendering_in_another_thread() -> None:
    go_on = threading.Event()

    def slow() -> str:
        with limited_rendering("prompt 7"):
            go_on.wait(30)
            return str(tiny_tokenizer().apply_chat_template(CHAT, tokenize=False))

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(slow)
        busy_until = time.process_time() + 0.4
        while time.process_time() < busy_until:
            pass
        go_on.set()
        assert answer.result() == "<s>hi"
