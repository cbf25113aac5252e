"""Conversations → DATA: tokens, loss mask and turn spans in parquet, with data.json beside them.

Rows stream through worker processes and come back in order; what grows with the input is the set of 16-byte sample ids
that finds exact duplicates, nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import nextafter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import TemplateSyntaxError

from collectors.conversations.datasets import find_dataset
from collectors.conversations.mix import Mix, MixedSource, open_inputs
from collectors.targets.images import open_images
from collectors.tokenize.batches import FACTS, SampleBatch, SampleRules, batches_of, ordered_batches
from collectors.tokenize.template import NOT_STABLE, ChatTemplate, read_template
from collectors.tokenize.turns import RewrittenError
from collectors.tokenize.write import Tally, data_files, new_data, refuse_existing_data, write_document
from hiddenstore.console.output import output
from hiddenstore.console.progress import Progress
from hiddenstore.console.text import plural
from hiddenstore.conversation import ENABLE_THINKING, NO_ANSWER, Conversation, Problem, Row, Source, way_to_keep
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.files.documents import seal
from hiddenstore.files.layout import DATA_JSON
from hiddenstore.fs import is_address
from hiddenstore.fs.seam import Filesystem
from hiddenstore.inputs import IMAGES, input_digest
from hiddenstore.targets.folder import TargetFolder, open_target
from hiddenstore.targets.rendering import RENDER_ERRORS
from schemas.base import FORMAT_VERSION, IMAGES_FORMAT
from schemas.manifest import FileEntry
from schemas.prepared import LossOn, Overlong, PreparedData, PreparedImages, SourceCount

USUAL_SHARE, SHARE_OF_FEW = 0.01, 0.1
"""Of the validation split, where none is named."""
WORTH_A_SPLIT = 10


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare. ``max_tokens`` None is the target's context; ``workers`` None is every core, when worth it.

    ``validation`` is the share of samples in the validation split, in [0, 1]; None is 1 %, and 10 % or one sample where
    that holds none of ``WORTH_A_SPLIT`` out. ``template`` is a file that stands in for the target's own chat template;
    ``think_loss`` False leaves the reasoning of answers unsupervised; ``dataset_root`` holds local copies of datasets
    by name. ``revision`` and ``trust_remote_code`` are those of the target, as for capture. Raises ConfigError:
    ``option-invalid``."""

    loss_on: LossOn = "assistant"
    think_loss: bool = True
    max_tokens: int | None = None
    overlong: Overlong = "cut"
    validation: float | None = 0.01
    template: str | None = None
    workers: int | None = None
    dataset_root: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problem = None
        if self.validation is not None and not 0 <= self.validation <= 1:
            problem = f"the validation share must lie in 0…1, not {self.validation:g}"
        elif self.max_tokens is not None and self.max_tokens < 2:
            problem = f"max tokens must be at least 2, not {self.max_tokens}"
        elif self.workers is not None and self.workers < 1:
            problem = f"there must be at least 1 worker, not {self.workers}"
        if problem is not None:
            raise ConfigError(problem, kind=Kind.OPTION_INVALID)


@dataclass
class BatchTally(Tally):
    """Counts over batches; ``read``: rows of every source that was begun, in order."""

    read: list[int] = field(default_factory=list)
    source_samples: Counter[int] = field(default_factory=Counter)
    source_tokens: Counter[int] = field(default_factory=Counter)

    def add(self, batch: SampleBatch) -> np.ndarray:
        """Count a batch; bool [n]: its samples that are new, the others are duplicates."""
        # Labels do not tell: two slices of a file have one, and the files of a dataset have others than it.
        sources = np.searchsorted(np.cumsum(self.read), self.rows + batch.places, side="right").tolist()
        self.rows += batch.rows
        for problem in batch.problems:
            self.reject(problem)
        is_new = np.zeros(batch.samples.num_rows, dtype=bool)
        names = batch.samples.column("sample_id").to_pylist()
        tokens = batch.facts["tokens"].tolist()
        for row, (name, source, length) in enumerate(zip(names, sources, tokens, strict=True)):
            sample_id = bytes.fromhex(name)
            if sample_id not in self.ids:
                self.ids.add(sample_id)
                is_new[row] = True
                self.source_samples[source] += 1
                self.source_tokens[source] += length
        facts = batch.facts[is_new]
        self.samples += len(facts)
        self.duplicates += len(is_new) - len(facts)
        self.longest = max(self.longest, int(facts["tokens"].max(initial=0)))
        self.totals.update({name: int(facts[name].sum()) for name in FACTS.names or ()})
        return is_new

    def source_counts(self, sources: Sequence[MixedSource]) -> tuple[SourceCount, ...]:
        """What every source gave, in order."""
        return tuple(
            SourceCount(
                source=mixed.source.label,
                rows=self.read[number],
                samples=self.source_samples[number],
                tokens=self.source_tokens[number],
                available=mixed.available,
                cap=mixed.entry.cap,
                weight=mixed.entry.weight,
            )
            for number, mixed in enumerate(sources)
        )


