"""Servers that `eval --serve` and `regenerate` start, and that are gone after; the engine is a Python whose server has
known numbers and answers."""

import errno
import json
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from serve_cases import write_exports
from tiny_target import save_target

from hiddenstore.cli import main
from hiddenstore.errors import HiddenstoreError, Kind, StorageError
from hiddenstore.servers import ServerProcess, VllmPython, _wait_until_up, engine_flags, running
from tests.trainer.export_cases import case
from trainer.cli.servers import ServerOptions, _served_dtype
from trainer.evaluate import rounds
from trainer.export.write import export
from trainer.serve import ENGINES
from trainer.serve.drafter import keep_draft_len, read_drafter
from trainer.serve.launch import server_of
from trainer.serve.plan import ServeOptions

PROGRAM = """#!{python}
import json, os, sys, threading, time
if sys.argv[1] == "-c":
    sys.exit({missing})
sys.path[:0] = [{tests!r}]
words = sys.argv[1:]
open({log!r}, "a").write(json.dumps([os.getpid(), words]) + "\\n")
if {broken}:
    print("ValueError: no such dtype")
    sys.exit(1)
from fake_server import FakeServer, _Handler
class Handler(_Handler):
    def do_GET(self):
        self._answer("") if self.path == "/health" else super().do_GET()
class Server(FakeServer):
    def server_bind(self):
        self.RequestHandlerClass = Handler
        self.server_address = ("127.0.0.1", int(words[words.index("--port") + 1]))
        super().server_bind()
engine, named, drafts = {flags}
target = words[words.index(named) + 1]
Server(models=(target,), accepts=(3, 0, 1, 2) if drafts in words else (), engine=engine).serve_forever()
"""


