"""The page of a run and of several: its figures are those of eval and of the log, its colours those of the walk."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, CorruptionError
from hiddenstore.testing.builders import make_store
from tests.tiny_world import TRAIN, World, run
from tests.trainer.runs import ON_CPU, tiny_store
from trainer.evaluate.acceptance import AcceptanceTally, walk
from trainer.report import _article, _settings, accepted_lengths, compare_page, measure, run_page, short_names
from trainer.settings import load_config
from trainer.train.log import Curves, read_curves
from trainer.train.loop import train
from trainer.train.run_folder import describe, training_store


def typed(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="hiddenstore")


def validated(*losses: float) -> Curves:
    return Curves(validations=[{"step": 10 * n, "loss": loss} for n, loss in enumerate(losses, 1)])


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two runs over one store that differ in their rate and validate twice."""
    place = tmp_path_factory.mktemp("runs")
    for name, rate in (("slow", "1e-4"), ("fast", "1e-2")):
        words = (f"optim.lr={rate}", "train.validate_every=2", "train.max_steps=4")
        assert run("train", world / "store", "-o", str(place / name), *TRAIN, *words, "-q") == 0
    return str(place / "slow"), str(place / "fast")


def test_the_page_of_a_run_says_what_eval_says(runs: tuple[str, str], world: World, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    made = typed("report", runs[1], "-o", str(out), "--measure", "1000", "--json")
    assert made.exit_code == 0, made.stderr
    document = json.loads(made.stdout)
    judged = json.loads(typed("eval", runs[1], world / "store", "--untrained", "--json").stdout)
    shown = document["figures"]
    assert shown["accepted length"] == f"{judged['accepted_length']:.2f}"
    assert shown["n-gram floor"] == f"{judged['ngram_accepted_length']:.2f}"
    assert shown["untrained"] == f"{judged['untrained_accepted_length']:.2f}"
    html = out.read_text(encoding="utf-8")
    for title in ("Loss and accuracy", "Acceptance", "Data", "Time", "Settings", "Drafted text"):
        assert f">{title}</h2>" in html
    assert "https:" not in html
    is_below = judged["accepted_length"] <= judged["ngram_accepted_length"]
    levels = {one["level"] for one in document["verdicts"] if one["section"] == "Acceptance"}
    assert levels == ({"bad"} if is_below else {"good"})


def test_what_is_marked_as_accepted_is_what_the_walk_accepts() -> None:
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1])
    hits = np.array([0, 0, 2, 1, 0, 3, 1, 0, 0, 0, 1, 0, 3, 0])
    ids = np.arange(100, 114)
    tally = AcceptanceTally(3)
    walk(hits, mask, tally)
    html = _article(0, ids, mask, hits, None)
    taken = " ".join(re.findall(r'class="taken">([^<]*)<', html)).split()
    own = " ".join(re.findall(r'class="own">([^<]*)<', html)).split()
    assert len(taken) == sum(tally.accepted_at)
    assert len(taken) + len(own) == tally.tokens + 2  # the first token of each answer is of the prefill
    assert [int(token) for token in re.findall(r"\b1\d\d\b", re.sub("<[^>]*>", " ", html.split("turn")[1]))] == list(
        ids
    )
    assert f"{len(taken)} of {tally.tokens} generated ones" in html


def test_settings_that_differ_from_the_stores_own_are_listed(runs: tuple[str, str]) -> None:
    info = describe(runs[0])
    page = run_page(info, training_store(info), None)
    (section,) = [section for section in page.sections if section.title == "Settings"]
    changed = section.body.split("<details>")[0]
    assert "optim.lr" in changed
    assert "train.max_steps" in changed
    assert "optim.kind" not in changed
    assert "optim.kind" in section.body


def test_a_rate_that_follows_from_the_steps_of_the_run_is_none_that_was_set(tmp_path: Path) -> None:
    store = tiny_store(tmp_path)

    def changed(*words: str) -> str:
        config = load_config(store, words=["train.max_steps=600", *words])
        return _settings(store, config.model_dump(mode="json")).body.split("<details>")[0]

    assert "train.max_steps" in changed()
    assert "optim.lr" not in changed()
    assert "optim.lr" not in changed("optim.kind=adamw")
    assert "optim.lr" in changed("optim.lr=1e-3")


