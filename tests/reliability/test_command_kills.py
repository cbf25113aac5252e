"""SIGKILLs of every command that writes, at random moments: the same command finishes the job, and nothing differs from
the run that was not stopped."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from hiddenstore import inputs
from hiddenstore.store import Store
from hiddenstore.testing.invariants import contents
from hiddenstore.testing.suite import Tally, run_and_kill
from hiddenstore.testing.workload import require_sound
from hiddenstore.verify import verify
from tests.collectors import peer_dumps
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.reliability.figures import Figures
from tests.trainer.runs import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = 30
SAMPLES = 40
UNIT_TOKENS = 120
TIMED = ("tokens_per_s", "data_wait_fraction")
TRAIN = [*WORDS, "train.max_steps=30", "train.checkpoint_every=3", "train.validate_every=9"]


def command(*words: str) -> None:
    """``hiddenstore WORDS`` on small units."""
    from hiddenstore.cli import main

    inputs.UNIT_TOKENS = UNIT_TOKENS
    main([*words, "-q"])


@dataclass(frozen=True)
class Base:
    """A target, DATA, a store of it, a damaged copy of that, and a dump of another project."""

    folder: Path

    def words(self, name: str, out: Path) -> list[str]:
        """What a person types, the first time and after a kill."""
        store, target = str(self.folder / "store"), str(self.folder / "target")
        if name == "collect":
            return ["collect", str(self.folder / "data"), "-o", str(out), "--target", target, "--layers", "0,1,2"]
        if name == "copy":
            return ["copy", store, str(out), "--recipe", "compact"]
        if name == "repair":
            if not out.exists():
                shutil.copytree(self.folder / "damaged", out)
            return ["repair", str(out), "-y", "--accept-loss", str(SAMPLES)]
        if name == "import":
            dump = ["import", str(self.folder / "dump"), "--from", "modelopt-hf", "-o", str(out), "--target", target]
            return [*dump, "--layers", "0,1,2", "--check", "none"]
        has_begun = (out / "run.json").exists()
        return ["train", store, "-o", str(out), *(["--resume"] if has_begun else TRAIN)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    made = Base(tmp_path_factory.mktemp("kills"))
    data_for_tiny(made.folder / "data", samples=SAMPLES)
    save_target(made.folder / "target")
    run_and_kill(command, tuple(made.words("collect", made.folder / "store")), None)
    shutil.copytree(made.folder / "store", made.folder / "damaged")
    for record in Store.open(made.folder / "damaged").commits()[::2]:
        path = made.folder / "damaged" / record.segment / "layer_1/c/0/0"
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(bytes(data))
    peer_dumps.modelopt(made.folder / "dump", peer_dumps.speak(SAMPLES), (0, 1, 2))
    return made


def check_store(out: Path, straight: Path) -> None:
    require_sound(Store.open(out), contents(Store.open(straight)), finished=True)
    assert verify(out, "bytes").findings == []


def check_run(out: Path, straight: Path) -> None:
    found, expected = (
        [
            {name: value for name, value in json.loads(line).items() if name not in TIMED}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in (out, straight)
    )
    assert found == expected, "wrong: other losses"
    weights = [(run / "checkpoints/step-30/drafter.safetensors").read_bytes() for run in (out, straight)]
    assert weights[0] == weights[1], "wrong: other weights"


@pytest.mark.parametrize("name", ["collect", "copy", "repair", "import", "train"])
def test_kills_of_a_command_cost_nothing_but_time(name: str, base: Base, tmp_path: Path, figures: Figures) -> None:
    tally, dice = Tally(), random.Random(name)
    check = check_run if name == "train" else check_store
    straight = tmp_path / "straight"
    span_s = run_and_kill(command, tuple(base.words(name, straight)), None)
    for number in count():
        out = tmp_path / f"killed-{number}"
        for _ in range(dice.randint(1, 3)):
            run_and_kill(command, tuple(base.words(name, out)), dice.uniform(0, span_s), tally)
        run_and_kill(command, tuple(base.words(name, out)), None, tally)
        finish(tally, number, partial(check, out, straight))
        shutil.rmtree(out)
        if tally.points >= KILLS or tally.failures:
            break
    figures.add("SIGKILLs of a command", name, tally)
    assert tally.failures == []


def finish(tally: Tally, number: int, check: Callable[[], None]) -> None:
    """The check of one place is no point of its own."""
    tally.points -= 1
    tally.check(f"place {number}", check)
