"""``hiddenstore demo``: the whole path, on the bundled target or a real model, as a pipeline that is there to copy."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import click

from collectors.demo import MT_BENCH, QUESTIONS, TARGET_DIR, pipeline_text
from collectors.demo.corpus import conversations
from hiddenstore.cli.inner import do
from hiddenstore.cli.run import Pipeline, StageResult, run_pipeline
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import seconds, size
from hiddenstore.errors import ConflictError, Kind
from hiddenstore.fs.publish import make_folder, replace_file
from hiddenstore.fs.seam import storage_errors
from hiddenstore.servers import VllmPython
from hiddenstore.settings import load
from hiddenstore.threads import usable_cores

BUNDLED_QUESTIONS = 3000
BUNDLED_HELD_OUT = 90
DRAFTER = "eagle3.1"
PIPELINE = "pipeline.yaml"
SMOLLM2_QUESTIONS = 2000
# A server on CPU: short texts, the dtype that CPUs with AMX or AVX512-BF16 multiply fastest.
ENGINE_ARGS = ("dtype=bfloat16", "max-model-len=1024")
# Compiling takes each server about a minute, once; without it drafts cost twice as much
# (benchmarks/results/what-pays-2026-11-23.md).
UNCOMPILED = "enforce-eager=true"


@click.command(
    epilog=examples(
        "hiddenstore demo",
        "hiddenstore demo --quick",
        "hiddenstore demo --target smollm2 --engine-python ENV/bin/python",
    )
)
@click.argument("folder", required=False, type=click.Path())
@click.option(
    "--target",
    type=click.Choice(["bundled", "smollm2"]),
    default="bundled",
    show_default=True,
    help="A target of 2.85 M parameters that is here, or a real one that is downloaded.",
)
@click.option("--quick", is_flag=True, help="The idea in one minute (smollm2: a few), without a result worth keeping.")
@click.option("--seed", default=0, show_default=True, help="Seed of the drafter.")
@click.option("--model", metavar="FILE", help="smollm2's wheel, or a GGUF file, instead of a download.")
@click.option("--engine-python", metavar="PY", help="A Python with vLLM, which then serves the drafter of smollm2.")
@common_options
def demo(folder: str | None, target: str, quick: bool, seed: int, model: str | None, engine_python: str | None) -> None:
    """The whole path on CPU: conversations, states, a trained drafter, its accepted length, an export.

    Writes a pipeline into FOLDER (default: hiddenstore-demo) and runs it: five minutes on two cores with the bundled
    target of 2.85 M parameters, which downloads nothing; about an hour with --target smollm2, a real instruct model
    of 135 M. After a stop, whatever the reason, the same command goes on; when all is done it shows what is there.
    """
    if target == "bundled" and (model or engine_python):
        raise click.UsageError("--model and --engine-python are for --target smollm2")
    name = target + ("-quick" if quick else "")
    usual = "hiddenstore-demo" + {"bundled": "", "smollm2": "-llm"}[target] + ("-quick" if quick else "")
    path = Path(folder or usual)
    words = _smollm2(model, engine_python, quick) if target == "smollm2" else {}
    _claim(path)
    words = words or _bundled(path)
    if "engine_args" in words and (path / PIPELINE).is_file():
        # Begun with a compiler on PATH and gone on without, or the other way round, it is the same demo.
        words["engine_args"] = _engine_args(UNCOMPILED not in (path / PIPELINE).read_text(encoding="utf-8"))
    file = _pipeline_file(path, name, {**words, "out": str(path), "seed": seed})
    results = run_pipeline(load(Pipeline, file))
    document = _document(path, results)
    out = output()
    out.data(document, human=lambda: _show(document))
    yours = "TARGET" if target == "bundled" else str(words["target"])
    out.hint("hiddenstore", "run", "--target", yours, "--data", "chats.jsonl", label="now with your conversations")


def _claim(folder: Path) -> None:
    """Raises ConflictError: ``output-exists``: the folder holds what no demo made."""
    with storage_errors(folder):
        if folder.exists() and any(folder.iterdir()) and not (folder / "done").is_dir():
            problem = f"{folder} holds things that no demo made"
            raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint=f"hiddenstore demo {shlex.quote(f'{folder}-2')}")
        make_folder(folder / "done")


def _pipeline_file(folder: Path, name: str, words: Mapping[str, Any]) -> Path:
    """The filled-in pipeline. Raises ConflictError: ``output-exists``: the one there says otherwise."""
    text = _filled(name, words)
    if words.get("engine_python", "") is None:
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("serve:"))
    file = folder / PIPELINE
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise ConflictError(
            f"{file} says otherwise: another demo, other options, or edited",
            kind=Kind.OUTPUT_EXISTS,
            hint=f"{shlex.join(['hiddenstore', 'run', str(file)])} runs it as it stands; or name another FOLDER",
        )
    replace_file(file, text.encode())
    return file


def _filled(name: str, words: Mapping[str, Any]) -> str:
    return Template(pipeline_text(name)).substitute({key: json.dumps(value) for key, value in words.items()})


def _bundled(folder: Path) -> dict[str, Any]:
    """Target and questions of the demo that downloads nothing: training and held-out questions lie in ``folder``."""
    files = {"questions": folder / "questions.jsonl", "held_out": folder / "held-out-questions.jsonl"}
    if not all(file.exists() for file in files.values()):
        unique = {row["messages"][0]["content"]: row for row in conversations()}
        # An order that depends on their text alone.
        order = sorted(unique, key=lambda text: hashlib.sha256(text.encode()).digest())
        training = order[BUNDLED_HELD_OUT:][:BUNDLED_QUESTIONS]
        for file, texts in zip(files.values(), (training, order[:BUNDLED_HELD_OUT]), strict=True):
            lines = (json.dumps(unique[text], ensure_ascii=False) + "\n" for text in texts)
            replace_file(file, "".join(lines).encode())
    return {"target": str(TARGET_DIR.resolve()), "ranks": _cores(), **{key: str(file) for key, file in files.items()}}


def _smollm2(model: str | None, engine_python: str | None, quick: bool) -> dict[str, Any]:
    """Target and questions of the demo on a real model; the engine, where there is one."""
    from collectors.demo import smollm2

    return {
        "target": str(smollm2(model)),
        "questions": str(QUESTIONS),
        "held_out": str(MT_BENCH),
        "count": SMOLLM2_QUESTIONS,
        "workers": _cores(),
        "engine_python": _engine_python(engine_python),
        "engine_args": _engine_args(not quick and VllmPython(engine_python).can_compile),
    }


def _engine_args(compiles: bool) -> list[str]:
    return [*ENGINE_ARGS, *([] if compiles else [UNCOMPILED])]


def _engine_python(named: str | None) -> str | None:
    """The Python named, or this one where it has vLLM. Raises ConfigError: ``not-installed``: the one named lacks it,
    which is better said now than in an hour."""
    python = VllmPython(named)
    if named is not None:
        python.require()
    return python.program if python.has_vllm else None


def _cores() -> int:
    """Up to two: more processes than that find nothing to do on models this small."""
    return min(2, usable_cores())


def _document(folder: Path, results: Sequence[StageResult]) -> dict[str, Any]:
    answers = {result.stage.name.rpartition("/")[2]: result.answer for result in results}
    info = do("info", str(folder / "store"), quiet=True)
    live, served = answers["decode"], answers.get("serve")
    shown = ("draft_len", "accepted_length", "tokens_per_s", "baseline_tokens_per_s", "speedup", "speedup_rounds")
    of_server = (*shown, "answers", "ties", "differences")
    return {
        **{name: info[name] for name in ("tokens", "bytes_stored", "bytes_raw")},
        "accepted_length": {
            "untrained": live["untrained_accepted_length"],
            "ngram": live["ngram_accepted_length"],
            "simulated": live["simulated_accepted_length"],
            "live": live["accepted_length"],
            "served": served["accepted_length"] if served else None,
        },
        "draft_len": live["draft_len"],
        "identical_prompts": live["prompts"] - len(live["differences"]) - len(live["ties"]),
        "ties": len(live["ties"]),
        **{name: live[name] for name in ("prompts", "looping_share", "tokens_per_s", "baseline_tokens_per_s")},
        "served": {name: served[name] for name in of_server} if served else None,
        "drafter_bytes": answers["export"].get("bytes"),
        "paths": {
            "store": str(folder / "store"),
            "run": str(folder / DRAFTER / "run"),
            "drafter": str(folder / DRAFTER / "drafter"),
            "pipeline": str(folder / PIPELINE),
        },
        "stages_done_before": sum(result.was_done for result in results),
        "stages": len(results),
        "seconds": round(sum(result.seconds for result in results), 1),
    }


def _show(document: dict[str, Any]) -> None:
    """The last page."""
    out, lengths, served = output(), document["accepted_length"], document["served"]
    rows = [
        ("untrained drafter", lengths["untrained"]),
        ("best n-gram table, same training text", lengths["ngram"]),
        ("trained drafter, simulated on recorded text", lengths["simulated"]),
        ("trained drafter, live", lengths["live"]),
    ]
    head = [f"tokens per target forward, chain of {document['draft_len']}", ">accepted length"]
    out.print()
    out.table(head, [[name, f"{length:.2f}"] for name, length in rows if length is not None])
    same = f"{document['identical_prompts']} of {document['prompts']} answers identical to plain greedy decoding"
    smaller = document["bytes_raw"] / document["bytes_stored"]
    stored = f"{size(document['bytes_stored'])}, {smaller:.2f}x smaller than raw bf16"
    drafter = "" if document["drafter_bytes"] is None else f"; the drafter {size(document['drafter_bytes'])}"
    before = document["stages_done_before"]
    slower = document["tokens_per_s"] < document["baseline_tokens_per_s"]
    speed = f"{document['tokens_per_s']:,.1f}; greedy {document['baseline_tokens_per_s']:,.1f}; in process"
    pairs = [
        ("captured", f"{document['tokens']:,} tokens in {stored}{drafter}"),
        ("lossless", same + (f", {document['ties']} more part at a tie" if document["ties"] else "")),
        ("looping", f"{document['looping_share']:.0%} of the greedy answers, left out above"),
        ("tokens/s", speed + ", where so small a target gains no time" * slower),
    ]
    if served:
        spread = ""
        if len(served["speedup_rounds"]) > 1:
            spread = f" ({min(served['speedup_rounds']):.2f}–{max(served['speedup_rounds']):.2f})"
        pairs += [
            ("in vLLM", f"{served['tokens_per_s']:,.1f}; without {served['baseline_tokens_per_s']:,.1f} tokens/s"),
            (
                "",
                f"{served['speedup']:.2f}x{spread} at length {served['accepted_length']:.2f}, "
                f"drafts of {served['draft_len']}",
            ),
            (
                "",
                f"{served['answers']} answers; {_answers(served['ties'])} part at a tie, "
                f"{_answers(served['differences'])} otherwise",
            ),
        ]
        if served["speedup"] < 1:
            pairs.append(("", "slower: on this machine drafts cost more than the tokens they save"))
    pairs += [*document["paths"].items()]
    was_there = f"; {before} of {document['stages']} stages were there" if before else ""
    out.print()
    out.pairs([*pairs, ("took", seconds(document["seconds"]) + was_there)])


def _answers(departures: Sequence[dict[str, Any]]) -> int:
    return sum(one["rounds"] for one in departures)
