"""Answers rewritten by the target: equal to plain greedy, deterministic, looping ones dropped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from collectors.regenerate import generate, in_process
from collectors.regenerate.generate import Answer, Sampling, nucleus, prompt_batches
from collectors.regenerate.job import regenerate, take_answered
from collectors.regenerate.options import RegenerateOptions, RegenerateReport
from collectors.targets.load import LoadedTarget
from hiddenstore.errors import ConfigError, ConflictError, InterruptError, NotFoundError, StorageError
from tests.collectors.tiny import TEMPLATE, save_target, tiny_target

PROMPTS = [[1, 40, 41, 42], [1, 50], [1, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69], [1, 33, 34], [1, 70]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        [("user", "hello"), ("assistant", "x"), ("user", "and then?"), ("assistant", "y")],
        [("system", "be kind"), ("user", "a longer question about nothing"), ("assistant", "z")],
        [("system", "nothing was said")],
        [("user", "bye"), ("assistant", "w"), ("user", "unanswered")],
    ]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) for row in rows]
    path.write_text("\n".join([*lines, "not json"]) + "\n")
    return path


@pytest.fixture
def options(chats: Path, tmp_path: Path, target: Path) -> RegenerateOptions:
    return RegenerateOptions((str(chats),), tmp_path / "out.jsonl", str(target), max_new_tokens=12, seed=3)


def run(options: RegenerateOptions) -> RegenerateReport:
    return regenerate(options)


def rows(path: str | Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in Path(path).read_text().splitlines()]


def answers_of(target: LoadedTarget, prompts: list[list[int]], sampling: Sampling, name: str) -> list[Answer]:
    """In the order of the prompts."""
    return [answer for _, answer in sorted(generate.generate_batch(target, prompts, sampling, name), key=itemgetter(0))]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "granite", "qwen3-moe"])
def test_greedy_answers_equal_the_argmax_of_plain_forwards(family: str) -> None:
    target = tiny_target(family)
    answers = answers_of(target, PROMPTS, Sampling(0, 14), "t")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = list(prompt)
        for token in answer.token_ids:
            with torch.no_grad():
                assert target.model(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)
        if answer.ended:
            with torch.no_grad():
                assert target.model(torch.tensor([ids])).logits[0, -1].argmax() in target.eos_token_ids()
        else:
            assert len(answer.token_ids) == 14


@pytest.mark.parametrize("temperature", [1e-28, 1e-37, 1e-40, 5e-324])
def test_answers_at_the_smallest_temperatures_are_the_greedy_ones(temperature: float) -> None:
    target = tiny_target("llama")
    greedy = answers_of(target, PROMPTS, Sampling(0, 6), "t")
    assert answers_of(target, PROMPTS, Sampling(temperature, 6), "t") == greedy


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_read_a_few_rows_at_a_time_get_the_answers_that_they_get_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = tiny_target(family), sorted(PROMPTS, key=len, reverse=True)
    alone = [answers_of(target, [prompt], Sampling(0, 14), "t")[0] for prompt in prompts]
    for tokens in (1, 2 * len(prompts[0]), 10_000):
        monkeypatch.setitem(generate.PREFILL_TOKENS, "cpu", tokens)
        assert answers_of(target, prompts, Sampling(0, 14), "t") == alone


def test_a_part_of_a_prefill_holds_neighbours_within_the_limit_and_names_the_longest() -> None:
    parts = generate.prefill_parts([30, 9, 10, 4, 4, 4, 4, 4, 4], 20)
    found = [(rows.start, rows.stop, longest) for rows, longest in parts]
    assert found == [(0, 1, 30), (1, 3, 10), (3, 8, 4), (8, 9, 4)]


def test_the_first_sign_of_life_comes_before_all_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tiny_target("llama"), list[tuple[int, int]]()
    monkeypatch.setitem(generate.PREFILL_TOKENS, "cpu", 1)
    list(generate.generate_batch(target, PROMPTS, Sampling(0, 2), "t", lambda *counts: seen.append(counts)))
    assert seen[: len(PROMPTS)] == [(0, len(prompt)) for prompt in PROMPTS]
    assert seen[len(PROMPTS)] == (len(PROMPTS), 0)


def test_compacting_the_batch_changes_no_greedy_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    # Many end tokens make rows finish at different steps.
    monkeypatch.setattr(type(target), "eos_token_ids", lambda _self: list(range(0, 96, 9)))
    compacted = answers_of(target, PROMPTS, Sampling(0, 30), "t")
    monkeypatch.setattr(generate, "COMPACT_BELOW", 0.0)
    assert answers_of(target, PROMPTS, Sampling(0, 30), "t") == compacted
    assert len({len(answer.token_ids) for answer in compacted}) > 1


def test_sampling_follows_the_seed_and_the_name_of_the_batch() -> None:
    target = tiny_target("llama")
    first = answers_of(target, PROMPTS, Sampling(1.0, 10, seed=1), "a")
    assert answers_of(target, PROMPTS, Sampling(1.0, 10, seed=1), "a") == first
    assert answers_of(target, PROMPTS, Sampling(1.0, 10, seed=2), "a") != first
    assert answers_of(target, PROMPTS, Sampling(1.0, 10, seed=1), "b") != first


def test_samples_follow_the_targets_distribution() -> None:
    target = tiny_target("llama")
    prompt = [1, 40, 41, 42]
    drawn = answers_of(target, [prompt] * 3000, Sampling(0.8, 1, seed=1), "t")
    counts = torch.zeros(96)
    for answer in drawn:
        counts[answer.token_ids[0] if answer.token_ids else 2] += 1
    with torch.no_grad():
        expected = torch.softmax(target.model(torch.tensor([prompt])).logits[0, -1] / 0.8, -1)
    assert (counts / 3000 - expected).abs().sum() < 0.15


def test_every_answer_is_rewritten_in_order_and_problems_are_counted(options: RegenerateOptions) -> None:
    report = run(options)
    written = rows(options.out)
    assert (report.read, report.written) == (5, len(written))
    assert report.dropped["no-answer"] == report.dropped["invalid-json"] == 1
    assert [message["role"] for message in written[0]] == ["user", "assistant", "user", "assistant"]
    assert written[0][0]["content"] == "hello"
    assert written[0][1]["content"] != "x"
    assert written[-1][-1]["role"] == "assistant", "a question after the last answer is left out"


def test_a_conversation_that_the_template_refuses_is_left_out_and_counted(
    options: RegenerateOptions, tmp_path: Path
) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    (tmp_path / "strict.jinja").write_text(refusal + TEMPLATE)
    report = run(replace(options, template=str(tmp_path / "strict.jinja")))
    assert (report.written, report.dropped["refused"]) == (2, 1)
    assert report.examples["refused"] == "conversation 2: no system role here"


def test_a_conversation_that_begins_with_an_answer_says_so(options: RegenerateOptions, chats: Path) -> None:
    greeting = {"messages": [{"role": "assistant", "content": "welcome"}, {"role": "user", "content": "hi"}]}
    chats.write_text(json.dumps(greeting) + "\n" + chats.read_text())
    report = run(options)
    assert report.dropped["refused"] == 1
    assert report.examples["refused"] == "conversation 1: it begins with an answer, before which nothing was said"


def test_answers_do_not_depend_on_the_number_of_workers(options: RegenerateOptions, tmp_path: Path) -> None:
    options = replace(options, batch_size=2)
    run(options)
    run(replace(options, out=tmp_path / "two.jsonl", workers=2))
    assert (tmp_path / "two.jsonl").read_bytes() == Path(options.out).read_bytes()


def test_looping_answers_are_dropped_and_their_share_is_reported(
    options: RegenerateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(_target: object, prompts: list[list[int]], *_more: object) -> list[tuple[int, Answer]]:
        return [(i, Answer([40, 41] * 10 if i % 2 else list(range(40, 60)), True)) for i in range(len(prompts))]

    monkeypatch.setattr(in_process, "generate_batch", answers)
    report = run(options)
    assert report.dropped["looping"] == 1
    assert report.looping_share == pytest.approx(1 / report.answers)
    assert report.written == 2


def test_a11_a_row_says_which_of_its_answers_the_limit_cut(
    options: RegenerateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(_target: object, prompts: list[list[int]], *_more: object) -> list[tuple[int, Answer]]:
        return [(row, Answer(list(range(40, 60)), ended=False)) for row in range(len(prompts))]

    monkeypatch.setattr(in_process, "generate_batch", answers)
    assert run(options).cut > 0
    answered = [message for row in rows(options.out) for message in row if message["role"] == "assistant"]
    assert {message["finish_reason"] for message in answered} == {"length"}


def test_a_question_without_an_answer_gets_one_after_every_user_turn(
    options: RegenerateOptions, tmp_path: Path
) -> None:
    asked = [{"role": "system", "content": "be kind"}, *({"role": "user", "content": f"why {i}?"} for i in range(2))]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": asked}) + "\n")
    report = run(replace(options, inputs=(str(tmp_path / "prompts.jsonl"),)))
    assert [message["role"] for message in rows(options.out)[0]] == ["system", "user", "assistant", "user", "assistant"]
    assert report.answers == 2


def test_a_system_message_opens_conversations_that_have_none(options: RegenerateOptions) -> None:
    run(replace(options, system="be brief"))
    assert [messages[0] for messages in rows(options.out)[:2]] == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "be kind"},
    ]


def folder_of_answers(options: RegenerateOptions) -> Path:
    return Path(f"{options.out}.answers")


def answers_kept(options: RegenerateOptions) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder_of_answers(options).glob("answers-*"))


def stop_after(options: RegenerateOptions, answers: int) -> None:
    with pytest.raises(InterruptError):
        regenerate(options, lambda: answers_kept(options) >= answers)


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(options: RegenerateOptions, tmp_path: Path) -> None:
    options = replace(options, batch_size=1)
    run(options)
    stopped = replace(options, out=tmp_path / "stopped.jsonl")
    for answers in (0, 1):
        stop_after(stopped, answers)
        assert not Path(stopped.out).exists()
    assert run(stopped).resumed > 0
    assert Path(stopped.out).read_bytes() == Path(options.out).read_bytes()
    assert not folder_of_answers(stopped).exists()


def test_greedy_answers_that_ended_are_those_of_a_larger_limit_and_stay(
    options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many end tokens make some answers end within the smaller limit.
    monkeypatch.setattr(LoadedTarget, "eos_token_ids", lambda _self: list(range(0, 96, 6)))
    options = replace(options, temperature=0.0, max_new_tokens=40)
    run(options)
    stopped = replace(options, out=tmp_path / "stopped.jsonl", max_new_tokens=6)
    stop_after(stopped, 3)
    kept = (folder_of_answers(stopped) / "answers-1-of-1.jsonl").read_text().splitlines()
    cut = {json.loads(line)["row"] for line in kept if "is_cut" in json.loads(line)}
    assert 0 < len(cut) < len({json.loads(line)["row"] for line in kept})
    assert 0 < run(replace(stopped, max_new_tokens=40)).resumed < len(kept)
    assert Path(stopped.out).read_bytes() == Path(options.out).read_bytes()
    sampled = replace(stopped, out=tmp_path / "sampled.jsonl", temperature=0.8)
    stop_after(sampled, 1)
    with pytest.raises(ConflictError, match="max_new_tokens"):
        run(replace(sampled, max_new_tokens=40))


def test_a_line_that_a_kill_cut_in_two_is_answered_again(options: RegenerateOptions, tmp_path: Path) -> None:
    options = replace(options, batch_size=1)
    run(options)
    cut = replace(options, out=tmp_path / "cut.jsonl")
    stop_after(cut, 2)
    file = folder_of_answers(cut) / "answers-1-of-1.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    assert run(cut).resumed == whole.count(b"\n") - 1
    assert Path(cut.out).read_bytes() == Path(options.out).read_bytes()


def test_an_answer_is_kept_while_others_of_its_batch_go_on(
    options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many end tokens make the rows of the one batch end at different steps.
    monkeypatch.setattr(LoadedTarget, "eos_token_ids", lambda _self: list(range(0, 96, 6)))
    options = replace(options, max_new_tokens=40)
    run(options)
    stopped = replace(options, out=tmp_path / "stopped.jsonl")
    stop_after(stopped, 1)
    assert 0 < answers_kept(stopped) < 3
    kept = answers_kept(stopped)
    assert run(stopped).resumed == kept
    assert Path(stopped.out).read_bytes() == Path(options.out).read_bytes()


def test_tokens_a_second_do_not_count_what_loading_the_target_takes(
    options: RegenerateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading_s, load = 1.5, in_process.load_target

    def slowly(*words: Any) -> LoadedTarget:
        time.sleep(loading_s)
        return load(*words)

    monkeypatch.setattr(in_process, "load_target", slowly)
    report = run(options)
    assert report.new_tokens / report.tokens_per_s <= report.seconds - loading_s


def test_what_was_answered_can_be_taken_while_the_rest_waits(options: RegenerateOptions, tmp_path: Path) -> None:
    options = replace(options, batch_size=1)
    with pytest.raises(NotFoundError, match="holds no answers"):
        take_answered(options, tmp_path / "so-far.jsonl")
    stop_after(options, 3)
    report = take_answered(options, tmp_path / "so-far.jsonl")
    assert 0 < report.written == len(rows(tmp_path / "so-far.jsonl"))
    assert report.dropped["not-answered"] > 0
    run(options)
    assert set(Path(options.out).read_text().splitlines()) > set((tmp_path / "so-far.jsonl").read_text().splitlines())


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_workers_end_with_the_process_that_was_killed(options: RegenerateOptions, chats: Path) -> None:
    chats.write_text(chats.read_text().splitlines()[0] + "\n" + chats.read_text() * 60)
    words = ["regenerate", str(chats), "-o", str(options.out), "--target", str(options.target), "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "hiddenstore", *words, "--max-new-tokens", "64", "-q"])
    wait_for(lambda: answers_kept(options) > 0)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, workers)))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_worker_that_is_killed_ends_the_run_and_keeps_the_answers(options: RegenerateOptions, chats: Path) -> None:
    chats.write_text(chats.read_text() * 60)

    def kill_a_worker() -> bool:
        if answers_kept(options):
            for child in children_of(os.getpid()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                        os.kill(child, signal.SIGKILL)
        return False

    with pytest.raises(StorageError) as caught:
        regenerate(replace(options, workers=2, max_new_tokens=64), kill_a_worker)
    assert caught.value.kind == "worker-died"
    assert answers_kept(options) > 0


_LEAVES_A_POOL = """
import sys, time
from collectors.regenerate.generate import Sampling
from collectors.regenerate.in_process import WorkerPool
from collectors.regenerate.options import RegenerateOptions

