"""Prompts to decode, as token ids: chat messages from JSONL, or the held-out text of prepared DATA or of a store."""

import inspect
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from hiddenstore.conversation import (
    BESIDE_QUESTION,
    BESIDE_TURNS,
    IMAGE_KEYS,
    MESSAGE_COLUMNS,
    TEMPLATE_KWARGS,
    TOOLS_COLUMN,
    Problem,
    Row,
    decoded_row,
    parse_row,
    way_to_keep,
)
from hiddenstore.conversation.messages import ROLE_OF, Message, with_known_reasoning
from hiddenstore.errors import ConfigError, FormatError, Kind, NotFoundError
from hiddenstore.files.layout import DATA_JSON, STORE_JSON
from hiddenstore.fs import is_address, open_filesystem
from hiddenstore.records import Sample
from hiddenstore.targets.identity import tokenizer_differences
from hiddenstore.targets.rendering import RENDER_ERRORS, limited_rendering, reason_of, template_of
from schemas.capture import TargetIdentity
from schemas.prepared import PreparedData

FIELDS = ("messages", "conversations", "turns", "prompt", "question", "problem", "instruction", "conversation")
TURNS = ("turns", "prompt")
"""Fields that may list the texts of a user's turns."""
_FORM = "--prompts FILE.jsonl, a question a line: prompt, turns, messages, question, problem or instruction"
EXAMPLES = 3
"""Rows that a message about several quotes."""


@dataclass(frozen=True)
class Beside:
    """What a chat template is given besides the messages: ``tools``, and the rest by name."""

    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """As a row of conversations has it."""
        named = {TOOLS_COLUMN: self.tools, TEMPLATE_KWARGS: dict(self.template_kwargs)}
        return {name: value for name, value in named.items() if value}


NOTHING_BESIDE = Beside()


@dataclass(frozen=True)
class Question:
    """One conversation to be answered, at ``location``: ``history`` ends with a user's message or a tool's; ``more``
    are the user's next ones, each asked after the answer to the one before."""

    task: str
    history: tuple[Message, ...]
    more: tuple[str, ...] = ()
    beside: Beside = NOTHING_BESIDE
    location: str = ""


def has_tools(messages: Sequence[Message], beside: Beside) -> bool:
    """Whether tools are offered, called or answer: what servers take in ways of their own."""
    return bool(beside.tools) or any("tool_calls" in one or one["role"] == "tool" for one in messages)


def read_questions(
    files: Sequence[str], unusable: list[str], count: int | None = None, takes_tools: bool = True
) -> list[Question]:
    """Questions in file order, at most ``count`` of each task; rows that ask nothing are put into ``unusable``, and
    those with tools where none are taken. Raises NotFoundError: ``path-missing``; ConfigError: ``input-empty``."""
    questions: list[Question] = []
    per_task: Counter[str] = Counter()
    for name in files:
        for question in questions_of(Path(name), unusable):
            if not takes_tools and has_tools(question.history, question.beside):
                unusable.append(f"{question.location}: tools, which the chat template of --target renders: give it")
                continue
            per_task[question.task] += 1
            if count is None or per_task[question.task] <= count:
                questions.append(question)
    if not questions:
        raise no_prompt(", ".join(files), unusable)
    return questions


def questions_of(path: Path, unusable: list[str]) -> Iterator[Question]:
    """Questions of a JSONL file, in order. Rows that ask nothing are put into ``unusable``, as ``file:line: why``. A
    line holds ``messages`` or ``conversations``, ``turns`` (MT-Bench), ``prompt`` (HumanEval, a text or a list of a
    user's turns), ``question`` (GSM8K), ``problem`` (MATH) or ``instruction`` (Alpaca). Its task is ``task``, else
    ``category``, else the file's name. What stands beside it is read as ``prepare`` reads it: system messages, tools,
    ``chat_template_kwargs`` and ``enable_thinking``. Raises NotFoundError: ``path-missing``."""
    if not path.is_file():
        raise NotFoundError(f"no prompts at {path}: expected a JSONL file", kind=Kind.PATH_MISSING, hint=_FORM)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            question = _question(line.removeprefix(BOM_UTF8) if number == 1 else line, path.stem)
            if isinstance(question, Question):
                yield replace(question, location=f"{path}:{number}")
            else:
                unusable.append(f"{path}:{number}: {question}")


