"""docs/from-clone-to-server.md, replayed: its blocks as they stand, up to a drafter served by a real vLLM."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_server import vllm_server

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from-clone-to-server.md").read_text(encoding="utf-8")

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1500)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def shell(text: str, folder: Path, **more: str) -> str:
    """What a block prints, run in ``folder``, where the page's folder of the repository is ``collectors``."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        ["sh", "-euc", text], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_block_of_the_page_runs_and_the_server_accepts_what_decode_accepts(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "collectors").symlink_to(ROOT / "collectors")
    (recipe,) = blocks("yaml")
    questions, work, measure = blocks("sh")
    (tmp_path / "first.yaml").write_text(recipe, encoding="utf-8")
    began = time.monotonic()
    shell(questions, tmp_path)
    printed = shell(work, tmp_path).replace("\\\n", " ")
    trained_s = time.monotonic() - began
    command = shlex.split(next(line for line in printed.splitlines() if line.startswith("vllm serve")))
    settings = json.loads(command[command.index("--speculative-config") + 1])
    drafter = tmp_path / settings["model"]
    # The CPU build has no `vllm` program, so its settings go to the module behind it.
    target = str(tmp_path / "collectors/demo/target")
    with vllm_server(target, tmp_path / "server.txt", {**settings, "model": str(drafter)}) as url:
        shell(measure, tmp_path, SERVER=url)
    record_property("seconds", [round(trained_s), round(time.monotonic() - began)])
    done = json.loads((tmp_path / "first/done/eagle3.1.decode.json").read_text(encoding="utf-8"))
    decoded = json.loads(done["answer"])
    rows = re.findall(r"^\|(.*)\|$", (tmp_path / "served.md").read_text(encoding="utf-8"), re.MULTILINE)
    header, *_, last = [[cell.strip() for cell in row.split("|")] for row in rows]
    served = float(dict(zip(header, last, strict=True))["accepted length"])
    assert served == pytest.approx(decoded["engine_accepted_length"], rel=0.03)
