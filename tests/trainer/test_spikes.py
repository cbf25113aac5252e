"""The loss-spike guard, the best checkpoints, and the run that waits no longer."""

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.cli import main
from hiddenstore.data import TokenBatches
from hiddenstore.errors import CaptureError, ConfigError, NotFoundError
from hiddenstore.files.documents import seal
from hiddenstore.records import sample_id
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_samples, make_store
from tests.trainer.runs import WORDS, store_of, tiny_store
from trainer.config import LoopConfig
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.simulate import evaluate
from trainer.train import checkpoint
from trainer.train import loop as loop_module
from trainer.train.guard import ENOUGH, MOST_IN_A_ROW, WINDOW, BestCheckpoints, BestState, SpikeGuard
from trainer.train.log import Curves, read_curves
from trainer.train.loop import train
from trainer.train.run_folder import branch, load_drafter

GUARDED = [
    *WORDS,
    "optim.kind=adamw",
    "train.max_steps=30",
    "train.validate_every=0",
    "train.checkpoint_every=10",
    "train.keep=9",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tiny_store(tmp_path_factory.mktemp("store"))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def poison(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """States of these batches (from 0) become huge and wrong, as a corrupted store's would."""
    real = TokenBatches.__iter__
    order: dict[tuple[int, int], int] = {}

    def poisoned(self: TokenBatches):  # type: ignore[no-untyped-def]
        for batch in real(self):
            place = (batch.cursor.epoch, batch.cursor.samples)
            if order.setdefault(place, len(order)) in bad:
                packs = [replace(p, final=p.final * -40, aux=p.aux.flip(-1) * 1e4) for p in batch.packs]
                batch = replace(batch, packs=packs)
            yield batch

    monkeypatch.setattr(TokenBatches, "__iter__", poisoned)


def test_a_loss_is_judged_by_the_median_of_the_last_ones_that_were_taken() -> None:
    guard, taken = SpikeGuard(4.0), []
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        loss = 1.0 + float(torch.rand(1, generator=generator))
        loss = 50.0 if step % 17 == 5 else loss
        expected = len(taken) < ENOUGH or loss <= 4 * statistics.median(taken[-WINDOW:])
        assert guard.accepts(loss) is expected
        if expected:
            taken.append(loss)
        guard = SpikeGuard(4.0, type(guard.state).model_validate_json(guard.state.model_dump_json()))
    assert guard.skipped == 300 - len(taken) > 10


def test_steps_that_teach_nothing_make_no_spike_of_those_that_do(tmp_path: Path) -> None:
    samples = []
    for index, one in enumerate(make_samples(40)):
        mask = one.loss_mask * (index % 4 == 0)
        samples.append(replace(one, id=sample_id(one.input_ids, mask), loss_mask=mask, split="train"))
    made = store_of(tmp_path, samples)
    words = [*GUARDED, "data.batch_tokens=40", "data.pack_tokens=40", "train.max_steps=80"]
    report = train(made.path, tmp_path / "run", words=words)
    taught = [line["taught"] for line in lines(tmp_path / "run") if "taught" in line]
    assert sum(count == 0 for count in taught) > 40
    assert (report.steps, report.skipped_steps) == (80, 0)


def test_a_spike_changes_no_weight_and_its_samples_are_written_down(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {24})
    words = [*GUARDED, "train.checkpoint_every=1", "train.keep=99", "train.spike_factor=1.4"]
    report = train(store.path, tmp_path / "run", words=words)
    assert report.skipped_steps == 1
    found = lines(tmp_path / "run")
    (record,) = [line for line in found if "skipped_samples" in line]
    steps = {line["step"]: line for line in found if "loss" in line}
    assert record["step"] == 25
    assert set(record["skipped_samples"]) <= set(store.sample_ids)
    assert [step for step, line in steps.items() if line["skipped"]] == [25]
    before, after, later = (checkpoint.load(tmp_path / f"run/checkpoints/step-{step}").drafter for step in (24, 25, 26))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert any(not torch.equal(tensor, later[name]) for name, tensor in before.items())


def test_a_resumed_run_judges_as_the_uninterrupted_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {22, 27})
    train(store.path, tmp_path / "straight", words=[*GUARDED, "train.spike_factor=1.4"])
    train(store.path, tmp_path / "run", words=[*GUARDED, "train.spike_factor=1.4"])
    shutil.rmtree(tmp_path / "run/checkpoints/step-30")
    again = train(store.path, tmp_path / "run", resume=True)
    assert again.skipped_steps == 2
    ends = [checkpoint.load(tmp_path / name / "checkpoints/step-30") for name in ("straight", "run")]
    assert ends[0].state.spikes == ends[1].state.spikes
    assert all(torch.equal(tensor, ends[1].drafter[name]) for name, tensor in ends[0].drafter.items())


def test_a_loss_that_stays_high_ends_the_run_and_names_the_samples(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, set(range(22, 40)))
    with pytest.raises(CaptureError, match=f"the last of {MOST_IN_A_ROW + 1} in a row above 1.25 times") as caught:
        train(store.path, tmp_path / "run", words=[*GUARDED, "train.spike_factor=1.25"])
    assert caught.value.kind == "loss-stays-high"
    assert any(sample in str(caught.value) for sample in store.sample_ids)
    assert str(caught.value.hint).endswith("--resume train.spike_factor=none")
    assert train(store.path, tmp_path / "run", resume=True, words=["train.spike_factor=none"]).steps == 30


def test_validation_gives_the_accepted_length_that_eval_gives(store: Store, tmp_path: Path) -> None:
    report = train(store.path, tmp_path / "run", words=WORDS)
    loaded = load_drafter(tmp_path / "run", head=store.head(), final_norm=store.capture.final_norm)
    found = evaluate([loaded], store, "validation", [DraftShape(3)])[0].tally
    assert report.validation["accepted_length"] == found.accepted_length
    assert report.validation["per_position"] == pytest.approx(found.per_position)
    assert report.validation["loss"] == pytest.approx(statistics.mean(report.validation["losses"]))


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float], name: str = "loss") -> None:
    """Validations that find these values in turn."""
    left = iter(values)
    real = loop_module.validate

    def validate(session: Any) -> None:
        real(session)
        session.validation[name] = next(left)

    monkeypatch.setattr(loop_module, "validate", validate)


