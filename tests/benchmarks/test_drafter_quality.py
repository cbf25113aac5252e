"""The quality benchmark trains and judges once, reads a finished run back, and its tables say what was measured."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import drafter_quality
from benchmarks.commands import Command
from benchmarks.drafter_quality import BY_NAME, ROWS, Bench, Quality, table
from benchmarks.report import spread
from collectors.targets.layers import choose_layers
from hiddenstore.cli import main
from hiddenstore.testing.builders import NUM_LAYERS, VOCAB, make_store
from trainer.drafters import DRAFTERS
from trainer.train.run_folder import describe


class InThisProcess(Command):
    """The same commands without a process each."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[str] = []

    def cpu_s(self, *words: str) -> float:
        self.trained.append(words[words.index("-o") + 1])
        self._run(words)
        return 2.0

    def answer(self, *words: str) -> Quality:
        answer: Quality = json.loads(self._run([*words, "--json"]))
        return answer

    def _run(self, words: Sequence[str]) -> str:
        done = CliRunner().invoke(main, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("quality")
    choice = choose_layers("all-drafters", None, NUM_LAYERS)
    make_store(folder, samples=12, layers=choice.aux_layers, final=choice.final)
    (folder / "runs").mkdir()
    return Bench(str(folder / "store"), folder / "runs", 2, InThisProcess())


@pytest.fixture(scope="module")
def results(bench: Bench) -> list[Quality]:
    return [bench.measure(BY_NAME[name], 0) for name in ("medusa", "eagle3")]


def test_every_row_names_a_drafter_and_a_folder_of_its_own() -> None:
    assert len({row.folder for row in ROWS}) == len(ROWS)
    assert {row.words[1] for row in ROWS} == set(DRAFTERS) - {"mtp"}


def test_chains_are_as_long_as_the_drafter_drafts(results: list[Quality]) -> None:
    assert [list(one["chains"]) for one in results] == [["3", "4"], ["3", "7"]]
    assert all(chain["accepted_length"] >= 1 for one in results for chain in one["chains"].values())
    assert results[0]["tokens"] == results[1]["tokens"] > 0


def test_a_finished_run_is_read_back_and_one_of_other_settings_is_made_anew(
    bench: Bench, results: list[Quality]
) -> None:
    command = bench.command
    assert isinstance(command, InThisProcess)
    before = len(command.trained)
    assert bench.measure(BY_NAME["medusa"], 0) == results[0]
    assert len(command.trained) == before
    longer = Bench(bench.store, bench.runs, 3, command)
    assert longer.measure(BY_NAME["medusa"], 0)["tokens"] > results[0]["tokens"]
    assert len(command.trained) == before + 1


@pytest.mark.parametrize("name", ["peagle", "dspark", "eagle1"])
def test_a_draft_vocabulary_is_that_of_every_row_that_has_one_and_settings_are_of_all(bench: Bench, name: str) -> None:
    row, mask = BY_NAME[name], [] if name == "eagle1" else ["drafter.mask_token_id=0"]
    narrow = Bench(bench.store, bench.runs, 1, bench.command, ("train.precision=fp32", *mask), 48)
    quality = narrow.measure(row, 1)
    assert "train.precision=fp32" in quality["words"]
    assert describe(narrow.run(row, 1)).spec.drafter.vocab_size == (VOCAB if row.whole else 48)
    assert list(quality["chains"]) == ["3", "7"]


def test_the_tables_give_the_median_of_the_seeds_and_say_where_a_chain_is_shorter(results: list[Quality]) -> None:
    def seed(length: float) -> Quality:
        return results[0] | {
            "chains": {name: one | {"accepted_length": length} for name, one in results[0]["chains"].items()}
        }

    (line,) = table([seed(length) for length in (1.5, 1.2, 1.3)]).splitlines()[2:]
    assert line.startswith("| medusa | ")
    assert "| 1.300 (1.200–1.500) | 1.300 (1.200–1.500), chain of 4: its longest |" in line
    assert spread([1.25]) == "1.250"
    assert len(table([*results, results[1] | {"lr": 9.0}]).splitlines()) == 5


def test_the_report_is_written_with_the_floors_of_the_text(
    bench: Bench, results: list[Quality], tmp_path: Path
) -> None:
    drafter_quality.publish(bench, "tiny", results, tmp_path)
    (document,) = [json.loads(path.read_text()) for path in tmp_path.glob("drafter_quality-tiny-*.json")]
    assert document["rows"] == results
    assert set(document["ngram"]) == {"3", "7"}
    (page,) = tmp_path.glob("*.md")
    assert str(bench.store) not in page.read_text() + json.dumps(document)
