"""The training commands of docs/scale-out.md, by a real torchrun and by stand-ins for SLURM's programs: a signal
leads to a checkpoint that the next job goes on from."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.runs import WORDS, tiny_store
from tests.trainer.test_group import losses
from tests.trainer.two_ranks import free_ports
from trainer.train import checkpoint

# What a page tells a reader to type, as the blocks of tests/test_docs.py.
pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
SMALL = [word for word in WORDS if not word.startswith("train.")]
NO_INTERVALS = ["train.validate_every=0", "train.checkpoint_every=0"]
# Two tasks of one node, whose worst status is the step's.
SRUN = """
for i in 0 1; do
    SLURM_STEP_ID=0 SLURM_PROCID=$i SLURM_NTASKS=2 SLURM_LOCALID=$i "$@" & echo $! >> tasks
done
worst=0
for task in $(jobs -p); do wait $task; status=$?; [ $status -le $worst ] || worst=$status; done
exit $worst"""
SCONTROL = '[ "$1" = requeue ] && echo "$2" >> requeued || echo 127.0.0.1'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store, and ``hiddenstore`` as a program whose new runs are small; ``STEPS`` is their end."""
    tiny_store(tmp_path)
    program = f'{sys.executable} -m hiddenstore.cli "$@" {shlex.join(NO_INTERVALS)} train.max_steps=$STEPS'
    own = f'case "$*" in *--resume*) exec {program} ;; *) exec {program} {shlex.join(SMALL)} ;; esac'
    for name, text in {"hiddenstore": own, "srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def fence(word: str) -> str:
    """The one fence of the page that trains by ``word``."""
    (found,) = (text for text in re.findall(r"```\w*\n(.*?)```", PAGE, re.S) if word in text and "train store" in text)
    return found


def start(folder: Path, script: str, steps: int, **environment: str) -> subprocess.Popen[str]:
    programs = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine = {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEPS": str(steps)}
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=os.environ | mine | environment, stdout=said, stderr=said, text=True
        )


def wait_for_steps(folder: Path, job: subprocess.Popen[str]) -> None:
    metrics, deadline = folder / "runs/first/metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline, (folder / "said").read_text()
        assert job.poll() is None, (folder / "said").read_text()
        time.sleep(0.05)


def stopped_at(folder: Path) -> int:
    """Steps of the run, the last of which has a checkpoint."""
    run = folder / "runs/first"
    done = len(losses(run))
    assert checkpoint.checkpoints(run) == [run / f"checkpoints/step-{done}"]
    return done


@pytest.mark.timeout(600)
def test_a_job_of_slurm_that_is_signalled_saves_is_queued_again_and_goes_on(folder: Path) -> None:
    script = fence("srun")
    assert "MASTER_PORT=29500" in script
    ports = free_ports(2)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    job = start(folder, script.replace("29500", str(ports[0])), 4000, **slurm)
    wait_for_steps(folder, job)
    for task in (folder / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    job.wait(timeout=120)
    assert (folder / "requeued").read_text() == "7\n", (folder / "said").read_text()
    done = stopped_at(folder)
    again = start(folder, script.replace("29500", str(ports[1])), done + 2, **slurm)
    assert again.wait(timeout=240) == 0, (folder / "said").read_text()
    assert (folder / "requeued").read_text() == "7\n"
    assert len(losses(folder / "runs/first")) == done + 2


@pytest.mark.timeout(600)
def test_a_signal_to_torchrun_reaches_its_ranks_which_save_and_one_process_goes_on(folder: Path) -> None:
    (port,) = free_ports(1)
    line = fence("torchrun").replace("--nproc-per-node 8", f"--nproc-per-node 2 --master-port {port}")
    assert "--nproc-per-node 2" in line
    job = start(folder, f"exec {line}", 4000)
    wait_for_steps(folder, job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=240) == 1
    done = stopped_at(folder)
    assert "a checkpoint is saved" in (folder / "said").read_text()
    again = start(folder, "exec hiddenstore train store -o runs/first --resume", done + 2)
    assert again.wait(timeout=240) == 0, (folder / "said").read_text()
    assert len(losses(folder / "runs/first")) == done + 2
