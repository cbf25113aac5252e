"""Numbers and bytes that a change of the source must not change; ``python -m tests.golden.values`` records them.

Record again only with a change that means to alter a value, and say which in its message: that the others did not move
is what the file is for. All of it is of one machine: an entry brought over from another has other last bits, which only
the first machine sees. Every section is a function of an empty folder. Members that name a moment or a machine are
normalised or left out by ``document_of``; all the rest is compared.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch

import hiddenstore
from tests.golden.reading import CHATS, RECORDED, STORES, answer, command, digest, lines_of, round_to

BUNDLED = Path(__file__).parents[2] / "collectors" / "demo" / "target"
CONTAINERS = ("zarr", "webdataset")
RECIPES = ("raw", "lossless", "safe", "compact", "tiny")
LIBRARIES = ("numpy", "numcodecs", "pyarrow", "safetensors", "tokenizers", "torch", "transformers", "zarr", "zstandard")
ENGINES = ("vllm", "sglang", "trtllm", "speculators")

COMMON = (
    "data.batch_tokens=160", "data.pack_tokens=80", "drafter.intermediate_size=32", "drafter.num_heads=2",
    "drafter.num_kv_heads=1", "drafter.head_dim=8", "train.max_steps=5", "train.validate_every=3", "train.device=cpu",
)  # fmt: skip
NARROW = ("drafter.hidden_size=16", "drafter.vocab_size=40", "loss.steps=3")
BLOCKS = ("drafter.mask_token_id=0", "drafter.block_size=4", "drafter.num_layers=2", "loss.num_anchors=16")
# fmt: off
RUNS: dict[str, tuple[str, ...]] = {
    "eagle1": ("--drafter", "eagle1"),
    "eagle1-recipe": ("-c", "eagle1"),
    "eagle3": ("--drafter", "eagle3", *NARROW),
    "eagle3-whole-vocabulary": ("--drafter", "eagle3", "drafter.num_layers=2", "loss.steps=2", "optim.kind=adamw",
                                "drafter.hidden_size=32", "drafter.vocab_size=64"),
    "eagle3.1": ("-c", "eagle3.1", *NARROW),
    "eagle3-lk-alpha": ("--drafter", "eagle3", *NARROW, "loss.kind=lk_alpha"),
    "eagle3-lk-lambda": ("--drafter", "eagle3", *NARROW, "loss.kind=lk_lambda"),
    "eagle3-topk": ("--drafter", "eagle3", *NARROW),
    "dflash": ("--drafter", "dflash", *BLOCKS),
    "dflash-long": ("--drafter", "dflash", *BLOCKS, "train.max_steps=40", "train.validate_every=0", "optim.lr=0.01"),
    "medusa": ("--drafter", "medusa"),
    "medusa-recipe": ("-c", "medusa"),
}
# fmt: on
EVALUATED = {"dflash-long": ("--draft-len", "1,3"), "eagle3": ("--draft-len", "1,3,2x2")}
EXPORTED = ("eagle1", "eagle3", "eagle3-whole-vocabulary", "eagle3.1", "dflash", "medusa")


def machine() -> dict[str, Any]:
    """What the last bits of a float may depend on."""
    names = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", names.read_text(), re.MULTILINE) if names.exists() else []
    return {
        "cpu": models[0] if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def built(folder: Path) -> dict[str, Any]:
    """Stores of random states through the Writer: every recipe in both containers."""
    from hiddenstore.testing.builders import make_store

    found = {}
    for recipe in RECIPES:
        for container in CONTAINERS:
            place = folder / f"{recipe}-{container}"
            place.mkdir()
            final = "all" if recipe in ("lossless", "tiny") else "supervised"
            make_store(place, samples=4, codec=recipe, container=container, final=final)
            found[place.name] = store_of(place / "store")
    return found | {"data": folder_of(folder / "raw-zarr" / "data")}


def copied(folder: Path) -> dict[str, Any]:
    """The golden raw store encoded anew: every recipe in both containers, from bits that no kernel made."""
    found = {}
    for recipe in RECIPES:
        for container in CONTAINERS:
            store = folder / f"{recipe}-{container}"
            command("copy", STORES / "raw-webdataset", store, "--recipe", recipe, "--container", container)
            found[store.name] = store_of(store)
    return found


def collected(folder: Path) -> dict[str, Any]:
    """Prepared with the bundled target's tokenizer and captured with its weights."""
    (folder / "chats.jsonl").write_bytes(CHATS.read_bytes())
    with chdir(folder):
        (folder / "target").symlink_to(BUNDLED, target_is_directory=True)
        command("prepare", "chats.jsonl", "-o", "data", "--target", "target", "--val", "20%")
        words = ("--layers", "all-drafters", "--recipe", "safe", "--device", "cpu", "--batch-tokens", "512")
        command("collect", "data", "-o", "store", "--target", "target", *words)
    return {"data": folder_of(folder / "data"), "store": store_of(folder / "store")}


