"""What a person gets wrong with a store, a run or a command: a clear error, the exit code, nothing half written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_input import (
    CONFLICT,
    FOUND,
    MISFIT,
    STORAGE,
    USAGE,
    Case,
    check,
    damaged_run,
    damaged_store,
    on,
    rows,
    run_with_config,
    text,
    train,
)
from tests.tiny_world import TRAIN, World, run

CASES = [
    # look and care
    *(
        Case(f"{name} nothing", on(name, "nowhere"), USAGE, "store-missing", ("nowhere",))
        for name in ("info", "ls", "show", "stats", "verify", "repair", "gc")
    ),
    *(
        Case(f"{name} no store", on(name, "target"), USAGE, "store-missing", ("target",))
        for name in ("info", "ls", "show", "stats", "verify", "repair", "gc")
    ),
    Case("diff with nothing", on("diff", "store", "nowhere"), USAGE, "store-missing", ("nowhere",)),
    Case("show an unknown sample", on("show", "store", "zzz"), USAGE, "sample-missing", ("zzz",), "hiddenstore ls"),
    Case("show beyond the end", on("show", "store", "99"), USAGE, "sample-missing", ("99", "40"), "hiddenstore ls"),
    Case("an unknown test", on("ls", "store", "--where", "length>3"), USAGE, "option-invalid", ("length",)),
    *(
        Case(
            f"{command[0]} into the name of a snapshot",
            lambda w, _, command=command: (command[0], *w.named(command[1:]), "-o", w / "store@v9"),
            USAGE,
            "usage",
            ("store@v9 is a name for the snapshot v9 of the store", "which it would hide"),
            "another place, such as",
        )
        for command in (
            ("prepare", "chats.jsonl", "--target", "T"),
            ("train", "store"),
            ("export", "run", "--engine", "vllm"),
            ("export-data", "store", "--to", "deepspec"),
            ("import-drafter", "drafter", "--store", "store"),
            ("regenerate", "chats.jsonl", "--target", "T"),
            ("report", "store"),
            ("vocab", "store"),
            ("run", "--target", "T", "--data", "chats.jsonl"),
        )
    ),
    Case("an unknown snapshot", lambda w, _: ("info", w / "store@v9"), USAGE, "snapshot-missing", ("v9",)),
    Case("copy nothing", on("copy", "nowhere", "dst"), USAGE, "store-missing", ("nowhere",)),
    Case("copy of another target", on("copy", "other_store", "store"), CONFLICT, "store-mismatch", ("weights_sha256",)),
    Case(
        "copy of two targets",
        on("copy", "store", "other_store", "dst"),
        CONFLICT,
        "store-mismatch",
        ("weights_sha256",),
    ),
    Case("copy recipe unknown", on("copy", "store", "dst", "--recipe", "q9"), USAGE, "name-unknown", ("q9",)),
    Case(
        "gc of no age",
        on("gc", "store", "--older-than", "soon"),
        USAGE,
        "option-invalid",
        ("soon",),
        "--older-than 24h",
    ),
    # vocab
    Case(
        "vocab over another file", on("vocab", "store", "-o", "chats.jsonl"), CONFLICT, "file-exists", ("chats.jsonl",)
    ),
    Case("vocab file missing", on("vocab", "store", "--file", "no.pt"), USAGE, "path-missing", ("no.pt",)),
    Case(
        "vocab file of another kind",
        on("vocab", "store", "--file", "chats.jsonl"),
        FOUND,
        "vocab-corrupt",
        ("chats.jsonl",),
    ),
    *(
        Case(
            f"vocab {where} a file",
            lambda w, _, rest=rest: ("vocab", w / "store", "-o", f"{w / 'chats.jsonl'}/{rest}"),  # type: ignore[misc]
            STORAGE,
            "path-invalid",
            ("chats.jsonl",),
        )
        for where, rest in (("in", "d2t.pt"), ("below", "deep/d2t.pt"))
    ),
    # train
    Case("train nothing", train(store="nowhere"), USAGE, "store-missing", ("nowhere",)),
    Case(
        "key unknown", train("optim.learning_rate=1"), USAGE, "config-unknown-key", ("optim.learning_rate", "optim.lr")
    ),
    Case("value of the wrong type", train("optim.lr=fast"), USAGE, "config-invalid", ("optim.lr", "number", "fast")),
    Case(
        "two values wrong", train("optim.lr=fast", "loss.steps=0"), USAGE, "config-invalid", ("optim.lr", "loss.steps")
    ),
    Case("settings missing", train("-c", "no.yaml"), USAGE, "path-missing", ("no.yaml",)),
    Case(
        "settings no YAML",
        lambda w, f: ("train", w / "store", "-o", "new", "-c", text("c.yaml", "a: [")(f)),
        USAGE,
        "config-unreadable",
        ("c.yaml",),
    ),
    Case("drafter unknown", train("--drafter", "eagle9"), USAGE, "name-unknown", ("eagle9", "eagle3")),
    Case(
        "layers not stored",
        train("drafter.aux_layers=0,1,3"),
        USAGE,
        "store-lacks-states",
        ("3",),
        "hiddenstore collect",
    ),
    Case("no final stored", train(store="no_final"), USAGE, "store-lacks-states", ("final",), "hiddenstore collect"),
    Case(
        "train a damaged store",
        lambda w, f: ("train", damaged_store(w, f), "-o", "new", *TRAIN),
        FOUND,
        "file-size",
        ("samples",),
        "hiddenstore repair",
    ),
    Case("run exists", on("train", "store", "-o", "run"), CONFLICT, "output-exists", ("step-2",), "--resume"),
    Case(
        "resume a damaged run",
        lambda w, f: ("train", w / "store", "-o", run_with_config(w, f, "drafter: [eagle3"), "--resume"),
        FOUND,
        "run-corrupt",
        ("config.yaml",),
    ),
    Case("nothing to resume", train("--resume"), USAGE, "run-missing", ("new",), "hiddenstore train"),
    Case(
        "resume another store",
        on("train", "other_store", "-o", "run", "--resume"),
        CONFLICT,
        "resume-store",
        ("weights_sha256",),
        "hiddenstore train",
    ),
    Case("draft vocabulary missing", train("drafter.vocab_file=no.pt"), USAGE, "path-missing", ("no.pt",)),
    Case("device unavailable", train("train.device=cuda:7"), USAGE, "device-unavailable", ("cuda:7",)),
    Case("train: a sample longer than a pack", train("data.pack_tokens=20"), USAGE, "sample-too-long", ("20", "60")),
    # eval
    Case("eval no run", on("eval", "nowhere", "store"), USAGE, "checkpoint-missing", ("nowhere",), "hiddenstore train"),
    Case("eval another target", on("eval", "run", "other_store"), MISFIT, "target-mismatch", ("weights_sha256",)),
    Case(
        "eval an empty split", on("eval", "run", "train_store"), USAGE, "split-empty", ("validation",), "--split train"
    ),
    Case(
        "eval without the layers", on("eval", "run", "no_final"), USAGE, "layer-missing", ("2",), "hiddenstore collect"
    ),
    Case(
        "eval a damaged store",
        lambda w, f: ("eval", w / "run", damaged_store(w, f), "--split", "train"),
        FOUND,
        "file-size",
        ("samples",),
        "hiddenstore repair",
    ),
    Case(
        "eval a damaged run",
        lambda w, f: ("eval", damaged_run(w, f), w / "store"),
        FOUND,
        "checkpoint-corrupt",
        ("drafter.safetensors",),
    ),
    # decode
    Case(
        "decode another target",
        on("decode", "run", "--target", "other_target", "--prompts", "store"),
        MISFIT,
        "target-mismatch",
        ("weights_sha256",),
    ),
    Case(
        "decode no target",
        on("decode", "run", "--target", "./no", "--prompts", "store"),
        USAGE,
        "target-missing",
        ("./no",),
    ),
    Case(
        "decode no run",
        on("decode", "data", "--target", "target", "--prompts", "store"),
        USAGE,
        "checkpoint-missing",
        ("data",),
    ),
    Case(
        "prompts missing",
        on("decode", "run", "--target", "target", "--prompts", "no.jsonl"),
        USAGE,
        "path-missing",
        ("no.jsonl",),
    ),
    Case(
        "prompts empty",
        lambda w, f: ("decode", w / "run", "--target", w / "target", "--prompts", text("p.jsonl", "")(f)),
        USAGE,
        "input-empty",
        ("p.jsonl",),
    ),
    Case(
        "prompts no JSON",
        lambda w, f: ("decode", w / "run", "--target", w / "target", "--prompts", rows("{")(f)),
        USAGE,
        "input-empty",
        ("rows.jsonl:1",),
    ),
    Case(
        "prompts of an empty split",
        on("decode", "run", "--target", "target", "--prompts", "all_train"),
        USAGE,
        "input-empty",
        ("validation",),
    ),
    Case(
        "decode a sampled tree",
        lambda w, _: (
            *("decode", w / "run", "--target", w / "target", "--prompts", w / "store"),
            *("--draft-len", "2x2", "--temperature", "0.5"),
        ),
        USAGE,
        "no-tree",
        ("temperature 0",),
        "--draft-len 3",
    ),
    # export
    Case(
        "export over a folder",
        on("export", "run", "--engine", "vllm", "-o", "exported"),
        CONFLICT,
        "output-exists",
        ("exported",),
    ),
    Case(
        "export engine unknown",
        on("export", "run", "--engine", "vlm", "-o", "out"),
        USAGE,
        "name-unknown",
        ("vlm", "vllm"),
    ),
    Case(
        "export no run", on("export", "store", "--engine", "vllm", "-o", "out"), USAGE, "checkpoint-missing", ("store",)
    ),
    Case(
        "export a damaged run",
        lambda w, f: ("export", damaged_run(w, f), "--engine", "vllm", "-o", "out"),
        FOUND,
        "checkpoint-corrupt",
        ("drafter.safetensors",),
    ),
    Case(
        "export-data without every final",
        on("export-data", "store", "--to", "speculators", "-o", "out"),
        MISFIT,
        "final-missing",
        ("final",),
        "--final all",
    ),
    Case(
        "export-data over a folder",
        on("export-data", "store", "--to", "speculators", "-o", "exported", "--missing-final", "zeros"),
        CONFLICT,
        "output-exists",
        ("exported",),
    ),
    Case(
        "export-data of layers not held",
        on("export-data", "store", "--to", "speculators", "-o", "out", "--layers", "0,3", "--missing-final", "zeros"),
        USAGE,
        "layer-missing",
        ("3",),
    ),
    Case(
        "export-data of a damaged store",
        lambda w, f: (
            "export-data",
            damaged_store(w, f),
            "--to",
            "speculators",
            "-o",
            "out",
            "--missing-final",
            "zeros",
        ),
        FOUND,
        "file-size",
        ("samples",),
    ),
    Case(
        "export-data format unknown",
        on("export-data", "store", "--to", "arrow", "-o", "out"),
        USAGE,
        "usage",
        ("arrow", "speculators"),
    ),
    # object storage
    Case(
        "address with a password",
        on("info", "s3://AKIAEXAMPLE:dontshow@bucket/store"),
        USAGE,
        "address-invalid",
        ("s3://…", "without user, password or query"),
        "docs/object-storage.md",
    ),
    Case("address without a bucket", on("info", "s3:///store"), USAGE, "address-invalid", ("s3://BUCKET/PATH",)),
    Case(
        "run on object storage",
        on("train", "store", "-o", "s3://bucket/run"),
        USAGE,
        "scheme-unsupported",
        ("RUN lies on a local disk", "s3://bucket/…"),
    ),
    Case(
        "export to object storage",
        on("export-data", "store", "--to", "speculators", "-o", "gs://bucket/out", "--missing-final", "zeros"),
        USAGE,
        "scheme-unsupported",
        ("gs://bucket/…",),
    ),
    # usage
    Case("command unknown", on("colect"), USAGE, "usage", ("colect", "collect"), "hiddenstore collect --help"),
    Case("option unknown", on("info", "store", "--colour"), USAGE, "usage", ("--colour",), "hiddenstore info --help"),
    Case("argument missing", on("train"), USAGE, "usage", ("STORE",), "hiddenstore train --help"),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def test_bad_input_is_a_clear_error_and_changes_nothing(
    case: Case, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(case, world, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    "words",
    [("info", "nowhere"), ("prepare", "no.jsonl", "-o", "out", "--target", "./t"), ("train", "no", "-o", "run")],
)
def test_a_process_ends_with_the_code_and_one_line_of_json_says_the_same(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hiddenstore.cli", *words]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout, told.returncode, told.stdout) == (USAGE, "", USAGE, "")
    document = json.loads(told.stderr)
    assert (document["schema"], document["exit_code"]) == ("hiddenstore.error/1", USAGE)
    assert plain.stderr.startswith(f"error: {document['message']}  [{document['kind']}]\n")
    assert list(tmp_path.iterdir()) == []


def test_verify_names_the_damaged_file_and_the_command_that_repairs(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = damaged_store(world, tmp_path)
    assert run("verify", damaged) == FOUND
    printed = capsys.readouterr()
    assert "file-size" in printed.out
    assert f"next: hiddenstore repair {damaged}" in printed.err
