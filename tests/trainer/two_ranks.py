"""Several training runs in one pair of processes, because starting a pair costs seconds."""

import faulthandler
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Job:
    """One call of ``train`` on both ranks."""

    store: str
    run: str
    words: list[str] = field(default_factory=list)
    resume: bool = False


def on_two_ranks(jobs: list[Job]) -> None:
    """Run the jobs one after the other on two gloo ranks."""
    text = json.dumps([asdict(job) for job in jobs])
    ports = " ".join(str(port) for port in free_ports(len(jobs)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.two_ranks", text, ports],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def main() -> None:
    """The body of one rank."""
    from trainer.train.loop import train

    faulthandler.dump_traceback_later(450)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for job, port in zip(json.loads(sys.argv[1]), sys.argv[2].split(), strict=True):
        os.environ["MASTER_PORT"] = port
        train(job["store"], job["run"], words=job["words"], resume=job["resume"])


if __name__ == "__main__":
    main()
