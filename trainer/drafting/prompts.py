"""Prompts to decode, as token ids: chat messages from JSONL, or the held-out text of prepared DATA or of a store."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, FormatError, NotFoundError
from hiddenstore.layout import DATA_JSON, STORE_JSON
from hiddenstore.records import Sample
from schemas.capture import TargetIdentity
from trainer.drafting.questions import no_prompt, questions_of


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target's answer begins, and the messages they were made of, where known."""

    ids: list[int]
    messages: list[dict[str, str]] | None = None


def read_prompts(
    source: str, tokenizer: Any, identity: TargetIdentity, split: str, unusable: list[str]
) -> Iterator[Prompt]:
    """Prompts in file order, each ending where the target's answer begins; rows without one are put into ``unusable``.

    ``source`` is a JSONL file of questions (`trainer.drafting.questions`; of several turns the first, as the others
    follow on answers that nobody has given yet), a DATA folder or a store; of the last two only samples of ``split``,
    up to their first supervised token.

    Raises:
        NotFoundError: no such file.
        ConfigError: ``prompts-empty``: there is none, with the first line that holds none and why.
        FormatError: DATA or store of another tokenizer.
    """
    path = Path(source)
    if (path / STORE_JSON).is_file():
        from hiddenstore.store import Store

        store = Store.open(path)
        _require_tokenizer(source, store.capture.target.tokenizer_sha256, identity)
        chosen = (entry.id for _, entry in store.entries if entry.split == split)
        found = _cut_before_answers(store.sample(sample_id) for sample_id in chosen)
        return _at_least_one(found, source, split=split)
    if (path / DATA_JSON).is_file():
        from hiddenstore.inputs import PreparedInput

        prepared = PreparedInput.open(path)
        _require_tokenizer(source, prepared.info.tokenizer_sha256, identity)
        held_out = (sample for sample in prepared.samples() if sample.split == split)
        return _at_least_one(_cut_before_answers(held_out), source, split=split)
    if not path.is_file():
        raise NotFoundError(f"no prompts at {source}: expected a JSONL file, DATA or a store", kind="prompts-missing")
    return _at_least_one(_from_jsonl(path, tokenizer, unusable), source, unusable)


def _at_least_one(
    prompts: Iterator[Prompt], source: str, unusable: Sequence[str] = (), *, split: str | None = None
) -> Iterator[Prompt]:
    first = next(prompts, None)
    if first is None:
        if split is None:
            raise no_prompt(source, unusable)
        raise ConfigError(
            f"{source} holds no {split} sample with an answer",
            kind="prompts-empty",
            hint="--prompts FILE.jsonl with messages, or DATA prepared with a larger --val",
        )
    return chain([first], prompts)


def _from_jsonl(path: Path, tokenizer: Any, unusable: list[str]) -> Iterator[Prompt]:
    if tokenizer.chat_template is None:
        raise ConfigError("the target's tokenizer has no chat template", kind="template-missing")
    for question in questions_of(path, unusable):
        messages = list(question.history)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        yield Prompt([int(token) for token in ids], messages)


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