EACH = [*WORDS, "train.validate_every=1", "train.checkpoint_every=0", "train.keep=1"]


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoint.checkpoints(run)]


def test_the_best_checkpoints_stay_beside_the_newest(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [5, 3, 4, 2, 6, 2, 7, 8, 9, 9, 9, 9])
    report = train(store.path, tmp_path / "run", words=[*EACH, "train.keep_best=2"])
    assert names(tmp_path / "run") == ["step-4", "step-6", "step-12"]
    assert report.best_checkpoint == checkpoint.best(tmp_path / "run") == tmp_path / "run/checkpoints/step-4"
    state = checkpoint.read_state(tmp_path / "run/checkpoints/step-12").standing
    assert (state.best, state.since) == ({"step-4": 2.0, "step-6": 2.0}, 8)


def test_on_a_new_machine_a_run_has_its_best_checkpoints_and_takes_no_other_for_the_best(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror = tmp_path / "run", str(tmp_path / "mirror")
    scripted(monkeypatch, [5, 2, 3])
    best = train(
        store.path, run, words=[*EACH, "train.max_steps=3", "train.keep_best=2"], mirror=mirror
    ).best_checkpoint
    shutil.rmtree(run)
    assert train(store.path, run, resume=True, mirror=mirror).best_checkpoint == best == checkpoint.best(run)
    assert names(run) == ["step-2", "step-3"]
    shutil.rmtree(run / "checkpoints" / "step-2")
    assert train(store.path, run, resume=True).best_checkpoint is None
    with pytest.raises(NotFoundError, match="step-2 is not kept"):
        checkpoint.best(run)


def test_eval_takes_the_best_checkpoint_when_asked(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, [5, 3, 4])
    train(store.path, tmp_path / "run", words=[*EACH, "train.max_steps=3"])
    walked = []
    for words in (["--best"], []):
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(tmp_path / "run"), store.path, *words, "--json"])
        assert ended.value.code == 0
        walked.append(json.loads(capsys.readouterr().out)["step"])
    assert walked == [2, 3]


def test_a_run_without_best_says_so(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(store.path, tmp_path / "none", words=[*EACH, "train.max_steps=2", "train.keep_best=0"])
    assert names(tmp_path / "none") == ["step-2"]
    train(store.path, tmp_path / "run", words=[*WORDS, "train.max_steps=2", "train.validate_every=0"])
    with pytest.raises(NotFoundError, match="none of its steps was validated"):
        checkpoint.best(tmp_path / "run")
    scripted(monkeypatch, [1, 2])
    train(store.path, tmp_path / "two", words=[*EACH, "train.max_steps=2"])
    assert names(tmp_path / "two") == ["step-1", "step-2"]
    branch(tmp_path / "two", tmp_path / "on")
    with pytest.raises(NotFoundError, match=r"step-1 is not kept .* or of the run that this one goes on from"):
        checkpoint.best(tmp_path / "on")


def test_accepted_length_is_better_the_larger_it_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.0, 1.5, 1.2, 1.1], "accepted_length")
    words = [*EACH, "train.max_steps=4", "train.best_by=accepted_length"]
    report = train(store.path, tmp_path / "run", words=words)
    assert report.best_checkpoint == tmp_path / "run/checkpoints/step-2"