def no_prompt(source: str, unusable: Sequence[str]) -> ConfigError:
    """What to raise for a source without a single prompt."""
    why = f"; of {len(unusable)} rows the first: {unusable[0]}" if unusable else ""
    return ConfigError(f"{source} holds no prompt{why}", kind=Kind.INPUT_EMPTY, hint=_FORM)


def left_out(unusable: Sequence[str]) -> str:
    """One line about rows that ask nothing."""
    first = "; ".join(unusable[:EXAMPLES])
    more = f" and {len(unusable) - EXAMPLES} more" if len(unusable) > EXAMPLES else ""
    return f"{len(unusable)} {'row holds' if len(unusable) == 1 else 'rows hold'} no prompt, left out: {first}{more}"


def _question(line: bytes, stem: str) -> Question | str:
    """The question of a row, or why there is none."""
    row = decoded_row(Row("", _listed(line), len(line)))
    if isinstance(row, Problem):
        return row.detail
    task = str(row.get("task") or row.get("category") or stem)
    if (name := next((name for name in FIELDS if row.get(name)), None)) is None:
        return f"expected one of {', '.join(FIELDS)}"
    if task != task.encode(errors="ignore").decode():
        return f"a task {task!a}, which holds half of a character"
    value = row[name]
    is_turns = name in TURNS and isinstance(value, list) and all(isinstance(turn, str) for turn in value)
    turns = [{"role": "user", "content": turn} for turn in value] if is_turns else []
    asked = {member: row[member] for member in (*BESIDE_TURNS, *IMAGE_KEYS, *BESIDE_QUESTION) if member in row}
    if name in MESSAGE_COLUMNS or isinstance(value, list):
        asked[name if name in MESSAGE_COLUMNS else "messages"] = turns or _without_answer(value)
    else:
        asked["instruction" if name == "instruction" else "prompt"] = value
    conversation = parse_row(Row("", asked, len(line)))
    if isinstance(conversation, Problem):
        return "; ".join(filter(None, (conversation.detail, way_to_keep([conversation.reason]))))
    more = tuple(turn["content"] for turn in turns[1:])
    messages = conversation.messages[: len(conversation.messages) - len(more)]
    if all(message["role"] != "user" for message in messages):
        return "nothing is left to answer"
    return Question(task, tuple(messages), more, Beside(conversation.tools, conversation.template_kwargs))


def _listed(line: bytes) -> Any:
    """A row; messages alone are one too."""
    if line.lstrip().startswith(b"["):
        with suppress(ValueError, RecursionError):
            return {"messages": json.loads(line)}
    return line


def _without_answer(turns: Any) -> Any:
    """Messages up to the last one that is to be answered, whatever those behind it hold; one without a role asks."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return turns
    turns = [turn if {"role", "from"} & turn.keys() else {"role": "user", **turn} for turn in turns]
    roles = [ROLE_OF.get(str(turn.get("role") or turn.get("from")).strip().lower()) for turn in turns]
    return turns[: next((end for end in range(len(turns), 0, -1) if roles[end - 1] != "assistant"), 0)]


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target's answer begins, and the messages they were made of, where known, with what the
    chat template was given besides."""

    ids: list[int]
    messages: list[Message] | None = None
    beside: Beside = NOTHING_BESIDE


