"""`eval --engine`: what a running server gets accepted, on a server whose counters are known."""

import json
import socket

import pytest
from click.testing import CliRunner
from fake_server import RECORDED, fake_server

from hiddenstore.cli import main
from hiddenstore.servers.http import HttpClient, ServerAccess
from trainer.evaluate.prompts import read_questions
from trainer.evaluate.server import SERVERS, DraftCounts, LlamacppServer, SamplingOptions, sglang_counts, vllm_counts

ACCEPTS = (3, 0, 1, 2)
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}
GSM8K = {"question": "How many clips?", "answer": "48/2 = 24 #### 24"}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def close(a, b):\n", "entry_point": "close"}


def run(words, code=0):
    result = CliRunner().invoke(main, ["eval", *words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def document(words):
    return json.loads(run([*words, "--json"]).stdout)


def error(words, code):
    return json.loads(run([*words, "--json"], code).stderr.strip().splitlines()[-1])


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [{"prompt": f"one {i}", "task": "sums"} for i in range(3)] + [{"prompt": "two", "task": "tales"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(file)


def words(engine, server, prompts, *more):
    return ["--engine", engine, "--server", server.url, "--prompts", prompts, *more]


def test_the_counters_of_a_real_vllm_are_read_with_and_without_total():
    assert vllm_counts(RECORDED) == DraftCounts(0, 0, 0, (0, 0, 0))
    moved = RECORDED.replace("spec_decode_num_drafts_total{", "spec_decode_num_drafts{")
    lines = [
        line.rpartition(" ")[0] + " 5.0" if "spec_decode_num_drafts{" in line else line for line in moved.splitlines()
    ]
    found = vllm_counts("\n".join(lines))
    assert found is not None
    assert found.drafts == 5
    assert vllm_counts("vllm:num_requests_running 1.0\n") is None


def test_counters_of_two_engines_of_one_server_are_added():
    page = "\n".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="m"}} {value}'
        for engine, factor in (("0", 1), ("1", 2))
        for name, value in (("drafts", 10 * factor), ("draft_tokens", 20 * factor), ("accepted_tokens", 6 * factor))
    )
    page += "".join(
        f'\nvllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{i}"}} {v}'
        for i, v in enumerate((4.0, 2.0))
    )
    found = vllm_counts(page)
    assert found == DraftCounts(30, 60, 18, (4, 2))
    assert found.accepted_length == pytest.approx(1.6)
    assert found.draft_len == 2


def test_sglang_s_answers_say_the_same_whatever_release_spelled_them():
    histogram = [1, 1, 1, 1]
    older = {"completion_tokens": 11, "spec_verify_ct": 4, "spec_accept_length": 2.75}
    newer = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12, "spec_correct_drafts_histogram": histogram}
    middle = {"spec_accept_token_num": 6, "spec_draft_token_num": 12, "spec_accept_histogram": histogram}
    for extra in (newer, middle):
        assert sglang_counts({**older, **extra}) == DraftCounts(4, 12, 6, (3, 2, 1))
    assert sglang_counts(older) == DraftCounts(4, 0, 6, ())
    assert sglang_counts({"completion_tokens": 11, "spec_verify_ct": 0}) is None


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_accepted_length_is_counted_by_task_and_for_all(engine, prompts):
    with fake_server(engine=engine, accepts=ACCEPTS) as server:
        found = document(words(engine, server, prompts, "--concurrency", "2"))
    assert found["schema"] == "hiddenstore.eval/1"
    assert [(row["task"], row["drafts"], row["answers"]) for row in found["rows"]] == [
        ("sums", 12, 3),
        ("tales", 4, 1),
        ("all", 16, 4),
    ]
    for row in (*found["rows"], found):
        assert row["accepted_length"] == pytest.approx(1 + sum(ACCEPTS) / len(ACCEPTS))
        assert row["per_position"] == ([] if engine == "trtllm" else [0.75, 0.5, 0.25])
        assert row["draft_len"] == 3
    assert found["rows"][-1]["answer_tokens"] == 4 * 11
    assert not any(row["others_were_served"] for row in found["rows"])


