"""`eval --rounds`: two servers asked in turn, and where their answers part."""

import json

import pytest
from click.testing import CliRunner
from fake_server import fake_server
from tiny_target import save_target

from hiddenstore.cli import main
from trainer.evaluate.acceptance import tie_gap
from trainer.evaluate.prompts import Question
from trainer.evaluate.rounds import _parting, departures, parted
from trainer.evaluate.server import Choice, Completion, SamplingOptions, TaskResult

ACCEPTS = (3, 0, 1, 2)
QUESTION = "which word is next of these"


def evaluate(*words, code=0):
    result = CliRunner().invoke(main, ["eval", "--engine", "vllm", *words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def document(*words):
    return json.loads(evaluate(*words, "--json").stdout)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [{"prompt": QUESTION, "task": "words"}, {"prompt": "two", "task": "tales"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(file)


def asked_of(server):
    """What it was asked, warm-ups left out."""
    return [body["messages"][-1]["content"] for _, body in server.asked if body["max_tokens"] > 8]


def test_every_round_asks_both_servers_and_what_went_first_goes_last_in_the_next(prompts, monkeypatch):
    from trainer.evaluate import rounds

    order, real = [], rounds.measure
    monkeypatch.setattr(
        rounds, "measure", lambda server, *rest: (order.append(server.client.url), real(server, *rest))[1]
    )
    with fake_server(accepts=ACCEPTS) as server, fake_server() as plain:
        found = document("--server", server.url, "--baseline-server", plain.url, "--prompts", prompts, "--rounds", "3")
        assert order == [plain.url, server.url, server.url, plain.url, plain.url, server.url]
        assert asked_of(server) == asked_of(plain) == 3 * ["two", QUESTION]
    assert found["rounds"] == 3
    assert len(found["speedup_rounds"]) == 3
    assert found["speedup"] == sorted(found["speedup_rounds"])[1]
    assert found["drafts"] == 3 * 2 * len(ACCEPTS)
    assert found["accepted_length"] == pytest.approx(1 + sum(ACCEPTS) / len(ACCEPTS))
    assert found["answers"] == found["rows"][-1]["same_as_baseline"] == 6
    assert found["ties"] == found["differences"] == []


@pytest.mark.parametrize(
    ("lead", "top", "kind", "render"),
    [
        (0.5, -0.5, "ties", False),
        (0.5, -0.5, "ties", True),
        (0.75, -0.5, "differences", False),
        (None, -0.5, "differences", False),
        # A server that says logits: two steps at 16 to 32 are 0.25, at 32 to 64 0.5.
        (0.25, 20.0, "ties", False),
        (0.375, 20.0, "differences", True),
        (0.375, 40.0, "ties", False),
    ],
)
def test_an_answer_that_differs_is_listed_with_the_gap_of_the_logits_where_it_parts(
    prompts, lead, top, kind, render, tmp_path
):
    other = QUESTION.upper().replace("NEXT", "LAST")
    key = "made" if render else QUESTION
    says = {key: QUESTION.upper()}
    more = ["--target", save_target(tmp_path / "target")] if render else []
    with (
        fake_server(accepts=ACCEPTS, says={key: other}) as server,
        fake_server(lead=lead, top=top, says=says, second="LAST ") as plain,
    ):
        words = ["--server", server.url, "--baseline-server", plain.url, "--prompts", prompts, "--rounds", "2", *more]
        result = evaluate(*words, "--json")
    found = json.loads(result.stdout)
    listed = found[kind]
    assert [row["question"] for row in listed] == (["two", QUESTION] if render else [QUESTION])
    row = listed[-1]
    assert (row["turn"], row["at"], row["plain"][:4], row["drafted"][:4]) == (0, 14, "NEXT", "LAST")
    assert row["logit_gap"] == (None if lead is None else pytest.approx(lead))
    assert row["logit"] == (top if top > 0 else None)
    assert row["tie_gap"] == tie_gap(row["logit"])
    assert row["rounds"] == 2
    assert found["differences" if kind == "ties" else "ties"] == []
    assert ("differs that is no tie" in result.stderr) == (kind == "differences")


def test_every_two_answers_that_differ_are_judged_whatever_their_round():
    class Plain:
        """Repeats one of its two answers, at a lead that is a tie."""

        asked, dtype = 0, "bfloat16"

        def retell(self, messages, sampling):
            self.asked += 1
            others = ("a ", {"z": 3.0}), ("b ", {"c": 0.125, "q": 0.1875}), ("d", {"e": 2.0})
            return Completion("a b d", 3, choices=tuple(Choice(token, choices, 20.0) for token, choices in others))

    def answers(*texts):
        return [TaskResult("t", 1, 1.0, [Completion(text, 3) for text in texts])]

    question = Question("t", [{"role": "user", "content": "which"}], ["and then"])
    of_plain = [answers("a b d", "x"), answers("a b d", "x"), answers("a b d", "x"), answers("a q", "x")]
    of_drafted = [answers("a c", "y"), answers("a c", "x"), answers("z b d", "y"), answers("a b d", "x")]
    plain = Plain()
    found = list(departures(plain, [question], parted([question], of_plain, of_drafted), SamplingOptions(8, 0.0)))
    assert plain.asked == 1
    listed = {(one.plain, one.drafted): (one.rounds, one.logit_gap, one.is_tie) for one in found}
    assert listed == {
        ("b d", "c"): (2, 0.125, True),
        ("a b d", "z b d"): (1, 3.0, False),
        ("q", "b d"): (1, 0.1875, True),
    }
    assert {one.turn for one in found} == {0}
    # Steps at 16 to 32 are 2^-6 in fp16: two are less than the lead of 0.125.
    plain.dtype = "float16"
    in_fp16 = list(departures(plain, [question], parted([question], of_plain, of_drafted), SamplingOptions(8, 0.0)))
    assert not any(one.is_tie for one in in_fp16)
    assert {one.document()["tie_gap"] for one in in_fp16} == {2**-5}


@pytest.mark.parametrize(
    ("logit", "dtype", "gap"),
    [
        (16.0, "bfloat16", 0.25),
        (31.9, "bfloat16", 0.25),
        (-32.0, "bfloat16", 0.5),
        (1.0, "bfloat16", 2**-6),
        (None, "bfloat16", 0.5),
        (20.0, "float16", 2**-5),
        (20.0, "float32", 1e-3),
    ],
)
def test_a_tie_is_as_wide_as_two_steps_of_the_dtype_at_the_logit_s_size(logit, dtype, gap):
    import torch

    assert tie_gap(logit, dtype) == gap
    if logit is not None and dtype != "float32":
        value = torch.tensor(abs(logit), dtype=getattr(torch, dtype))
        if float(value) == abs(logit):
            assert 2 * float(torch.nextafter(value, value + 1e4) - value) == gap


def test_rounding_turns_two_logits_two_steps_apart_around_and_never_three():
    import torch

    torch.manual_seed(0)

    def computed(logits):
        """What sums in another order are rounded from: hardly another number."""
        return (logits + 1e-4 * torch.randn(logits.shape)).bfloat16().float()

    # Between the middles of steps of 0.125 now and then.
    first, second = 20.0625 + 0.125 * torch.randint(0, 4, (2, 100_000)) + 1e-4 * torch.randn(2, 100_000)
    gap_alone, gap_among = (computed(first) - computed(second) for _ in range(2))
    assert float(gap_alone[gap_among <= 0].max()) == 0.25 == tie_gap(20.0)


def test_answers_part_at_the_token_that_begins_alike_though_a_later_letter_is_the_first_to_differ():
    others = ("nums", {"x": 5.0}), ("[", {"[:": 0.0}), ("i", {"j": 2.25, ":": 9.0}), (" + 1", {"]": 3.0})
    choices = [Choice(token, each, -0.5) for token, each in others]
    # Also where the token of that very letter has a choice that begins alike, behind by more.
    assert _parting(choices, "nums[:i + 1]", 5) == (0.0, -0.5)
    # Where a choice of that very letter's token is the other's word, it is there.
    assert _parting(choices, "nums[j]", 5) == (2.25, -0.5)
    assert _parting(choices, "nums[i + 1]", 99) is None


@pytest.mark.parametrize(
    ("drafted", "gap"),
    [
        ("It is paris.", 0.25),
        ("It is Pisa.", 3.0),
        ("It is 🗼.", 2.0),
        ("It is", 4.0),
        # No choice of the plain server's: nobody knows how far behind it lies.
        ("It is banana.", None),
        ("It is p", None),
        ("Paris", None),
    ],
)
@pytest.mark.parametrize("thought", ["", "It is easy: Paris"])
def test_the_gap_is_that_of_the_word_that_the_other_answer_goes_on_with_behind_a_thought_too(drafted, gap, thought):
    others = {"\xa0Paris": 0.125, " paris": 0.25, " \ufffd": 2.0, " P": 3.0, "<|im_end|>": 4.0}
    tokens = [*(["<think>", *thought.partition(" "), "</think>", "\n"] if thought else []), "It is", " Paris", "."]
    choices = tuple(Choice(token, others if token == " Paris" else {"That": 9.0}, 20.0) for token in tokens)

    class Plain:
        dtype = "bfloat16"

        def retell(self, messages, sampling):
            return Completion("It is Paris.", 3, thought=thought, choices=choices)

    def answers(text):
        return [[TaskResult("t", 1, 1.0, [Completion(text, 3, thought=thought)])]]

    question = Question("t", [{"role": "user", "content": "which"}])
    differing = parted([question], answers("It is Paris."), answers(drafted))
    (one,) = departures(Plain(), [question], differing, SamplingOptions(8, 0.0))
    assert (one.logit_gap, one.is_tie) == (gap, gap == 0.25)
    assert (one.plain, one.logit) == ("It is Paris."[one.at - len(thought) :], None if gap is None else 20.0)


@pytest.mark.parametrize(
    ("engine", "second", "kind"), [("vllm", "LAST ", "ties"), ("llamacpp", "PAST ", "differences")]
)
def test_thoughts_that_part_are_judged_as_texts_are(engine, second, kind, prompts):
    says, thinks = {QUESTION: "SO"}, {QUESTION: "WHICH IS NEXT IN IT"}
    others = {QUESTION: "WHICH IS LAST IN IT"}
    with (
        fake_server(engine=engine, accepts=ACCEPTS, says=says, thinks=others) as server,
        fake_server(engine=engine, says=says, thinks=thinks, lead=0.25, second=second) as plain,
    ):
        words = ["--server", server.url, "--baseline-server", plain.url, "--prompts", prompts, "--json"]
        found = json.loads(CliRunner().invoke(main, ["eval", "--engine", engine, *words]).stdout)
    ((row,), others) = found[kind], found["differences" if kind == "ties" else "ties"]
    assert (row["at"], row["plain"], row["drafted"]) == (9, "NEXT IN IT", "LAST IN IT")
    assert row["logit_gap"] == (0.25 if kind == "ties" else None)
    assert others == []


def test_rounds_without_a_baseline_are_refused(prompts):
    with fake_server(accepts=ACCEPTS) as server:
        result = evaluate("--server", server.url, "--prompts", prompts, "--rounds", "2", code=2)
    assert "--baseline-server" in result.stderr


def test_a_table_for_a_folder_that_is_not_there_is_refused_before_anything_is_asked(prompts, tmp_path):
    with fake_server(accepts=ACCEPTS) as server:
        words = ("--server", server.url, "--prompts", prompts, "--markdown", str(tmp_path / "none" / "table.md"))
        result = evaluate(*words, code=2)
        assert asked_of(server) == []
    assert f"mkdir -p {tmp_path / 'none'}" in result.stderr


@pytest.mark.parametrize("differs", [True, False])
def test_a_person_is_told_that_a_server_of_unknown_dtype_is_taken_for_bf16(prompts, differs):
    says = {QUESTION: QUESTION.upper()}
    others = {QUESTION: QUESTION.upper().replace("NEXT", "LAST")} if differs else says
    with fake_server(accepts=ACCEPTS, says=others) as server, fake_server(lead=0.5, says=says) as plain:
        shown = evaluate("--server", server.url, "--baseline-server", plain.url, "--prompts", prompts).stdout
    assert ("what it computes in is not known: taken for bf16" in " ".join(shown.split())) == differs
