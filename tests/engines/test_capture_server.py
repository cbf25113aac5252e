"""Capture from a real vLLM server: the states it writes are Hugging Face's, and what does not fit is said."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from collectors.checks.crosscheck import row_errors
from collectors.demo import TARGET_DIR
from collectors.engines import CaptureRequest, EngineOptions
from collectors.engines.vllm import VllmProcess
from collectors.engines.vllm_server import LayerIds, VllmServer, kv_transfer_config, speculative_config
from collectors.targets.load import EngineTarget, load_target, probe_states
from hiddenstore.errors import ConfigError
from hiddenstore.targets.folder import open_target

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

LENGTHS = [1, 2, 16, 17, 64, 90, 200] * 4
TOLERANCE = 1e-4
START_S = 300


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def server(states: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = LayerIds.of(tuple(range(-1, 8)), 8)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET_DIR)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    command += [
        "--enforce-eager",
        "--max-num-seqs",
        "16",
        "--speculative-config",
        json.dumps(speculative_config(asked)),
    ]
    command += ["--kv-transfer-config", json.dumps(kv_transfer_config(str(states), on_cpu=True))]
    root = str(Path(__file__).parents[2])
    with (states / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": root})
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", process, states / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def target() -> EngineTarget:
    return EngineTarget(open_target(str(TARGET_DIR)), "float32")


def test_every_layer_equals_hugging_face_and_no_file_stays(server: str, states: Path) -> None:
    engine = VllmServer(target(), EngineOptions(tuple(range(-1, 8)), 256, longest=200, server=server))
    reference = load_target(str(TARGET_DIR), "float32", "cpu")
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, reference.head.vocab_size, length).astype(np.int32) for length in LENGTHS]
    requests = [CaptureRequest(ids, np.arange(len(ids), dtype=np.int32)) for ids in rows]
    captured = engine.capture(requests)
    start = 0
    for ids in rows:
        expected = probe_states(reference.parts, torch.from_numpy(ids.astype(np.int64))[None], "llama").states
        found = torch.cat([captured.aux[:, start : start + len(ids)], captured.final[None, start : start + len(ids)]])
        for layer, wanted in zip(found, [*expected, expected[-1]], strict=True):
            assert float(row_errors(layer, wanted).max()) < TOLERANCE
        start += len(ids)
    assert torch.equal(reference.head.logits(captured.final[captured.next_rows]).argmax(-1), captured.next_tokens)
    assert len(captured.next_rows) == len(requests)
    assert list(states.glob("*.safetensors*")) == []
    assert engine.describe().version.startswith("0.")


def test_a_server_s_files_and_the_memory_of_one_process_hold_the_same_bits(server: str) -> None:
    """One request at a time on both sides: the rows of a product round by how many there are of them."""
    layers, rng = tuple(range(-1, 8)), np.random.default_rng(1)
    rows = [rng.integers(3, 300, length).astype(np.int32) for length in LENGTHS[:7]]
    requests = [CaptureRequest(ids, np.arange(len(ids), dtype=np.int32)) for ids in rows]
    one = {"max_num_seqs": 1, "enable_prefix_caching": False}
    found = VllmServer(
        target(), EngineOptions(layers, 256, longest=200, server=server, extra={"concurrency": 1})
    ).capture(requests)
    inside = VllmProcess(target(), EngineOptions(layers, 256, longest=200, dtype="float32", extra=one))
    try:
        captured = inside.capture(requests)
    finally:
        inside.close()
    for ours, theirs in ((captured.aux, found.aux), (captured.final, found.final)):
        assert torch.equal(ours.bfloat16(), theirs.bfloat16())
    assert torch.equal(captured.next_tokens, found.next_tokens)


def test_a_server_of_other_layers_is_refused_with_the_command_that_starts_the_right_one(server: str) -> None:
    engine = VllmServer(target(), EngineOptions((1, 3), 256, server=server))
    with pytest.raises(ConfigError, match=r"expected 3 layers for vLLM's ids \[2, 4, 8\]") as caught:
        engine.capture([CaptureRequest(np.array([5, 6, 7], np.int32), np.array([2], np.int32))])
    assert caught.value.kind == "server-unfit"
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 8]' in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"extra": {"model": "gpt-9"}}, "server-unfit"),
        ({"longest": 512}, "server-unfit"),
        ({"extra": {"modle": "x"}}, "engine-arg"),
    ],
)
def test_a_server_that_cannot_serve_the_job_is_refused_before_it_runs(
    server: str, options: dict[str, object], kind: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        VllmServer(target(), EngineOptions((1, 3), 256, server=server, **options))  # type: ignore[arg-type]
    assert caught.value.kind == kind


def test_a_folder_that_is_not_seen_from_here_is_named(server: str, tmp_path: Path) -> None:
    engine = VllmServer(target(), EngineOptions((1, 3), 256, server=server, scratch=tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="cannot be reached from here") as caught:
        engine.capture([CaptureRequest(np.array([5, 6, 7], np.int32), np.array([2], np.int32))])
    assert caught.value.kind == "server-unfit"
