"""``hiddenstore run``: a pipeline file as the commands it stands for, from the first unfinished stage to the last."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, ConfigDict, Field, field_validator

from hiddenstore.cli.inner import check, do, do_on_ranks, find
from hiddenstore.cli.peers import translated
from hiddenstore.console.output import common_options, examples, output
from hiddenstore.console.text import seconds
from hiddenstore.errors import ConfigError, ConflictError, Kind, NotFoundError
from hiddenstore.files.documents import load, seal
from hiddenstore.files.layout import DATA_JSON, refuse_snapshot
from hiddenstore.files.lock import WRITER, FolderLock
from hiddenstore.fs import require_local
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.publish import existing_part, make_folder, replace_file, tree_files
from hiddenstore.fs.seam import storage_errors
from hiddenstore.registry import nearest
from hiddenstore.settings import all_problems, written
from hiddenstore.settings import load as load_settings
from schemas.base import FORMAT_VERSION, Document, Format
from schemas.prepared import PreparedData

Section = dict[str, str | Any]
"""Options of a command by their long names, with ``_`` or ``-``: ``max-tokens: 2048``, ``full: true``. ``str``: what is
written stays as it is, since YAML would make a number of version 0.10 and of revision 0123456."""
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": False}

# Options whose file a command writes.
_WRITTEN = ("--markdown", "--answers", "--take")

# Options that a pipeline has its own member for, or that belong to all of the run.
_RESERVED = ("--out", "--target", "--drafter", "--config", "--resume", "--json", "--quiet", "--verbose")
_STAGES = ("regenerate", "prepare", "collect", "verify", "eval", "decode", "export", "serve")

# What lies in ``out`` beside the folders of drafters.
_ANSWERS, _DATA, _STORE, _DONE_FOLDER = "answers.jsonl", "data", "store", "done"
_NO_DRAFTERS = (_ANSWERS, _DATA, _STORE, _DONE_FOLDER, WRITER)


class DrafterSection(BaseModel):
    """One drafter. ``config``: a preset of ``hiddenstore train`` or a YAML file; ``settings``: its key.path=value words
    as a tree; ``ranks``: processes to train it on."""

    model_config = ConfigDict(extra="forbid")

    drafter: str | None = None
    config: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    ranks: int = Field(1, gt=0)


class Pipeline(BaseModel):
    """``out`` is the folder of everything the run makes. One capture serves every entry of ``drafters``; ``eval``,
    ``decode``, ``export`` and ``serve`` (``eval --serve`` of the export) are done for each. ``regenerate``, ``decode``
    and ``serve`` happen where their section is there. ``minutes``: about how long a command takes, to be shown."""

    model_config = ConfigDict(extra="forbid")

    target: str
    out: str
    inputs: list[str] = Field(min_length=1)
    regenerate: Section | None = None
    prepare: Section = Field(default_factory=dict)
    collect: Section = Field(default_factory=dict)
    verify: Section = Field(default_factory=lambda: Section(full=True, meaning=True))
    drafters: dict[str, DrafterSection] = Field(min_length=1)
    eval: Section = Field(default_factory=dict)
    decode: Section | None = None
    export: Section = Field(default_factory=dict, validate_default=True)
    serve: Section | None = None
    minutes: dict[str, float] = Field(default_factory=dict)

    @field_validator(*_STAGES, mode="before")
    @classmethod
    def _stages_are_there_or_left_out(cls, section: Any) -> Any:
        # ``decode:`` and ``decode: none`` are the same None here, and mean opposite things.
        if section is None:
            raise ValueError("write {} for no options, or leave the section out")
        return section

    @field_validator("export")
    @classmethod
    def _vllm_where_no_engine_is_named(cls, section: Section) -> Section:
        return section if section.get("engine") else {**section, "engine": "vllm"}

    @field_validator("drafters", mode="before")
    @classmethod
    def _drafters_may_be_empty(cls, drafters: Any) -> Any:
        return {name: section or {} for name, section in drafters.items()} if isinstance(drafters, dict) else drafters

    @field_validator("drafters")
    @classmethod
    def _names_are_folders(cls, drafters: dict[str, DrafterSection]) -> dict[str, DrafterSection]:
        for name in drafters:
            if name in ("", ".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} cannot name a folder")
            if name in _NO_DRAFTERS:
                raise ValueError(f"out/{name} is not a drafter's; choose another name than {name!r}")
        return drafters


@dataclass(frozen=True)
class Stage:
    """``name``: ``prepare``, or ``eagle3/train``. ``command`` with its ``words``; ``product``: what it leaves on disk,
    None for an answer alone; ``resume``: the words instead where ``product`` was begun before; ``ranks``: processes."""

    name: str
    command: str
    words: tuple[str, ...]
    product: Path | None = None
    resume: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def record(self) -> str:
        """The document of the finished stage, below ``out``."""
        return f"{_DONE_FOLDER}/{self.name.replace('/', '.')}.json"

    @property
    def mark(self) -> str:
        """The document of the stage while its command works."""
        return f"{self.record}.begun"

    def line(self, words: Sequence[str]) -> str:
        """The command as a person types it."""
        return shlex.join(["hiddenstore", self.command, *words])


class _Builder:
    """Makes the stages of a pipeline; ``problems`` are keys of sections that are no options, with what fixes each."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._out = pipeline, Path(pipeline.out)
        self.problems: dict[str, str | None] = {}

    def stages(self) -> Iterator[Stage]:
        """Every stage in order."""
        pipeline, target = self._pipeline, ("--target", self._pipeline.target)
        data, store, inputs = self._out / _DATA, self._out / _STORE, tuple(pipeline.inputs)
        if pipeline.regenerate is not None:
            answers = self._out / _ANSWERS
            words = (*inputs, "-o", str(answers), *target, *self._options("regenerate"))
            yield Stage("regenerate", "regenerate", words, answers)
            inputs = (str(answers),)
        yield Stage("prepare", "prepare", (*inputs, "-o", str(data), *target, *self._options("prepare")), data)
        yield Stage("collect", "collect", (str(data), "-o", str(store), *target, *self._options("collect")), store)
        yield Stage("verify", "verify", (str(store), *self._options("verify")))
        for name, section in pipeline.drafters.items():
            yield from self._drafter_stages(name, section, str(store))

    def _drafter_stages(self, name: str, section: DrafterSection, store: str) -> Iterator[Stage]:
        run, drafter = self._out / name / "run", self._out / name / "drafter"
        named = (("--drafter", section.drafter), ("-c", section.config))
        options = [word for option, value in named if value is not None for word in (option, value)]
        settings = tuple(setting_words(section.settings))
        if _begins_at_target(section, settings):
            options += ["--target", self._pipeline.target]
        words = (store, "-o", str(run), *options, *settings)
        yield Stage(f"{name}/train", "train", words, run, (store, "-o", str(run), "--resume"), section.ranks)
        costs = ("--target", self._pipeline.target) if _switch(self._pipeline.eval.get("costs")) else ()
        yield Stage(f"{name}/eval", "eval", (str(run), store, *costs, *self._options("eval")))
        if self._pipeline.decode is not None:
            words = (str(run), "--target", self._pipeline.target, *self._options("decode"))
            yield Stage(f"{name}/decode", "decode", words)
        yield Stage(f"{name}/export", "export", (str(run), "-o", str(drafter), *self._options("export")), drafter)
        if self._pipeline.serve is not None:
            words = ("--serve", str(drafter), "--target", self._pipeline.target, *self._options("serve", "eval"))
            yield Stage(f"{name}/serve", "eval", words)

    def _options(self, section: str, command: str | None = None) -> list[str]:
        """A section as words of ``command``, by default the one it is named after."""
        command = command or section
        options = {
            option.removeprefix("--"): parameter
            for parameter in find(command).params
            if isinstance(parameter, click.Option)
            for option in parameter.opts
            if option.startswith("--") and option not in _RESERVED
        }
        words = []
        for key, value in getattr(self._pipeline, section).items():
            name = str(key).replace("_", "-")
            if name in options and options[name].is_flag and _switch(value) is None:
                self.problems[f"{section}: {name} is true or false, found {value!r}"] = f"{name}: true"
                continue
            if name in options:
                words += _option_words(f"--{name}", options[name], value)
                continue
            close = nearest(name, options)
            advice = f"did you mean {close}?" if close else f"it takes {', '.join(sorted(options))}"
            problem = f"{section}: hiddenstore {command} takes no {name!r} here; {advice}"
            self.problems[problem] = f"hiddenstore {command} --help"
        return words