def test_the_baseline_gives_a_speed_up_and_says_whether_answers_stayed_the_same(prompts, tmp_path):
    with fake_server(accepts=ACCEPTS) as server, fake_server() as plain:
        more = ("--baseline-server", plain.url, "--markdown", str(tmp_path / "table.md"))
        found = document(words("vllm", server, prompts, *more))
        shown = run(words("vllm", server, prompts, *more)).stdout
    for row in found["rows"]:
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["baseline_tokens_per_s"])
        assert row["same_as_baseline"] == row["answers"]
    assert "speed-up" in shown
    table = (tmp_path / "table.md").read_text().splitlines()
    assert table[2].count("|") == table[4].count("|") == 9
    assert table[4].startswith("| sums | 3 | 2.50 | 0.75 0.50 0.25 |")


def test_a_key_comes_from_the_environment_and_is_never_shown(prompts, monkeypatch):
    monkeypatch.setenv("RIGHT_KEY", "right-key")
    monkeypatch.setenv("WRONG_KEY", "wrong-key")
    with fake_server(accepts=ACCEPTS, key="right-key") as server:
        found = document(words("vllm", server, prompts, "--api-key-env", "RIGHT_KEY"))
        refused = error(words("vllm", server, prompts, "--api-key-env", "WRONG_KEY"), 2)
        unset = error(words("vllm", server, prompts, "--api-key-env", "NO_SUCH_KEY"), 2)
    assert found["rows"][-1]["answer_tokens"] == 4 * 11
    assert "right-key" not in json.dumps(found)
    assert (refused["kind"], unset["kind"]) == ("server-refused", "api-key-missing")
    assert refused["message"] == f"not a key: Bearer … (HTTP 401 from {server.url}/v1/models)"


def test_servers_of_other_draft_lengths_stand_below_each_other(prompts):
    with fake_server(accepts=ACCEPTS) as one, fake_server(accepts=(0, 0)) as other:
        found = document(words("vllm", one, prompts, "--server", other.url, "-n", "1"))
        shown = run(words("vllm", one, prompts, "--server", other.url)).stdout
    lengths = {(row["server"], row["task"]): row["accepted_length"] for row in found["rows"]}
    assert lengths[one.url, "all"] == 2.5
    assert lengths[other.url, "all"] == 1.0
    assert {row["answers"] for row in found["rows"] if row["task"] == "sums"} == {1}
    assert one.url in shown
    assert other.url in shown


def test_a_benchmark_s_own_files_are_read_and_second_turns_follow_the_first_answer(tmp_path):
    for name, row in (("mt", MT_BENCH), ("gsm8k", GSM8K), ("humaneval", HUMANEVAL)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("mt", "gsm8k", "humaneval")]
    found = read_questions(files, [])
    assert [question.task for question in found] == ["writing", "gsm8k", "humaneval"]
    assert found[1].history[-1]["content"] == GSM8K["question"]
    with fake_server(accepts=ACCEPTS) as server:
        answered = document(words("vllm", server, files[0]))
        spoken = [body["messages"] for _, body in server.asked[1:]]
    assert answered["answers"] == 2
    assert [message["content"] for message in spoken[1]] == ["Write a post.", "WRITE A POST.", "Rewrite it."]


def test_rows_that_ask_nothing_are_counted_and_named(prompts, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "fine"}\n{\n3\n\n{"messages": []}\n[{"role": "assistant", "content": "x"}]\n')
    with fake_server(accepts=ACCEPTS) as server:
        shown = run(words("vllm", server, str(file), "--json"))
    assert json.loads(shown.stdout)["prompts_unusable"] == 4
    said = " ".join(shown.stderr.split())
    assert "4 rows hold no prompt, left out" in said
    assert all(f"rows.jsonl:{number}: " in said for number in (2, 3, 5))
    assert "and 1 more" in said


def test_questions_that_are_not_there_are_missed_before_a_server_starts(tmp_path):
    words = ["--serve", str(tmp_path), "--target", str(tmp_path), "--prompts", str(tmp_path / "none.jsonl")]
    said = run(words, 2).stderr
    assert "none.jsonl" in said
    assert "starting" not in said


def test_an_answer_recorded_with_the_question_is_not_shown_to_the_server(tmp_path):
    file = tmp_path / "chats.jsonl"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    file.write_text(json.dumps({"conversations": turns}) + "\n")
    (question,) = read_questions([str(file)], [])
    assert question.history == ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})