def prepare(
    inputs: Sequence[str] | Mix,
    out: str | Path,
    target: str,
    options: PrepareOptions | None = None,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> PreparedData:
    """Write ``out`` from every conversation of ``inputs``; all of it or nothing.

    Args:
        inputs: files, folders, datasets by name (``dataset:NAME``) and hub ids (``name[config]:split[slice]``), read in
            this order; or a mix of them.
        target: folder or hub id whose tokenizer and chat template are used; its weights are not read.
        stopping: called between batches; a True ends the run with InterruptError and leaves nothing.

    Raises:
        ConfigError: an input, the template or an option cannot be used, or no row can (``nothing-usable``).
        ConflictError: ``output-exists``.
        NotFoundError: an input, the target or the template file is not there.
        StorageError: the disk refused or a worker died.
    """
    options = options or PrepareOptions()
    if not is_address(out):
        refuse_existing_data(Path(out))
    mixed = open_inputs(inputs, options.dataset_root)
    _refuse_prompts(mixed, options.loss_on)
    seed = inputs.seed if isinstance(inputs, Mix) else None
    try:
        return _prepare(mixed, seed, out, target, options, stopping)
    except _NoneHeldOut as few:
        share = few.share
    output().note(f"{USUAL_SHARE:.0%} of so few samples holds none out: {share:.3g} of them instead")
    return _prepare(mixed, seed, out, target, replace(options, validation=share), stopping)


class _NoneHeldOut(Exception):  # noqa: N818 - no error: the samples are few, and are split again
    def __init__(self, lowest_id: bytes) -> None:
        super().__init__()
        self.share = max(SHARE_OF_FEW, nextafter(int.from_bytes(lowest_id[:8]) / 2.0**64, 1.0))


def _prepare(
    mixed: Sequence[MixedSource],
    seed: int | None,
    out: str | Path,
    target: str,
    options: PrepareOptions,
    stopping: Callable[[], bool],
) -> PreparedData:
    """Raises _NoneHeldOut: the usual share holds none of the samples out; nothing is written."""
    folder = open_target(target, options.revision, trust_remote_code=options.trust_remote_code)
    text = read_template(options.template)
    template = ChatTemplate(folder.tokenizer, options.loss_on, text, options.think_loss, folder.end_ids)
    tally = BatchTally()
    check_template(template)
    limit = _max_tokens(folder, options.max_tokens)
    share = USUAL_SHARE if options.validation is None else options.validation
    images = open_images(folder)
    rules = SampleRules(template, limit, options.overlong, share, images)
    with new_data(out) as fs:
        sources = [entry.source for entry in mixed]
        rows = batches_of(_rows(mixed, tally.read), images is not None)
        batches = ordered_batches(rules, rows, options.workers, stopping, sum(source.size for source in sources))
        files, image_files = _write(fs, _checked(batches, folder, template), _progress(sources), tally)
        if options.validation is None and not tally.totals["validation"] and tally.samples >= WORTH_A_SPLIT:
            raise _NoneHeldOut(min(tally.ids))
        tokenizer_sha256, chat_template_sha256 = template.digests
        prepared_images = None
        if images is not None and image_files:
            prepared_images = PreparedImages(spec=images.spec, samples=tally.totals["images"], files=image_files)
        document = PreparedData(
            format=FORMAT_VERSION if prepared_images is None else IMAGES_FORMAT,
            images=prepared_images,
            digest=input_digest(_names(fs, files)),
            files=files,
            target=folder.label,
            tokenizer_sha256=tokenizer_sha256,
            tokenizer_rules_sha256=folder.tokenizer_rules_sha256,
            chat_template_sha256=chat_template_sha256,
            vocab_size=int(folder.config.vocab_size),
            loss_on=template.loss_on,
            think_loss=template.think_loss,
            mask_from=template.mask_from,
            template_date=template.date,
            max_tokens=rules.max_tokens,
            overlong=rules.overlong,
            validation_share=rules.validation,
            reasoning_lost=tally.totals["reasoning_lost"],
            words_lost=tally.totals["words_lost"] or None,
            ends_unlearned=tally.totals["end_unlearned"] or None,
            sources=tally.source_counts(mixed),
            mix_seed=seed,
            **tally.members(),
        )
        write_document(fs, DATA_JSON, seal(document))
    return document


def _refuse_prompts(sources: Sequence[MixedSource], loss_on: LossOn) -> None:
    for mixed in sources:
        name = mixed.entry.dataset
        if name is not None and loss_on != "all" and find_dataset(name).shape.is_prompt:
            raise ConfigError(
                f"dataset {name} holds questions without answers: there is nothing to learn from yet",
                kind=Kind.DATASET_PROMPTS_ONLY,
                hint=f"hiddenstore prepare dataset:{name} --mode generate -o prompts.jsonl, then regenerate it",
            )


def _max_tokens(folder: TargetFolder, limit: int | None) -> int | None:
    context = getattr(folder.config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 2:
        return limit
    if limit is not None and limit > context:
        problem = f"max tokens {limit:,} is beyond the {context:,} positions of target {folder.label}"
        raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint=f"--max-tokens {context}")
    return limit or context


def _rows(sources: Sequence[MixedSource], read: list[int]) -> Iterator[Row]:
    for mixed in sources:
        read.append(0)
        for row in mixed.source.rows():
            read[-1] += 1
            yield row


def _checked(batches: Iterator[SampleBatch], folder: TargetFolder, template: ChatTemplate) -> Iterator[SampleBatch]:
    """The same batches; a fault of the target, not of a row, ends them."""
    vocabulary = int(folder.config.vocab_size)
    for batch in batches:
        if batch.highest_id >= vocabulary:
            raise FormatError(
                f"the tokenizer of target {folder.label} gives token id {batch.highest_id}, "
                f"but its config has {vocabulary} ids: they do not belong together",
                kind=Kind.TOKENIZER_MISMATCH,
            )
        for problem in batch.problems:
            if problem.reason == NOT_STABLE:
                refuse_if_unstable(template, problem)
        yield batch


def _progress(sources: list[Source]) -> Progress:
    counts = [source.count for source in sources if source.count is not None]
    if len(counts) == len(sources):
        return Progress("prepare", sum(counts), "rows")
    return Progress("prepare", sum(source.size for source in sources), "bytes")


def _write(
    fs: Filesystem, batches: Iterator[SampleBatch], progress: Progress, tally: BatchTally
) -> tuple[tuple[FileEntry, ...], tuple[FileEntry, ...]]:
    with data_files(fs) as (parts, images, rejects), progress:
        for batch in batches:
            is_new = tally.add(batch)
            for problem in batch.problems:
                rejects.write(problem)
            samples = batch.samples if is_new.all() else batch.samples.filter(pa.array(is_new))
            parts.write(samples, int(batch.facts["tokens"][is_new].sum()))
            # One by one: an array of bytes holds less than 2 GiB.
            for row in (row for number in np.flatnonzero(is_new) for row in batch.images[number]):
                images.write(pa.RecordBatch.from_pylist([row], schema=IMAGES), len(row["data"]) >> 4)
            fields = {"samples": tally.samples, "rejects": tally.rejects.total(), "duplicates": tally.duplicates}
            progress.advance(batch.rows if progress.unit == "rows" else batch.size, **fields)
        if not tally.samples:
            raise _nothing_usable(tally)
        # A file has bytes around its rows.
        progress.update(progress.total or progress.done)
        rejects.close()
        return parts.close(), images.close()


def _nothing_usable(tally: BatchTally) -> ConfigError:
    counts = tally.reject_counts()
    reasons = [f"{count.reason}: {plural(count.rows, 'row')}, first {count.examples[0]}" for count in counts]
    ways = {
        NO_ANSWER: "hiddenstore regenerate INPUT -o answers.jsonl --target TARGET, then prepare those",
        NOT_STABLE: f"{_TAGS_HINT}; or --loss-on all",
    }
    return ConfigError(
        "\n".join([f"none of {plural(tally.rows, 'row')} can be used; nothing was written", *reasons]),
        kind=Kind.NOTHING_USABLE,
        hint=ways.get(counts[0].reason) or way_to_keep(count.reason for count in counts),
    )


def _names(fs: Filesystem, files: tuple[FileEntry, ...]) -> Iterator[tuple[str, str]]:
    for file in files:
        with fs.local_copy(file.path) as path, pq.ParquetFile(path) as part:
            for batch in part.iter_batches(columns=["sample_id", "split"]):
                yield from zip(batch["sample_id"].to_pylist(), batch["split"].to_pylist(), strict=True)


_TAGS_HINT = "give a template with {% generation %} tags: --template FILE"
_PROBE_ANSWERS = ("It is four.", "<think>\nTwo and two.\n</think>\n\nIt is four.")


def check_template(template: ChatTemplate) -> None:
    """Try a template on two messages, so that a fault of its own is told before any row's. Raises ConfigError:
    ``template-invalid``, ``mask-empty`` or ``template-unstable``."""
    answer = _PROBE_ANSWERS[0]
    probe = _probe([answer])
    try:
        text, tagged = template.render(probe)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be parsed: line {error.lineno}: {error}", kind=Kind.TEMPLATE_INVALID
        ) from error
    except RENDER_ERRORS:
        return  # A template may demand more than the probe has; the rows will tell.
    if answer not in text:
        problem = "the chat template writes nothing of the assistant's messages"
        raise ConfigError(problem, kind=Kind.TEMPLATE_INVALID, hint=_TAGS_HINT)
    if template.loss_on == "all":
        return
    if not template.is_tagged:
        _check_prefixes(template)
    elif answer not in "".join(text[start:end] for start, end in tagged):
        raise ConfigError(
            "the {% generation %} tags of the chat template do not hold the assistant's text: the mask is empty",
            kind=Kind.MASK_EMPTY,
            hint="put the answer between {% generation %} and {% endgeneration %}: --template FILE",
        )


