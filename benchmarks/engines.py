"""Drafters in real engines beside `decode` and `eval`: accepted length, answers, and speed with and without.

RUN …: runs of ``hiddenstore train`` for one target. `decode` answers the first COUNT questions of each task of PROMPTS;
those whose answers do not loop are asked of every engine, of a server without a drafter and of one with it in turn.
Methods without training follow the runs, the target as its own draft the last. What an engine does not take is a row
with its reason. A finished cell is not repeated, so the same command goes on after a stop.
Usage: python -m benchmarks.engines RUN … --target DIR --prompts FILE --cells DIR [--name NAME] [--dtype float32]
[--vllm PYTHON] [--vllm-args KEY=VALUE …] [--llama-server FILE --gguf FILE] [--llamacpp-args KEY=VALUE …]
"""

import hashlib
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.commands import Command, RefusedError
from benchmarks.drafter_quality import Quality, once
from hiddenstore.targets.gguf import target_folder
from trainer.drafters import drafter_kind
from trainer.evaluate.prompts import read_questions
from trainer.train.run_folder import describe

CHAIN = 3
METHODS = ("ngram", "suffix", "draft-target")
OF_DECODE = ("accepted_length", "engine_accepted_length", "simulated_accepted_length")
SPEEDS = ("tokens_per_s", "baseline_tokens_per_s")
COUNTED = ("ngram_accepted_length", "per_position", "drafts", "prompts", "answers", "ties", "differences")
MEMBERS = (*OF_DECODE, *SPEEDS, *COUNTED, "speedup", "speedup_rounds")
HEAD = (
    *("drafter", "engine", "drafts of", "accepted length", "decode", "decode, as engines count", "eval, same text"),
    *("answers the same / part at a tie / differ", "tokens/s", "without", "speed-up, median of the rounds"),
)


def about(draft: Path | str) -> Quality:
    """What a cell depends on: how far is drafted, and of a run its checkpoint."""
    if isinstance(draft, str):
        return {"drafts_of": CHAIN}
    info = describe(draft)
    length = drafter_kind(info.spec.drafter.name).longest_draft(info.spec.drafter) or CHAIN
    return {"drafts_of": length, "state": hashlib.sha256((info.checkpoint / "state.json").read_bytes()).hexdigest()}


def cell(options: Namespace, engine: str, draft: Path | str, target: str, asked: Quality) -> Quality:
    """What a command says of a run, or of a method without one, in an engine; ``decode`` is our own."""
    name, key = draft if isinstance(draft, str) else draft.name, {**asked, **about(draft)}
    folder, row = options.cells / engine / name, {"drafter": name, "engine": engine}

    def make() -> Quality:
        folder.mkdir(parents=True)
        words = ["--target", target, "--max-new-tokens", str(options.max_new_tokens), *key["words"]]
        if engine == "decode":
            words += ["--draft-len", str(key["drafts_of"]), "--answers", str(folder / "answers.jsonl")]
            said = Command(accepts=(0, 3)).demand("decode", str(draft), *words)
        else:
            answered = options.cells / "decode" / options.runs[0].name / "answers.jsonl"
            words += ["--engine", engine, "--prompts", str(answered), *served(engine, draft, folder, target, key)]
            said = Command().demand("eval", *words, folder=folder)
        return {**row, **{member: said[member] for member in MEMBERS if member in said}}

    report.progress(f"{engine}: {name}")
    try:
        return once(folder, key, make)
    except RefusedError as error:
        if engine == "decode":
            raise SystemExit(f"decode {draft}: {error}") from error
        first, _, rest = str(error).partition("\n")
        kind = f" {rest[rest.rindex('[') :]}" if rest else ""
        return {**row, "refused": f"{first}{kind}".replace(target, "TARGET")}


def served(engine: str, draft: Path | str, folder: Path, target: str, key: Quality) -> list[str]:
    """The words of `eval` that have it served; a run is exported first. Raises RefusedError."""
    if isinstance(draft, str):
        own = target if engine == "llamacpp" else target_folder(target)
        return ["--method", draft, *(["--serve", own] if draft == "draft-target" else [])]
    words = ["--draft-len", str(key["drafts_of"]), "--dtype", key["dtype"], "-o", str(folder / "drafter")]
    words += ["--target", target] if engine == "llamacpp" else []
    Command().demand("export", str(draft), "--engine", engine, *words)
    return ["--serve", str(folder / "drafter")]