def test_with_a_tokenizer_token_ids_are_sent_to_the_engine_s_own_endpoint(prompts, tmp_path):
    from tiny_target import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    for engine, path, key in (("sglang", "/generate", "input_ids"), ("vllm", "/v1/completions", "prompt")):
        with fake_server(engine=engine, accepts=ACCEPTS) as server:
            document(words(engine, server, prompts, "--target", str(tmp_path / "target")))
            where, body = server.asked[-1]
        messages = [{"role": "user", "content": "two"}]
        assert where == path
        assert body[key] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert body.get("sampling_params", body)["repetition_penalty"] == 1


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vllm", {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}),
        ("sglang", {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}),
        ("trtllm", {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}),
        ("llamacpp", {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}),
        ("http", {"presence_penalty": 0, "frequency_penalty": 0}),
    ],
)
def test_no_penalty_that_a_model_ships_changes_a_measured_answer(engine, said, prompts):
    with fake_server(engine=engine, accepts=ACCEPTS) as server:
        document(words(engine, server, prompts))
    for _, body in server.asked:
        assert {name: value for name, value in body.items() if name.endswith("_penalty")} == said


@pytest.mark.parametrize(
    ("template", "code", "kind"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", 4, "template-endless"),
        ("{{ raise_exception('no') }}", 2, "template-invalid"),
    ],
)
def test_a18_a_template_that_never_ends_or_refuses_is_a_named_error_although_other_threads_render(
    prompts, tmp_path, monkeypatch, template, code, kind
):
    from tiny_target import make_tokenizer

    monkeypatch.setattr("hiddenstore.targets.rendering.RENDER_S", 0.2)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    with fake_server(engine="vllm", accepts=ACCEPTS) as server:
        more = ("--target", str(tmp_path / "target"), "--concurrency", "2")
        failure = error(words("vllm", server, prompts, *more), code)
    assert failure["kind"] == kind
    assert "--target" in failure["fix"]


def test_a_server_that_does_not_draft_is_refused_with_the_command_that_makes_one(prompts):
    with fake_server() as server:
        found = error(words("vllm", server, prompts), 2)
        assert (found["kind"], server.asked) == ("no-speculation", [])
        assert "hiddenstore serve" in found["fix"]
        plain = run(words("http", server, prompts))
        assert "speed only" in plain.stderr
    for engine, fix in (("sglang", "--engine sglang"), ("trtllm", "enable_iter_perf_stats=true")):
        with fake_server(engine=engine) as server:
            found = error(words(engine, server, prompts), 2)
            assert found["kind"] == "no-speculation"
            assert fix in found["fix"]


def test_iterations_that_tensorrt_llm_dropped_before_they_were_read_are_noticed(prompts):
    with fake_server(engine="trtllm", accepts=ACCEPTS) as server:
        server.kept_iterations = 2
        found = error(words("trtllm", server, prompts), 4)
        assert found["kind"] == "server-answer"
        assert "iter_stats_max_iterations" in found["fix"]


def test_another_model_several_models_and_another_baseline_are_refused(prompts):
    with fake_server(models=("a",)) as one, fake_server(models=("b", "c")) as two:
        assert "serves a, not z" in error(words("http", one, prompts, "--model", "z"), 2)["message"]
        assert "several models" in error(words("http", two, prompts), 2)["message"]
        more = ("--baseline-server", one.url)
        with fake_server(accepts=ACCEPTS) as server:
            found = error(words("vllm", server, prompts, *more), 2)
    assert found["kind"] == "server-unfit"


def test_a_server_that_is_not_there_and_one_that_refuses_are_said_so(prompts, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    found = error(["--engine", "vllm", "--server", gone, "--prompts", prompts], 5)
    assert found["kind"] == "server-unreachable"
    assert gone in found["message"]
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "too long"}\n')
    with fake_server(accepts=ACCEPTS) as server:
        found = error(words("vllm", server, str(long)), 2)
    assert found["message"].startswith("the prompt is longer than the context (HTTP 400 from ")


