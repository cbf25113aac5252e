"""Reading what TensorRT-LLM saves: files written here by hand, to its documentation, whole, half and wrong."""

import zipfile
from pathlib import Path

import pytest
import torch

from collectors.engines.trtllm_files import SavedFolder, read_entry
from hiddenstore.errors import CaptureError

WIDTH = 8
TOKENS = 5
WHERE = Path("states_7.pt")


def entry(layers: int = 2, *, repeat: str = "last", dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random states of one request; layer k holds values around 10·k, the final hidden around -5."""
    states = [torch.randn(TOKENS, WIDTH) + 10 * k for k in range(1, layers + 1)]
    final = torch.randn(TOKENS, WIDTH) - 5
    blocks = {"last": [*states, final], "first": [final, *states], "no": states}[repeat]
    return {
        "id": 7,
        "input_ids": torch.arange(3, 3 + TOKENS),
        "hidden_state": final.to(dtype),
        "aux_hidden_states": torch.cat(blocks, dim=-1).to(dtype),
    }


def folder_at(path: Path) -> SavedFolder:
    return SavedFolder(path, layers=2, width=WIDTH)


@pytest.mark.parametrize("repeat", ["last", "first", "no"])
@pytest.mark.parametrize("key", ["aux_hidden_states", "hidden_state_features"])
def test_layers_come_out_in_order_however_the_final_hidden_is_repeated_among_them(repeat: str, key: str) -> None:
    saved = entry(repeat=repeat)
    saved[key] = saved.pop("aux_hidden_states")
    states = read_entry(saved, 2, WIDTH, WHERE)
    assert states.aux.shape == (2, TOKENS, WIDTH)
    assert [round(float(layer.float().mean()) / 10) for layer in states.aux] == [1, 2]
    assert torch.equal(states.final, saved["hidden_state"])
    assert states.token_ids.tolist() == [3, 4, 5, 6, 7]


def test_only_the_final_hidden_needs_no_layers() -> None:
    saved = entry()
    del saved["aux_hidden_states"]
    assert read_entry(saved, 0, WIDTH, WHERE).aux.shape == (0, TOKENS, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_float_the_engine_computes_in_is_taken(dtype: torch.dtype) -> None:
    assert read_entry(entry(dtype=dtype), 2, WIDTH, WHERE).aux.dtype == dtype


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"aux_hidden_states": None}, "engine-layers", "no aux_hidden_states nor hidden_state_features, but 2 layers"),
        ({"hidden_state": None}, "engine-file", "it has no tensor hidden_state, only aux_hidden_states, id, input_ids"),
        ({"input_ids": "text"}, "engine-file", "no tensor input_ids"),
        ({"aux_hidden_states": torch.zeros(5, 12)}, "engine-layers", "12 wide, but 2 layers of 8 make 16"),
        ({"aux_hidden_states": torch.zeros(4, 16)}, "engine-file", r"shape \[4, 16\], but the request has 5 tokens"),
        ({"hidden_state": torch.zeros(5, 6)}, "engine-layers", "hidden_state of request 1 of states_7.pt is 6 wide"),
        ({"hidden_state": torch.zeros(3, 8)}, "engine-file", "a reused prefix or a chunked prefill"),
        ({"aux_hidden_states": torch.zeros(5, 16, dtype=torch.int8)}, "engine-file", "torch.int8"),
    ],
)
def test_states_of_other_layers_rows_or_kind_are_refused(change: dict[str, object], kind: str, says: str) -> None:
    saved = {key: value for key, value in (entry() | change).items() if value is not None}
    with pytest.raises(CaptureError, match=says) as caught:
        read_entry(saved, 2, WIDTH, WHERE)
    assert caught.value.kind == kind


@pytest.mark.parametrize("repeat", ["last", "first"])
def test_a_layer_that_is_missing_is_seen_although_the_repeated_final_hidden_fills_its_place(repeat: str) -> None:
    saved = entry(layers=1, repeat=repeat)
    assert saved["aux_hidden_states"].shape[1] == 2 * WIDTH
    with pytest.raises(CaptureError, match="16 wide, 8 of it hidden_state once more, but 2 layers"):
        read_entry(saved, 2, WIDTH, WHERE)


def test_a_file_is_taken_once_and_removed_when_its_last_request_is_done(tmp_path: Path) -> None:
    torch.save([entry(), entry()], tmp_path / "states_2.pt")
    folder = folder_at(tmp_path)
    first, second = folder.take()
    assert list(folder.take()) == []
    folder.done(second)
    assert (tmp_path / "states_2.pt").exists()
    folder.done(first)
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_file_is_left_until_it_is_whole(tmp_path: Path) -> None:
    torch.save([entry()], tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    folder, path = folder_at(tmp_path), tmp_path / "states_1.pt"
    for end in (0, 3, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        assert list(folder.take()) == [], end
        assert folder.unfinished() == [f"states_1.pt ({end} bytes)"]
    path.write_bytes(data)
    assert len(list(folder.take())) == 1


class Planted:
    """What a pickle may do: call anything."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (Path("planted"),)


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save([Planted()], tmp_path / "states_1.pt")
    with pytest.raises(CaptureError, match=r"cannot read TensorRT-LLM's file states_1\.pt") as caught:
        list(folder_at(tmp_path).take())
    assert caught.value.kind == "engine-file"
    assert not (tmp_path / "planted").exists()


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "states_1.pt", "w") as archive:
        archive.writestr("notes.txt", "nothing")
    with pytest.raises(CaptureError, match="cannot read"):
        list(folder_at(tmp_path).take())


def test_what_lies_in_the_folder_before_the_first_request_is_cleared(tmp_path: Path) -> None:
    torch.save([entry()], tmp_path / "states_0.pt")
    (tmp_path / ".owner").touch()
    folder_at(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == [".owner"]