with WorkerPool(RegenerateOptions(("unread",), "unwritten", sys.argv[1]), 1) as pool:
    for _, _, answer in pool.answer(Sampling(0.8, 40), [([[5, 6, 7]] * 800, "a batch")], lambda _drawn, _read: None):
        if not answer.ended:
            time.sleep(1)  # by now the worker holds more of them than a pipe takes
            break
"""


def test_workers_end_although_nobody_takes_the_answers_that_they_hold(target: Path) -> None:
    left = subprocess.run([sys.executable, "-c", _LEAVES_A_POOL, str(target)], timeout=90, check=False)
    assert left.returncode == 0


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"temperature": 0.1}, "answers-differ"), ({"inputs": "chats.jsonl"}, "answers-differ")],
)
def test_other_settings_or_inputs_never_join_a_run(
    options: RegenerateOptions, change: dict[str, object], kind: str, tmp_path: Path
) -> None:
    options = replace(options, batch_size=1)
    stop_after(options, 2)
    if "inputs" in change:
        other = tmp_path / "other" / "chats.jsonl"
        other.parent.mkdir()
        row = {"messages": [{"role": "user", "content": "else"}, {"role": "assistant", "content": "x"}]}
        other.write_text(f"{json.dumps(row)}\n" * 4)
        change = {"inputs": (str(other),)}
    with pytest.raises(ConflictError) as caught:
        run(replace(options, **change))  # type: ignore[arg-type]
    assert caught.value.kind == kind


def test_shards_write_the_output_once_the_last_is_done(options: RegenerateOptions, tmp_path: Path) -> None:
    options = replace(options, temperature=0.0)
    run(options)
    parts = replace(options, out=tmp_path / "parts.jsonl")
    first = run(replace(parts, shard=(2, 2)))
    assert first.waiting == [1]
    assert not Path(parts.out).exists()
    last = run(replace(parts, shard=(1, 2)))
    assert not last.waiting
    assert Path(parts.out).read_bytes() == Path(options.out).read_bytes()


def test_the_nucleus_is_the_smallest_set_that_holds_the_share() -> None:
    chances = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]])
    for top_p in (0.3, 0.5, 0.7, 0.76, 0.95):
        for row, kept in zip(chances.tolist(), nucleus(chances, top_p).tolist(), strict=True):
            ranked = sorted(range(4), key=lambda i: -row[i])
            count = next(n for n in range(1, 5) if sum(row[i] for i in ranked[:n]) >= top_p - 1e-6)
            assert [i for i in range(4) if kept[i] > 0] == sorted(ranked[:count])


@pytest.mark.parametrize("width", [0.1, 2.0, 8.0])
def test_the_nucleus_of_a_large_vocabulary_is_the_smallest_set_however_wide_it_is(width: float) -> None:
    chances = torch.softmax(width * torch.randn(3, 9000, dtype=torch.float64), -1)
    for row, kept in zip(chances, nucleus(chances, 0.9), strict=True):
        least = row[kept > 0].min()
        assert torch.equal(kept, row.masked_fill(row < least, 0.0))
        assert kept.sum() - least < 0.9 <= kept.sum()


def test_max_samples_limits_the_conversations(options: RegenerateOptions) -> None:
    assert run(replace(options, max_samples=1)).written <= 1


def test_an_existing_output_is_never_replaced(options: RegenerateOptions) -> None:
    Path(options.out).write_text("mine")
    with pytest.raises(ConflictError) as caught:
        run(options)
    assert caught.value.kind == "output-exists"
    assert Path(options.out).read_text() == "mine"


def test_input_without_any_answer_is_an_error(options: RegenerateOptions, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "system", "content": "hi"}]}\n')
    with pytest.raises(ConfigError) as caught:
        run(replace(options, inputs=(str(tmp_path / "none.jsonl"),)))
    assert caught.value.kind == "nothing-usable"
    assert not Path(options.out).exists()
    assert not folder_of_answers(options).exists()


def test_batches_hold_prompts_of_similar_length() -> None:
    assert prompt_batches([3, 9, 5, 9], 2) == [[1, 3], [2, 0]]
