"""Several training runs in one pair of processes, because starting a pair costs seconds."""

import faulthandler
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.forked import Forked
from trainer.train.loop import train


@dataclass
class Job:
    """One call of ``train`` on both ranks."""

    store: str
    run: str
    words: list[str] = field(default_factory=list)
    resume: bool = False


def on_two_ranks(jobs: list[Job]) -> None:
    """Run the jobs one after the other on two gloo ranks."""
    ports = free_ports(len(jobs))
    processes = [
        Forked(_train_each, jobs, ports, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2") for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=500)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def _train_each(jobs: list[Job], ports: list[int]) -> None:
    """The body of one rank."""
    faulthandler.dump_traceback_later(450)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for job, port in zip(jobs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        train(job.store, job.run, words=job.words, resume=job.resume)