def test_a_run_ends_when_patience_does_and_goes_on_when_it_is_raised(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [5, 3, 4, 4, 9, 9, 9, 9])
    report = train(store.path, tmp_path / "run", words=[*EACH, "train.patience=2"])
    assert (report.steps, report.stopped_early) == (4, True)
    assert report.best_checkpoint == tmp_path / "run/checkpoints/step-2"
    again = train(store.path, tmp_path / "run", resume=True)
    assert (again.steps, again.stopped_early, again.was_finished) == (4, True, True)
    more = train(store.path, tmp_path / "run", resume=True, words=["train.patience=4"])
    assert (more.steps, more.stopped_early) == (6, True)


def test_patience_without_validations_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="validate_every is 0"):
        train(store.path, tmp_path / "run", words=[*WORDS, "train.patience=1", "train.validate_every=0"])
    (tmp_path / "four").mkdir()
    trained_only = make_store(tmp_path / "four", samples=4, layers=(1, 3, 4))
    with pytest.raises(ConfigError, match="holds no validation samples") as caught:
        train(trained_only.path, tmp_path / "run", words=[*WORDS, "train.patience=1"])
    assert caught.value.kind == "validation-missing"


def test_another_measure_starts_the_ranking_anew_and_no_value_is_no_judgement() -> None:
    old = BestState(by="loss", best={"step-3": 1.0}, since=2)
    standing = BestCheckpoints(LoopConfig(best_by="accepted_length"), old)
    assert standing.state == BestState(by="accepted_length")
    assert standing.add(4, {"accepted_length": None, "loss": 0.1}) is False
    assert standing.add(5, {"accepted_length": 1.5, "loss": math.inf}) is True
    assert standing.names == ["step-5"]


def test_validations_of_other_text_are_not_compared(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, words = tmp_path / "run", [*EACH, "train.max_steps=3", "train.keep_best=2", "data.batch_tokens=40"]
    scripted(monkeypatch, [2, 3, 3, 8, 9, 9])
    train(store.path, run, words=[*words, "train.validation_tokens=1"])
    more = train(store.path, run, words=["train.max_steps=6", "train.validation_tokens=9999"], resume=True)
    part, _, _, whole, *_ = texts = [line["validation"]["text"] for line in lines(run) if "validation" in line]
    assert texts == [part] * 3 + [whole] * 3
    assert part != whole
    assert more.best_checkpoint == checkpoint.best(run) == run / "checkpoints/step-4"
    standing = checkpoint.read_state(more.checkpoint).standing
    assert (standing.best, standing.since) == ({"step-4": 8.0, "step-5": 9.0}, 2)
    assert "was 8.000 at step 4 " in (read_curves(run).overfit(6) or "")
    assert read_curves(run).overfit(4) is None
    assert "was 2.000 at step 1 " in (read_curves(run).overfit(3) or "")


def test_validations_of_a_program_that_named_no_text_are_those_of_the_next_one() -> None:
    standing = BestCheckpoints(LoopConfig(keep_best=1, patience=2), BestState(best={"step-2": 5.0}, since=1))
    assert not standing.add(14, {"loss": 6.0, "text": "whole"})
    assert standing.state == BestState(text="whole", best={"step-2": 5.0}, since=2)
    assert standing.is_out_of_patience
    assert standing.add(16, {"loss": 7.0, "text": "part"})
    assert standing.names == ["step-16"]
    older, whole, part = {"step": 2, "loss": 5.0}, {"step": 14, "text": "whole"}, {"step": 16, "text": "part"}
    curves = Curves(validations=[older, {**whole, "loss": 6.0}, {**part, "loss": 7.0}])
    assert "was 5.000 at step 2 " in (curves.overfit(14) or "")
    assert curves.overfit(16) is None


def test_a_validation_that_is_no_number_uses_up_patience_and_keeps_no_checkpoint_from_being_written() -> None:
    standing = BestCheckpoints(LoopConfig(patience=2))
    assert standing.add(6, {"loss": 2.0})
    for since, loss in enumerate((math.nan, math.inf)):
        assert (standing.state.since, standing.is_out_of_patience) == (since, False)
        assert not standing.add(12, {"loss": loss})
    assert standing.names == ["step-6"]
    assert standing.is_out_of_patience
    assert b'"step-6":2.0' in seal(standing.state)
