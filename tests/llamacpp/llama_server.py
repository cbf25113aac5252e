"""A real ``llama-server`` on a free port of this machine, started by the command that ``hiddenstore serve`` prints."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hiddenstore.servers.http import HttpClient, ServerAccess
from trainer.evaluate.server import DraftCounts, LlamacppServer
from trainer.serve import ENGINES
from trainer.serve.launch import plan_of, resolve
from trainer.serve.plan import ServeOptions

BUILT = Path(os.environ.get("LLAMACPP", ""))
"""The folder that ``build.sh`` filled."""
START_S = 120
# Arithmetic of the target in fp32 throughout, so that batches of one and of several tokens round alike.
PLAIN = ("--host", "127.0.0.1", "--port", "0", "-t", "1", "-np", "1", "-c", "1024", "-fa", "off")
FP32 = ("-ctk", "f32", "-ctv", "f32")
FP32_DRAFTER = ("-ctkd", "f32", "-ctvd", "f32")


@dataclass(frozen=True)
class Served:
    """Greedy answers as token ids, end tokens left out, and what the server counted over them."""

    answers: list[list[int]]
    counts: DraftCounts


def convert(target: str, out: Path, pre: str, *words: str) -> str:
    """``out``, the GGUF file that llama.cpp's converter makes of a folder."""
    script, source = Path(__file__).with_name("convert.py"), BUILT / "source"
    command = [sys.executable, str(script), str(source), pre, target, "--outfile", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(out)


@contextlib.contextmanager
def llama_server(
    target: str, log: Path, drafter: str | None = None, method: str = "none", length: int = 3
) -> Iterator[str]:
    """URL of a server, up until the block ends; what it says goes to ``log``."""
    flags = (*PLAIN, *FP32, *(FP32_DRAFTER if drafter else ()))
    asked = ServeOptions(
        target=target, drafter=drafter, method=None if drafter else method, draft_len=length, flags=flags
    )
    if method == "draft-target":
        asked = ServeOptions(target=target, drafter=drafter, method=method, draft_len=length, flags=flags)
    engine = ENGINES["llamacpp"]
    _, *words = plan_of(engine, resolve(engine, asked).request).command
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen([BUILT / "build/bin/llama-server", *words], stdout=said, stderr=subprocess.STDOUT)
    try:
        yield _url(process, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def answers(url: str, prompts: list[list[int]], new_tokens: int) -> Served:
    """Every prompt answered greedily, one after another."""
    client, before, given = HttpClient(ServerAccess(url, tries=1)), counted(url), []
    for prompt in prompts:
        body = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        given.append(client.post("/completion", body, lambda document: list(document["tokens"])))
    return Served(given, counted(url) - before)


def counted(url: str) -> DraftCounts:
    """What a server counted so far."""
    counts = LlamacppServer(HttpClient(ServerAccess(url, tries=1))).counts()
    assert counts is not None
    return counts


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"listening on (http://[\d.:]+)", text)
        if found and "model loaded" in text:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"llama-server did not come up:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