def read_prompts(
    source: str, tokenizer: Any, identity: TargetIdentity, split: str, unusable: list[str]
) -> Iterator[Prompt]:
    """Prompts in file order, each ending where the target's answer begins; rows without one are put into ``unusable``.
    ``source`` is a JSONL file of questions (`trainer.evaluate.prompts`; of several turns the first, as the others
    follow on answers that do not exist yet), a DATA folder or a store; of the last two only samples of ``split``, up to
    their first supervised token. Raises NotFoundError: no such file; ConfigError: ``input-empty``: there is none,
    with the first line that holds none and why; FormatError: DATA or store of another tokenizer."""
    path, fs = Path(source), open_filesystem(source)
    samples: Iterator[Sample] | None = None
    if fs.size(STORE_JSON) is not None:
        from hiddenstore.store import Store

        store = Store.open(fs)
        _require_tokenizer(source, store.capture.target, identity)
        samples = (store.sample(entry.id) for _, entry in store.entries if entry.split == split)
    elif fs.size(DATA_JSON) is not None:
        from hiddenstore.inputs import PreparedInput

        prepared = PreparedInput.open(fs)
        _require_tokenizer(source, prepared.info, identity)
        samples = (sample for sample in prepared.samples() if sample.split == split)
    elif is_address(source) or not path.is_file():
        raise NotFoundError(f"no prompts at {source}: expected a JSONL file, DATA or a store", kind=Kind.PATH_MISSING)
    prompts = _from_jsonl(path, tokenizer, unusable) if samples is None else _cut_before_answers(samples, unusable)
    first = next(prompts, None)
    if first is not None:
        return chain([first], prompts)
    if samples is None or unusable:
        raise no_prompt(source, unusable)
    raise ConfigError(
        f"{source} holds no {split} sample with an answer",
        kind=Kind.INPUT_EMPTY,
        hint="--prompts FILE.jsonl with messages, or DATA prepared with a larger --val",
    )


def _from_jsonl(path: Path, tokenizer: Any, unusable: list[str]) -> Iterator[Prompt]:
    if tokenizer.chat_template is None:
        raise ConfigError("the target's tokenizer has no chat template", kind=Kind.TEMPLATE_MISSING)
    fix = "hiddenstore prepare FILE -o DATA --template FILE, then --prompts DATA"
    for number, question in enumerate(questions_of(path, unusable), start=1):
        messages, location = list(question.history), f"prompt {number} of {path}"
        try:
            ids = prompt_ids(tokenizer, messages, location, fix, question.beside)
        except RENDER_ERRORS as error:
            unusable.append(f"{location}: the chat template refuses it: {reason_of(error)}")
            continue
        yield Prompt(ids, messages, question.beside)


def prompt_ids(
    tokenizer: Any, messages: Sequence[Message], location: str, fix: str, beside: Beside = NOTHING_BESIDE
) -> list[int]:
    """Token ids of a conversation up to where the answer begins; ``fix`` is what to do about an endless template.
    Raises ValueError: a member of ``template_kwargs`` is no word of the template's, but says how it is rendered."""
    kwargs, tools = beside.template_kwargs, None if beside.tools is None else [dict(tool) for tool in beside.tools]
    template = template_of(tokenizer, tools)
    # Among these are max_length and truncation, which would cut the prompt.
    if taken := sorted(kwargs.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys()):
        raise ValueError(f"{TEMPLATE_KWARGS} cannot give {taken[0]}")
    with limited_rendering(location, fix):
        ids = tokenizer.apply_chat_template(
            with_known_reasoning(messages, template),
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            return_dict=False,
            **kwargs,
        )
    return [int(token) for token in ids]


def _cut_before_answers(samples: Iterable[Sample], unusable: list[str]) -> Iterator[Prompt]:
    for sample in samples:
        if sample.images:
            unusable.append(f"sample {sample.id}: it holds images, and prompts are decoded from tokens alone")
            continue
        supervised = sample.loss_mask.nonzero()[0]
        if len(supervised) and supervised[0]:
            yield Prompt([int(token) for token in sample.input_ids[: int(supervised[0])]])


def _require_tokenizer(source: str, theirs: TargetIdentity | PreparedData, identity: TargetIdentity) -> None:
    if differences := tokenizer_differences(theirs, identity):
        raise FormatError(
            f"{source} was tokenised by another tokenizer than the target's: {'; '.join(differences)}",
            kind=Kind.TARGET_MISMATCH,
        )
