"""Launchers without their cluster: who gets which unit, what a loss costs, when the job gives up, where workers go."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collectors.engines.hf import HfEngine
from collectors.job import CollectOptions, CollectReport, collect
from collectors.launch import LauncherChoice, launch, read_launcher
from collectors.launch.crew import Lost
from collectors.launch.dispatch import ATTEMPTS, Dispatch
from collectors.launch.placement import Placement, place
from collectors.launch.ray import require_answer
from collectors.launch.report import WorkerReport, documents, lines, shares
from collectors.launch.worker import CaptureWorker, Failure
from hiddenstore.errors import CaptureError, ConfigError, CorruptionError, FormatError, InterruptError
from hiddenstore.rank import Drain, Rank
from hiddenstore.store import Store
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import save_target

SAMPLES = 40


class HereCrew:
    """Workers in this process, each call done when made; ``ends(index, method, unit)`` ends a worker in a call."""

    def __init__(self, options: CollectOptions, size: int, ends: Callable[[int, str, str], bool]) -> None:
        self.size = size
        self._options, self._ends = options, ends
        self._workers: dict[int, CaptureWorker] = {}
        self._answers: list[tuple[int, Any]] = []

    def start(self, index: int) -> None:
        self._workers[index] = CaptureWorker(self._options, Rank(index, self.size))

    def call(self, index: int, method: str, *arguments: str) -> None:
        if self._ends(index, method, arguments[0] if arguments else ""):
            self._answers.append((index, Lost("the test ended it")))
        else:
            self._answers.append((index, getattr(self._workers[index], method)(*arguments)))

    def wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        answers, self._answers = self._answers, []
        return answers

    def stop(self, index: int) -> None:
        self._workers[index].stop()

    def kill(self, index: int) -> None:
        self._workers[index].close()


def never(_index: int, _method: str, _unit: str) -> bool:
    return False


def dispatch(
    options: CollectOptions,
    size: int = 3,
    ends: Callable[[int, str, str], bool] = never,
    drain: Drain | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> CollectReport:
    return Dispatch(HereCrew(options, size, ends), options, drain or Drain(), note).run()


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 80)


@pytest.fixture(scope="module")
def place_of_work(tmp_path_factory: pytest.TempPathFactory) -> CollectOptions:
    """DATA, target, and a store that one process collected."""
    folder = tmp_path_factory.mktemp("launch")
    data = data_for_tiny(folder / "data", samples=SAMPLES)
    options = CollectOptions(data, folder / "straight", str(save_target(folder / "target")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hiddenstore.inputs.UNIT_TOKENS", 80)
        collect(options, note=lambda _text: None)
    return options


@pytest.fixture
def options(place_of_work: CollectOptions, tmp_path: Path) -> CollectOptions:
    return replace(place_of_work, store=tmp_path / "store")


def units_of(options: CollectOptions) -> list[str]:
    return [record.unit for record in Store.open(options.store).commits()]


def test_three_workers_write_the_store_that_one_process_writes(
    options: CollectOptions, place_of_work: CollectOptions
) -> None:
    notes: list[str] = []
    report = dispatch(options, note=notes.append)
    assert segment_bytes(options.store) == segment_bytes(place_of_work.store)
    assert Store.open(options.store).sample_ids == Store.open(place_of_work.store).sample_ids
    assert report.samples == len(Store.open(options.store))
    assert report.pending_units == 0
    assert sum(worker.units for worker in report.workers) == report.units == len(units_of(options))
    assert sum(worker.tokens for worker in report.workers) == report.tokens
    assert all(0 < worker.forward_share < 1 for worker in report.workers)
    assert len(notes) == 1


def test_units_of_a_lost_worker_are_done_by_others_and_counted_once(
    options: CollectOptions, place_of_work: CollectOptions
) -> None:
    left = {3, 7, 8, 15, 16}
    seen = 0

    def ends(_index: int, method: str, _unit: str) -> bool:
        nonlocal seen
        seen += method == "capture"
        return method == "capture" and seen in left

    report = dispatch(options, ends=ends)
    assert sum(worker.losses for worker in report.workers) == len(left)
    assert segment_bytes(options.store) == segment_bytes(place_of_work.store)
    assert report.samples == len(Store.open(options.store))
    assert report.units == len(units_of(options))


def test_a_unit_that_ends_every_worker_is_named_and_all_others_are_done(options: CollectOptions) -> None:
    poison = units_of(replace(options, store=options.data.parent / "straight"))[2]
    with pytest.raises(CaptureError, match=f"unit {poison} was lost {ATTEMPTS} times .*the test ended it") as caught:
        dispatch(options, ends=lambda _index, _method, unit: unit == poison)
    assert caught.value.kind == "unit-lost"
    everything = units_of(replace(options, store=options.data.parent / "straight"))
    assert units_of(options) == [unit for unit in everything if unit != poison]
    report = dispatch(options)
    assert (report.units, report.resumed_units, report.pending_units) == (1, len(everything) - 1, 0)


@pytest.mark.parametrize("method", ["open", "capture"])
def test_workers_that_all_end_at_once_end_the_job(options: CollectOptions, method: str) -> None:
    with pytest.raises(CaptureError, match=f"{2 * ATTEMPTS} workers were lost and no unit was done between") as caught:
        dispatch(options, 2, ends=lambda _index, called, _unit: called == method)
    assert caught.value.kind == "workers-lost"


def test_a_refusal_of_every_worker_is_raised_once_as_one_process_raises_it(options: CollectOptions) -> None:
    wrong = replace(options, layers="1,77")
    with pytest.raises(ConfigError) as alone:
        collect(wrong, note=lambda _text: None)
    with pytest.raises(ConfigError) as launched:
        dispatch(wrong)
    assert (launched.value.message, launched.value.kind, launched.value.hint) == (
        alone.value.message,
        alone.value.kind,
        alone.value.hint,
    )


def test_a_request_to_stop_keeps_what_is_written_and_the_same_job_does_the_rest(
    options: CollectOptions, place_of_work: CollectOptions
) -> None:
    drain = Drain()
    started = 0

    def stop_at_the_tenth(_index: int, method: str, _unit: str) -> bool:
        nonlocal started
        started += method == "capture"
        if started == 10:
            drain.request()
        return False

    with pytest.raises(InterruptError):
        dispatch(options, ends=stop_at_the_tenth, drain=drain)
    done = len(units_of(options))
    assert 0 < done < len(units_of(place_of_work))
    report = dispatch(options)
    assert report.resumed_units == done
    assert segment_bytes(options.store) == segment_bytes(place_of_work.store)


def test_rejects_of_all_workers_count_against_one_budget(
    options: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = HfEngine.capture
    captured = 0

    def zero_states_in_two_units(self: HfEngine, requests: Sequence[Any], stop: Callable[[], bool]) -> Any:
        nonlocal captured
        found = capture(self, requests, stop)
        captured += 1
        # The units of two workers, so that no worker alone is over the one reject that is allowed.
        if captured in (2, 3):
            found.aux[0, 1] = 0
        return found

    monkeypatch.setattr(HfEngine, "capture", zero_states_in_two_units)
    with pytest.raises(CaptureError, match=r"2 samples rejected \(2 zero-rows\), more than the 1 allowed") as caught:
        dispatch(options)
    assert caught.value.kind == "too-many-rejects"


def test_an_error_survives_the_way_to_the_driver() -> None:
    for error in (
        FormatError("no", kind="k", hint="h"),
        CorruptionError("bad", kind="c", path="p", samples=("a", "b")),
    ):
        back = Failure.of(error).error()
        assert type(back) is type(error)
        assert back.__dict__ == error.__dict__


def test_a_launcher_is_read_with_its_number_of_workers() -> None:
    assert read_launcher("ray") == LauncherChoice("ray", None)
    assert read_launcher("ray:3") == LauncherChoice("ray", 3)
    for text, kind in (("rai", "launcher-unknown"), ("ray:0", "launcher-workers"), ("ray:", "launcher-workers")):
        with pytest.raises(ConfigError) as caught:
            read_launcher(text)
        assert caught.value.kind == kind


def test_the_local_launcher_takes_no_number_of_workers(options: CollectOptions) -> None:
    with pytest.raises(ConfigError, match="takes no number of workers"):
        launch("local:2", options, Drain(), lambda _text: None)


GPU_NODES = [{"CPU": 32.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 6.0}, {"CPU": 8.0}]


@pytest.mark.parametrize(
    ("nodes", "workers", "tensor_parallel", "device", "expected"),
    [
        (GPU_NODES, None, 1, "auto", Placement(14, 1.0, 1)),
        (GPU_NODES, None, 4, "auto", Placement(3, 1.0, 4)),
        (GPU_NODES, 2, 4, "cuda", Placement(2, 1.0, 4)),
        (GPU_NODES, None, 1, "cpu", Placement(3, 8.0, 0)),
        ([{"CPU": 2.0}], 3, 1, "auto", Placement(3, 0.66, 0)),
        ([{"CPU": 16.0}, {"CPU": 16.0}], 3, 1, "auto", Placement(3, 8.0, 0)),
    ],
)
def test_workers_are_placed_by_groups_of_gpus_or_shares_of_cores(
    nodes: list[dict[str, float]], workers: int | None, tensor_parallel: int, device: str, expected: Placement
) -> None:
    assert place(nodes, workers, tensor_parallel, device) == expected


@pytest.mark.parametrize(
    ("workers", "tensor_parallel", "device", "message"),
    [
        (4, 4, "auto", "4 workers of 4 GPUs each do not fit; GPUs per node: 8, 6, 0"),
        (None, 16, "auto", "no node of the Ray cluster has the 16 GPUs of one worker"),
    ],
)
def test_workers_that_do_not_fit_are_refused(
    workers: int | None, tensor_parallel: int, device: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        place(GPU_NODES, workers, tensor_parallel, device)
    assert caught.value.kind == "launcher-resources"


def test_the_report_names_each_worker_and_its_utilisation() -> None:
    workers = [
        WorkerReport(0, ["a"], units=2, tokens=10, seconds=2.0, forward_s=1.5, wait_s=0.25, losses=1),
        WorkerReport(1, ["b"], units=3, tokens=12, seconds=2.0, forward_s=1.0),
    ]
    assert dict(lines(workers)) == {
        "workers": "2, 1 lost and replaced",
        "units each": "2/3",
        "target": "75/50 % of each worker's time",
        "waiting": "12/0 % of each worker's time, for writes",
    }
    assert documents(workers)[0]["forward_share"] == 0.75
    assert shares(range(20)) == "0…10…19"


def test_an_address_at_which_nothing_listens_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        require_answer(address)
    with pytest.raises(OSError, match="refused"):
        require_answer(address)
    require_answer("auto")