def line(row: Quality, decoded: Quality) -> list[Any]:
    """A row of the table, beside what `decode` said of its run, which is empty where there is none."""
    if "refused" in row:
        return [row["drafter"], row["engine"], "", f"no: {row['refused']}", *[""] * (len(HEAD) - 4)]
    lengths = [row["accepted_length"], *(decoded.get(name) for name in OF_DECODE)]
    parted = [sum(one["rounds"] for one in row[kind]) for kind in ("ties", "differences")]
    answers = " / ".join(map(str, (row["answers"] - sum(parted), *parted)))
    cells = [*("–" if length is None else f"{length:.3f}" for length in lengths), answers]
    cells += [*(f"{row[name]:.1f}" for name in SPEEDS), report.spread(row["speedup_rounds"])]
    return [row["drafter"], row["engine"], row["drafts_of"], *cells]


def parsed() -> Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("runs", type=lambda path: Path(path).resolve(), nargs="+")
    for name in ("--cells", "--llama-server", "--gguf"):
        parser.add_argument(name, type=lambda path: Path(path).resolve(), required=name == "--cells")
    parser.add_argument("--target", required=True, type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--prompts", required=True, help="JSONL of questions")
    parser.add_argument("--vllm", type=lambda path: str(Path(path).absolute()), help="a Python that has vLLM")
    for name in ("--vllm-args", "--llamacpp-args"):
        parser.add_argument(name, nargs="*", default=[], help="KEY=VALUE: flags of the servers")
    for name, value in {"--name": "bundled", "--dtype": "bfloat16", "--count": 1, "--rounds": 3}.items():
        parser.add_argument(name, type=type(value), default=value)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if len({run.name for run in options.runs}) < len(options.runs) or (options.llama_server and not options.gguf):
        raise SystemExit("runs need names of their own, and --llama-server needs --gguf")
    questions = read_questions([options.prompts], [], options.count)
    text = "\n".join(json.dumps({"task": one.task, "messages": one.history}) for one in questions) + "\n"
    options.cells.mkdir(parents=True, exist_ok=True)
    (options.cells / "prompts.jsonl").write_text(text, encoding="utf-8")
    asked: Quality = {"questions": len(questions), "text": hashlib.sha256(text.encode()).hexdigest()}
    asked |= {"max_new_tokens": options.max_new_tokens, "dtype": options.dtype}
    words = ["--dtype", options.dtype, "-n", str(len(questions)), "--prompts", str(options.cells / "prompts.jsonl")]
    key = {**asked, "words": words}
    decoded = {run.name: cell(options, "decode", run, options.target, key) for run in options.runs}
    rows: list[Quality] = []
    engines: dict[str, tuple[str, list[str], list[str]]] = {}
    if options.vllm:
        flags = [f"dtype={options.dtype}", *options.vllm_args]
        engines["vllm"] = options.target, flags, ["--engine-python", options.vllm]
    if options.llama_server:
        os.environ["PATH"] = f"{options.llama_server.parent}{os.pathsep}{os.environ['PATH']}"
        engines["llamacpp"] = str(options.gguf), options.llamacpp_args, []
    for engine, (target, flags, words) in engines.items():
        words = ["--rounds", str(options.rounds), *words, *(w for flag in flags for w in ("--engine-arg", flag))]
        key = {**asked, "words": words, "rounds": options.rounds}
        rows += [cell(options, engine, draft, target, key) for draft in (*options.runs, *METHODS)]
    first, floor = decoded[options.runs[0].name], decoded[options.runs[0].name]["ngram_accepted_length"]
    how = "; ".join(f"{engine} of {Path(of).name}: `{' '.join(flags)}`" for engine, (of, flags, _) in engines.items())
    page = [
        f"# Drafters in real engines on {options.name}, {report.today()}\n",
        f"{report.machine_line()} `decode` answered {first['prompts']} of {len(questions)} questions without looping, "
        f"{options.dtype}, up to {options.max_new_tokens} tokens; engines were asked the same, greedy, one stream, "
        f"{options.rounds} rounds with and without in turn. n-gram floor of the same answers: {floor}. {how}.\n",
        report.table(HEAD, [line(row, decoded.get(row["drafter"], {})) for row in rows]),
    ]
    # Where things lie on this machine stays out of the file.
    shown = [{name: row[name] for name in row if name != "words"} for row in (*decoded.values(), *rows)]
    report.publish(f"engines-{options.name}", {"rows": shown}, options.results, page)


if __name__ == "__main__":
    main()