def test_bad_words_are_usage_errors(prompts, tmp_path):
    assert "--prompts" in error(["--engine", "vllm", "--server", "http://127.0.0.1:1"], 2)["message"]
    assert "http://HOST:PORT" in error(["--engine", "vllm", "--server", "ftp://x", "--prompts", prompts], 2)["message"]
    assert "leave RUN, STORE and --cache out" in error([str(tmp_path), "--engine", "vllm"], 2)["message"]
    assert "RUN and STORE" in error([str(tmp_path), "--server", "http://127.0.0.1:1"], 2)["message"]


def test_drafts_for_others_meanwhile_are_noticed(prompts, monkeypatch):
    with fake_server(accepts=ACCEPTS) as server:
        monkeypatch.setattr(server, "tokens", 3)
        assert "drafted for others" in run(words("vllm", server, prompts)).stderr


def test_a_llama_server_without_metrics_without_a_drafter_or_past_six_digits_says_so(prompts):
    with fake_server(engine="llamacpp", accepts=ACCEPTS) as server:
        server.has_metrics = False
        said = error(words("llamacpp", server, prompts), 2)
        assert (said["kind"], "--metrics" in said["message"]) == ("no-speculation", True)
        assert server.asked == []
        server.has_metrics, server.counted_before = True, 2_345_678
        said = error(words("llamacpp", server, prompts), 4)
        assert (said["kind"], said["fix"]) == ("server-answer", "start llama-server anew")
    with fake_server(engine="llamacpp") as server:
        assert error(words("llamacpp", server, prompts), 2)["kind"] == "no-speculation"


def test_what_was_measured_stays_where_llama_cpp_begins_to_round_while_it_answers(prompts):
    with fake_server(engine="llamacpp", accepts=ACCEPTS) as server:
        server.counted_before = 999_960  # the warm-up and the three sums pass a million
        result = run(words("llamacpp", server, prompts, "--json"))
    found = json.loads(result.stdout)
    assert (found["accepted_length"], found["rows"][-1]["answer_tokens"]) == (None, 4 * 11)
    assert "rounded from a million on" in " ".join(result.stderr.split())


def test_a_llama_server_says_the_gaps_of_a_completion_in_the_form_of_chats():
    with fake_server(engine="llamacpp", lead=0.5) as server:
        client = HttpClient(ServerAccess(server.url))
        told = LlamacppServer(client, None, lambda messages, kwargs: [1]).retell([], SamplingOptions(4))
    assert (told.text, told.choices) == ("MADE", (("MADE", {"other": 0.5}, -0.5),))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_answers_that_are_thoughts_alone_are_compared_by_these_and_said_to_be_empty(engine, tmp_path):
    (tmp_path / "mt.jsonl").write_text(json.dumps(MT_BENCH) + "\n")
    turns = MT_BENCH["turns"]
    empty, thoughts = dict.fromkeys(turns, ""), {turn: f"They want: {turn}" for turn in turns}
    others = {**thoughts, turns[1]: "zzz"}
    with (
        fake_server(engine=engine, says=empty, thinks=thoughts) as plain,
        fake_server(engine=engine, says=empty, thinks=others, accepts=ACCEPTS) as server,
    ):
        more = ["--baseline-server", plain.url, "--json"]
        result = run(words(engine, server, str(tmp_path / "mt.jsonl"), *more))
        sent = server.asked[-1][1]["messages"][1]
    found = json.loads(result.stdout)
    assert (found["answers"], found["rows"][0]["same_as_baseline"]) == (2, 1)
    assert [(row["turn"], row["plain"], row["drafted"]) for row in found["differences"]] == [
        (1, "They want: Rewrite i", "zzz")
    ]
    assert sent == {"role": "assistant", "content": ""}
    for one in (plain, server):
        assert f"{one.url} answered with thoughts alone" in result.stderr


@pytest.mark.parametrize(("most_choices", "asked"), [(20, [20]), (5, [20, 5]), (2, [20, 5, 2])])
def test_a_server_is_asked_for_as_many_choices_as_it_allows(most_choices, asked):
    with fake_server(lead=0.5, most_choices=most_choices) as server:
        client = HttpClient(ServerAccess(server.url))
        told = SERVERS["http"](client).retell([{"role": "user", "content": "two"}], SamplingOptions(4))
        assert [body["top_logprobs"] for _, body in server.asked] == asked
    assert told.choices == (("TWO", {"other": 0.5}, -0.5),)