def trained(folder: Path) -> dict[str, Any]:
    """Every drafter for a few steps from copies of golden stores, since a run leaves its snapshot; evaluated and
    exported."""
    found: dict[str, Any] = {}
    stores = folder / "stores"
    for name in ("tiny-webdataset", "safe-webdataset"):
        shutil.copytree(STORES / name, stores / name)
    for name, words in RUNS.items():
        store = stores / ("tiny-webdataset" if name.endswith("topk") else "safe-webdataset")
        torch.manual_seed(0)  # a checkpoint holds the state of this process' generator
        command("train", store, "-o", folder / name, *settings_after(COMMON, words))
        found[f"run {name}"] = run_of(folder / name)
    for name, words in EVALUATED.items():
        for split in ("train", "validation"):
            document = command(
                "eval", folder / name, stores / "safe-webdataset", "--split", split, "--device", "cpu", *words
            )
            found[f"eval {name} {split}"] = without(document, "run", "store")
    for name in EXPORTED:
        for engine in ENGINES:
            found[f"export {name} {engine}"] = exported(folder / name, engine, folder / f"{name}-{engine}")
    return found


def exported(run: Path, engine: str, out: Path) -> dict[str, Any]:
    """Digests of the files written for an engine, or the kind of the refusal."""
    words = ("--target", "ORG/MODEL") if engine == "speculators" else ()
    code, _printed, complained = answer(
        "export", run, "--engine", engine, "-o", out, "--dtype", "float32", "--json", *words
    )
    if code:
        return {"code": code, "refused": json.loads(complained)["kind"]}
    return {path.relative_to(out).as_posix(): file_of(path) for path in sorted(out.rglob("*")) if path.is_file()}


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "built": built, "copied": copied, "collected": collected, "trained": trained,
}  # fmt: skip


