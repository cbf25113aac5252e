"""What engines share: putting answers together, the scratch folder, devices of a rank, settings."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from collectors.capture.options import CollectOptions, engine_options, read_engine_args
from collectors.cli.collect import engine_flags
from collectors.engines import ENGINES, CaptureRequest, EngineOptions, EngineRow, open_engine, read_settings, resources
from collectors.engines.assembly import Assembly
from collectors.engines.resources import PREFIX, Scratch, gpus_of, rank_devices
from collectors.targets.layers import choose_layers
from hiddenstore.doctor import DoctorCheck
from hiddenstore.errors import CaptureError, ConfigError
from hiddenstore.process import Rank

WIDTH, LAYERS = 8, 2


def request(*ids: int, rows: tuple[int, ...] = ()) -> CaptureRequest:
    return CaptureRequest(np.array(ids, np.int32), np.array(rows, np.int32))


def states(tokens: int, first: float) -> tuple[torch.Tensor, torch.Tensor]:
    aux = torch.arange(first, first + LAYERS * tokens).reshape(LAYERS, tokens, 1).expand(-1, -1, WIDTH)
    return aux.float(), (100 + torch.arange(first, first + tokens)).reshape(tokens, 1).expand(-1, WIDTH).float()


def test_answers_in_any_order_lie_in_request_order() -> None:
    requests = [request(5, 6, 7, rows=(1, 2)), request(8, rows=(0,)), request(9, 9, rows=(0,))]
    assembly = Assembly(requests, LAYERS, WIDTH)
    for index, first in ((2, 40), (0, 10), (1, 30)):
        ids = requests[index].input_ids
        assembly.put(index, ids, *states(len(ids), first), next_token=70 + index)
    captured = assembly.captured()
    assert captured.token_ids.tolist() == [5, 6, 7, 8, 9, 9]
    assert captured.aux[:, :, 0].tolist() == [[10, 11, 12, 30, 40, 41], [13, 14, 15, 31, 42, 43]]
    assert captured.final[:, 0].tolist() == [111, 112, 130, 140]
    assert (captured.next_rows.tolist(), captured.next_tokens.tolist()) == ([1, 2], [70, 71])


def test_what_does_not_belong_to_its_request_is_refused() -> None:
    assembly = Assembly([request(5, 6, 7, rows=(2,)), request(8)], LAYERS, WIDTH)
    ids = np.array([5, 6, 7])
    aux, final = states(3, 0)
    with pytest.raises(CaptureError, match=r"ran 3 tokens for request 0 of 2 that are not the 3"):
        assembly.put(0, ids[::-1], aux, final)
    for wrong_aux, wrong_final in ((aux[:, 1:], final), (aux[1:], final), (aux, final[:, 1:])):
        with pytest.raises(CaptureError, match="prefix cache") as caught:
            assembly.put(0, ids, wrong_aux, wrong_final)
        assert caught.value.kind == "engine-shape"
    assembly.put(0, ids, aux, final)
    with pytest.raises(CaptureError, match="answered request 0 of 2 twice"):
        assembly.put(0, ids, aux, final)
    with pytest.raises(CaptureError, match="never answered 1 of 2 requests, first 1"):
        assembly.captured()


def test_a_rank_without_devices_of_its_own_is_refused_with_what_fits() -> None:
    assert rank_devices(["4", "5"], local_rank=1, count=2) == ["4", "5"]
    with pytest.raises(ConfigError, match="rank 1 of this machine needs 2 GPUs, and 3 are visible") as caught:
        rank_devices(["0", "1", "2"], local_rank=1, count=2)
    assert caught.value.kind == "devices-too-few"
    assert str(caught.value.hint).startswith("start 1 ranks per machine")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_ranks_of_a_machine_are_spread_over_its_gpus(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = CollectOptions("data", "store", "target", device=device)
    choice = choose_layers("1,3", "supervised", 8)
    found = [engine_options(options, choice, 10, Rank(rank, 8, rank % 4)).device for rank in range(8)]
    assert found == [f"cuda:{rank % 4}" for rank in range(8)]
    named = replace(options, device="cuda:2")
    assert engine_options(named, choice, 10, Rank(1, 2, 1)).device == "cuda:2"


@pytest.mark.parametrize("layers", ["eagle3", "dflash", "all-drafters", "9"])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_layers_that_a_shallow_target_lacks_are_answered_with_some_that_it_has(layers: str, num_layers: int) -> None:
    try:
        choose_layers(layers, None, num_layers)
    except ConfigError as error:
        fix = str(error.hint).removeprefix("--layers ")
        assert choose_layers(fix, None, num_layers).aux_layers
    else:
        assert (layers, num_layers >= 3) == ("eagle3", True)


@pytest.mark.parametrize(("extra", "count"), [({}, 4), ({"pipeline_parallel_size": 2}, 8)])
def test_an_engine_takes_the_gpus_of_all_its_stages(extra: dict[str, int], count: int) -> None:
    assert gpus_of(4, extra) == count


def test_a_scratch_folder_goes_with_its_owner(tmp_path: Path) -> None:
    one, other = Scratch(tmp_path), Scratch(tmp_path)
    (one.path / "states").write_bytes(b"x")
    other.close()
    assert one.path.exists()
    assert not other.path.exists()
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    code = f"from collectors.engines.resources import Scratch; Scratch(__import__('pathlib').Path({str(tmp_path)!r})); "
    code += "__import__('time').sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    while not list(tmp_path.glob(f"{PREFIX}*")):
        assert process.poll() is None
        time.sleep(0.05)
    (left,) = tmp_path.glob(f"{PREFIX}*")
    beside = Scratch(tmp_path)
    assert left.exists(), "its owner still runs"
    process.kill()
    process.wait()
    Scratch(tmp_path).close()
    assert not left.exists()
    beside.close()


def test_a_scratch_folder_that_is_missing_or_too_small_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder") as caught:
        Scratch(tmp_path / "nowhere")
    assert caught.value.kind == "scratch-invalid"
    scratch = Scratch(tmp_path)
    with pytest.raises(ConfigError, match="are under way at one time") as caught:
        scratch.require(scratch.free_bytes() * 2)
    assert caught.value.kind == "scratch-invalid"
    scratch.close()


def test_settings_are_a_closed_list_and_read_as_yaml() -> None:
    assert read_settings("x", {"a": 1}, {"a": 0, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match="engine x has no setting 'concurency', it has: concurrency") as caught:
        read_settings("x", {"concurency": 1}, {"concurrency": 8})
    assert caught.value.hint == "--engine-arg concurrency=…"
    read = read_engine_args(["enforce-eager=true", "gpu_memory_utilization=0.5", "extra={a: 1}", "name=x=y"])
    assert read == {"enforce_eager": True, "gpu_memory_utilization": 0.5, "extra": {"a": 1}, "name": "x=y"}
    for wrong in ("alone", "=3", "a={"):
        with pytest.raises(ConfigError, match="no KEY=VALUE"):
            read_engine_args([wrong])


class EchoEngine:
    """An engine of a file that the table of engines names."""

    final_norm = None

    def __init__(self, target: object, options: EngineOptions) -> None:
        self.target, self.volume = target, options.extra["volume"]

    def describe(self) -> None: ...

    def capture(self, requests: object, stop: object, done: object = None) -> None: ...

    def close(self) -> None: ...


def echo_checks() -> list[DoctorCheck]:
    return [DoctorCheck("engine echo", "ok", "made of air")]


def test_an_engine_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(folder=SimpleNamespace(adapter=None))
    row = EngineRow(f"{__name__}:EchoEngine", f"{__name__}:echo_checks", flags={"volume": "how loud."})
    monkeypatch.setitem(ENGINES.rows, "echo", row)

    @click.command()
    @engine_flags
    @click.option("--data")
    def collect(data: str, engine_flags: dict[str, str]) -> None:
        engine = open_engine("echo", plain, EngineOptions((), 1, extra=engine_flags))  # type: ignore[arg-type]
        click.echo(f"{data} {engine.volume} {engine_flags}")  # type: ignore[attr-defined]

    assert CliRunner().invoke(collect, ["--volume", "3", "--data", "d"]).output == "d 3 {'volume': '3'}\n"
    assert "Engine echo: how loud." in CliRunner().invoke(collect, ["--help"]).output
    assert "engine echo" in [check.name for check in resources.checks()]
    with pytest.raises(ConfigError, match="engine echo runs in this process and takes no --server"):
        open_engine("echo", None, EngineOptions((), 1, server="http://localhost"))  # type: ignore[arg-type]
