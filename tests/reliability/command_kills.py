"""Every command that writes, SIGKILLed at random moments in processes of its own, on a disk or on object storage: the
same command finishes the job, and nothing differs from the run that was not stopped."""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from hiddenstore import inputs
from hiddenstore.files import layout
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.publish import upload
from hiddenstore.store import Store
from hiddenstore.testing.suite import Tally, run_and_kill
from hiddenstore.testing.workload import contents, require_sound
from hiddenstore.verify import verify
from tests.accepting import repair_words
from tests.collectors import peer_dumps
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.trainer.runs import WORDS

COMMANDS = ("collect", "copy", "repair", "import", "train")
SAMPLES = 40
UNIT_TOKENS = 120
TIMED = ("tokens_per_s", "data_wait_fraction")
TRAIN = [*WORDS, "train.max_steps=30", "train.checkpoint_every=3", "train.validate_every=9"]


def command(environment: Mapping[str, str], *words: str) -> None:
    """``hiddenstore WORDS`` on small units."""
    os.environ.update(environment)
    from hiddenstore.cli import main

    inputs.UNIT_TOKENS = UNIT_TOKENS
    main([*words, "-q"])


@dataclass(frozen=True)
class Base:
    """A target, DATA, a dump of another project and a damaged store in ``folder``; a store of DATA and what commands
    write at ``place``, that folder or an address. ``environment`` is what a command finds there."""

    folder: Path
    place: str
    container: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def make(self) -> "Base":
        data_for_tiny(self.folder / "data", samples=SAMPLES)
        save_target(self.folder / "target")
        peer_dumps.modelopt(self.folder / "dump", peer_dumps.speak(SAMPLES), (0, 1, 2))
        self.run("collect", f"{self.place}/store")
        self.run("collect", f"{self.folder}/damaged")
        damage(self.folder / "damaged")
        return self

    def words(self, name: str, out: str) -> list[str]:
        """What a person types, the first time and after a kill."""
        store, target = f"{self.place}/store", str(self.folder / "target")
        if name == "collect":
            how = ["--target", target, "--layers", "0,1,2", "--container", self.container]
            return ["collect", str(self.folder / "data"), "-o", out, *how]
        if name == "copy":
            return ["copy", store, out, "--recipe", "compact"]
        if name == "repair":
            return repair_words(out)
        if name == "import":
            dump = ["import", str(self.folder / "dump"), "--from", "modelopt-hf", "-o", out, "--target", target]
            return [*dump, "--layers", "0,1,2", "--check", "none"]
        has_begun = Path(out, "run.json").exists()
        return ["train", store, "-o", out, *(["--resume"] if has_begun else TRAIN)]

    def out(self, name: str, number: str) -> str:
        """A place of its own for one job: runs are local, and a repair needs something that is damaged."""
        folder = self.folder if name == "train" else self.place
        out = f"{folder}/{name}-{number}"
        if name == "repair":
            upload(self.folder / "damaged", open_filesystem(out), layout.STORE_JSON)
        return out

    def run(self, name: str, out: str, delay_s: float | None = None, tally: Tally | None = None) -> float:
        """One run of a command, killed after ``delay_s``; the seconds it took."""
        return run_and_kill(command, (self.environment, *self.words(name, out)), delay_s, tally)


def damage(store: Path) -> None:
    """Flip a byte in the largest file of every second unit."""
    for record in Store.open(store).commits()[::2]:
        files = [store / record.segment / file.path for file in record.files]
        path = max(files, key=lambda file: file.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def check_store(out: str, straight: str) -> None:
    require_sound(Store.open(out), contents(Store.open(straight)), finished=True)
    assert verify(out, "bytes").findings == []


def check_run(out: str, straight: str) -> None:
    losses, expected = (
        [
            {name: value for name, value in json.loads(line).items() if name not in TIMED}
            for line in Path(run, "metrics.jsonl").read_text().splitlines()
        ]
        for run in (out, straight)
    )
    assert losses == expected, "wrong: other losses"
    weights = [Path(run, "checkpoints/step-30/drafter.safetensors").read_bytes() for run in (out, straight)]
    assert weights[0] == weights[1], "wrong: other weights"


def kill_often(base: Base, name: str, kills: int) -> Tally:
    """At least ``kills`` kills of a command that came before its end, one to three in a row in one place, then the
    same command to its end and a look at what it left."""
    tally, dice = Tally(), random.Random(name)
    look: Callable[[str, str], None] = check_run if name == "train" else check_store
    straight = base.out(name, "straight")
    span_s = base.run(name, straight)
    for number in count():
        out = base.out(name, str(number))
        for _ in range(dice.randint(1, 3)):
            base.run(name, out, dice.uniform(0, span_s), tally)
        base.run(name, out, None, tally)
        # A look at a place is no kill.
        tally.points -= 1
        tally.check(f"place {number}", partial(look, out, straight))
        folder, _slash, last = out.rpartition("/")
        open_filesystem(folder).remove_tree(last)
        if tally.points >= kills or tally.failures:
            return tally
    raise AssertionError
