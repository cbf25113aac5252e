"""What a store gives its readers, as digests and numbers: through the command line and the public Python only."""

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hiddenstore
from hiddenstore.data import TokenBatches
from tests.tiny_world import run

GOLDEN = Path(__file__).parent
STORES = GOLDEN / "stores"
TARGET = GOLDEN / "target"
DATA = GOLDEN / "data"
CHATS = GOLDEN / "chats.jsonl"
EXPECTED = GOLDEN / "expected.json"
RECORDED = GOLDEN / "recorded.json"
REBUILT = GOLDEN / "rebuilt"
EXPECTED_REBUILT = GOLDEN / "rebuilt.json"


def command(*words: str | Path) -> Any:
    """What ``hiddenstore WORDS --json`` answers; exit code 3, findings, is an answer too."""
    code, printed, complained = answer(*words, "--json")
    assert code in (0, 3), f"{words}: {complained}"
    return json.loads(printed)


def answer(*words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``hiddenstore WORDS``, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(*map(str, words))
    return code, out.getvalue(), err.getvalue()


def digest(data: bytes | np.ndarray | torch.Tensor) -> str:
    """Hex sha256 of bytes, or of the little-endian, row-major bytes of an array."""
    if isinstance(data, torch.Tensor):
        data = data.detach().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()).hexdigest()


def samples_of(location: Path) -> dict[str, dict[str, Any]]:
    """Per sample id, in the order of the store: digests of tokens, mask, turns and every decoded state."""
    store = hiddenstore.open(location)
    return {name: record_digests(store[name]) for name in store.sample_ids}


def record_digests(record: Any) -> dict[str, Any]:
    sample, top = record.sample, record.topk
    digests = {
        "split": sample.split,
        "tokens": digest(sample.input_ids.astype("<i4")),
        "mask": digest(sample.loss_mask.astype("u1")),
        "spans": digest(sample.spans.astype("<i4")),
        "aux": [digest(layer) for layer in record.aux],
        "final": digest(record.final),
        "final_rows": digest(record.final_rows.astype("<i4")),
    }
    return digests if top is None else digests | {"topk": [digest(part) for part in (top.ids, top.log_probs, top.lse)]}


def batches_of(location: Path) -> Iterator[dict[str, Any]]:
    """Two epochs under two seeds: sample ids of every global batch, and one digest over all its packs."""
    pack = max(row["tokens"] for row in command("ls", location, "-n", "0")["rows"])
    for seed in (0, 7):
        batches = TokenBatches(
            hiddenstore.open(location), batch_tokens=2 * pack, pack_tokens=pack, seed=seed, epochs=2, device="cpu"
        )
        for batch in batches:
            packs = hashlib.sha256("".join(map(pack_digest, batch.packs)).encode()).hexdigest()
            yield {"seed": seed, "cursor": batch.cursor.to_json(), "ids": batch.all_sample_ids, "packs": packs}


def pack_digest(pack: Any) -> str:
    tensors = [
        pack.input_ids, pack.loss_mask, pack.positions, pack.document, pack.aux, pack.final, pack.final_rows,
    ]  # fmt: skip
    if pack.topk is not None:
        tensors += [pack.topk.ids, pack.topk.log_probs, pack.topk.lse]
    return digest("".join(map(digest, tensors)).encode())


def verify_of(location: Path) -> dict[str, Any]:
    """``verify --full`` without the text of its findings, which may be worded better one day."""
    document = command("verify", location, "--full")
    kinds = {name: sorted(item["kind"] for item in document[name]) for name in ("findings", "notes")}
    return {name: document[name] for name in ("ok", "units", "samples", "files", "bytes_checked")} | kinds


def info_of(location: Path) -> dict[str, Any]:
    """``info`` without the path."""
    return {name: value for name, value in command("info", location).items() if name not in ("path", "schema")}


def show_of(location: Path) -> dict[str, Any]:
    """``show`` of the first sample, its norms rounded."""
    shown = command("show", location, "0")
    norms = [[row["field"], row["rows"], round_to(row["rms_median"], 4)] for row in shown["norms"]]
    return {name: shown[name] for name in ("id", "split", "tokens", "supervised", "pieces")} | {"norms": norms}


def round_to(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def files_of(folder: Path) -> dict[str, str]:
    """Path and sha256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest(path.read_bytes()) for path in files}


def store_facts(location: Path) -> dict[str, Any]:
    """All that is expected of one golden store."""
    saved = command("info", location)["snapshots"]
    return {
        "files": files_of(location),
        "samples": samples_of(location),
        "snapshots": {name: hiddenstore.open(location, name).sample_ids for name in map(snapshot_name, saved)},
        "info": info_of(location),
        "verify": verify_of(location),
        "ls": command("ls", location, "-n", "0")["rows"],
        "show": show_of(location),
        "batches": list(batches_of(location)),
    }


def rebuilt_facts(location: Path) -> dict[str, Any]:
    """A store of rebuilt states: digests of what it holds, and numbers of what machines bring back to a tolerance."""
    store = hiddenstore.open(location)
    samples = {}
    for name in store.sample_ids:
        reader, index = store.reader_of(name)
        stored, whole = record_digests(reader.read(index)), store[name]
        fields = dict(zip(store.capture.fields, [*whole.aux, whole.final], strict=True))
        rebuilt = {
            field: fields[field].float().flatten()[:: max(1, fields[field].numel() // 24)].tolist()
            for field, kept in store.capture.states.items()
            if kept == "rebuilt"
        }
        samples[name] = {"stored": stored, "rebuilt": rebuilt}
    return {
        "files": files_of(location),
        "samples": samples,
        "info": info_of(location),
        "verify": verify_of(location),
    }


def snapshot_name(entry: Any) -> str:
    return entry if isinstance(entry, str) else entry["name"]


def lines_of(document: dict[str, Any]) -> str:
    """JSON with one entry a line, so that a changed value is a changed line."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in sorted(document.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"
