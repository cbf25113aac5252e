"""Attempts on runs, checkpoints and exports: copied, renamed, mixed, edited; and on targets edited between commands."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hiddenstore.files.documents import sha256_hex
from tests.attacks.second.lab import Attempt, Lab, Outcome, reseal, rewrite
from tests.attacks.second.stores import crlf, put
from tests.tiny_world import TRAIN

Spoil = Callable[[Lab, Path], object]
STEP = "checkpoints/step-2"
WEIGHTS, OPTIMIZER, STATE = f"{STEP}/drafter.safetensors", f"{STEP}/optimizer.safetensors", f"{STEP}/state.json"


def on_run(command: str, spoil: Spoil, *more: str) -> Callable[[Lab], Outcome]:
    """Spoil a copy of the run, then use it."""

    def do(lab: Lab) -> Outcome:
        run = lab.copy("run")
        spoil(lab, run)
        return use(lab, command, run, *more)

    return do


def use(lab: Lab, command: str, run: Path, *more: str) -> Outcome:
    store, target = lab.path("store"), lab.path("target")
    words: dict[str, tuple[object, ...]] = {
        "resume": ("train", store, "-o", run, "--resume", "train.max_steps=2"),
        "more": ("train", store, "-o", run, "--resume", "train.max_steps=3"),
        "branch": ("train", store, "-o", lab.folder / "branch", "--resume-from", run / STEP),
        "warm": ("train", store, "-o", lab.folder / "warm", *TRAIN, f"train.init_from={run}"),
        "eval": ("eval", run, store),
        "export": ("export", run, "--engine", "vllm", "-o", lab.folder / "out"),
        "decode": ("decode", run, "--target", target, "--prompts", lab.path("chats.jsonl"), "-n", "1"),
    }  # fmt: skip
    return lab.run(*words[command], *more)


def write(name: str, data: bytes | Callable[[bytes], bytes]) -> Spoil:
    def spoil(_: Lab, run: Path) -> None:
        if callable(data):
            rewrite(run / name, data)
        else:
            (run / name).write_bytes(data)

    return spoil


def gone(name: str) -> Spoil:
    def spoil(_: Lab, run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], object], seal: bool = True) -> Spoil:
    """The weights changed, and state.json made to fit."""

    def spoil(_: Lab, run: Path) -> None:
        held = {name: tensor.clone() for name, tensor in load_file(run / WEIGHTS).items()}
        change(held)
        save_file(held, run / WEIGHTS)
        if seal:
            digest = sha256_hex((run / WEIGHTS).read_bytes())
            reseal(run / STATE, lambda document: document["files"].update({"drafter.safetensors": digest}))

    return spoil


def other_run(lab: Lab) -> Path:
    """Another run over the same store, of another seed."""
    run = lab.folder / "other"
    assert lab.run("train", lab.path("store"), "-o", run, *TRAIN, "train.seed=7", "-q").code == 0
    return run


def from_other(name: str) -> Spoil:
    def spoil(lab: Lab, run: Path) -> None:
        source, aim = other_run(lab) / name, run / name
        if source.is_dir():
            shutil.rmtree(aim)
            shutil.copytree(source, aim)
        else:
            shutil.copy(source, aim)

    return spoil


def edited(change: Callable[[str], str]) -> Spoil:
    return write("config.yaml", lambda data: change(data.decode()).encode())


def header(claim: int) -> Callable[[bytes], bytes]:
    """A safetensors header that claims another length."""
    return lambda data: struct.pack("<Q", claim) + data[8:]


CORRUPT = "checkpoint-corrupt|run-corrupt|document-corrupt"

ATTEMPTS = (
    *(
        Attempt(f"a run: {what}, {command}", on_run(command, spoil), word)
        for what, command, spoil, word in (
            (
                "LATEST leaves the folder",
                "resume",
                write("checkpoints/LATEST", b"../../../etc\n"),
                "held",
            ),
            (
                "LATEST leaves the folder",
                "eval",
                write("checkpoints/LATEST", b"../../../etc\n"),
                "held",
            ),
            ("LATEST is empty", "eval", write("checkpoints/LATEST", b""), "run-corrupt|checkpoint-missing|held"),
            (
                "LATEST is binary",
                "eval",
                write("checkpoints/LATEST", b"\xff\xfe\0"),
                "run-corrupt|checkpoint-missing|held",
            ),
            (
                "LATEST names nothing",
                "eval",
                write("checkpoints/LATEST", b"step-99\n"),
                "run-corrupt|checkpoint-missing|held",
            ),
            ("LATEST with CRLF", "eval", write("checkpoints/LATEST", b"step-2\r\n"), "held|run-corrupt"),
            ("no LATEST", "eval", gone("checkpoints/LATEST"), "held|checkpoint-missing"),
            ("no checkpoints", "eval", gone("checkpoints"), "checkpoint-missing|run-missing"),
            ("no checkpoints", "resume", gone("checkpoints"), "held|checkpoint-missing|run-missing|run-corrupt"),
            ("no run.json", "resume", gone("run.json"), "run-missing|run-corrupt"),
            ("no snapshot.json", "resume", gone("snapshot.json"), "run-corrupt|run-missing|held"),
            ("no config.yaml", "eval", gone("config.yaml"), "run-corrupt|run-missing|held"),
            ("no config.yaml", "resume", gone("config.yaml"), "run-corrupt|run-missing"),
            ("no vocab", "eval", gone("vocab.safetensors"), "path-missing"),
            ("no optimizer", "more", gone(OPTIMIZER), CORRUPT),
            ("no optimizer", "eval", gone(OPTIMIZER), f"held|{CORRUPT}"),
            ("no weights", "eval", gone(WEIGHTS), CORRUPT),
            ("run.json CRLF", "resume", write("run.json", crlf), "document-corrupt|run-corrupt"),
            (
                "run.json indented",
                "eval",
                write("run.json", lambda d: json.dumps(json.loads(d), indent=1).encode()),
                "held",
            ),
            (
                "state.json without its newline",
                "eval",
                write(STATE, bytes.rstrip),
                "document-corrupt|checkpoint-corrupt",
            ),
            ("state.json of another step", "more", lambda _, run: reseal(run / STATE, put("step", value=1)), CORRUPT),
            (
                "state.json of a step of 2^70",
                "more",
                lambda _, run: reseal(run / STATE, put("step", value=1 << 70)),
                CORRUPT,
            ),
            (
                "state.json with a place beyond the end",
                "resume",
                lambda _, run: reseal(run / STATE, put("cursor", "samples", value=10**9)),
                f"{CORRUPT}|cursor-invalid|held",
            ),
            (
                "state.json with a negative place",
                "more",
                lambda _, run: reseal(run / STATE, put("cursor", "samples", value=-1)),
                f"{CORRUPT}|cursor-invalid|document-invalid",
            ),
            (
                "state.json of another snapshot",
                "resume",
                lambda _, run: reseal(run / STATE, put("cursor", "snapshot", value="0" * 32)),
                "cursor-mismatch",
            ),
            ("weights of another run", "eval", from_other(WEIGHTS), CORRUPT),
            ("the optimizer of another run", "more", from_other(OPTIMIZER), CORRUPT),
            ("a whole checkpoint of another run", "resume", from_other(STEP), "held|run-corrupt|resume-settings"),
            ("the vocabulary of another run", "eval", from_other("vocab.safetensors"), "held"),
            (
                "config.yaml of another drafter",
                "eval",
                edited(lambda c: c.replace("eagle3", "medusa")),
                "run-corrupt|resume-settings|config-invalid|config-unknown-key|checkpoint-corrupt|held",
            ),
            (
                "config.yaml of another drafter",
                "resume",
                edited(lambda c: c.replace("eagle3", "medusa")),
                "run-corrupt|resume-settings|config-invalid|config-unknown-key|checkpoint-corrupt",
            ),
            (
                "config.yaml of another width",
                "resume",
                edited(lambda c: c.replace("intermediate_size: 96", "intermediate_size: 128")),
                "run-corrupt|resume-settings|checkpoint-corrupt",
            ),
            (
                "config.yaml of another learning rate",
                "resume",
                edited(lambda c: c.replace("lr: 0.005", "lr: 0.5")),
                "held|resume-settings|run-corrupt",
            ),
            (
                "config.yaml runs code",
                "eval",
                write("config.yaml", b"!!python/object/apply:os.system ['touch PWNED']\n"),
                "config-unreadable|run-corrupt|held",
            ),
            (
                "config.yaml of anchors that explode",
                "resume",
                write(
                    "config.yaml",
                    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
                    + b"".join(
                        b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % ((n, n) + (n - 1,) * 8) for n in range(98, 110)
                    ),
                ),
                "config-unreadable|config-unknown-key|run-corrupt",
            ),
            (
                "config.yaml with tabs and CRLF",
                "resume",
                write("config.yaml", crlf),
                "held|config-unreadable|run-corrupt",
            ),
            (
                "config.yaml empty",
                "resume",
                write("config.yaml", b""),
                "config-unreadable|run-corrupt|resume-settings|held",
            ),
            ("metrics.jsonl cut in a line", "more", write("metrics.jsonl", lambda d: d[:-20]), "held"),
            ("metrics.jsonl of binary", "more", write("metrics.jsonl", b"\xff\xfe\n\0\n"), "run-corrupt"),
            ("metrics.jsonl with NaN", "more", write("metrics.jsonl", b'{"step": NaN}\n'), "run-corrupt"),
            ("metrics.jsonl of infinity", "more", write("metrics.jsonl", b'{"step": 1e999}\n'), "run-corrupt"),
            ("metrics.jsonl is a list", "resume", write("metrics.jsonl", b"[1]\n"), "run-corrupt|held"),
            (
                "metrics.jsonl of half a line, finished",
                "resume",
                write("metrics.jsonl", lambda d: d[:-20]),
                "held|run-corrupt",
            ),
            (
                "metrics.jsonl is a folder",
                "more",
                lambda _, run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
                "io-error|run-corrupt|path-invalid",
            ),
            (
                "snapshot.json edited",
                "resume",
                lambda _, run: reseal(run / "snapshot.json", put("commits", value=[])),
                "snapshot-corrupt|run-corrupt|cursor-invalid|store-empty|split-empty",
            ),
            (
                "snapshot.json names another record",
                "resume",
                lambda _, run: reseal(run / "snapshot.json", put("commits", 0, "sha256", value="0" * 64)),
                "snapshot-mismatch|run-corrupt|cursor-invalid",
            ),
            (
                "weights with NaN",
                "eval",
                tensors(lambda t: t["fc.weight"].fill_(float("nan"))),
                "non-finite|checkpoint-corrupt|loss-not-finite|drafter-unfit",
            ),
            (
                "weights with NaN",
                "export",
                tensors(lambda t: t["fc.weight"].fill_(float("nan"))),
                "non-finite|checkpoint-corrupt|export-differs|drafter-unfit",
            ),
            (
                "weights with NaN",
                "warm",
                tensors(lambda t: t["fc.weight"].fill_(float("nan"))),
                "non-finite|checkpoint-corrupt|loss-not-finite|drafter-unfit",
            ),
            (
                "weights with infinity",
                "decode",
                tensors(lambda t: t["lm_head.weight"].fill_(float("inf"))),
                "non-finite|checkpoint-corrupt|drafter-unfit",
            ),
            ("a tensor missing", "eval", tensors(lambda t: t.pop("norm.weight")), CORRUPT),
            ("a tensor more", "eval", tensors(lambda t: t.update(extra=torch.zeros(3))), CORRUPT),
            (
                "a tensor of another shape",
                "eval",
                tensors(lambda t: t.update({"norm.weight": torch.ones(63)})),
                CORRUPT,
            ),
            (
                "a tensor of integers",
                "eval",
                tensors(lambda t: t.update({"norm.weight": torch.ones(64, dtype=torch.int64)})),
                CORRUPT,
            ),
            (
                "weights as float16",
                "export",
                tensors(lambda t: t.update({k: v.half() for k, v in t.items()})),
                f"held|{CORRUPT}",
            ),
            ("a header of 2^63 bytes", "eval", write(WEIGHTS, header((1 << 63) - 1)), CORRUPT),
            ("weights of no bytes", "branch", write(WEIGHTS, b""), CORRUPT),
            (
                "a checkpoint renamed step-5",
                "eval",
                lambda _, run: (
                    (run / STEP).rename(run / "checkpoints/step-5"),
                    (run / "checkpoints/LATEST").write_text("step-5\n"),
                ),
                "held|checkpoint-corrupt|run-corrupt",
            ),
            (
                "a checkpoint renamed step-5",
                "more",
                lambda _, run: (
                    (run / STEP).rename(run / "checkpoints/step-5"),
                    (run / "checkpoints/LATEST").write_text("step-5\n"),
                ),
                "held|checkpoint-corrupt|run-corrupt",
            ),
            ("nothing", "more", lambda _, run: None, "held"),
            ("copied and renamed", "branch", lambda _, run: None, "held"),
        )
    ),
)
