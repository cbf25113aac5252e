"""Questions that the target asks itself: an instruct model continues the empty turn of a user (Magpie, Xu et al. 2024).

They look like what it was tuned on, so that its answers to them are text it will be served for.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from collectors.regenerate.answers import claim_settings, damaged
from collectors.regenerate.generate import Sampling, generate_batch
from collectors.regenerate.job import refuse_existing
from collectors.regenerate.options import RegenerateOptions, open_answering, require_possible
from collectors.targets.load import LoadedTarget, load_target
from hiddenstore.console.progress import Progress
from hiddenstore.errors import CaptureError, ConfigError, InterruptError, Kind
from hiddenstore.files.documents import foreign_json
from hiddenstore.fs import require_local
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.publish import make_folder, replace_file
from hiddenstore.records import LOOP_SHARE, repeated_share
from hiddenstore.targets.checkpoint import checkpoint_sha256
from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.rendering import RENDER_ERRORS, limited_rendering, reason_of, template_of

LONGEST_QUESTION = 96
SHORTEST_CHARACTERS = 12
LEAST_USABLE = 0.2
TEMPERATURE, TOP_P = 1.0, 0.95
_MARK = "\u2063question\u2063"


def questions_file(out: str | Path) -> Path:
    """Where the questions for an output of `regenerate` lie: ``OUT.questions.jsonl``."""
    return Path(f"{out}.questions.jsonl")


def invent(options: RegenerateOptions, count: int, stopping: Callable[[], bool] = lambda: False) -> Counter[str]:
    """Write at least ``count`` different questions as ``messages`` rows to `questions_file`, batch after batch: after a
    kill the same call goes on. Those that did not end, loop, are short or were there before are left out and counted.
    Raises ConflictError: ``output-exists``: OUT; ``answers-differ``: the questions there are another target's, or were
    asked with another seed, system message, template, batch size or dtype; ConfigError: ``template-missing``: the
    target has no chat template, or none that a user's turn opens; ``template-invalid``: it refuses one; CaptureError:
    ``nothing-answered``: fewer than a fifth of what the target asks is a question; InterruptError: ``interrupted``."""
    require_possible(options)
    out = require_local(options.out, "a file of answers")
    refuse_existing(out, options.rows_per_file)
    path, dropped = questions_file(out), Counter[str]()
    folder = open_answering(options, str(options.target))
    make_folder(out.parent)
    _claim(path, options, folder)
    rows = _rows(path)
    if len(rows) >= count:
        return dropped
    target = load_target(folder, options.dtype, options.device)
    known = {row["messages"][-1]["content"].casefold() for row in rows}
    with Progress("invent questions", count, "questions", start=len(rows)) as progress:
        for batch in _batches(target, options, 1 + max((row["batch"] for row in rows), default=-1)):
            for number, text, fault in batch:
                fault = "duplicate" if fault is None and text.casefold() in known else fault
                if fault is not None:
                    dropped[fault] += 1
                    continue
                known.add(text.casefold())
                rows.append({"batch": number, "messages": [*_system(options), {"role": "user", "content": text}]})
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:count])
            replace_file(path, "".join(lines).encode())
            progress.update(min(len(rows), count), dropped=dropped.total())
            if len(rows) >= count:
                return dropped
            if dropped.total() > options.batch_size and len(rows) < LEAST_USABLE * (len(rows) + dropped.total()):
                reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items()))
                raise CaptureError(
                    f"the target asks too few questions: {len(rows)} of {len(rows) + dropped.total()}, {reasons}",
                    kind=Kind.NOTHING_ANSWERED,
                    hint="give it prompts instead: hiddenstore regenerate prompts.jsonl -o answers.jsonl --target T",
                )
            if stopping():
                raise InterruptError(
                    "stopped as asked; the questions are kept", kind=Kind.INTERRUPTED, hint="the same command goes on"
                )
    return dropped


def _claim(path: Path, options: RegenerateOptions, folder: TargetFolder) -> None:
    """Keep what the questions depend on beside them, or find that they were asked so."""
    names = ("seed", "system", "batch_size", "dtype")
    asked = {
        "target": folder.label,
        "revision": folder.revision,
        "checkpoint_sha256": checkpoint_sha256(folder),
        "config_sha256": folder.config_sha256,
        "chat_template_sha256": folder.chat_template_sha256,
        **{name: getattr(options, name) for name in names},
    }
    beside = path.with_suffix(".settings.json")
    anew = shlex.join(["rm", str(path), str(beside)])
    hint, fs = f"{anew} has new ones asked; or name another file with -o", LocalFilesystem(path.parent)
    claim_settings(fs, beside.name, asked, f"{path} holds questions that were asked otherwise", hint)


def _rows(path: Path) -> list[dict[str, Any]]:
    # Lines of bytes: those of text would end at U+2028 too, which a question may hold.
    lines = path.read_bytes().splitlines() if path.is_file() else []
    rows: list[dict[str, Any]] = []
    try:
        for line in lines:
            row = foreign_json(line)
            _ = int(row["batch"]), str.casefold(row["messages"][-1]["content"])
            rows.append(row)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        hint = f"{shlex.join(['rm', str(path)])} has them asked again"
        raise damaged(path, f"line {len(rows) + 1} is no question", hint) from error
    return rows


def _system(options: RegenerateOptions) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _batches(
    target: LoadedTarget, options: RegenerateOptions, first: int
) -> Iterator[list[tuple[int, str, str | None]]]:
    """Number of the batch, text and what is wrong with it, batch after batch without end."""
    prompt, end = _open_turn(target, options)
    sampling = Sampling(TEMPERATURE, LONGEST_QUESTION, options.seed or 0, TOP_P, end)
    number = first
    while True:
        batch = []
        for _, answer in sorted(
            generate_batch(target, [prompt] * options.batch_size, sampling, f"questions {number}"),
            key=lambda pair: pair[0],
        ):
            text = target.tokenizer.decode(
                answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ).strip()
            fault = None if answer.ended else "cut"
            fault = fault or ("looping" if repeated_share(answer.token_ids) > LOOP_SHARE else None)
            batch.append((number, text, fault or ("short" if len(text) < SHORTEST_CHARACTERS else None)))
        yield batch
        number += 1


def _open_turn(target: LoadedTarget, options: RegenerateOptions) -> tuple[list[int], tuple[int, ...]]:
    """Token ids up to where a user's words begin, and the token that ends them."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        raise ConfigError(f"target {target.folder.label} has no chat template", kind=Kind.TEMPLATE_MISSING)
    messages = [*_system(options), {"role": "user", "content": _MARK}]
    try:
        with limited_rendering("a first turn"):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template_of(tokenizer)))
    except RENDER_ERRORS as error:
        message = f"the chat template of target {target.folder.label} refuses a first turn: {reason_of(error)}"
        raise ConfigError(message, kind=Kind.TEMPLATE_INVALID) from error
    before, mark, after = text.partition(_MARK)
    ids = tokenizer(before, add_special_tokens=False).input_ids
    end = tokenizer(after, add_special_tokens=False).input_ids[:1]
    if not mark or not ids:
        message = f"the chat template of target {target.folder.label} does not write a user's words as they are"
        raise ConfigError(message, kind=Kind.TEMPLATE_MISSING)
    return list(ids), tuple(end)
