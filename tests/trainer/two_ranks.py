"""Several training runs in one pair of processes, because starting a pair costs seconds."""

import faulthandler
import os
import random
import socket
import time
from contextlib import suppress
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
        # A rank waits for one that failed for half an hour.
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    said = [process.communicate(timeout=10)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different, and none that the system gives to a connection before it is used: those
    begin at 32,768 on Linux."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(15_000, 32_768)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


def _train_each(jobs: list[Job], ports: list[int]) -> None:
    """The body of one rank."""
    faulthandler.dump_traceback_later(450)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for job, port in zip(jobs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        train(job.store, job.run, words=job.words, resume=job.resume)
