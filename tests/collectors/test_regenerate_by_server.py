"""Answers by a server over real sockets: faults, budgets, kills, shards, keys, tools and reasoning."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from chat_double import (
    FAULTS,
    Asked,
    ChatDouble,
    chat_double,
    expected,
    options,
    plain_answer,
    texts,
    two_turns,
    write,
)

from collectors.conversations.mix import open_sources
from collectors.regenerate.answers import AnswersFolder
from collectors.regenerate.job import regenerate
from collectors.regenerate.options import RegenerateOptions, RegenerateReport, answer_settings
from collectors.regenerate.rewrite import Reply
from collectors.regenerate.server import ChatServer, UnansweredError, _read_reply, _read_text
from hiddenstore.cli import main
from hiddenstore.conversation import Conversation, parse_row
from hiddenstore.errors import CaptureError, ConfigError, ConflictError, StorageError
from hiddenstore.servers.http import ServerAccess

KEY = "sk-1234567890"


pytestmark = pytest.mark.usefixtures("short_waits")


def run(chosen: RegenerateOptions) -> RegenerateReport:
    return regenerate(chosen)


def rows(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def messages(path: str | Path) -> list[dict[str, Any]]:
    return list(json.loads(Path(path).read_text().splitlines()[0])["messages"])


def test_each_answer_is_replaced_before_the_next_turn_is_asked(tmp_path: Path, double: ChatDouble) -> None:
    report = run(options(tmp_path, double))
    assert texts(report.out) == expected(12)
    assert (report.written, report.answers, report.tokens) == (12, 24, 24 * 7)
    assert not Path(f"{report.out}.answers").exists()


def test_the_last_answer_alone_is_written_anew_where_that_is_asked_for(tmp_path: Path, double: ChatDouble) -> None:
    report = run(options(tmp_path, double, turns="last"))
    assert texts(report.out) == [[f"first {i}", "old", f"second {i}", f"reply 3 to second {i}"] for i in range(12)]
    assert report.answers == 12
    alone = run(options(tmp_path, double, [[("user", "a"), ("user", "b")]], turns="last", out="alone.jsonl"))
    assert texts(alone.out) == [["a", "b", "reply 2 to b"]]


def test_text_is_continued_raw_and_says_where_it_was_cut(tmp_path: Path, double: ChatDouble) -> None:
    report = run(options(tmp_path, double, [[("user", "Once upon")], [("user", "x"), ("assistant", "old")]], raw=True))
    assert sorted(asked["prompt"] for asked in double.asked) == ["Once upon", "x"]
    assert "messages" not in double.asked[0]
    assert texts(report.out)[0] == ["Once upon", " goes on after 9"]
    assert messages(report.out)[1]["finish_reason"] == "length"


def test_parquet_files_hold_the_rows_and_prepare_reads_them(tmp_path: Path, double: ChatDouble) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    double.answer = lambda asked: (
        {"message": {"content": "", "tool_calls": [call]}} if asked.get("tools") else plain_answer(asked)
    )
    run(options(tmp_path, double, out="a.jsonl"))
    run(options(tmp_path, double, out="shards", rows_per_file=5))
    shards = sorted((tmp_path / "shards").iterdir())
    assert [pq.read_metadata(shard).num_rows for shard in shards] == [5, 5, 2]
    chats = tmp_path / "tools.jsonl"
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}], "tools": tools}
    chats.write_text(json.dumps(row) + "\n")
    base = options(tmp_path, double, out="t.parquet")
    run(replace(base, inputs=(str(chats),)))

    def read(*paths: Path) -> list[Any]:
        found = [parse_row(row) for source in open_sources([str(p) for p in paths]) for row in source.rows()]
        assert all(isinstance(one, Conversation) for one in found), found
        return [(one.messages, one.tools) for one in found]  # type: ignore[union-attr]

    assert read(tmp_path / "shards") == read(tmp_path / "a.jsonl")
    ((turns, named),) = read(tmp_path / "t.parquet")
    assert turns[1]["tool_calls"][0]["function"]["name"] == "f"
    assert named == tools


def test_the_choices_of_what_is_written_are_settings_of_the_command(tmp_path: Path, double: ChatDouble) -> None:
    chats = write(tmp_path / "chats.jsonl", two_turns(3))
    words = ["regenerate", chats, "-o", str(tmp_path / "parts"), "-q", "--set", "turns=last"]
    server = ["--server", double.url, "--set", "rows_per_file=2", "--set", "raw=true"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *server])
    assert ended.value.code == 0
    assert [path.name for path in sorted((tmp_path / "parts").iterdir())] == [
        "train-00000.parquet", "train-00001.parquet"
    ]  # fmt: skip
    with pytest.raises(SystemExit) as refused:
        main(["regenerate", chats, "-o", str(tmp_path / "other"), "--target", "t", "--set", "raw=true"])
    assert refused.value.code == 2


def test_the_request_says_what_was_asked_for(tmp_path: Path, double: ChatDouble) -> None:
    more = {"temperature": 0.3, "top_p": 0.9, "max_new_tokens": 11, "system": "be brief", "extra": {"top_k": 5}}
    run(options(tmp_path, double, [[("user", "hi")]], **more))
    (asked,) = double.asked
    assert asked == {
        "model": "bundled",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "temperature": 0.3,
        "top_p": 0.9,
        "max_tokens": 11,
        "top_k": 5,
    }


def test_members_of_requests_can_be_set_on_the_command_line(tmp_path: Path, double: ChatDouble) -> None:

    chats = write(tmp_path / "chats.jsonl", two_turns(1))
    extra = ["extra.chat_template_kwargs={enable_thinking: false}", "extra.stop=[a, b]", "extra.min_p=0.1", "top_p=1"]
    words = [word for setting in extra for word in ("--set", setting)]
    with pytest.raises(SystemExit) as caught:
        main(["regenerate", chats, "-o", str(tmp_path / "o.jsonl"), "--server", double.url, *words])
    assert caught.value.code == 0
    assert double.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    (row,) = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert row["chat_template_kwargs"] == {"enable_thinking": False}
    assert (double.asked[0]["stop"], double.asked[0]["min_p"]) == (["a", "b"], 0.1)
    assert double.asked[0]["top_p"] == 1


def test_a_share_that_is_not_set_is_the_servers_own_and_no_run_goes_on_with_another(
    tmp_path: Path, double: ChatDouble
) -> None:
    chosen = options(tmp_path, double, [[("user", "hi")], [("user", "ho")]], max_samples=1)
    run(chosen)
    assert "top_p" not in double.asked[0]
    assert answer_settings(chosen, "m") != answer_settings(replace(chosen, top_p=1.0), "m")


def test_the_only_model_a_server_has_needs_no_name(tmp_path: Path, double: ChatDouble) -> None:
    run(options(tmp_path, double, [[("user", "hi")]], model=None))
    assert double.asked[0]["model"] == "bundled"


@pytest.mark.parametrize(
    ("models", "hint"), [(("big", "small"), "--model big"), (("$(rm b)", "s"), "--model '$(rm b)'"), ((), None)]
)
def test_a_server_of_several_models_or_none_is_asked_nothing(
    tmp_path: Path, double: ChatDouble, models: tuple[str, ...], hint: str | None
) -> None:
    double.models = models
    with pytest.raises(ConfigError, match="which one is the target") as caught:
        run(options(tmp_path, double, [[("user", "hi")]], model=None))
    assert (caught.value.kind, caught.value.hint) == ("model-unclear", hint)
    assert double.asked == []


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "silent"])
def test_a_fault_is_tried_again_and_leaves_no_trace(tmp_path: Path, double: ChatDouble, fault: str) -> None:
    double.fault = lambda _asked, tries: fault if tries <= 2 else None
    report = run(options(tmp_path, double, two_turns(5)))
    assert texts(report.out) == expected(5)
    assert not report.dropped
    assert min(double.tries.values()) == 3
    assert max(double.answered.values()) == 1


def test_a_server_that_stays_silent_is_given_up_after_the_timeout(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda asked, tries: (
        "silent" if tries == 1 and "second" in asked["messages"][-1]["content"] else None
    )
    report = run(options(tmp_path, double, two_turns(2), timeout_s=0.3))
    assert texts(report.out) == expected(2)


def test_a_server_that_goes_on_failing_is_given_up_with_its_own_words_first() -> None:
    with chat_double() as double:
        double.fault = lambda _asked, tries: "429" if tries == 2 else "500"
        server = ChatServer(ServerAccess(double.url, tries=5), RegenerateOptions((), "out.jsonl", model="m"))
        with pytest.raises(UnansweredError, match=r"^fault 500 \(HTTP 500 from .*\) \(5 tries\)$"):
            server.reply([{"role": "user", "content": "hi"}], None, 0)
        server.close()


@pytest.mark.parametrize("status", ["401", "404"])
def test_a_wrong_key_or_model_ends_the_run_at_once(tmp_path: Path, double: ChatDouble, status: str) -> None:
    double.fault = lambda _asked, _tries: status
    chosen = options(tmp_path, double)
    with pytest.raises(ConfigError, match=rf"^fault {status} \(HTTP {status} from ") as caught:
        run(chosen)
    assert caught.value.kind == "server-refused"
    assert not Path(f"{chosen.out}.answers").exists(), "nothing was answered, so nothing is left"


def test_a_server_that_dies_spends_the_budget_and_the_same_command_goes_on(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda _asked, _tries: "500" if len(double.asked) > 10 else None
    # One at a time: an answer on its way when the budget is spent is not kept.
    chosen = options(tmp_path, double, max_failures=2, retries=1, concurrency=1)
    with pytest.raises(StorageError, match="max_failures=2") as caught:
        run(chosen)
    assert caught.value.kind == "server-failing"
    assert not Path(chosen.out).exists()
    double.fault = lambda _asked, _tries: None
    report = run(chosen)
    assert texts(report.out) == expected(12)
    assert report.resumed == 10
    assert max(double.answered.values()) == 1, "an answer that was kept is never asked for again"


def test_failures_within_the_budget_are_tried_once_more_and_then_left_out(tmp_path: Path, double: ChatDouble) -> None:
    def fault(asked: Asked, tries: int) -> str | None:
        last = asked["messages"][-1]["content"]
        return "500" if last == "first 3" or (last == "first 5" and tries <= 2) else None

    double.fault = fault
    report = run(options(tmp_path, double, max_failures=2, retries=1))
    assert texts(report.out) == [row for row in expected(12) if row[0] != "first 3"]
    assert report.dropped == {"server-failed": 1}


def test_no_more_than_the_asked_number_of_requests_run_at_a_time(tmp_path: Path, double: ChatDouble) -> None:
    together = threading.Barrier(3)
    running: list[int] = []
    most: list[int] = []

    def answer(asked: Asked) -> Asked:
        running.append(1)
        most.append(len(running))
        # Passes only while three requests are here at once.
        together.wait(timeout=30)
        running.pop()
        return plain_answer(asked)

    double.answer = answer
    run(options(tmp_path, double, [[("user", f"q {i}")] for i in range(9)], concurrency=3))
    assert max(most) == 3


@pytest.mark.parametrize(
    ("first", "then", "difference"),
    [
        ({"revision": "a"}, {"revision": "b"}, r"revision 'a'.*now 'b'"),
        ({"engine_args": ("dtype=bfloat16",)}, {"engine_args": ()}, r"engine_args \['dtype=bfloat16'\].*now None"),
    ],
)
def test_answers_of_another_revision_or_engine_are_not_mixed_in(
    first: dict[str, Any], then: dict[str, Any], difference: str, tmp_path: Path, double: ChatDouble
) -> None:
    ours = options(tmp_path, double)
    AnswersFolder(tmp_path / "out.jsonl", 1).claim(answer_settings(replace(ours, **first), "m"))
    with pytest.raises(ConflictError, match=difference):
        AnswersFolder(tmp_path / "out.jsonl", 1).claim(answer_settings(replace(ours, **then), "m"))


def test_a_killed_run_goes_on_and_nothing_is_lost_or_doubled(tmp_path: Path, double: ChatDouble) -> None:
    gate = threading.Event()

    def answer(asked: Asked) -> Asked:
        if len(double.asked) > 9 and not gate.is_set():
            gate.wait(60)
        return plain_answer(asked)

    double.answer = answer
    chosen = options(tmp_path, double)
    command = [
        *(sys.executable, "-m", "hiddenstore.cli", "regenerate", chosen.inputs[0], "-o", str(chosen.out)),
        *("--server", double.url, "--model", "bundled", "--concurrency", "4", "--max-new-tokens", "256"),
    ]
    log = Path(f"{chosen.out}.answers") / "answers-1-of-1.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (log.is_file() and log.read_bytes().count(b"\n") >= 6):
            threading.Event().wait(0.02)
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        process.send_signal(signal.SIGKILL)
    gate.set()
    kept = log.read_bytes().count(b"\n")
    done = subprocess.run([*command, "--json"], check=True, capture_output=True)
    assert texts(chosen.out) == expected(12)
    assert json.loads(done.stdout)["resumed"] == kept
    assert not log.parent.exists()


def test_shards_split_the_work_and_the_last_combines_in_input_order(tmp_path: Path, double: ChatDouble) -> None:
    with chat_double() as other:
        chosen = options(tmp_path, double)
        assert run(replace(chosen, shard=(1, 3))).waiting == [2, 3]
        assert run(replace(chosen, shard=(3, 3), server=other.url)).waiting == [2]
        assert not Path(chosen.out).exists()
        assert run(replace(chosen, shard=(2, 3))).written == 12
        assert texts(chosen.out) == expected(12)
        assert len(double.asked) + len(other.asked) == 24


@pytest.mark.parametrize("second", [1, 2])
def test_shards_that_ended_before_their_input_grew_are_waited_for(
    tmp_path: Path, double: ChatDouble, second: int
) -> None:
    assert run(options(tmp_path, double, shard=(2, 2))).waiting == [1]
    grown = options(tmp_path, double, two_turns(16), shard=(second, 2))
    assert run(grown).waiting == [3 - second]
    assert not Path(grown.out).exists()
    assert run(replace(grown, shard=(3 - second, 2))).waiting == []
    assert texts(grown.out) == expected(16)


def test_two_runs_of_one_shard_exclude_each_other(tmp_path: Path, double: ChatDouble) -> None:
    chosen = options(tmp_path, double)
    second: list[BaseException] = []

    def answer(asked: Asked) -> Asked:
        if not second:
            with pytest.raises(ConflictError) as caught:
                run(chosen)
            second.append(caught.value)
        return plain_answer(asked)

    double.answer = answer
    report = run(replace(chosen, concurrency=1))
    assert getattr(second[0], "kind", "") == "answers-running"
    # The second came before the first answer, and leaves the empty file to whom it belongs.
    assert texts(report.out) == expected(12)


def test_the_key_reaches_the_server_and_nothing_else(
    tmp_path: Path, double: ChatDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    chosen = options(tmp_path, double, max_failures=0, retries=0, api_key_env="TEST_KEY")
    double.fault = lambda asked, _tries: "500" if "second" in asked["messages"][-1]["content"] else None
    with pytest.raises(StorageError) as caught:
        run(chosen)
    assert {headers["Authorization"] for headers in double.headers} == {f"Bearer {KEY}"}
    assert KEY not in f"{caught.value!r}{chosen!r}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_a_variable_that_holds_no_key_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        run(RegenerateOptions((write(tmp_path / "a.jsonl", two_turns(1)),), "o", server="x", api_key_env="NO_SUCH_KEY"))


BAD_ANSWERS = {
    "deep": b"[" * 100_000,
    "infinite": b'{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 1e999}}',
    "long": b'{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": ' + b"9" * 4000 + b"}}",
    "surrogate": b'{"choices": [{"message": {"content": "\\ud800"}}]}',
    "call": b'{"choices": [{"message": {"tool_calls": ["add"]}}]}',
    "function": b'{"choices": [{"message": {"tool_calls": [{"function": null}]}}]}',
    "id": b'{"choices": [{"message": {"tool_calls": [{"id": 7, "function": {"name": "add"}}]}}]}',
    "calls": b'{"choices": [{"message": {"tool_calls": {"name": "add"}}}]}',
    "reasoning": b'{"choices": [{"message": {"content": "x", "reasoning": [1]}}]}',
}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_bad_answer_costs_its_own_conversation_and_no_other(tmp_path: Path, double: ChatDouble, bad: str) -> None:
    double.fault = lambda asked, _tries: BAD_ANSWERS[bad] if asked["messages"][-1]["content"] == "second 1" else None
    report = run(options(tmp_path, double, two_turns(3), retries=1))
    assert texts(report.out) == [expected(3)[0], expected(3)[2]]
    assert report.dropped == {"server-failed": 1}
    assert "is no answer" in report.examples["server-failed"]


def test_cut_looping_empty_and_reasoned_answers_are_told_apart(tmp_path: Path, double: ChatDouble) -> None:
    def answer(asked: Asked) -> Asked:
        said = asked["messages"][-1]["content"]
        found = plain_answer(asked)
        if said in ("cut", "aborted"):
            found["finish_reason"] = {"cut": "length", "aborted": "abort"}[said]
        elif said == "loop":
            found["message"]["content"] = "again and " * 20
        elif said == "empty":
            found["message"]["content"] = None
        elif said == "think":
            found["message"]["reasoning_content"] = "two and two"
        elif said == "filter":
            found["finish_reason"] = "content_filter"
        return found

    double.answer = answer
    asked = [[("user", said)] for said in ("cut", "loop", "empty", "think", "filter", "aborted")]
    report = run(options(tmp_path, double, asked))
    assert (report.cut, report.written) == (2, 3)
    assert [row["messages"][1].get("finish_reason") for row in rows(report.out)] == ["length", None, "length"]
    assert report.dropped == {"looping": 1, "empty": 1, "content-filter": 1}
    reasoned = rows(report.out)[1]["messages"][1]
    assert reasoned == {"role": "assistant", "content": "reply 1 to think", "reasoning_content": "two and two"}


CALL = {"id": "old-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def with_tools(tmp_path: Path) -> str:
    turns = [
        {"role": "user", "content": "one and one?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "old-1"},
        {"role": "assistant", "content": "two"},
    ]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": turns, "tools": TOOLS}) + "\n")
    return str(path)


@pytest.mark.parametrize("called", ["add", "multiply", None])
def test_recorded_tool_results_are_used_while_the_target_calls_the_same_tools(
    tmp_path: Path, double: ChatDouble, called: str | None
) -> None:
    call = {"id": "new-7", "type": "function", "function": {"name": called, "arguments": '{"a": 1, "b": 1}'}}

    def answer(asked: Asked) -> Asked:
        if called is None or asked["messages"][-1]["role"] == "tool":
            return plain_answer(asked)
        return {"message": {"role": "assistant", "content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}

    double.answer = answer
    report = run(replace(options(tmp_path, double), inputs=(with_tools(tmp_path),)))
    found = messages(report.out)
    assert double.asked[0]["tools"] == TOOLS
    if called == "add":
        assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
        assert found[1]["tool_calls"] == [call]
        assert found[2] == {"role": "tool", "content": "2", "tool_call_id": "new-7"}
        assert double.asked[1]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert report.short == 0
    else:
        assert [message["role"] for message in found] == ["user", "assistant"]
        assert report.short == 1


def test_the_answers_go_straight_into_prepare(tmp_path: Path, double: ChatDouble) -> None:
    from tiny_templates import tiny_target

    from collectors.tokenize.prepare import PrepareOptions, prepare

    report = run(options(tmp_path, double))
    info = prepare([report.out], tmp_path / "data", tiny_target(tmp_path / "target"), PrepareOptions(workers=1))
    assert (info.samples, info.rejects) == (12, ())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--server", "http://x", "--target", "t"), "either"),
        ((), "either"),
        (("--server", "http://x", "--workers", "2"), "--workers has no meaning with --server"),
        (("--target", "t", "--concurrency", "2"), "--concurrency has no meaning with --target"),
        (("--server", "http://x", "--shard", "3/2"), "3/2"),
        (("--server", "http://x", "--set", "topp=1"), "top_p"),
        (("--server", "http://u:p@x", "--model", "m"), "server-url"),
    ],
)
def test_wrong_words_are_usage_errors(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:

    chats = write(tmp_path / "chats.jsonl", two_turns(1))
    with pytest.raises(SystemExit) as caught:
        main(["regenerate", chats, "-o", str(tmp_path / "o.jsonl"), *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["chats.jsonl"]


def test_a11_an_answer_that_met_its_limit_carries_that_fact_into_the_mask(tmp_path: Path, double: ChatDouble) -> None:
    from tiny_templates import CHATML, tiny_target

    from collectors.tokenize.prepare import PrepareOptions, prepare
    from hiddenstore.inputs import PreparedInput

    def answer(asked: Asked) -> Asked:
        is_cut = asked["messages"][-1]["content"] == "long"
        return plain_answer(asked) | {"finish_reason": "length" if is_cut else "stop"}

    double.answer = answer
    report = run(options(tmp_path, double, [[("user", "long")], [("user", "short")]]))
    cut, ended = (json.loads(line)["messages"][-1] for line in Path(report.out).read_text().splitlines())
    assert (report.cut, cut["finish_reason"]) == (1, "length")
    assert "finish_reason" not in ended
    target = tiny_target(tmp_path / "target", CHATML)
    prepare([report.out], tmp_path / "data", target, PrepareOptions(workers=1))
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(target).decode
    samples = PreparedInput.open(tmp_path / "data").samples()
    supervised = [decode(sample.input_ids[sample.loss_mask == 1]) for sample in samples]
    assert supervised == ["reply 1 to long", "reply 1 to short<|im_end|>"]


def test_a10_a_seed_is_sent_only_where_one_was_asked_for(tmp_path: Path, double: ChatDouble) -> None:
    conversations = [[("user", "hi"), ("assistant", "old"), ("user", "again")]] * 2
    run(options(tmp_path, double, conversations, seed=0))
    assert len({asked["seed"] for asked in double.asked}) == len(double.asked) == 2
    run(options(tmp_path, double, conversations, out="other.jsonl"))
    assert not any("seed" in asked for asked in double.asked[2:])


def test_a10_a_server_that_fails_and_then_is_gone_is_named_by_its_own_words_first(tmp_path: Path) -> None:
    with chat_double() as double:
        double.fault = lambda _asked, tries: "500" if tries == 1 else "closed"
        chosen = options(tmp_path, double, two_turns(3), retries=2)
        with pytest.raises(StorageError, match=r"^fault 500 \(HTTP 500 from .*\), then no answer from ") as caught:
            run(chosen)
    assert "none was answered" in caught.value.message
    assert "kept" not in str(caught.value.hint), "there is no answer to keep"


@pytest.mark.parametrize(("fault", "kind"), [("500", "server-failing"), ("400", "server-refused")])
def test_a9_a_run_in_which_nothing_is_answered_is_an_error_and_can_be_repeated(
    tmp_path: Path, double: ChatDouble, fault: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:

    double.fault = lambda _asked, _tries: fault
    chats, out = write(tmp_path / "chats.jsonl", two_turns(4)), tmp_path / "out.jsonl"
    words = ["regenerate", chats, "-o", str(out), "--server", double.url, "--set", "retries=0"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code not in (0, None)
    assert kind in capsys.readouterr().err
    assert not out.exists()
    double.fault = lambda _asked, _tries: None
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert texts(out) == expected(4)


def test_a9_the_budget_of_failures_is_a_share_too(tmp_path: Path, double: ChatDouble) -> None:
    double.fault = lambda asked, _tries: None if asked["messages"][-1]["content"][-1] in "01" else "500"
    chosen = options(tmp_path, double, two_turns(6), retries=0)
    with pytest.raises(StorageError, match=r"max_failure_share=0\.5 of 6") as caught:
        run(chosen)
    assert "what was answered is kept" in str(caught.value.hint)
    assert not Path(chosen.out).exists()
    report = run(replace(chosen, max_failure_share=0.7))
    assert report.dropped == {"server-failed": 4}
    assert report.resumed == 4


def test_a9_a_run_whose_every_answer_is_left_out_is_an_error(tmp_path: Path, double: ChatDouble) -> None:
    double.answer = lambda _asked: {"message": {"content": ""}, "finish_reason": "stop"}
    chosen = options(tmp_path, double, two_turns(2))
    with pytest.raises(CaptureError, match="2 empty") as caught:
        run(chosen)
    assert caught.value.kind == "nothing-answered"
    assert not Path(chosen.out).exists()


@pytest.mark.parametrize(("reason", "is_cut"), [("eos", False), ("end_turn", False), ("", False), ("abort", True)])
def test_what_a_server_calls_the_end_of_an_answer_is_no_cut(reason: str, is_cut: bool) -> None:
    choice = {"message": {"content": "so it is"}, "finish_reason": reason}
    assert _read_reply({"choices": [choice]}).is_cut is is_cut


@pytest.mark.parametrize("read", [_read_reply, _read_text])
@pytest.mark.parametrize(
    ("said", "is_cut"),
    [
        ({"finish_reason": "stop", "stop_reason": "\nUser:"}, True),
        ({"finish_reason": "stop", "matched_stop": "\nUser:"}, True),
        ({"finish_reason": "stop_sequence"}, True),
        ({"finish_reason": "stop", "stop_reason": 128009}, False),
        ({"finish_reason": "stop", "matched_stop": 128009}, False),
        *(({"finish_reason": "stop", "stop_reason": said}, False) for said in (None, "", "end_turn")),
        *(({"finish_reason": "stop", "matched_stop": said}, False) for said in ("<|im_end|>", "</s>", "<end_of_turn>")),
        *(({"finish_reason": "stop", "matched_stop": said}, True) for said in ("</answer>", "<", "\n<|x|>")),
    ],
)
def test_a_stop_string_is_no_end_that_the_target_wrote(
    read: Callable[[Any], Reply], said: dict[str, Any], is_cut: bool
) -> None:
    choice = {"message": {"content": "so it is"}, "text": "so it is", **said}
    assert read({"choices": [choice]}).is_cut is is_cut