def refuse_if_unstable(template: ChatTemplate, problem: Problem) -> None:
    """ConfigError ``template-unstable`` where the template and not the row is at fault."""
    if _rewrites_history(template):
        raise _unstable(template, f"{problem.location}: {problem.detail}")


@lru_cache(maxsize=1)
def _rewrites_history(template: ChatTemplate) -> bool:
    """Whether a second turn changes the first. Where not even that one suits its prompt, each row is told."""
    probes = [_probe(_PROBE_ANSWERS[:1]), *(_probe([answer, answer]) for answer in _PROBE_ANSWERS)]
    once, *twice = (getattr(result, "reason", None) == NOT_STABLE for result in template.tokenise(probes))
    return any(twice) and not once


def _check_prefixes(template: ChatTemplate) -> None:
    """Raises what is wrong with an answer alone where none suits its prompt, with thoughts or where none are asked for
    either: MiniMax-M2's prompt opens a thought, behind which its target never writes an answer alone."""
    plain = _probe(_PROBE_ANSWERS[:1])
    question, answer = plain.messages
    thoughtful = replace(plain, messages=[question, {**answer, "reasoning_content": "Two and two."}])
    errors = []
    for probe in (plain, thoughtful, replace(plain, template_kwargs={ENABLE_THINKING: False})):
        try:
            return _check_answer(template, probe)
        except ConfigError as error:
            errors.append(error)
        except RENDER_ERRORS:
            pass
    raise errors[0]