def test_options_that_would_be_left_unread_are_refused(prompts, tmp_path):
    with fake_server(accepts=ACCEPTS) as server:
        for more in (["--best"], ["--untrained"], ["--costs"]):
            assert more[0] in error(words("vllm", server, prompts, *more), 2)["message"]
        assert server.asked == []
    text = [str(tmp_path), str(tmp_path / "store")]
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{}")
    for more in (["--prompts", prompts], ["--rounds", "2"], ["--markdown", "m"], ["--target", "t"]):
        assert more[0] in error([*text, *more], 2)["message"]


def test_a_llama_server_without_metrics_is_a_baseline(prompts):
    with fake_server(engine="llamacpp", accepts=ACCEPTS) as server, fake_server(engine="llamacpp") as plain:
        plain.has_metrics = False
        found = document(words("llamacpp", server, prompts, "--baseline-server", plain.url))
    assert found["accepted_length"] == 2.5
    assert all(row["same_as_baseline"] == row["answers"] for row in found["rows"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_switches_beside_a_question_are_sent_with_it_alone(tmp_path, engine):
    file, off = tmp_path / "p.jsonl", {"enable_thinking": False}
    file.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "one", **off}, {"prompt": "two"})))
    with fake_server(engine=engine, accepts=ACCEPTS) as server:
        document(words(engine, server, str(file)))
        asked = {body["messages"][-1]["content"]: body for _, body in server.asked if body["max_tokens"] > 8}
    assert {text: body.get("chat_template_kwargs") for text, body in asked.items()} == {"one": off, "two": None}


TOOL = {"type": "function", "function": {"name": "look"}}
CALLED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"function": {"name": "look"}}]},
    {"role": "tool", "content": "d"},
]


@pytest.mark.parametrize(
    ("engine", "path", "member"), [("vllm", "/v1/completions", "prompt"), ("sglang", "/generate", "input_ids")]
)
def test_tools_beside_a_question_are_rendered_here_where_servers_that_are_started_render_the_rest(
    tmp_path, engine, path, member
):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"messages": CALLED, "tools": [TOOL]}) + '\n{"prompt": "two"}\n')
    questions = read_questions([str(file)], [])
    with fake_server(engine=engine, accepts=ACCEPTS) as server:
        one = SERVERS[engine](HttpClient(ServerAccess(server.url)), None, lambda *given: [len(given[0]), 7], False)
        for question in questions:
            one.ask(question.history, SamplingOptions(16, beside=question.beside))
    (rendered, with_tools), (_, plain) = server.asked
    assert (rendered, with_tools[member]) == (path, [3, 7])
    assert plain["messages"] == [{"role": "user", "content": "two"}]


def test_a_server_whose_target_is_not_known_is_not_asked_with_tools_and_as_many_others_are(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"messages": CALLED, "tools": [TOOL]}, {"messages": CALLED}, {"prompt": "two"}, {"prompt": "three"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with fake_server(engine="vllm", accepts=ACCEPTS) as server:
        found = error(words("vllm", server, str(file)), 2)
        assert (found["kind"], server.asked) == ("input-empty", [])
        assert "p.jsonl:1: tools, which the chat template of --target renders" in found["message"]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = document(words("vllm", server, str(file), "--count", "1"))
    assert (found["prompts_unusable"], found["answers"]) == (2, 1)
    assert server.asked[-1][1]["messages"] == [{"role": "user", "content": "two"}]


def test_a_prompt_that_the_target_s_template_refuses_is_left_out_before_anything_is_asked(tmp_path):
    from tiny_target import make_tokenizer

    tokenizer, file = make_tokenizer(), tmp_path / "p.jsonl"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuses + "{{ messages[-1].content }}"
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    file.write_text('{"prompt": "one"}\n{"prompt": "two", "system": "brief"}\n')
    with fake_server(engine="vllm", accepts=ACCEPTS) as server:
        result = run(words("vllm", server, str(file), "--target", str(tmp_path / "target")))
    assert "p.jsonl:2: the chat template of" in " ".join(result.stderr.split())
    assert len([body for _, body in server.asked if body["max_tokens"] > 8]) == 1
