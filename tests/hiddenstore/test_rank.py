"""Which worker this is, and stopping when asked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError
from hiddenstore.process import Rank, drain_on_signal, free_bytes, from_environment, peak_bytes


def test_without_a_launcher_this_is_rank_0_of_1() -> None:
    assert from_environment({}) == Rank(0, 1, 0)
    assert from_environment({"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}) == Rank(0, 1, 0)


def test_torchrun_and_slurm_variables_are_read() -> None:
    assert from_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Rank(3, 8, 1)
    step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    assert from_environment(step) == Rank(5, 6, 0)


# As SLURM's env.c sets them: a batch script has no step id, the shell of salloc one that is no step's.
OUTSIDE = [{}, {"SLURM_STEP_ID": ""}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}]


@pytest.mark.parametrize("step", OUTSIDE)
def test_a_batch_script_of_several_tasks_is_none_of_them(step: dict[str, str]) -> None:
    script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", **step}
    for environment in (script, script | {"SLURM_NTASKS": "1"}):
        assert from_environment(environment) == Rank(0, 1, 0)
    for environment in (script, step):
        with pytest.raises(ConfigError, match=r"SLURM_NTASKS=8, but .* no srun started it") as caught:
            from_environment(environment | {"SLURM_NTASKS": "8"})
        assert caught.value.kind == "rank-invalid"
        assert "srun hiddenstore" in str(caught.value.hint)


def test_torchrun_inside_a_slurm_job_decides() -> None:
    both = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    assert from_environment(both) == Rank(9, 16, 1)


def test_an_array_alone_says_nothing_about_ranks_for_it_may_be_a_sweep() -> None:
    assert from_environment({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "64"}) == Rank(0, 1, 0)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_ID": "3"}, "SLURM_PROCID, SLURM_LOCALID"),
    ],
)
def test_a_partial_set_is_an_error_that_names_what_is_missing(environment: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"but not {missing}") as caught:
        from_environment(environment)
    assert caught.value.kind == "rank-invalid"


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0")])
def test_an_impossible_rank_is_an_error(rank: str, world: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0"})
    assert caught.value.kind == "rank-invalid"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_sets_the_flag_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with drain_on_signal() as drain:
        assert not drain.requested
        os.kill(os.getpid(), number)
        assert drain.wait(1)
        assert drain.requested
        assert drain.signal_name == number.name
    assert signal.getsignal(number) == before


def test_a_second_signal_exits_130_at_once() -> None:
    code = (
        "import os, signal, time\nfrom hiddenstore.process import drain_on_signal\n"
        "with drain_on_signal() as d:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0.01)\n"
        "    print('alive', flush=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (130, "alive\n")


def test_free_memory_is_the_machine_s_or_what_a_container_leaves(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    assert free_bytes(meminfo, cgroup) == 0
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\nHugePages_Total:  0\n")
    assert free_bytes(meminfo, cgroup) == 4000 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000000\n")
    (cgroup / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    assert free_bytes(meminfo, cgroup) == 4000 * 1024
    (cgroup / "memory.max").write_text("2000000\n")
    assert free_bytes(meminfo, cgroup) == 1_300_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says it in /proc")
def test_the_peak_of_this_process_is_at_least_what_it_holds(tmp_path: Path) -> None:
    held = bytes(1 << 24)
    assert peak_bytes() > len(held)
    assert peak_bytes(tmp_path / "none") == 0