def _check_answer(template: ChatTemplate, probe: Conversation) -> None:
    text, answer = template.render(probe)[0], probe.messages[1]["content"]
    try:
        start, end = template.prefixes(probe, text).answer(1)
    except RewrittenError as error:
        raise _unstable(template, str(error), is_single_turn=True) from error
    if answer not in text[start:end]:
        raise _unstable(template, "the generation prompt already holds part of the answer", is_single_turn=True)
    header = text[start : text.index(answer, start)]
    if "add_generation_prompt" not in template.text_for(None) and any(token in header for token in template.end_tokens):
        problem = f"the chat template ignores add_generation_prompt: {header!r} before an answer would be supervised"
        raise ConfigError(problem, kind=Kind.TEMPLATE_UNSTABLE, hint=_TAGS_HINT)


def _unstable(template: ChatTemplate, detail: str, is_single_turn: bool = False) -> ConfigError:
    options = "--loss-on all"
    if not is_single_turn and template.loss_on == "assistant":
        options = "--loss-on last-turn or --loss-on all"
    reason = "renders a prompt otherwise once it is answered" if is_single_turn else "rewrites earlier turns"
    return ConfigError(
        f"the chat template has no {{% generation %}} tags and {reason}, so that rendered prefixes do not show "
        f"what the target writes\n{detail}",
        kind=Kind.TEMPLATE_UNSTABLE,
        hint=f"{_TAGS_HINT}; or {options}",
    )


def _probe(answers: Sequence[str]) -> Conversation:
    question = {"role": "user", "content": "What is two and two?"}
    return Conversation("probe", [m for text in answers for m in (question, {"role": "assistant", "content": text})])