def settings_after(common: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """``words``, after those of ``common`` that they do not set themselves."""
    given = {word.partition("=")[0] for word in words}
    return tuple(word for word in common if word.partition("=")[0] not in given) + words


def run_of(run: Path) -> dict[str, Any]:
    """Every line of the log without clocks, and the final weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    newest = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return {
        "steps": [without(line, "tokens_per_s", "data_wait_fraction") for line in lines],
        "weights": file_of(newest / "drafter.safetensors"),
        "optimizer": file_of(newest / "optimizer.safetensors"),
    }


def store_of(location: Path) -> dict[str, Any]:
    """Every file of a store, and the size of its decoded states for a machine that makes other last bits."""
    store = hiddenstore.open(location)
    states = {}
    for name in store.sample_ids:
        record = store[name]
        fields = [*record.aux, record.final] if record.topk is None else [*record.aux, record.topk.log_probs]
        states[name] = [magnitude(field) for field in fields]
    return {"files": folder_of(location), "states": states}


def magnitude(states: torch.Tensor) -> list[float | None]:
    """Root of the mean square over finite values, and their mean as a share of it."""
    values = states.double()
    values = values[values.isfinite()]
    rms = values.square().mean().sqrt()
    return [round_to(float(value), 7) for value in (rms, values.mean() / rms if rms else rms)]


def folder_of(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {attempt_free(path.relative_to(folder).as_posix()): file_of(path) for path in files}


def attempt_free(text: str) -> str:
    """Without the eight random digits that tell two attempts at a unit apart.

    The digest in the name of a slice goes too: ``slice.json`` holds it, where it is compared as a digest.
    """
    text = re.sub(r"(segments/[A-Za-z0-9_-]+)-[0-9a-f]{8}\b", r"\1-ATTEMPT", text)
    return re.sub(r"slice-[0-9a-f]{16}\.", "slice-DIGEST.", text)


def file_of(path: Path) -> Any:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return tensors_of(data)
    if path.parent.name in ("commits", "snapshots", "advice") or path.name in ("store.json", "slice.json"):
        document = json.loads(data)
        # Of a tree nothing could be compared that another machine makes in other last bits.
        for file in [file for file in document.get("files", ()) if file.pop("tree", None)]:
            file["sha256"] = digest((path.parents[1] / document["segment"] / file["path"]).read_bytes())
        return document_of(json.loads(attempt_free(json.dumps(document))))
    if path.name == "config.json":
        return json.loads(data)
    return {"sha256": digest(data)}


def document_of(document: dict[str, Any]) -> dict[str, Any]:
    """A sealed document without its seal, which is over the random digits, and without versions of libraries."""
    document = without(document, "sha256")
    if "engine" in document:
        document["engine"] = without(document["engine"], "version", "versions")
    return document


def tensors_of(data: bytes) -> dict[str, Any]:
    """Per tensor of a safetensors file: type, shape, sha256 of the bytes, and for floats their magnitude."""
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    tensors: dict[str, Any] = {"metadata": sorted(header.pop("__metadata__", {}))}
    for name, entry in sorted(header.items()):
        start, stop = entry["data_offsets"]
        block = data[end + start : end + stop]
        tensors[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": digest(block)}
        kind = {"F32": torch.float32, "BF16": torch.bfloat16}.get(entry["dtype"])
        if kind is not None and block:
            tensors[name]["magnitude"] = magnitude(torch.frombuffer(bytearray(block), dtype=kind))
    return tensors


def without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def differences(recorded: Any, measured: Any, exact: bool, path: str = "") -> Iterator[str]:
    """Where two values differ. Not ``exact``: digests and sizes of files are not compared, floats to a tolerance."""
    if isinstance(recorded, dict) and isinstance(measured, dict):
        for name in sorted(recorded.keys() | measured.keys()):
            place = f"{path}/{name}"
            if name not in recorded or name not in measured:
                yield f"{place} is {'new' if name in measured else 'gone'}"
            elif exact or name not in ("sha256", "file_sha256", "size"):
                yield from differences(recorded[name], measured[name], exact, place)
    elif isinstance(recorded, list) and isinstance(measured, list) and len(recorded) == len(measured):
        for index, pair in enumerate(zip(recorded, measured, strict=True)):
            yield from differences(*pair, exact, f"{path}/{index}")
    elif recorded != measured and (exact or not close(recorded, measured, path)):
        yield f"{path}: recorded {recorded!r}, measured {measured!r}"


def close(recorded: Any, measured: Any, path: str) -> bool:
    """1e-4 of the value; more for counts over few tokens, which one tie decides, and for rounded states."""
    if not all(isinstance(value, float) for value in (recorded, measured)):
        return False
    relative, absolute = next((bounds for name, bounds in TOLERANCES.items() if name in path), (1e-4, 1e-6))
    return abs(recorded - measured) <= max(relative * abs(recorded), absolute)


TOLERANCES = {
    "/acc/": (0.0, 0.1),
    "/per_position/": (0.0, 0.1),
    "accepted_length": (0.1, 0.0),
    "/states/": (1e-2, 1e-2),
    "/stats/": (1e-2, 1e-3),
    "/magnitude/": (1e-3, 1e-3),
}
"""Relative and absolute, by what the path of a value holds."""


def main() -> None:
    torch.set_num_threads(1)
    values: dict[str, Any] = {"machine": machine()}
    for name, measure in SECTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            values |= {f"{name}/{entry}": value for entry, value in measure(Path(folder)).items()}
    RECORDED.write_text(lines_of(values))


if __name__ == "__main__":
    sys.exit(main())
