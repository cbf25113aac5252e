"""Launchers without their cluster: what is asked of them, where workers go."""

import pickle
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from collectors.capture.job import CollectOptions
from collectors.launch import launch
from hiddenstore.errors import ConfigError, CorruptionError, FormatError, HiddenstoreError, Kind
from hiddenstore.process import Drain, Rank

OPTIONS = CollectOptions("data", "store", "target")


@pytest.mark.parametrize(
    "error",
    [
        FormatError("no", kind=Kind.FORMAT_FUTURE, hint="h"),
        ConfigError("no", kind=Kind.OPTION_INVALID, problems=("one", "two")),
        CorruptionError("bad", kind=Kind.FILE_CORRUPT, path="p", samples=("a", "b")),
    ],
)
def test_an_error_survives_the_way_to_another_process(error: HiddenstoreError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), back.__dict__, str(back)) == (type(error), error.__dict__, str(error))


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        ("rai", "option-invalid"),
        ("ray:0", "option-invalid"),
        ("ray:", "option-invalid"),
        ("local:2", "option-invalid"),
    ],
)
def test_a_launcher_that_cannot_be_is_refused(launcher: str, kind: str) -> None:
    with pytest.raises(ConfigError, match="should be local, ray or ray:WORKERS") as caught:
        launch(launcher, OPTIONS, Drain(), lambda _text: None)
    assert caught.value.kind == kind


@pytest.mark.parametrize(("launcher", "ranks"), [("local", "2"), ("ray", "1"), ("ray:4", "1")])
def test_workers_that_would_each_spread_over_the_same_gpus_or_over_one_are_refused(
    launcher: str, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--device-map auto spreads a target over every GPU") as caught:
        launch(launcher, replace(OPTIONS, extra={"device_map": "auto"}), Drain(), lambda _text: None)
    assert caught.value.kind == "launcher-resources"
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("word", "gpus"), [("cpu", 8), ("cuda:0", 8), (None, 8), ("auto", 0), ("auto", 1), ("balanced", 1)]
)
def test_ranks_of_one_machine_take_a_device_map_that_spreads_over_no_gpus(
    word: str | None, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("collectors.launch.collect", lambda *words: started.append(words))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    for name, value in {"LOCAL_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    launch("local", replace(OPTIONS, extra={"device_map": word}), Drain(), lambda _text: None)
    assert started[0][1] == Rank(1, 2, 1)


@pytest.mark.parametrize("word", ["cpu", None])
def test_a_worker_of_ray_takes_a_device_map_of_one_device(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    placed = SimpleNamespace(on_ray=lambda *words: started.append(words))
    monkeypatch.setitem(sys.modules, "collectors.launch.ray", placed)
    launch("ray", replace(OPTIONS, extra={"device_map": word}), Drain(), lambda _text: None)
    assert started[0][1] is None


def test_a_worker_alone_on_its_machine_spreads_over_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("collectors.launch.collect", lambda *words: started.append(words))
    for name, value in {"LOCAL_WORLD_SIZE": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    launch("local", replace(OPTIONS, extra={"device_map": "auto"}), Drain(), lambda _text: None)
    assert started[0][1] == Rank(1, 2, 0)


GPU_NODES = [{"CPU": 32.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 6.0}, {"CPU": 8.0}]


@pytest.mark.parametrize(
    ("nodes", "workers", "more", "expected"),
    [
        (GPU_NODES, None, {}, (14, {"num_cpus": 1, "num_gpus": 1})),
        (GPU_NODES, None, {"tensor_parallel": 4}, (3, {"num_cpus": 1, "num_gpus": 4})),
        (GPU_NODES, 2, {"tensor_parallel": 4, "device": "cuda"}, (2, {"num_cpus": 1, "num_gpus": 4})),
        (GPU_NODES, None, {"device": "cpu"}, (3, {"num_cpus": 8})),
        (GPU_NODES, None, {"server": "http://localhost:8000"}, (3, {"num_cpus": 8})),
        ([{"CPU": 2.0}], 3, {}, (3, {"num_cpus": 0.66})),
        ([{"CPU": 16.0}, {"CPU": 16.0}], 3, {}, (3, {"num_cpus": 8})),
    ],
)
def test_workers_are_placed_by_groups_of_gpus_or_shares_of_cores(
    nodes: list[dict[str, float]], workers: int | None, more: dict[str, Any], expected: tuple[int, dict[str, float]]
) -> None:
    pytest.importorskip("ray")
    from collectors.launch.ray import spread

    assert spread(nodes, workers, replace(OPTIONS, **more)) == expected


@pytest.mark.parametrize(
    ("workers", "tensor_parallel", "message"),
    [
        (4, 4, "4 workers with 4 GPUs each cannot be placed; GPUs per node of the Ray cluster: 8, 6, 0"),
        (None, 16, "1 worker with 16 GPUs each cannot be placed"),
    ],
)
def test_workers_that_do_not_fit_are_refused(workers: int | None, tensor_parallel: int, message: str) -> None:
    pytest.importorskip("ray")
    from collectors.launch.ray import spread

    with pytest.raises(ConfigError, match=message) as caught:
        spread(GPU_NODES, workers, replace(OPTIONS, tensor_parallel=tensor_parallel))
    assert caught.value.kind == "launcher-resources"


def test_an_address_at_which_nothing_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address} cannot be used: .*refused") as caught:
        launch("ray", OPTIONS, Drain(), lambda _text: None)
    assert caught.value.kind == "ray-unreachable"
