"""Prompts to decode, as token ids: chat messages from JSONL, or the held-out text of prepared DATA or of a store."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, FormatError, NotFoundError
from hiddenstore.layout import DATA_JSON, STORE_JSON
from hiddenstore.records import Sample
from schemas.capture import TargetIdentity

_FIELDS = ("messages", "conversations", "turns", "prompt", "question", "problem")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target's answer begins, and the messages they were made of, where known."""

    ids: list[int]
    messages: list[dict[str, str]] | None = None


def read_prompts(source: str, tokenizer: Any, identity: TargetIdentity, split: str) -> Iterator[Prompt]:
    """Prompts in file order, each ending where the target's answer begins.

    ``source`` is a JSONL file (``messages`` or ``conversations``, ``turns`` as MT-Bench has them, of which the first
    counts, ``prompt``, ``question`` or ``problem`` per line; a last assistant message is cut off), a DATA folder or a
    store; of the last two only samples of ``split``, up to their first supervised token.

    Raises:
        NotFoundError: no such file.
        ConfigError: a line that is no conversation, naming it; ``prompts-empty``.
        FormatError: DATA or store of another tokenizer.
    """
    path = Path(source)
    if (path / STORE_JSON).is_file():
        from hiddenstore.store import Store

        store = Store.open(path)
        _require_tokenizer(source, store.capture.target.tokenizer_sha256, identity)
        chosen = (entry.id for _, entry in store.entries if entry.split == split)
        return _at_least_one(_cut_before_answers(store.sample(sample_id) for sample_id in chosen), source, split)
    if (path / DATA_JSON).is_file():
        from hiddenstore.inputs import PreparedInput

        prepared = PreparedInput.open(path)
        _require_tokenizer(source, prepared.info.tokenizer_sha256, identity)
        held_out = (sample for sample in prepared.samples() if sample.split == split)
        return _at_least_one(_cut_before_answers(held_out), source, split)
    if not path.is_file():
        raise NotFoundError(f"no prompts at {source}: expected a JSONL file, DATA or a store", kind="prompts-missing")
    return _at_least_one(_from_jsonl(path, tokenizer), source)


def _at_least_one(prompts: Iterator[Prompt], source: str, split: str | None = None) -> Iterator[Prompt]:
    first = next(prompts, None)
    if first is None:
        what = f"no {split} sample with an answer" if split else "no prompt"
        raise ConfigError(
            f"{source} holds {what}",
            kind="prompts-empty",
            hint="--prompts FILE.jsonl with messages, or DATA prepared with a larger --val" if split else None,
        )
    return chain([first], prompts)


def _from_jsonl(path: Path, tokenizer: Any) -> Iterator[Prompt]:
    if tokenizer.chat_template is None:
        raise ConfigError("the target's tokenizer has no chat template", kind="template-missing")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                messages = _messages(line, f"{path}:{number}")
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                yield Prompt([int(token) for token in ids], messages)


def _messages(line: str, where: str) -> list[dict[str, str]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {error.msg} at column {error.colno}", kind="prompts-invalid") from error
    turns = row
    if isinstance(row, dict):
        name = next((name for name in _FIELDS if row.get(name)), "")
        turns = row.get(name)
        if name in ("turns", "prompt") and isinstance(turns, list) and isinstance(turns[0], str):
            # A user's later turns follow on answers that nobody has given yet.
            turns = turns[0]
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{where}: expected one of {', '.join(_FIELDS)}", kind="prompts-invalid")
    messages = [{"role": _role(turn), "content": str(turn.get("content", turn.get("value", "")))} for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ConfigError(f"{where}: nothing is left to answer", kind="prompts-invalid")
    return messages


def _role(turn: dict[str, Any]) -> str:
    role = str(turn.get("role", turn.get("from", "user")))
    return _ROLES.get(role, role)


def _cut_before_answers(samples: Iterable[Sample]) -> Iterator[Prompt]:
    for sample in samples:
        supervised = sample.loss_mask.nonzero()[0]
        if len(supervised) and supervised[0]:
            yield Prompt([int(token) for token in sample.input_ids[: int(supervised[0])]])


def _require_tokenizer(source: str, found: str, identity: TargetIdentity) -> None:
    if found != identity.tokenizer_sha256:
        raise FormatError(
            f"{source} was tokenised by another tokenizer than the target's: "
            f"{found[:8]}…, the target has {identity.tokenizer_sha256[:8]}…",
            kind="target-mismatch",
        )
