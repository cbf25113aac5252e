"""Two real processes train one drafter: the same steps as one process, and neither waits for a peer that is gone."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddenstore.data import TokenBatches
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind, StorageError
from hiddenstore.process import Rank
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from tests.forked import Forked, command
from tests.trainer.runs import ON_CPU, tiny_store
from tests.trainer.two_ranks import free_ports
from trainer.config import LoopConfig
from trainer.parallel.group import ProcessGroup, peer_errors, process_group, refuse_shared_gpus
from trainer.train import checkpoint
from trainer.train.loop import train
from trainer.train.state import require_shards_by_nccl


def failing(*words: str) -> None:
    """``hiddenstore WORDS`` whose second rank meets a damaged chunk in its third batch."""
    real = TokenBatches.__iter__

    def broken(self: TokenBatches) -> Iterator[Any]:
        for index, batch in enumerate(real(self)):
            if index == 2 and os.environ["RANK"] == "1":
                raise CorruptionError("a chunk is damaged", kind=Kind.CHUNK_CORRUPT)
            yield batch

    TokenBatches.__iter__ = broken  # type: ignore[method-assign]
    command(*words)


def on_its_own_disk(disks: Path, *words: str) -> None:
    """``hiddenstore WORDS`` in a folder of this rank's own, which the other ranks call by the same names."""
    os.chdir(disks / os.environ["RANK"])
    command(*words)


def start_two(*arguments: str, body: Callable[..., None] = command) -> list[Forked]:
    """Two ranks as torchrun starts them."""
    (port,) = free_ports(1)
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [Forked(body, "train", *arguments, **ranks, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def ended(processes: list[Forked]) -> tuple[list[int | None], list[str], list[str]]:
    """Exit codes, stdout and stderr of both."""
    said = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], [out for out, _ in said], [err for _, err in said]


def wait_for_steps(run: Path, count: int, process: Forked) -> None:
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)


def losses(run: Path) -> list[float]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in found if "loss" in line]


def assert_same_training(one: Path, two: Path) -> None:
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    weights = [checkpoint.load(run / "checkpoints/step-12").drafter for run in (one, two)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-4)


def cutting(stores: list[str], port: int) -> None:
    """A rank of a loop of somebody's own: the store it opened, then whether all cut the same batches."""
    rank = int(os.environ["RANK"])
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    batches = TokenBatches(Store.open(stores[rank]), batch_tokens=64, rank=rank, world_size=2)
    try:
        batches.require_one_order()
        sys.stdout.write("same")
    except ConflictError as error:
        sys.stdout.write(f"{error.kind} {error.message}")
    torch.distributed.destroy_process_group()


def test_ranks_that_opened_a_growing_store_at_different_moments_are_refused(tmp_path: Path) -> None:
    earlier, later = (str(make_store(tmp_path / name, samples=samples).path) for name, samples in (("a", 8), ("b", 9)))
    for stores, said in (([earlier, earlier], "same"), ([earlier, later], "ranks-differ")):
        (port,) = free_ports(1)
        ranks = [Forked(cutting, stores, port, RANK=str(rank)) for rank in range(2)]
        codes, outs, errors = ended(ranks)
        assert codes == [0, 0], errors
        assert [out.split()[0] for out in outs] == [said, said]
    assert "samples on ranks 0; " in outs[0]
    TokenBatches(Store.open(earlier), batch_tokens=64, rank=1, world_size=2).require_one_order()


