"""The SLURM job of docs/scale-out.md in which every node answers with a server of its own, run by stand-ins for srun
and the server's program."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from chat_double import chat_double

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
PROGRAMS = {
    "srun": 'for i in 0 1; do SLURM_STEP_ID=0 SLURM_PROCID=$i SLURM_NTASKS=2 "$@" || exit 1; done',
    "vllm": "trap 'kill $!; echo $$ >> stopped; exit' TERM; echo $$ >> started; sleep 600 & wait",
    "hiddenstore": f'exec {sys.executable} -m hiddenstore.cli "$@"',
}


def test_every_node_answers_its_share_and_stops_its_server(tmp_path: Path) -> None:
    (job,) = (fence for fence in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "regenerate" in fence)
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    rows = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with chat_double() as double:
        script = job.replace("http://localhost:8000", double.url)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line)["messages"][1]["content"] for line in lines]
    assert answers == [f"reply 1 to question {number}" for number in range(4)]
    started, stopped, deadline = tmp_path / "started", tmp_path / "stopped", time.monotonic() + 60
    while not stopped.exists() or sorted(stopped.read_text().split()) != sorted(started.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(started.read_text().split()) == 2
