"""The memory of a unit: another process fills it, what is wrong there is said here, and nothing of it stays."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from collectors.engines import CaptureRequest
from collectors.engines.unit_memory import Place, UnitMemory
from hiddenstore.errors import CaptureError

LAYERS, WIDTH = 2, 8
LENGTHS = (3, 70, 1)


def requests() -> list[CaptureRequest]:
    rows = [np.arange(10 * k, 10 * k + length, dtype=np.int32) for k, length in enumerate(LENGTHS)]
    return [CaptureRequest(ids, np.arange(len(ids) // 2, len(ids), dtype=np.int32)) for ids in rows]


def states(index: int) -> torch.Tensor:
    """float32 [T, L + 1, D], those of one request."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn((LENGTHS[index], LAYERS + 1, WIDTH), generator=generator)


def memory() -> UnitMemory:
    return UnitMemory.create(requests(), LAYERS, LAYERS + 1, WIDTH)


def fill(place: str, cut: int = 0) -> None:
    """What an engine's worker does for one request, ``cut`` of its first rows left out."""
    place_of = Place.parse(place)
    rows = states(place_of.index)[cut:]
    UnitMemory.open(place_of).put(place_of.index, requests()[place_of.index].input_ids, rows)


def test_what_another_process_puts_there_is_the_unit_in_request_order() -> None:
    unit = memory()
    assert unit.placed() == set()
    fill(str(unit.place(2)))
    worker = multiprocessing.get_context("spawn").Process(target=fill, args=(str(unit.place(1)),))
    worker.start()
    worker.join()
    fill(str(unit.place(0)))
    assert unit.placed() == {0, 1, 2}
    for index in (2, 1, 0):
        unit.assembly.note(index, 70 + index)
    captured = unit.assembly.captured()
    del unit
    expected = [states(index).to(torch.bfloat16) for index in range(3)]
    assert torch.equal(captured.aux, torch.cat([one[:, :LAYERS] for one in expected]).transpose(0, 1))
    rows = [one[request.final_rows, -1] for one, request in zip(expected, requests(), strict=True)]
    assert torch.equal(captured.final, torch.cat(rows))
    assert captured.token_ids.tolist() == np.concatenate([request.input_ids for request in requests()]).tolist()
    assert (captured.next_rows.tolist(), captured.next_tokens.tolist()) == ([1, 36, 37], [70, 71, 72])


def test_states_that_are_not_those_of_the_request_are_refused_in_both_processes() -> None:
    unit = memory()
    with pytest.raises(CaptureError):
        fill(str(unit.place(1)), 16)
    with pytest.raises(CaptureError, match=r"states \[2, 54, 8\] for request 1 .*prefix cache") as caught:
        unit.placed()
    assert caught.value.kind == "engine-shape"
    other = memory()
    with pytest.raises(CaptureError, match=r"states \[3, 2, 8\], expected \[tokens, 3, width\]"):
        other.put(0, requests()[0].input_ids, states(0)[:, 1:])
    with pytest.raises(CaptureError, match="expected"):
        other.placed()
    tokens = memory()
    with pytest.raises(CaptureError, match="tokens for request 0 of 3 that are not the 3"):
        tokens.put(0, requests()[1].input_ids, states(0))
    with pytest.raises(CaptureError) as caught:
        tokens.placed()
    assert caught.value.kind == "engine-tokens"


def test_a_unit_without_final_rows_has_none() -> None:
    unit = UnitMemory.create([CaptureRequest(np.array([3, 4], np.int32), np.zeros(0, np.int32))], 0, 1, WIDTH)
    unit.put(0, np.array([3, 4]), torch.ones((2, 1, WIDTH)))
    captured = unit.assembly.captured()
    assert (captured.final.shape, captured.next_rows.tolist()) == ((0, WIDTH), [])


def test_a_place_in_a_unit_that_is_gone_or_another_is_not_written_to(tmp_path: Path) -> None:
    unit, other = memory(), memory()
    assert unit.number != other.number, "units of two engines of a process are told apart"
    place = unit.place(0)
    with pytest.raises(ValueError, match=f"holds unit {unit.number} by now"):
        fill(f"{place.path}#{other.number}.0")
    assert unit.placed() == set()
    del unit
    with pytest.raises(ValueError, match=r"is gone|is not the memory of a unit"):
        UnitMemory.open(place)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(4096)
        with pytest.raises(ValueError, match="is not the memory of a unit"):
            UnitMemory.open(Place(f"/proc/self/fd/{file.fileno()}", 1, 0))
    with pytest.raises(ValueError, match="is no place"):
        Place.parse("/etc/passwd")