def engine(folder: Path, missing: int = 0, broken: bool = False, name: str = "engine-python") -> str:
    """A Python that 'has' an engine: the module it is told to run is a small server; or a ``llama-server``."""
    program = folder / name
    text = PROGRAM.format(
        python=sys.executable,
        missing=missing,
        broken=broken,
        tests=str(Path(__file__).parent),
        log=str(folder / "started.jsonl"),
        flags=("llamacpp", "-m", "--spec-type")
        if name == "llama-server"
        else ("vllm", "--model", "--speculative-config"),
    )
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def started(folder: Path) -> list[tuple[int, list[str]]]:
    return [tuple(json.loads(line)) for line in (folder / "started.jsonl").read_text().splitlines()]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_eval_serves_a_drafter_measures_it_beside_the_target_alone_and_ends_both(
    tmp_path: Path,
) -> None:
    exports = write_exports(tmp_path, "eagle3")
    target_folder, exported_drafter = exports["target"], exports["eagle3 for vllm"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = ["eval", "--serve", exported_drafter, "--target", target_folder, "--engine-python", engine(tmp_path)]
    words += ["--prompts", str(prompts), "--rounds", "2", "--engine-arg", "dtype=float32", "--revision", "main"]
    result = CliRunner().invoke(main, [*words, "--engine-arg", "enforce-eager=true", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["model"], found["accepted_length"]) == (target_folder, pytest.approx(2.5))
    assert (len(found["speedup_rounds"]), found["dtype"]) == (2, "float32")
    (plain, _), (drafted, with_drafter) = sorted(started(tmp_path), key=lambda one: "--speculative-config" in one[1])
    assert not is_running(plain)
    assert not is_running(drafted)
    assert with_drafter[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", target_folder]
    assert json.loads(with_drafter[with_drafter.index("--speculative-config") + 1])["model"] == exported_drafter
    assert with_drafter[with_drafter.index("--dtype") :][:5] == [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--revision",
        "main",
    ]


@pytest.mark.parametrize(
    ("own", "words", "dtype"),
    [
        ("float16", (), "float16"),
        ("bfloat16", ("dtype=auto",), "bfloat16"),
        # What vLLM makes of it is its own choice.
        ("float32", (), None),
        ("bfloat16", ("max-model-len=64", "dtype=half"), "float16"),
        ("bfloat16", ("dtype=fp8",), None),
        (None, (), None),
    ],
)
def test_the_dtype_of_a_server_started_here_is_what_it_is_given_or_the_target_s(
    tmp_path: Path, own: str | None, words: tuple[str, ...], dtype: str | None
) -> None:
    target = tmp_path / "none"
    if own is not None:
        target = Path(save_target(tmp_path / "target"))
        config = json.loads((target / "config.json").read_text()) | {"dtype": own}
        (target / "config.json").write_text(json.dumps(config))
    given = {name.name: None for name in fields(ServerOptions)}
    given |= {"engine": "vllm", "servers": (), "prompts": ("p",), "rounds": 1, "method": "ngram"}
    options = ServerOptions(**given | {"target": str(target), "engine_args": words})
    assert _served_dtype(options) == dtype
    assert _served_dtype(replace(options, engine="llamacpp")) is None
    assert _served_dtype(replace(options, servers=("u",), method=None, target=None)) is None


@pytest.fixture
def drafter_words(tmp_path: Path) -> list[str]:
    exports, prompts = write_exports(tmp_path, "eagle3"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = ["eval", "--serve", exports["eagle3 for vllm"], "--target", exports["target"], "--prompts", str(prompts)]
    return [*words, "--engine-python", engine(tmp_path)]


@pytest.mark.parametrize(("speeds", "kept"), [((100, 120, 130), 4), ((100, 120, 110), 1), ((100, 80, 90), 5)])
def test_of_several_draft_lengths_the_fastest_is_kept_where_it_pays(
    tmp_path: Path, drafter_words: list[str], monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...], kept: int
) -> None:
    real = rounds.measure_rounds

    def measured(servers: Any, *rest: Any) -> Any:
        return [
            [[replace(task, seconds=task.seconds * task.tokens_per_s / speed) for task in tasks] for tasks in all_of]
            for all_of, speed in zip(real(servers, *rest), speeds, strict=True)
        ]

    monkeypatch.setattr("trainer.cli.servers.measure_rounds", measured)
    words = [*drafter_words, "--draft-len", "1,4", "--rounds", "3"]
    result = CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    asked = [row["draft_len"] for row in found["rows"] if row["task"] == "all"]
    assert (asked, found["answers"], found["draft_len_kept"]) == ([1, 4], 12, kept != 5)
    assert found["speedup"] == pytest.approx(max(speeds[1:]) / speeds[0])
    assert ("no draft length pays on this machine: drafts of 4 give 0.90x (0.90–0.90)" in result.output) == (kept == 5)
    drafter = Path(drafter_words[2])
    commands = [words for _, words in started(tmp_path) if "--speculative-config" in words]
    drafts = [json.loads(words[words.index("--speculative-config") + 1]) for words in commands]
    assert sorted(draft["num_speculative_tokens"] for draft in drafts) == [1, 4]
    assert sorted(path.name for path in drafter.parent.glob("*.log")) == [
        f"{drafter.name}.{name}.log" for name in ("drafted-1", "drafted-4", "plain")
    ]
    assert read_drafter(drafter).draft_len == kept


@pytest.mark.parametrize(
    ("of_four", "rounds_given", "says"),
    [
        ((120.0, 120.0, 99.0, 120.0), (), "for none is above 1 in every round: drafts of 4 give 1.20x (0.99–1.20)"),
        ((120.0,), ("--rounds", "1"), "no draft length is shown to pay by fewer than 3 rounds: drafts of 4 give 1.20x"),
    ],
)
def test_a_length_that_was_slower_in_one_round_or_asked_in_too_few_is_not_shown_to_pay(
    drafter_words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    of_four: tuple[float, ...],
    rounds_given: tuple[str, ...],
    says: str,
) -> None:
    real = rounds.measure_rounds
    speeds = ([100.0] * len(of_four), [90.0] * len(of_four), of_four)

    def measured(servers: Any, *rest: Any) -> Any:
        return [
            [
                [replace(task, seconds=task.tokens / speed) for task in tasks]
                for tasks, speed in zip(all_of, of_server, strict=True)
            ]
            for all_of, of_server in zip(real(servers, *rest), speeds, strict=True)
        ]

    monkeypatch.setattr("trainer.cli.servers.measure_rounds", measured)
    words = [*drafter_words, "--draft-len", "1,4", *rounds_given, "--json"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert not json.loads(result.stdout)["draft_len_kept"]
    assert says in result.stderr
    assert read_drafter(Path(drafter_words[2])).draft_len == 5


def test_draft_lengths_that_change_nothing_are_seldom_said_to_pay() -> None:
    dice, times, false = random.Random(0), 2_000, 0
    for _ in range(times):
        plain = [dice.gauss(1, 0.07) for _ in range(rounds.rounds_for(4))]
        lengths = [[dice.gauss(1, 0.07) / one for one in plain] for _ in range(4)]
        false += any(map(rounds.is_shown_to_pay, lengths))
    assert false / times < 1 / 8
    assert [rounds.rounds_for(lengths) for lengths in range(6)] == [1, 1, 4, 5, 5, 6]


def test_a_draft_length_is_kept_in_every_file_of_an_export_that_says_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "drafter")
    identity = case("eagle3").identity.model_copy(update={"name": "org/target"})
    export(replace(case("eagle3"), identity=identity), "speculators", Path(folder))
    assert keep_draft_len(folder, 2)
    about, config = (json.loads(Path(folder, name).read_text()) for name in ("hiddenstore.json", "config.json"))
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert (about["draft_len"], proposal["speculative_tokens"], read_drafter(Path(folder)).draft_len) == (2, 2, 2)
    Path(folder, "SHA256SUMS").touch()
    assert not keep_draft_len(folder, 3)
    assert read_drafter(Path(folder)).draft_len == 2
    Path(folder, "SHA256SUMS").unlink()
    Path(folder, "hiddenstore.json").unlink()
    assert not keep_draft_len(folder, 3)
    assert not keep_draft_len("org/drafter", 3)


def test_what_was_measured_is_shown_where_the_export_cannot_be_written(
    drafter_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise StorageError("the disk is read-only", kind=Kind.IO_ERROR)

    monkeypatch.setattr("trainer.serve.drafter.replace_file", refuses)
    monkeypatch.setattr("trainer.evaluate.rounds.median", lambda _: 1.5)
    monkeypatch.setattr("trainer.cli.servers.is_shown_to_pay", lambda _: True)
    result = CliRunner().invoke(main, [*drafter_words, "--draft-len", "1,4", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["speedup"], found["draft_len"], found["draft_len_kept"]) == (1.5, 1, False)
    assert "the disk is read-only" in result.stderr
    assert "nothing here keeps that: hiddenstore serve … --draft-len 1" in result.stderr


def test_draft_lengths_of_servers_are_shown_in_one_table(
    drafter_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(main, [*drafter_words, "--draft-len", "1,4"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = [line.split()[1] for line in result.output.splitlines() if line.startswith("  prompts ")]
    assert lines == ["1", "4"], result.output


def test_tasks_of_a_narrow_terminal_keep_their_names_beside_long_speed_ups(
    drafter_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "roleplay-and-extraction"
    Path(drafter_words[drafter_words.index("--prompts") + 1]).write_text(f'{{"prompt": "one", "task": "{task}"}}\n')
    monkeypatch.setenv("COLUMNS", "80")
    words = [*drafter_words, "--draft-len", "1,4", "--rounds", "2"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if task in line]
    assert [row.split()[1] for row in rows] == ["1", "4", "1", "4"], result.output
    assert max(map(len, rows)) <= 80
    assert "…" not in "".join(rows)
    assert all("x (" in row for row in rows[2:])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--serve", "d", "--target", "t", "--draft-len", "2,3x4"), "--draft-len 3x4: a server that is started here"),
        (("--engine", "vllm", "--server", "http://127.0.0.1:1", "--draft-len", "3"), "this is for --serve"),
    ],
)
def test_draft_lengths_that_no_server_would_have_are_refused(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(main, ["eval", *words, "--prompts", str(tmp_path / "p.jsonl")])
    assert (result.exit_code, says in " ".join(result.output.split())) == (2, True), result.output


def test_eval_starts_a_llama_server_of_the_path_with_a_method_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(tmp_path, name="llama-server")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    words = [
        "eval",
        "--method",
        "ngram",
        "--engine",
        "llamacpp",
        "--target",
        "target.gguf",
        "--prompts",
        "prompts.jsonl",
    ]
    result = CliRunner().invoke(main, [*words, "--engine-arg", "threads=1", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["model"], found["accepted_length"]) == ("target.gguf", pytest.approx(2.5))
    (plain, alone), (drafted, with_lookup) = sorted(started(tmp_path), key=lambda one: "--spec-type" in one[1])
    assert "--spec-type" not in alone
    assert with_lookup[with_lookup.index("--spec-type") + 1] == "ngram-simple"
    assert with_lookup[with_lookup.index("--threads") :][:2] == ["--threads", "1"]
    assert not is_running(plain)
    assert not is_running(drafted)
    assert {"ngram.plain.log", "ngram.drafted.log"} <= {path.name for path in tmp_path.iterdir()}


def test_serve_becomes_the_llama_server_of_the_path(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 1\necho "served $*"\n')
    program.chmod(0o755)
    command = [sys.executable, "-m", "hiddenstore.cli", "serve", "--method", "ngram", "--engine", "llamacpp"]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "--target", "t.gguf"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "served -m t.gguf --spec-type ngram-simple" in done.stdout


def regenerated(folder: Path, *words: str) -> Any:
    (folder / "asked.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    given = ["regenerate", str(folder / "asked.jsonl"), "-o", str(folder / "answers.jsonl"), *words]
    return CliRunner().invoke(main, [*given, "--json"], catch_exceptions=False)


def test_regenerate_has_its_target_served_for_the_time_and_keeps_the_answers(tmp_path: Path) -> None:
    words = ("--target", str(tmp_path), "--engine-python", engine(tmp_path), "--engine-arg", "dtype=bfloat16")
    result = regenerated(tmp_path, *words)
    assert result.exit_code == 0, result.output
    answers = [json.loads(line)["messages"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [[turn["content"] for turn in turns] for turns in answers] == [["one", "ONE"], ["two", "TWO"]]
    ((server, command),) = started(tmp_path)
    assert command[2:6] == ["--model", str(tmp_path), "--dtype", "bfloat16"]
    assert not is_running(server)
    (tmp_path / "started.jsonl").unlink()
    again = regenerated(tmp_path, *words)
    assert "output-exists" in again.output
    assert not (tmp_path / "started.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--server", "http://127.0.0.1:1", "--engine-python", "python"), "give '--target T'"),
        (("--target", "t", "--engine-python", "python", "--workers", "2"), "--workers has no meaning with"),
        (("--target", "t", "--engine-arg", "dtype=float32"), "'--engine-python PY' starts"),
        (("--target", "t", "--engine-python", "python", "--set", "dtype=bfloat16"), "--engine-arg dtype=bfloat16"),
        (("--target", "t", "--engine-python", "python", "--set", "adapter=a"), "--set adapter has no meaning"),
        (("--target", "t", "--engine-python", "python", "--set", "top_p=2"), "at most 1, found 2"),
        (("--target", "t", "--engine-python", "python", "--set", "top_p=0"), "top-p must be above 0"),
        (("--server", "http://127.0.0.1:1", "--set", "timeout_s=0"), "the timeout must be above 0 s"),
    ],
)
def test_options_that_no_server_started_here_would_read_are_refused(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    result = regenerated(tmp_path, *words)
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_a_server_that_ends_is_said_with_its_last_error_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "said.log"
    started = server_of(
        ENGINES["vllm"],
        VllmPython(engine(tmp_path, broken=True)),
        ServeOptions(target=str(tmp_path), method="none"),
        log,
    )
    says = "ended with exit code 1: ValueError: no such dtype"
    with pytest.raises(HiddenstoreError, match=says) as caught, running([started]):
        pytest.fail("it is not up")
    assert (caught.value.kind, caught.value.hint) == ("server-unreachable", f"less {log}")


def test_the_reason_of_a_validation_is_said_and_not_the_page_that_explains_it(tmp_path: Path) -> None:
    log = tmp_path / "said.log"
    log.write_text(
        "ValidationError: 1 validation error\n  Value error, no dspark here\n  see https://errors.host/v/value_error\n"
    )
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]) as process:
        process.wait()
    with pytest.raises(HiddenstoreError, match="exit code 1: Value error, no dspark here"):
        _wait_until_up("http://127.0.0.1:1", process, log)


def test_an_error_of_whoever_asks_a_server_is_no_error_of_its_log(tmp_path: Path) -> None:
    python, log = VllmPython(engine(tmp_path)), tmp_path / "said.log"
    server = ServerProcess(python.command("target", ()), python.environment(), log)
    with pytest.raises(OSError, match="a disk of theirs is full"), running([server]):
        raise OSError(errno.ENOSPC, "a disk of theirs is full")


@pytest.mark.parametrize("length", [8, 80])
def test_sockets_of_a_server_lie_in_a_folder_of_its_own_whose_name_leaves_them_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with tempfile.TemporaryDirectory(prefix="t" * length, dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        log = tmp_path / "said.log"
        server = ServerProcess(("sh", "-c", "echo folder=$VLLM_RPC_BASE_PATH; exit 1"), os.environ, log)
        with pytest.raises(StorageError), running([server]):
            pytest.fail("it is no server")
        expected = f"folder={temporary}/hs-" if length == 8 else "folder=\n"
        assert log.read_text().startswith(expected)
        assert os.listdir(temporary) == []


def test_a_wish_to_stop_ends_the_wait_for_a_server(tmp_path: Path) -> None:
    log = tmp_path / "said.log"
    with (
        pytest.raises(HiddenstoreError, match="before the server was up") as caught,
        running([ServerProcess((sys.executable, "-c", "import time; time.sleep(600)"), os.environ, log)], lambda: True),
    ):
        pytest.fail("it is not up")
    assert caught.value.kind == "interrupted"


def test_a_server_ends_with_the_process_that_started_it_even_by_a_kill(tmp_path: Path) -> None:
    program = f"""if True:
        import time
        from pathlib import Path
        from hiddenstore.servers import ServerProcess, running
        from hiddenstore.servers import VllmPython
        python, log = VllmPython({engine(tmp_path)!r}), Path({str(tmp_path / "said.log")!r})
        with running([ServerProcess(python.command("target", ()), python.environment(), log)]) as (url,):
            print(url, flush=True)
            time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.kill()
    ((server, _),) = started(tmp_path)
    end = time.monotonic() + 60
    while is_running(server) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(server)


def test_a_proxy_of_the_environment_and_a_garbled_answer_do_not_hide_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.servers.START_S", 20)
    monkeypatch.setattr("hiddenstore.servers._POLL_S", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    log = tmp_path / "said.log"
    log.touch()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for said in (b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            _wait_until_up(f"http://127.0.0.1:{server.getsockname()[1]}", process, log)


def test_a_server_that_ends_is_named_while_the_one_before_it_still_starts(tmp_path: Path) -> None:
    servers = [
        ServerProcess([sys.executable, "-c", code], os.environ, tmp_path / f"{name}.log")
        for name, code in (
            ("slow", "import time; time.sleep(60)"),
            ("bad", "raise SystemExit('Error: no such drafter')"),
        )
    ]
    with pytest.raises(HiddenstoreError, match=r"ended with exit code 1: Error: no such drafter"), running(servers):
        raise AssertionError("both are up")


def test_a_switch_of_an_engine_needs_no_value() -> None:
    assert engine_flags(("enforce-eager", "dtype=float32")) == ("--enforce-eager", "--dtype", "float32")


def test_a_drafter_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "one"}\n')
    words = ["eval", "--serve", "maker/drafter", "--target", str(tmp_path), "--prompts", "p.jsonl"]
    result = CliRunner().invoke(main, [*words, "--engine-python", engine(tmp_path)])
    assert "maker/drafter/config.json does not exist" in result.stderr
    assert not (tmp_path / "started.jsonl").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--trust-remote-code",),
        ("--trust-remote-code", "--revision", "main"),
        ("--engine-arg", "trust-remote-code=true"),
        ("--engine-arg", "trust_remote_code=True", "--engine-arg", "revision=main"),
    ],
)
def test_no_server_is_started_of_a_target_whose_own_python_is_of_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "one"}\n')
    beside = ["--target", "maker/target", "--engine-python", engine(tmp_path)]
    asked = ["eval", "--method", "ngram", "--prompts", "p.jsonl", *beside, *words]
    if words[0] == "--trust-remote-code":
        words = ("--set", "trust_remote_code=true", *(("--set", "revision=main") if len(words) > 1 else ()))
    for command in (asked, ["regenerate", "p.jsonl", "-o", "answers.jsonl", *beside, *words]):
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, "code-unpinned" in result.stderr) == (2, True), result.output
    assert not (tmp_path / "started.jsonl").exists()


@pytest.mark.parametrize("words", [("--trust-remote-code",), ("--engine-arg", "trust-remote-code=true")])
def test_a_drafter_s_own_python_does_not_run_because_the_target_s_may(tmp_path: Path, words: tuple[str, ...]) -> None:
    exports = write_exports(tmp_path, "eagle3")
    config = Path(exports["eagle3 for vllm"]) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}))
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n')
    asked = ["eval", "--serve", exports["eagle3 for vllm"], "--target", exports["target"]]
    asked += ["--prompts", str(tmp_path / "p.jsonl"), "--engine-python", engine(tmp_path), *words]
    result = CliRunner().invoke(main, asked)
    assert (result.exit_code, "code-unpinned" in result.stderr) == (2, True), result.output
    assert not (tmp_path / "started.jsonl").exists()


@pytest.mark.parametrize("option", [("--engine-python", "python"), ("--revision", "main"), ("--trust-remote-code",)])
def test_an_option_that_llama_server_would_not_read_is_refused(tmp_path: Path, option: tuple[str, ...]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    words = ("--engine", "llamacpp", "--target", "t.gguf", "--prompts", str(prompts))
    result = CliRunner().invoke(main, ["eval", "--method", "ngram", *words, *option])
    assert (result.exit_code, "are vLLM's" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("name", ["engine-python", "nowhere"])
def test_a_python_without_the_engine_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    engine(tmp_path, missing=1)
    with pytest.raises(HiddenstoreError, match="has no vLLM") as caught:
        VllmPython(str(tmp_path / name)).require()
    assert caught.value.kind == "not-installed"
    assert not (tmp_path / "started.jsonl").exists()


def test_an_engine_that_no_python_starts_is_named_with_the_way_to_measure_it(tmp_path: Path) -> None:
    with pytest.raises(HiddenstoreError, match="is not started here") as caught:
        server_of(ENGINES["trtllm"], VllmPython(), ServeOptions(target="t", method="none"), tmp_path / "log")
    assert "--baseline-server" in str(caught.value.hint)
