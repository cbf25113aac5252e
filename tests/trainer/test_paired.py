"""Paired training: the difference and its error, what it is measured on, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.cli import main
from hiddenstore.errors import ConfigError
from hiddenstore.files.lock import FolderLock
from hiddenstore.inspect.choice import paired_lines
from hiddenstore.process import Rank
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_store, memory_input, random_records
from hiddenstore.writer import register_input, write_unit
from tests.trainer.runs import WORDS
from trainer.parallel.group import ProcessGroup
from trainer.slots import teacher_rows
from trainer.train.paired import PairPlan, held_out_overlaps, measure_paired, pair_row
from trainer.train.run_folder import TrainOptions
from trainer.train.state import build_state, token_batches

SHORT = [word for word in WORDS if not word.startswith(("train.", "drafter.vocab"))] + ["train.max_steps=2"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("raw"), samples=20, layers=(1, 3, 4), codec="raw")


def test_equal_states_differ_by_nothing_and_rounded_ones_by_little(raw: Store) -> None:
    seen: list[int] = []
    rows = measure_paired(raw, ("lossless", "compact"), (0, 1), SHORT, lambda total, doing: seen.append(total))
    assert [row.recipe for row in rows] == ["lossless", "compact"]
    assert (rows[0].difference, rows[0].standard_error) == (0.0, 0.0)
    assert rows[0].acceptance == rows[0].original_acceptance
    assert 0 < abs(rows[1].difference) < 0.05
    assert rows[1].half_width is not None
    assert rows[1].half_width > rows[1].standard_error > 0
    assert (rows[0].half_width, rows[0].most_lost) == (0.0, 0.0)
    assert len(seen) == set(seen).pop() == 2 * 2 * 3


def test_a_measurement_without_a_number_of_steps_is_refused_with_one(raw: Store) -> None:
    with pytest.raises(ConfigError, match=r"train\.max_steps=none") as caught:
        measure_paired(raw, ["compact"], [1, 2], ["train.max_steps=none"], lambda *_: None)
    assert (caught.value.kind, caught.value.hint) == ("option-invalid", "train.max_steps=200")


@pytest.mark.parametrize("words", [(), ("drafter.vocab_size=20", "loss.overlap_mass=draft")])
def test_acceptance_is_the_overlap_of_drafter_and_target_at_the_first_drafted_token(
    words: tuple[str, ...], raw: Store, tmp_path: Path
) -> None:
    options = TrainOptions(raw.path, tmp_path / "run", "eagle3", None, (*SHORT, "train.device=cpu", *words))
    session = build_state(options, ProcessGroup(Rank()), FolderLock(tmp_path / "run"))
    overlaps = []
    session.model.eval()
    with torch.no_grad():
        for batch in token_batches(raw, session.config, session.group, session.device, validation=True):
            for pack in batch.packs:
                rows = teacher_rows(pack.loss_mask, pack.document, session.config.loss.mask_offset)
                work = session.objective.prepare(pack)
                states = session.model.unroll(pack, work.slot_map, 1)
                q = session.model.lm_head(states).double().softmax(-1)
                held = pack.final[torch.searchsorted(pack.final_rows, rows)]
                p = session.target.head.logits(held, "pre_norm").double().softmax(-1)
                known = session.target.vocab.t2d
                p = p[known[p.argmax(-1)]][:, known]
                slots = work.slot_map.slots[:, 0]
                taught = slots >= 0
                overlaps += torch.minimum(p[taught], q[slots[taught]]).sum(-1).tolist()
    held_out = held_out_overlaps(session, raw)
    assert held_out.acceptance == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)
    assert float(held_out.slots.sum()) == len(overlaps)
    assert held_out.ids == sorted(entry.id for _, entry in raw.entries if entry.split == "validation")


def test_a_block_drafter_is_paired_by_the_overlap_of_every_block_s_first_slot(raw: Store) -> None:
    words = [
        "drafter.num_layers=1",
        "drafter.mask_token_id=0",
        "loss.num_anchors=4",
        "train.max_steps=2",
        "data.batch_tokens=400",
    ]
    rows = measure_paired(raw, ("lossless", "compact"), (0, 1), words, lambda *_, **__: None, drafter="dspark")
    assert [(row.drafter, row.recipe) for row in rows] == [("dspark", "lossless"), ("dspark", "compact")]
    assert rows[0].difference == 0.0
    assert 0 < abs(rows[1].difference) < 0.05
    assert all(0 < one < 1 for one in rows[1].acceptance)


def test_a_drafter_whose_loss_knows_no_overlap_is_refused_with_those_that_do(raw: Store) -> None:
    with pytest.raises(ConfigError, match="acceptance of medusa is not measured by overlap; it is of eagle3") as caught:
        measure_paired(raw, ("compact",), (0, 1), (), lambda *_: None, drafter="medusa")
    assert caught.value.kind == "option-invalid"


def test_a_store_without_original_states_or_held_out_text_is_refused(raw: Store, tmp_path: Path) -> None:
    rounded = make_store(tmp_path / "q8", samples=10, layers=(1, 3, 4))
    with pytest.raises(ConfigError, match=r"aux layers and final rows of .* are rounded already") as caught:
        measure_paired(rounded, ("compact",), (0, 1), SHORT, lambda *_: None)
    assert caught.value.kind == "states-rounded"
    run_copy(open_copy([raw], tmp_path / "train", None, lambda _record, entry: entry.split == "train"))
    with pytest.raises(ConfigError, match="holds no validation samples") as caught:
        measure_paired(Store.open(tmp_path / "train"), ("compact",), (0, 1), SHORT, lambda *_: None)
    assert caught.value.kind == "split-empty"


def test_the_inputs_of_a_store_are_told_apart(tmp_path: Path) -> None:
    store, other = make_store(tmp_path, samples=20, layers=(1, 3, 4), codec="raw"), memory_input(20, seed=1)
    register_input(store, other)
    for unit in other.units():
        write_unit(store, unit.name, other.info.digest, random_records(unit.samples, store.capture), (), ENGINE)
    store = Store.open(store.path)
    (row,) = rows = measure_paired(store, ("compact",), (0, 1), SHORT, lambda *_, **__: None)
    assert sorted(one.source for one in row.sources) == sorted(digest[:12] for digest in store.inputs())
    assert len(row.sources) == 2
    assert sum(one.samples for one in row.sources) == len([e for _, e in store.entries if e.split == "validation"])
    assert len(paired_lines(rows)) == 3


def test_one_held_out_sample_tells_no_interval_and_no_source() -> None:
    plan, ones, zeros = PairPlan("eagle3", (0, 1), (), 2), torch.ones(2, 3).double(), torch.zeros(2, 3).double()
    slots = torch.tensor([10.0, 10.0, 10.0]).double()
    (one,) = pair_row(plan, "compact", ones, zeros, slots, ["a", "a", "b"]).sources
    assert (one.source, one.samples) == ("a", 2)
    row = pair_row(plan, "compact", ones[:, :1], zeros[:, :1], slots[:1], ["a"])
    assert (row.half_width, row.sources, row.most_lost) == (None, (), float("inf"))


def test_no_seed_begins_that_the_minutes_do_not_allow_but_for_the_two_that_an_interval_takes(raw: Store) -> None:
    (row,) = measure_paired(raw, ("lossless",), range(5), SHORT, lambda *_, **__: None, minutes=1e-9)
    assert row.seeds == (0, 1)
    assert row.minutes is not None
    assert row.minutes > 0


def test_advise_finds_paired_training_and_keeps_its_rows(raw: Store) -> None:
    words = ("--paired", "--recipe", "compact", "--seeds", "2", "--json")
    result = CliRunner().invoke(main, ["advise", raw.path, *words, *SHORT], prog_name="hiddenstore")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["paired"]
    assert (row["recipe"], row["steps"], row["seeds"]) == ("compact", 2, [0, 1])
    assert len(row["acceptance"]) == len(row["original_acceptance"]) == 2
    shown = CliRunner().invoke(main, ["info", raw.path], prog_name="hiddenstore").stdout
    assert "points of acceptance" in " ".join(shown.split())
