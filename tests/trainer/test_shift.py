"""The shift: teacher rows, slots and runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.slots import document_starts, map_slots, open_steps, teacher_rows


def document_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


@pytest.mark.parametrize(("offset", "expected"), [(1, [3, 4, 5]), (0, [4, 5, 6]), (-1, [5, 6, 7])])
def test_mask_offset_moves_the_rows_that_teach(offset: int, expected: list[int]) -> None:
    mask = torch.zeros(9, dtype=torch.bool)
    mask[4:7] = True
    assert teacher_rows(mask, document_of([9]), offset).tolist() == expected


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_no_gate_looks_into_another_document(offset: int) -> None:
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
    rows = teacher_rows(mask, document_of([4, 4]), offset).tolist()
    assert rows == {1: [2], 0: [3], -1: [5]}[offset]


def test_first_row_of_a_document_teaches_nobody() -> None:
    mask = torch.ones(6, dtype=torch.bool)
    assert teacher_rows(mask, document_of([3, 3]), 0).tolist() == [1, 2, 4, 5]


def test_slot_of_step_i_lies_i_plus_one_before_its_teacher() -> None:
    plan = map_slots(torch.tensor([2, 5]), document_of([6]), 3)
    slots = torch.where(plan.slots >= 0, plan.active[plan.slots.clamp(min=0)], -1)
    assert slots.tolist() == [[1, 0, -1], [4, 3, 2]]
    assert plan.counts.tolist() == [2, 2, 1]


def test_distant_answers_make_separate_runs() -> None:
    plan = map_slots(torch.tensor([2, 40]), document_of([50]), 2)
    assert [(run.begin, run.end, run.at, run.document) for run in plan.ranges] == [(0, 2, 0, 0), (38, 40, 2, 0)]
    assert plan.active.tolist() == [0, 1, 38, 39]


def test_nothing_taught_gives_an_empty_plan() -> None:
    plan = map_slots(torch.zeros(0, dtype=torch.int64), document_of([5]), 3)
    assert plan.ranges == ()
    assert plan.active.numel() == 0
    assert plan.counts.tolist() == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.sampled_from([-1, 0, 1]),
    st.integers(0, 20),
)
def test_plan_agrees_with_the_definition(lengths: list[int], seed: int, steps: int, offset: int, gap: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    document = document_of(lengths)
    total = len(document)
    mask = torch.rand(total, generator=generator) < 0.4
    rows = teacher_rows(mask, document, offset)
    plan = map_slots(rows, document, steps, gap)
    expected = set()
    for t in range(total):
        for i in range(steps):
            p = t + 1 + i
            gate = p + offset
            same = p < total and document[p] == document[t] and 0 <= gate < total and document[gate] == document[p]
            if same and mask[gate]:
                expected.add((t, i, p))
    found = {
        (int(plan.active[plan.slots[r, i]]), i, int(rows[r]))
        for r in range(len(rows))
        for i in range(steps)
        if plan.slots[r, i] >= 0
    }
    assert found == expected
    assert torch.equal(open_steps(rows, document, steps), plan.slots >= 0)
    covered = [t for run in plan.ranges for t in range(run.begin, run.end)]
    assert covered == plan.active.tolist() == sorted(set(covered))
    for run in plan.ranges:
        assert int(document_starts(document)[run.begin]) == run.document
        assert len(set(document[run.begin : run.end].tolist())) == 1