def test_a_setting_that_no_store_suggests_does_not_stop_the_page(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(ConfigError):
        load_config(store, "dflash")
    words = ["drafter.mask_token_id=5", "optim.lr=0.5"]
    section = _settings(store, load_config(store, "dflash", words=words).model_dump(mode="json"))
    assert "optim.lr" in section.body.split("<details>")[0]


def test_a_run_whose_store_is_gone_has_a_page_without_acceptance_and_says_so(world: World, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(world / "store", tmp_path / "store")
    assert run("train", str(tmp_path / "store"), "-o", str(tmp_path / "run"), *TRAIN, "-q") == 0
    shutil.rmtree(tmp_path / "store")
    out = tmp_path / "run.html"
    made = typed("report", str(tmp_path / "run"), "-o", str(out))
    assert made.exit_code == 0, made.stderr
    assert "no longer holds what" in made.stderr
    html = out.read_text(encoding="utf-8")
    assert "acceptance was not measured" in html
    assert "Drafted text" not in html
    assert "Token ids are that text" not in html


def test_text_that_was_trained_on_and_runs_over_other_samples_are_named(world: World, tmp_path: Path) -> None:
    assert run("train", world / "train_store", "-o", str(tmp_path / "run"), *TRAIN, "-q") == 0
    info = describe(tmp_path / "run")
    store = training_store(info)
    assert store is not None
    measured = measure(info, store, 8, 3)
    assert measured is not None
    assert measured.split == "train"
    texts = [verdict.text for _, verdict in run_page(info, store, measured).verdicts]
    assert any("text it was trained on" in text for text in texts)
    others = [verdict.text for _, verdict in compare_page([info, describe(world / "run")]).verdicts]
    assert any("different samples" in text for text in others)


def test_runs_are_compared_by_what_they_validated(runs: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    made = typed("compare", *runs, "-o", str(out), "--json")
    assert made.exit_code == 0, made.stderr
    document = json.loads(made.stdout)
    last = [read_curves(Path(path)).validations[-1]["accepted_length"] for path in runs]
    assert document["figures"]["longest accepted at step 4"] == f"{max(last):.2f}"
    (verdict,) = [one for one in document["verdicts"] if "tokens per target forward" in one["text"]]
    assert (verdict["level"], "not compared in pairs" in verdict["text"]) == ("unknown", True)
    html = out.read_text(encoding="utf-8")
    assert "optim.lr" in html
    assert "train.max_steps" not in html
    assert "different samples" not in html


def test_runs_compare_where_they_validated_the_same_samples_in_whatever_order_or_recipe(tmp_path: Path) -> None:
    store, raw = tiny_store(tmp_path).path, str(tmp_path / "raw")
    assert run("copy", store, raw, "--recipe", "raw", "-q") == 0
    words = [*ON_CPU, "data.batch_tokens=80", "train.max_steps=2", "train.validate_every=2"]
    of_part, seed = "train.validation_tokens=1", "data.seed=1"
    places = {"all": (store,), "copied": (raw, seed), "part": (store, of_part), "other": (store, of_part, seed)}
    for name, (place, *changes) in places.items():
        train(place, tmp_path / name, words=[*words, *changes])

    def compared(*names: str) -> tuple[str, dict[str, str]]:
        page = compare_page([describe(tmp_path / name) for name in names])
        return "; ".join(verdict.text for _, verdict in page.verdicts), dict(page.tiles)

    text, figures = compared("all", "copied")
    assert "tokens per target forward" in text
    assert "different samples" not in text
    assert figures.keys() >= {"longest accepted at step 2", "by"}
    text, figures = compared("part", "other")
    assert "no step is known at which they were validated over the same text: lengths do not compare" in text
    assert "tokens per target forward" not in text
    assert not figures.keys() & {"longest accepted at step 2", "by"}


def test_the_page_of_a_run_has_the_accepted_lengths_of_its_validations_by_step(runs: tuple[str, str]) -> None:
    html = run_page(describe(runs[1]), None, None).sections[0].body
    figure = html.partition("Accepted length in validation")[2].partition("</figure>")[0]
    lengths = [one["accepted_length"] for one in read_curves(Path(runs[1])).validations]
    assert len(lengths) == 2
    assert [f"{length:.4g}" in figure for length in lengths] == [True, True]


def test_accepted_lengths_are_compared_at_the_last_step_that_all_runs_validated() -> None:
    def curves(lengths: dict[int, float | None]) -> Curves:
        of_text = {"text": "whole"}
        return Curves(validations=[{"step": at, "accepted_length": one, **of_text} for at, one in lengths.items()])

    often, seldom = curves({10: 2.0, 20: 1.5, 30: None}), curves({20: 1.6, 40: 1.9})
    assert accepted_lengths({"often": often, "seldom": seldom, "never": Curves()}) == (
        20,
        {"often": 1.5, "seldom": 1.6},
    )
    grown = Curves(validations=[*often.validations[:2], {"step": 40, "accepted_length": 1.9, "text": "more of it"}])
    assert accepted_lengths({"grown": grown, "seldom": seldom})[0] == 20
    apart = curves({15: 1.7})
    assert accepted_lengths({"apart": apart, "seldom": seldom}) == (None, {"apart": 1.7, "seldom": 1.9})
    assert accepted_lengths({"never": Curves()}) == (None, {})


def test_accepted_lengths_of_validations_that_name_no_text_are_not_compared() -> None:
    older = Curves(validations=[{"step": 20, "accepted_length": 1.5}])
    newer = Curves(validations=[{"step": 20, "accepted_length": 1.6, "text": "whole"}])
    for other, length in ((older, 1.5), (newer, 1.6)):
        assert accepted_lengths({"older": older, "other": other}) == (None, {"older": 1.5, "other": length})


def test_a_notebook_shows_a_run_as_a_table(runs: tuple[str, str], world: World) -> None:
    html = describe(runs[0])._repr_html_()
    assert f"<caption>Run {runs[0]}</caption>" in html
    assert f"<th>store</th><td>{world / 'store'}</td>" in html
    assert "<th>step</th><td>4</td>" in html


def test_one_run_is_not_compared(runs: tuple[str, str]) -> None:
    result = typed("compare", runs[0])
    assert result.exit_code == 2
    assert "hiddenstore report" in result.stderr


def test_names_of_runs_are_as_long_as_tells_them_apart() -> None:
    assert short_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/a/one"), Path("/b/two")]) == ["one", "two"]
    assert short_names([Path("/a/one"), Path("/a/one")]) == ["/a/one (1)", "/a/one (2)"]


def test_a_log_is_read_back_as_it_was_written(runs: tuple[str, str]) -> None:
    curves = read_curves(Path(runs[0]))
    assert [row["step"] for row in curves.steps] == [1, 2, 3, 4]
    assert [one["step"] for one in curves.validations] == [2, 4]
    assert 0 <= curves.wait_share <= 1
    assert curves.seconds > 0


def test_half_a_line_at_the_end_of_a_log_is_left_out_and_one_inside_is_damage(tmp_path: Path) -> None:
    numbers = {"lr": 0.1, "grad_norm": 1.0, "tokens": 10, "tokens_per_s": 5.0, "data_wait_fraction": 0.0}
    line = json.dumps({"step": 1, "loss": 1.0, "losses": [1.0], "acc": [0.5], **numbers})
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{line[:20]}")
    assert len(read_curves(tmp_path).steps) == 1
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{line[:20]}\n{line}\n")
    with pytest.raises(CorruptionError, match=r"metrics.jsonl:2 is no step") as error:
        read_curves(tmp_path)
    assert error.value.kind == "run-corrupt"
    assert read_curves(tmp_path / "nothing").steps == []


def test_a_run_overfits_when_its_validation_loss_has_risen_since_its_least() -> None:
    rising = validated(3.0, 2.0, 2.1)
    text = rising.overfit(30) or ""
    assert "2.000 at step 20" in text
    assert "2.100 at step 30" in text
    assert rising.overfit(20) is None
    assert validated(3.0, 2.0, 2.01).overfit(30) is None
    assert validated(3.0).overfit(10) is None
    assert validated().overfit(10) is None
    assert "at step 10" in (validated(3.0, float("nan")).overfit(20) or "")


def test_more_lines_than_styles_are_drawn_all_the_same() -> None:
    from hiddenstore.report.page import STYLES, Series, lines

    drawn = lines("t", [Series(f"line {n}", [0, 1], [n, n]) for n in range(STYLES + 2)], "x", "y")
    assert drawn.count('<path d="M5') == STYLES + 2
    style = (Path(__file__).parents[2] / "hiddenstore/report/page.css").read_text()
    assert all(f".{shape}.s{number}" in style for number in range(STYLES) for shape in ("line", "fill", "dot"))


def test_eval_warns_of_a_run_that_overfits(runs: tuple[str, str], world: World, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(runs[0], copy)
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "validation" in row and row["step"] == 4:
            row["validation"]["loss"] *= 1.5
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warned = typed("eval", str(copy), world / "store")
    assert warned.exit_code == 0
    assert "it overfits" in warned.stderr
    assert "it overfits" not in typed("eval", str(copy / "checkpoints" / "step-2"), world / "store").stderr
