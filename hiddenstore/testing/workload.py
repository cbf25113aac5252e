"""What a collector does to a store, as work that can be stopped at any point and done again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.files import layout
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import encode_records
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    memory_input,
    random_records,
    rebuilding_files,
    target_files,
)
from hiddenstore.testing.invariants import contents, fingerprint, problems
from hiddenstore.writer import create_store, register_input, write_encoded_unit
from schemas.capture import REBUILT, CaptureSpec
from schemas.manifest import Container

Backend = Callable[[str], Filesystem]
"""A filesystem over the place of that name, empty when it was never used; called again, another process's view of it.
For kills it must pickle."""

SAMPLES = 3
WIDTH = 8


@dataclass(frozen=True)
class Plan:
    """What to write: units encoded beforehand, and whether the input is registered before or after them."""

    codec: str = "bf16"
    register_first: bool = True
    container: Container = "zarr"

    @cached_property
    def capture(self) -> CaptureSpec:
        layers = (1, 3) if self.codec == REBUILT else (1,)
        return capture_spec(layers=layers, width=WIDTH, codec=self.codec)

    @cached_property
    def units(self) -> dict[str, EncodedUnit]:
        return {
            unit.name: encode_records(unit.name, random_records(unit.samples, self.capture), self.capture)
            for unit in memory_input(SAMPLES).units()
        }

    def expected(self, fs: Filesystem) -> tuple[dict[str, object], dict[str, str]]:
        """Fingerprint and contents of the run that was never stopped, in an empty place."""
        store = Workload(fs, self).run()
        assert problems(store, finished=True) == []
        assert len(self.units) >= 2
        assert len(store) == SAMPLES
        return fingerprint(store.fs), contents(store)


@dataclass
class Workload:
    """Create, register, write, commit, snapshot; ``done`` and ``registered``: what it was told had succeeded."""

    fs: Filesystem
    plan: Plan
    done: list[str] = field(default_factory=list)
    registered: bool = False

    def run(self) -> Store:
        plan = self.plan
        files = rebuilding_files(plan.capture) if plan.capture.blocks else target_files(WIDTH)
        store = create_store(self.fs, plan.capture, HEAD, recipe_name(plan.capture.codecs), files, plan.container)
        if plan.register_first:
            self.register(store)
        committed = {record.unit for record in store.commits()}
        for unit, encoded in plan.units.items():
            if unit not in committed:
                assert write_encoded_unit(store, unit, memory_input(SAMPLES).info.digest, encoded, (), ENGINE)
                self.done.append(unit)
        self.register(store)
        store = Store.open(self.fs)
        store.save_snapshot("end")
        return store

    def register(self, store: Store) -> None:
        register_input(store, memory_input(SAMPLES))
        self.registered = True

    def promised(self) -> "Workload":
        return replace(self, done=list(self.done))

    def check(self, fs: Filesystem, expected: tuple[dict[str, object], dict[str, str]]) -> None:
        """What a stop left in ``fs`` is sound, holds all that was promised, and the same work finishes the job. Raises
        AssertionError: it does not; HiddenstoreError: nor can it be read."""
        stored, read = expected
        if fs.size(layout.STORE_JSON) is not None:
            store = Store.open(fs)
            assert {record.unit for record in store.commits()} >= set(self.done), "lost: a unit that was committed"
            assert bool(store.inputs()) >= self.registered, "lost: an input that was registered"
            require_sound(store, read)
        else:
            assert self.done == [], "lost: the whole store"
        resumed = Workload(fs, self.plan)
        store = resumed.run()
        assert not set(resumed.done) & set(self.done), "doubled: a unit that was committed is done again"
        require_sound(store, read, finished=True)
        assert fingerprint(fs) == stored, "wrong: other documents or bytes than those of the run that was not stopped"


def require_sound(store: Store, expected: Mapping[str, str], *, finished: bool = False) -> None:
    """AssertionError unless a store holds nothing but ``expected`` (digests by sample id) and, ``finished``, all of it,
    and everything in it hangs together."""
    digests = contents(store)
    assert digests.items() <= expected.items(), "wrong: samples read as other data"
    assert not store.duplicates, "doubled: samples are in more than one unit"
    assert not finished or digests.keys() == expected.keys(), "lost: samples are missing"
    listed = problems(store, finished=finished)
    assert not listed, f"other: {listed[:3]}"
