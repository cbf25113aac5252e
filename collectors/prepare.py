"""Conversations → DATA: tokens, loss mask and turn spans in parquet, with data.json beside them.

Rows stream through worker processes and come back in order; what grows with the input is the set of 16-byte sample ids
that finds exact duplicates, nothing else.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from collectors.mix import Mix, MixedSource, open_inputs
from collectors.prepare_batches import Recipe, SampleBatch, batches_of, ordered_batches
from collectors.prepare_parts import PartWriter, RejectsWriter, new_folder, refuse_existing, write_document
from collectors.prepare_tally import Tally
from collectors.presets.opening import find_preset
from collectors.rows import NO_ANSWER, Row, Source
from collectors.target import TargetFolder, open_target
from collectors.template import NOT_STABLE, ChatTemplate, read_template
from collectors.template_check import check_template, refuse_if_unstable
from hiddenstore.cli.terminal import plural
from hiddenstore.documents import seal
from hiddenstore.errors import ConfigError, HiddenstoreError
from hiddenstore.fs_local import LocalFilesystem
from hiddenstore.layout import DATA_JSON
from hiddenstore.progress import Progress
from hiddenstore.registered import input_digest
from schemas.manifest import FileEntry
from schemas.prepared import LossOn, Overlong, PreparedData


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare. ``max_tokens`` None is the target's context; ``workers`` None is every core, when worth it.

    ``validation`` is the share of samples in the validation split, in [0, 1]; ``template`` a file that stands in for
    the target's own chat template; ``think_loss`` False leaves the thoughts of answers unsupervised; ``preset_root``
    holds local copies of presets. ``revision`` and ``trust_remote_code`` are those of the target, as for capture.
    """

    loss_on: LossOn = "assistant"
    think_loss: bool = True
    max_tokens: int | None = None
    overlong: Overlong = "cut"
    validation: float = 0.01
    template: str | None = None
    workers: int | None = None
    preset_root: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


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
        inputs: files, folders, presets (``preset:NAME``) and ``datasets`` ids (``name[config]:split[slice]``), read
            in this order; or a mix of them.
        target: folder or hub id whose tokenizer and chat template are used; its weights are not read.
        stopping: asked between batches; a True ends the run with InterruptError and leaves nothing.

    Raises:
        ConfigError: an input, the template or an option cannot be used, or no row can (``nothing-usable``).
        ConflictError: ``output-exists``.
        NotFoundError: an input, the target or the template file is not there.
        StorageError: the disk refused or a worker died.
    """
    options = options or PrepareOptions()
    out = Path(out)
    refuse_existing(out)
    _check_options(options)
    sources = open_inputs(inputs, options.preset_root)
    _refuse_prompts(sources, options.loss_on)
    folder = open_target(target, options.revision, trust_remote_code=options.trust_remote_code)
    given = read_template(options.template) if options.template is not None else None
    template = ChatTemplate(folder.tokenizer, options.loss_on, given, options.think_loss)
    check_template(template)
    recipe = Recipe(template, _max_tokens(folder, options.max_tokens), options.overlong, options.validation)
    with new_folder(out) as fs:
        tally = Tally()
        run = _Run(folder, options.workers, stopping)
        files = _write(fs, [mixed.source for mixed in sources], recipe, tally, run)
        document = _document(fs, folder, recipe, tally, files)
        seed = inputs.seed if isinstance(inputs, Mix) else None
        document = document.model_copy(update={"sources": tally.sources(sources), "mix_seed": seed})
        write_document(fs, DATA_JSON, seal(document))
    return document


@dataclass(frozen=True)
class _Run:
    folder: TargetFolder
    workers: int | None
    stopping: Callable[[], bool]


def _check_options(options: PrepareOptions) -> None:
    if not 0 <= options.validation <= 1:
        raise ConfigError(f"the validation share must lie in 0…1, not {options.validation:g}", kind="option-invalid")
    if options.max_tokens is not None and options.max_tokens < 2:
        raise ConfigError(f"max tokens must be at least 2, not {options.max_tokens}", kind="option-invalid")
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"there must be at least 1 worker, not {options.workers}", kind="option-invalid")


def _refuse_prompts(sources: Sequence[MixedSource], loss_on: LossOn) -> None:
    for mixed in sources:
        preset = mixed.entry.preset
        if preset is not None and loss_on != "all" and find_preset(preset).shape.is_prompt:
            raise ConfigError(
                f"preset {preset} holds questions without answers: there is nothing to learn from yet",
                kind="preset-prompts-only",
                hint=f"hiddenstore prepare preset:{preset} --mode generate -o prompts.jsonl, then regenerate it",
            )


def _max_tokens(folder: TargetFolder, asked: int | None) -> int | None:
    context = getattr(folder.config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 2:
        return asked
    if asked is not None and asked > context:
        raise ConfigError(
            f"max tokens {asked:,} is beyond the {context:,} positions of target {folder.label}",
            kind="max-tokens-beyond-target",
            hint=f"--max-tokens {context}",
        )
    return asked or context


def _write(
    fs: LocalFilesystem, sources: list[Source], recipe: Recipe, tally: Tally, run: _Run
) -> tuple[FileEntry, ...]:
    parts, rejects = PartWriter(fs), RejectsWriter(fs)
    counts = [source.count for source in sources if source.count is not None]
    by_rows = len(counts) == len(sources)
    total = sum(counts) if by_rows else sum(source.size for source in sources)
    batches = ordered_batches(recipe, batches_of(_rows(sources, tally.read)), run.workers, run.stopping)
    try:
        with Progress("prepare", total, "rows" if by_rows else "bytes") as progress:
            for batch in batches:
                _check_ids(batch, run.folder)
                _take(batch, recipe, tally, parts, rejects)
                refused = sum(count[0] for count in tally.rejects.values())
                fields = {"samples": tally.samples, "rejects": refused, "duplicates": tally.duplicates}
                progress.advance(batch.rows if by_rows else batch.size, **fields)
        if not tally.samples:
            raise _nothing_usable(tally)
        rejects.close()
        return parts.close()
    except BaseException:
        with suppress(HiddenstoreError):
            parts.abort()
            rejects.abort()
        raise


def _take(batch: SampleBatch, recipe: Recipe, tally: Tally, parts: PartWriter, rejects: RejectsWriter) -> None:
    tally.rows += batch.rows
    for problem in batch.problems:
        if problem.reason == NOT_STABLE:
            refuse_if_unstable(recipe.template, problem)
        tally.reject(problem)
        rejects.write(problem)
    fresh = tally.new_ones(batch)
    samples = batch.samples if fresh.all() else batch.samples.filter(pa.array(fresh))
    parts.write(samples, int(batch.tokens[fresh].sum()))


def _rows(sources: list[Source], read: Counter[str]) -> Iterator[Row]:
    for source in sources:
        before = read[source.label]
        for row in source.rows():
            read[source.label] += 1
            yield row
        if read[source.label] == before:
            raise ConfigError(f"{source.label} holds no row", kind="input-empty")


def _check_ids(batch: SampleBatch, folder: TargetFolder) -> None:
    rows = int(folder.config.vocab_size)
    if batch.highest_id >= rows:
        raise ConfigError(
            f"the tokenizer of target {folder.label} gives token id {batch.highest_id}, "
            f"but its config has {rows} ids: they do not belong together",
            kind="tokenizer-mismatch",
        )


def _nothing_usable(tally: Tally) -> ConfigError:
    counts = tally.counts()
    unanswered = counts[0].reason == NO_ANSWER
    reasons = [f"{count.reason}: {plural(count.rows, 'row')}, first {count.examples[0]}" for count in counts]
    return ConfigError(
        "\n".join([f"none of {plural(tally.rows, 'row')} can be used; nothing was written", *reasons]),
        kind="nothing-usable",
        hint="hiddenstore regenerate INPUT -o answers.jsonl --target TARGET, then prepare those"
        if unanswered
        else None,
    )


def _document(
    fs: LocalFilesystem, folder: TargetFolder, recipe: Recipe, tally: Tally, files: tuple[FileEntry, ...]
) -> PreparedData:
    tokenizer_sha256, chat_template_sha256 = recipe.template.digests
    return PreparedData(
        digest=input_digest(_names(fs, files)),
        target=folder.label,
        tokenizer_sha256=tokenizer_sha256,
        chat_template_sha256=chat_template_sha256,
        vocab_size=int(folder.config.vocab_size),
        loss_on=recipe.template.loss_on,
        think_loss=recipe.template.think_loss,
        mask_from=recipe.template.mask_from,
        max_tokens=recipe.max_tokens,
        overlong=recipe.overlong,
        validation_share=recipe.validation,
        rows_read=tally.rows,
        samples=tally.samples,
        validation_samples=tally.validation,
        tokens=tally.tokens,
        supervised_tokens=tally.supervised,
        longest=tally.longest,
        cut=tally.cut,
        duplicates=tally.duplicates,
        reasoning_lost=tally.reasoning_lost,
        rejects=tally.counts(),
        files=files,
    )


def _names(fs: LocalFilesystem, files: tuple[FileEntry, ...]) -> Iterator[tuple[str, str]]:
    for file in files:
        with pq.ParquetFile(os.path.join(fs.root, file.path)) as part:
            for batch in part.iter_batches(columns=["sample_id", "split"]):
                yield from zip(batch["sample_id"].to_pylist(), batch["split"].to_pylist(), strict=True)