def _begins_at_target(section: DrafterSection, settings: Sequence[str]) -> bool:
    """Whether the drafter is a layer of the target itself, and no other checkpoint is named to start from. Raises
    ConfigError: the section's ``config`` is a file that cannot be read."""
    file = section.config if section.config is not None and Path(section.config).is_file() else None
    said = written(file, settings)
    name = section.drafter or said.get("drafter.name") or section.config
    return name == "mtp" and said.get("train.init_from") is None


def _switch(value: Any) -> bool | None:
    """What is written of a flag; None where it is neither true nor false."""
    return _SWITCHES.get(str(value).lower())


def _option_words(option: str, parameter: click.Option, value: Any) -> list[str]:
    if parameter.is_flag:
        return [option] if _switch(value) else [*parameter.secondary_opts[:1]]
    if value is None:
        return []
    values = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    if parameter.nargs > 1:
        return [option, *values]
    if parameter.multiple:
        return [word for item in values for word in (option, item)]
    return [option, ",".join(values)]


def setting_words(tree: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[str]:
    """A tree of settings as ``key.path=value`` words."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from setting_words(value, (*path, str(key)))
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else "null" if value is None else str(value)
            yield f"{'.'.join((*path, str(key)))}={text}"


def stages_of(pipeline: Pipeline) -> list[Stage]:
    """Every stage in order. Raises ConfigError: ``option-invalid``: a section holds an option that its command does not
    have, or a value that is none of that option's; the message lists every one."""
    builder = _Builder(pipeline)
    stages, problems = list(builder.stages()), builder.problems
    for stage in stages:
        try:
            check(stage.command, stage.words)
        except click.UsageError as error:
            problems.setdefault(f"{stage.command}: {error.format_message()}", f"hiddenstore {stage.command} --help")
        except ConfigError as error:
            # Its words come from the pipeline file, not from a command line.
            lines = [problem.replace(" (command line)", "") for problem in error.problems]
            problems |= {f"{stage.name}: {line}": error.hint for line in lines}
        except NotFoundError as error:
            problems[f"{stage.name}: {error.message}"] = error.hint
    if problems:
        raise ConfigError(all_problems(list(problems)), kind=Kind.OPTION_INVALID, hint=next(iter(problems.values())))
    return stages


class DoneStage(Document):
    """A finished stage: its words, what it answered (JSON text), seconds. ``built_on``: digests of what it read."""

    format: Format = FORMAT_VERSION
    stage: str
    words: tuple[str, ...]
    answer: str
    seconds: float
    built_on: str


@dataclass(frozen=True)
class StageResult:
    """A stage after the run: its answer, its seconds, and whether an earlier run did it."""

    stage: Stage
    answer: Mapping[str, Any]
    seconds: float
    was_done: bool


def run_pipeline(pipeline: Pipeline) -> list[StageResult]:
    """Do every stage that is not done, in order; stop at the first that fails, which the same command repeats. Raises
    ConfigError: ``out`` is a name for a snapshot, or a section holds what its command does not take; before anything is
    done; ConflictError: the folder is another's, or another process runs a pipeline in it (``run-in-use``), or
    something in it was made by another pipeline; HiddenstoreError: what a command raises."""
    refuse_snapshot(pipeline.out)
    stages, out = stages_of(pipeline), require_local(pipeline.out, "the folder of a pipeline")
    if out.exists() and any(out.iterdir()) and not (out / _DONE_FOLDER).is_dir():
        raise ConflictError(
            f"{out} holds things that no `hiddenstore run` made", kind=Kind.OUTPUT_EXISTS, hint="out: another folder"
        )
    make_folder(out / _DONE_FOLDER)
    with FolderLock(out, "pipeline", "wait for it or stop it, or name another folder: out=FOLDER") as lock:
        lock.take()
        return _do_all(pipeline, stages, out)


def _do_all(pipeline: Pipeline, stages: Sequence[Stage], out: Path) -> list[StageResult]:
    fs, inputs, target = LocalFilesystem(out), _digest_of_files(pipeline.inputs), _digest_of_target(pipeline.target)
    finished: list[tuple[Stage, DoneStage]] = []
    results = []
    clock = _Clock(pipeline.minutes, stages)
    for number, stage in enumerate(stages, 1):
        files = _named_files(stage, out, (pipeline.target, *pipeline.inputs))
        read = inputs + (_digest_of_files(files) if files else "")
        # Records of 0.1.0's development versions end here.
        older = [digest + read for digest in _digests_before(stage, finished)]
        built_on = _built_on(fs, stage, [older[0] + _digest_of_state(stage, out, target), *older])
        earlier = _finished_before(fs, stage, built_on)
        about = "  (done before)" if earlier else clock.estimate(number - 1)
        output().note(f"\n{number}/{len(stages)}  {stage.name}{about}")
        try:
            done = earlier or _do(fs, stage, built_on)
        except click.exceptions.Exit:
            output().warn(f"{stage.name} is not done: it said why; the same command begins with it again")
            raise
        if earlier is None:
            fs.put_if_absent(stage.record, seal(done))
            Path(fs.root, stage.mark).unlink(missing_ok=True)
            clock.took(stage, done.seconds)
        finished.append((stage, done))
        results.append(StageResult(stage, json.loads(done.answer), done.seconds, earlier is not None))
        if stage.command == "prepare":
            _require_splits(Path(pipeline.out, _DATA), pipeline.eval.get("split") or "validation")
    return results


def _digests_before(stage: Stage, finished: Sequence[tuple[Stage, DoneStage]]) -> tuple[str, str]:
    """Digest of what earlier stages left for ``stage`` to read: products, of the capture and of its own drafter, and of
    answers the draft length that `eval --costs` leaves for `export`. The second counts answers whole, as records of
    0.1.0's development versions do."""
    drafter, _, _ = stage.name.rpartition("/")
    before = [(one, done) for one, done in finished if "/" not in one.name or one.name.startswith(f"{drafter}/")]
    products = [seal(done) for one, done in before if one.product is not None]
    if stage.command == "export":
        answers = [json.loads(done.answer) for one, done in before if one.command == "eval"]
        products += [f"{one['best_draft_len']}".encode() for one in answers if one.get("speedup", 0) > 1]
    first, second = (hashlib.sha256(b"".join(seals)) for seals in (products, [seal(done) for _, done in before]))
    return first.hexdigest(), second.hexdigest()


def _built_on(fs: LocalFilesystem, stage: Stage, digests: Sequence[str]) -> str:
    """The one of ``digests`` that ``stage`` was finished or begun with, else the first. Raises CorruptionError."""
    paths = [path for path in (stage.record, stage.mark) if fs.size(path) is not None]
    known = {load(fs, path, DoneStage).built_on for path in paths}
    return next((digest for digest in digests if digest in known), digests[0])


class _Clock:
    """How long stages will take: the pipeline's own ``minutes``, corrected by what this machine has needed so far."""

    def __init__(self, minutes: Mapping[str, float], stages: Sequence[Stage]) -> None:
        self._expected = [60 * minutes.get(stage.name.rpartition("/")[2], 0.0) for stage in stages]
        self._of = dict(zip((stage.name for stage in stages), self._expected, strict=True))
        self._needed_s = self._expected_s = 0.0

    def took(self, stage: Stage, spent_s: float) -> None:
        """A stage of this run is done."""
        if self._of[stage.name]:
            self._needed_s += spent_s
            self._expected_s += self._of[stage.name]

    def estimate(self, index: int) -> str:
        """``  about 3 m 20 s, 21 m 10 s to the end``; nothing where the pipeline does not say."""
        if not self._expected[index]:
            return ""
        # One short stage says little of a machine: five minutes as expected weigh against it.
        pace = (self._needed_s + 300) / (self._expected_s + 300)
        left = pace * sum(self._expected[index:])
        return f"  about {seconds(round(pace * self._expected[index]))}, {seconds(round(left))} to the end"


def _require_splits(data: Path, walked: str) -> None:
    """Refuse, before anything is captured, data without a sample to train on or in the split that ``eval`` walks."""
    prepared = load(LocalFilesystem(data), DATA_JSON, PreparedData)
    counts = {"train": prepared.samples - prepared.validation_samples, "validation": prepared.validation_samples}
    empty = next((split for split in ("train", walked) if not counts[split]), None)
    if empty is None:
        return
    reader, hint = "train", f"{shlex.join(['rm', '-r', str(data)])}, then prepare.val=10%"
    if empty == "validation":
        reader, hint = "eval", f"eval.split=train; or {hint} or more conversations"
    problem = f"{data} holds {counts['train']:,} train and {counts['validation']:,} validation samples"
    raise ConfigError(f"{problem}: {reader} would read none", kind=Kind.SPLIT_EMPTY, hint=hint)


def _finished_before(fs: LocalFilesystem, stage: Stage, built_on: str) -> DoneStage | None:
    """What ``stage`` gave, if it was done with the same words on the same inputs; another answer is dropped. Raises
    ConflictError: ``stage-changed``: its product is there, made otherwise; CorruptionError: its document is damaged."""
    if fs.size(stage.record) is None:
        return None
    done, record = load(fs, stage.record, DoneStage), Path(fs.root, stage.record)
    has_product = stage.product is not None and stage.product.exists()
    if (done.words, done.built_on) == (stage.words, built_on) and (has_product or stage.product is None):
        return done
    if has_product:
        how = "was made from inputs that have changed since: its files, the target or what was trained"
        if done.words != stage.words:
            how = f"was made by `{stage.line(done.words)}`, the pipeline now says `{stage.line(stage.words)}`"
        raise ConflictError(
            f"{stage.product} {how}; name another folder in out:, or remove it",
            kind=Kind.STAGE_CHANGED,
            hint=shlex.join(["rm", "-r", str(stage.product), str(record)]),
        )
    record.unlink()
    return None


def _digest_of_files(paths: Sequence[str]) -> str:
    """sha256 over the local files among ``paths``, whole ones where rows of them are named; hub ids are their names."""
    digest = hashlib.sha256("".join(path for path in paths if "[" in path).encode())
    for path in map(_without_rows, paths):
        for file in sorted(tree_files(path)) if path.is_dir() else [path]:
            digest.update(str(file).encode())
            if file.is_file():
                with file.open("rb") as handle:
                    digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def _digest_of_target(name: str) -> str:
    """Of a target or an adapter that lies on this machine; nothing of a hub id."""
    from hiddenstore.targets.checkpoint import files_sha256

    return files_sha256(Path(name)) if os.path.exists(name) else ""


def _digest_of_state(stage: Stage, out: Path, target: str) -> str:
    """Digest of what changes under a name that stays: of the target, an adapter that is named, and behind a training
    its newest checkpoint, which `train --resume` by hand makes."""
    words = [word for before, word in pairwise(stage.words) if before == "--adapter" or word.startswith("adapter=")]
    read = [target, *(_digest_of_target(word.removeprefix("adapter=")) for word in words)]
    drafter, _, kind = stage.name.rpartition("/")
    states = (out / drafter / "run" / "checkpoints").glob("step-*/state.json") if drafter and kind != "train" else ()
    if steps := {int(file.parent.name[5:]): file for file in states if file.parent.name[5:].isdecimal()}:
        newest = max(steps)
        with storage_errors(steps[newest]):
            read.append(f"{newest} {hashlib.sha256(steps[newest].read_bytes()).hexdigest()}")
    return hashlib.sha256("\n".join(read).encode()).hexdigest()


def _without_rows(text: str) -> Path:
    """The file or folder of an input that may choose a config, a split or rows of it (``chats.jsonl[:9]``,
    ``saved:test``); other inputs as they are."""
    name = None if text.startswith("dataset:") else existing_part(text)
    return Path(name or text.partition(":train[")[0])


def _named_files(stage: Stage, out: Path, others: Sequence[str]) -> list[str]:
    """The files that a stage's words name, such as settings or prompts, but for ``others`` and what the run made."""
    read = {word for before, word in pairwise(("", *stage.words)) if before not in _WRITTEN}
    words = read | {word.partition("=")[2] for word in read}
    files = sorted(word for word in words - {*others} if os.path.isfile(word))
    return [file for file in files if not Path(file).resolve().is_relative_to(out.resolve())]


def _do(fs: LocalFilesystem, stage: Stage, built_on: str) -> DoneStage:
    start, words = time.monotonic(), stage.words
    begun = DoneStage(stage=stage.name, words=words, answer="{}", seconds=0.0, built_on=built_on)
    # Between the end of a command and its record a kill leaves a product that the command would refuse to overwrite.
    mark = Path(fs.root, stage.mark)
    if stage.product is not None and stage.command != "collect":
        known = load(fs, stage.mark, DoneStage) if mark.is_file() else None
        if not (stage.product / "run.json" if stage.resume else stage.product).exists():
            replace_file(mark, seal(begun))
        elif stage.resume and known not in (None, begun):
            raise ConflictError(
                f"{stage.product} was begun with other settings or inputs than the pipeline has now; name another "
                "folder in out:, or remove it",
                kind=Kind.STAGE_CHANGED,
                hint=shlex.join(["rm", "-r", str(stage.product)]),
            )
        elif not stage.resume and known == begun:
            return begun
    # Without that document `train` itself tells what a kill left of a new run from checkpoints that nobody may lose.
    if stage.resume and stage.product is not None and (stage.product / "run.json").exists():
        words = stage.resume
    answer: Mapping[str, Any] = {}
    if stage.ranks > 1:
        do_on_ranks(stage.ranks, stage.command, words)
    else:
        answer = do(stage.command, *words)
    return begun.model_copy(
        update={"answer": json.dumps(answer, default=str), "seconds": round(time.monotonic() - start, 3)}
    )


@click.command(
    epilog=examples(
        "hiddenstore run pipeline.yaml",
        "hiddenstore run pipeline.yaml out=second drafters.eagle3.settings.optim.lr=1e-3",
        "hiddenstore run --target Qwen/Qwen3-8B --data chats.jsonl",
        "hiddenstore run llama_eagle3_mvp.yaml recipe_args.train_data_path=chats.jsonl",
    )
)
@click.argument("pipeline", type=click.Path(), required=False)
@click.argument("words", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("--target", metavar="T", help="Instead of PIPELINE: a folder or hub id to draft for.")
@click.option("--data", "inputs", multiple=True, metavar="INPUT", help="With --target: conversations; repeatable.")
@click.option("-o", "--out", metavar="OUT", help="With --target: the folder of everything. Default: runs/NAME.")
@common_options
def run(
    pipeline: str | None, words: tuple[str, ...], target: str | None, inputs: tuple[str, ...], out: str | None
) -> None:
    """Prepare, collect, verify, then train, evaluate and export every drafter of a PIPELINE file.

    PIPELINE may be a training file of Model Optimizer or NeMo AutoModel, whose every field is answered. With --target
    and --data there is no file: EAGLE-3 by its defaults; words change what they say. Each stage is a command that is
    printed before it runs. Finished stages are not repeated: after a stop, whatever the reason, the same command goes
    on. Sections hold the options of their commands: see docs/run.md.
    """
    if pipeline is not None and "=" in pipeline and not Path(pipeline).exists():
        words, file = (pipeline, *words), None
    else:
        file = pipeline
    settings = _pipeline(file, words, target, inputs, out)
    results = run_pipeline(settings)
    rows = [_summary(name, results, settings) for name in settings.drafters]
    stages = [
        {
            "stage": result.stage.name,
            "command": ["hiddenstore", result.stage.command, *result.stage.words],
            "seconds": result.seconds,
            "was_done": result.was_done,
        }
        for result in results
    ]
    document = {"out": settings.out, "drafters": rows, "stages": stages}
    output().data(document, human=lambda: _show(rows, results))
    engine = str(settings.export.get("engine", ""))
    output().hint("hiddenstore", "serve", rows[0]["folder"], "--target", settings.target, "--engine", engine)


def _pipeline(
    file: str | None, words: Sequence[str], target: str | None, inputs: Sequence[str], out: str | None
) -> Pipeline:
    """The pipeline of a file, or of the words that stand for one."""
    given = {"--target": target, "--data": inputs, "-o": out}
    if file is not None:
        if any(given.values()):
            raise click.UsageError(
                f"{next(name for name, value in given.items() if value)} is for a run without PIPELINE"
            )
        theirs = translated(file, words)
        if theirs is None:
            return load_settings(Pipeline, file, words)
        theirs.show()
        return load_settings(Pipeline, None, theirs.rest, theirs.pipeline())
    if target is None or not inputs:
        raise click.UsageError("Missing argument 'PIPELINE', or --target T and --data INPUT.")
    name = Path(os.path.abspath(target)).name
    defaults = {"target": target, "inputs": list(inputs), "out": out or f"runs/{name}", "drafters": {"eagle3": {}}}
    return load_settings(Pipeline, None, words, defaults)


def _summary(name: str, results: Sequence[StageResult], pipeline: Pipeline) -> dict[str, Any]:
    answers = {result.stage.name: result.answer for result in results}
    simulated, live = answers[f"{name}/eval"], answers.get(f"{name}/decode", {})
    longest = (simulated.get("sweep") or [simulated])[-1]
    return {
        "drafter": name,
        "draft_len": longest.get("draft_len"),
        "simulated": longest.get("accepted_length"),
        "ngram": longest.get("ngram_accepted_length", simulated.get("ngram_accepted_length")),
        "live": live.get("accepted_length"),
        "folder": str(Path(pipeline.out, name, "drafter")),
    }


def _show(rows: Sequence[dict[str, Any]], results: Sequence[StageResult]) -> None:
    def figures(row: dict[str, Any]) -> list[str]:
        values = (row[key] for key in ("ngram", "simulated", "live"))
        return [f"{value:.2f}" if isinstance(value, float) else "–" for value in values]

    out = output()
    out.print()
    out.table(
        ["drafter", ">draft", ">n-gram", ">simulated", ">live", "exported to"],
        [[row["drafter"], row["draft_len"], *figures(row), row["folder"]] for row in rows],
    )
    out.print()
    before = sum(result.was_done for result in results)
    spent = seconds(sum(result.seconds for result in results if not result.was_done))
    out.pairs([("stages", f"{len(results)} ({before} done before)" if before else str(len(results))), ("took", spent)])