SHARES: dict[str, tuple[str, Callable[[int], dict[str, int]]]] = {
    "each its own": ("same", lambda rank: {"rank": rank, "world_size": 4}),
    "two to a sequence": ("same", lambda rank: {"rank": rank // 2, "world_size": 2}),
    "all of one sequence": ("same", lambda rank: {"rank": 0}),
    "none": ("ranks-differ", lambda rank: {}),
    "how many alone": ("ranks-differ", lambda rank: {"world_size": 4}),
    "one twice as often": ("ranks-differ", lambda rank: {"rank": rank % 3, "world_size": 3}),
    "three of one": ("ranks-differ", lambda rank: {"rank": min(rank, 1), "world_size": 2}),
}


def sharing(store: str, port: int) -> None:
    """A rank of a loop of somebody's own: whether all ranks together read equal shares, for each way to name them."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    for _, named in SHARES.values():
        batches = TokenBatches(Store.open(store), batch_tokens=64, **named(rank))  # type: ignore[arg-type]
        try:
            batches.require_one_order()
            sys.stdout.write("same\n")
        except ConflictError as error:
            sys.stdout.write(f"{error.kind} {error.message} {error.hint}\n")
    torch.distributed.destroy_process_group()


def test_ranks_that_would_read_the_same_samples_are_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    store = str(make_store(tmp_path, samples=8).path)
    codes, outs, errors = ended([Forked(sharing, store, port, RANK=str(rank)) for rank in range(4)])
    assert codes == [0, 0, 0, 0], errors
    for out in outs:
        said = dict(zip(SHARES, out.splitlines(), strict=True))
        assert {name: line.split()[0] for name, line in said.items()} == {
            name: one for name, (one, _) in SHARES.items()
        }
        assert "they name none, none, none, none of world_size=1" in said["none"]
        assert "rank=distributed.get_rank()" in said["none"]


def test_a_start_that_is_refused_ends_both_ranks(tmp_path: Path) -> None:
    store = tiny_store(tmp_path)
    codes, _, said = ended(start_two(store.path, "-o", str(tmp_path / "run"), "--target", str(tmp_path / "nowhere")))
    assert codes == [2, 1]
    assert [text.count("nowhere is no folder and no hub id") for text in said] == [1, 0]


def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    train(store, tmp_path / "one", words=ON_CPU)
    codes, out, err = ended(start_two(store, "-o", str(tmp_path / "two"), "--json", *ON_CPU))
    assert codes == [0, 0], err
    assert json.loads(out[0])["steps"] == 12
    assert (out[1], err[1]) == ("", "")
    assert_same_training(tmp_path / "one", tmp_path / "two")
    validations = [
        [line for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines() if "validation" in line]
        for run in ("one", "two")
    ]
    for one, two in zip(*validations, strict=True):
        found = [json.loads(line)["validation"] for line in (one, two)]
        assert found[1]["losses"] == pytest.approx(found[0]["losses"], rel=1e-4)


def test_a_rank_without_a_pack_contributes_zero_and_the_first_says_so(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    words = [*ON_CPU, "data.batch_tokens=40", "data.pack_tokens=40"]
    train(store, tmp_path / "one", words=words)
    codes, _out, err = ended(start_two(store, "-o", str(tmp_path / "two"), "-q", *words))
    assert codes == [0, 0], err
    assert_same_training(tmp_path / "one", tmp_path / "two")
    assert "0.9 of 2 ranks have nothing to do in the average step" in err[0]
    assert "try data.batch_tokens=52" in err[0]
    assert err[1] == ""


def test_ranks_under_a_loss_that_depends_on_how_many_they_are_are_warned_once(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    words = [*ON_CPU, "train.max_steps=1", "loss.kind=lk_lambda", "loss.lk_blend=step"]
    codes, _out, err = ended(start_two(store, "-o", str(tmp_path / "two"), "-q", *words))
    assert codes == [0, 0], err
    assert "2 ranks train something else than one process" in " ".join(err[0].split())
    assert err[1] == ""


def test_a_signal_to_one_rank_stops_both_and_one_process_resumes_exactly(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    words = [*ON_CPU, "train.max_steps=400", "train.validate_every=0", "train.checkpoint_every=0"]
    run = tmp_path / "two"
    processes = start_two(store, "-o", str(run), "-q", *words)
    wait_for_steps(run, 3, processes[1])
    processes[1].send_signal(signal.SIGTERM)
    codes, _out, err = ended(processes)
    assert codes == [75, 75], err
    assert "a checkpoint is saved" in err[0]
    stopped = len(losses(run))
    assert checkpoint.checkpoints(run) == [run / f"checkpoints/step-{stopped}"]
    end = stopped + 4
    one = tmp_path / "one"
    assert train_until(store, one, words, end) == end
    assert train_until(store, run, [], end) == end
    assert losses(run)[:end] == pytest.approx(losses(one)[:end], rel=1e-4)


def train_until(store: str, run: Path, words: list[str], step: int) -> int:
    """Train or resume in this process and ask it to stop after ``step``; the steps done."""
    from hiddenstore.errors import InterruptError
    from trainer.train.log import RunLog, StepMetrics

    real = RunLog.step

    def stop_there(self: RunLog, metrics: StepMetrics) -> None:
        real(self, metrics)
        if metrics.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "step", stop_there)
        with pytest.raises(InterruptError):
            train(store, run, words=words, resume=(run / "run.json").exists())
    return len(losses(run))


def test_ranks_that_do_not_hold_the_checkpoint_that_the_first_goes_on_from_are_refused(tmp_path: Path) -> None:
    """Runs on each machine's own disk: the second one's lacks the newest checkpoint, has another, or is not there."""
    store, disks = tiny_store(tmp_path).path, tmp_path / "disks"
    train(store, disks / "0/run", words=[*ON_CPU, "train.max_steps=8"])
    train(store, tmp_path / "another", words=[*ON_CPU, "train.max_steps=8", "train.seed=2"])
    digest = checkpoint.state_digest(tmp_path / "another/checkpoints/step-8")[:12]
    for place, actual in (("0/run", "none"), ("../another", digest), (None, "none")):
        shutil.rmtree(disks / "1", ignore_errors=True)
        (disks / "1").mkdir()
        if place is not None:
            shutil.copytree(disks / place, disks / "1/run")
        if place == "0/run":
            shutil.rmtree(disks / "1/run/checkpoints/step-8")
        words = (store, "-o", "run", "--resume", "train.max_steps=10")
        codes, _out, err = ended(start_two(*words, body=partial(on_its_own_disk, disks)))
        assert codes == [1, 6], err
        assert "another rank failed  [another-rank]" in err[0]
        said = " ".join(err[1].split())
        assert "rank 1 of 2 does not hold run/checkpoints/step-8" in said
        assert f"expected, {actual} found [ranks-differ]" in said
        assert "rsync -a " in said
    assert checkpoint.latest(disks / "0/run") == disks / "0/run/checkpoints/step-8"


def test_a_rank_with_a_newer_checkpoint_than_the_first_goes_on_from_that_of_the_first(tmp_path: Path) -> None:
    store, disks = tiny_store(tmp_path).path, tmp_path / "disks"
    train(store, disks / "0/run", words=ON_CPU)
    shutil.copytree(disks / "0/run", disks / "1/run")
    shutil.copytree(disks / "0/run", tmp_path / "one")
    shutil.rmtree(disks / "0/run/checkpoints/step-12")
    codes, _out, err = ended(start_two(store, "-o", "run", "--resume", body=partial(on_its_own_disk, disks)))
    assert codes == [0, 0], err
    assert_same_training(tmp_path / "one", disks / "0/run")


def test_a_rank_that_fails_stops_the_other_and_says_why(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    codes, _out, err = ended(start_two(store, "-o", str(tmp_path / "two"), "-q", *ON_CPU, body=failing))
    assert codes == [1, 3], err
    assert "another rank failed  [another-rank]" in err[0]
    assert "a chunk is damaged" in err[1]
    assert len(losses(tmp_path / "two")) == 2


def test_a_rank_that_is_killed_does_not_leave_the_other_waiting(tmp_path: Path) -> None:
    store, run = tiny_store(tmp_path).path, tmp_path / "two"
    processes = start_two(store, "-o", str(run), "-q", *ON_CPU, "train.max_steps=100000", "train.validate_every=0")
    wait_for_steps(run, 2, processes[1])
    processes[1].kill()
    codes, _out, err = ended(processes)
    assert codes == [5, -signal.SIGKILL]
    assert "[rank-lost]" in err[0]


@pytest.mark.parametrize(
    ("environment", "fix"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "scontrol show hostnames"),
        ({"RANK": "0", "MASTER_ADDR": "here"}, "torchrun"),
    ],
)
def test_ranks_that_do_not_know_where_to_meet_are_told(environment: dict[str, str], fix: str) -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT") as caught, process_group(Rank(0, 2, 0), None, environment):
        pass
    assert caught.value.kind == "rank-rendezvous"
    assert fix in str(caught.value.hint)


def as_the_first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("named_by", ["a word", "a file", "the run that is resumed"])
def test_a_rank_waits_for_the_others_as_long_as_is_set(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, word, document = tmp_path / "run", "train.dist_timeout_minutes=0.005", "train: {dist_timeout_minutes: 0.005}"
    run.mkdir()
    named: dict[str, Any] = {"words": [word]}
    if named_by == "a file":
        (tmp_path / "settings.yaml").write_text(document)
        named = {"file": tmp_path / "settings.yaml"}
    elif named_by == "the run that is resumed":
        (run / "config.yaml").write_text(f"drafter: {{name: eagle3}}\n{document}\n")
        named = {"resume": True}
    # The other rank never comes.
    as_the_first_of_two(monkeypatch)
    with pytest.raises(StorageError) as caught:
        train(tmp_path / "store", run, **named)
    assert caught.value.kind == "rank-lost"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_the_first_of_two(monkeypatch)
    with pytest.raises(ConfigError, match="no GPU with NCCL") as caught:
        train(tmp_path / "store", tmp_path / "run", words=["train.dist_backend=nccl"])
    assert caught.value.hint == "train.dist_backend=auto"


def test_shards_of_a_gpu_s_parameters_need_nccl() -> None:
    settings = LoopConfig(parallel="fsdp", dist_backend="gloo")
    two = ProcessGroup(Rank(0, 2))
    with pytest.raises(ConfigError, match="over gloo") as caught:
        require_shards_by_nccl(settings, two, torch.device("cuda:0"))
    assert caught.value.kind == "option-invalid"
    require_shards_by_nccl(settings, two, torch.device("cpu"))
    require_shards_by_nccl(settings, ProcessGroup(Rank()), torch.device("cuda:0"))


def test_ranks_that_share_a_gpu_are_told_which_and_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"ranks 0, 2 on GPU a of one; ranks 4, 5 on GPU a of two$") as caught:
        refuse_shared_gpus(["a of one", "b of one", "a of one", "b of two", "a of two", "a of two"])
    assert caught.value.kind == "devices-too-few"
    assert "--nproc-per-node" in str(caught.value.hint)


def test_ranks_on_gpus_of_their_own_or_on_a_cpu_go_on() -> None:
    refuse_shared_gpus(["a of one", "b of one", "a of two"])
    refuse_shared_gpus(["", "", ""])


def test_of_what_nccl_says_the_line_that_tells_why_is_shown() -> None:
    said = "NCCL error in: NCCLUtils.cpp:93, unhandled system error\nncclSystemError: …\nLast error:\nno route to host"
    with pytest.raises(StorageError, match=r"^lost contact with the other ranks: no route to host$"), peer_errors():
        raise RuntimeError(said)
    with pytest.raises(StorageError, match=r"^lost contact with the other ranks: RuntimeError$"), peer_errors():
        raise RuntimeError


def test_a_machine_or_a_gpu_that_is_full_has_lost_nobody() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), peer_errors():
        torch.empty(1 << 50)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"), peer_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.AcceleratorError, match="device-side assert"), peer_errors():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
