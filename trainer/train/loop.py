"""The training loop: batches of a store in, a drafter out.

States come through TokenBatches, logits and embeddings from the head bundle; nothing else of the target is opened.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from hiddenstore.console.output import output
from hiddenstore.console.text import amount, plural, size
from hiddenstore.console.text import seconds as duration_text
from hiddenstore.data import BatchPlan, Cursor, GlobalBatch, PackedBatch, TokenBatches
from hiddenstore.data.read import SampleSlot
from hiddenstore.errors import InterruptError, Kind
from hiddenstore.files.lock import FolderLock
from hiddenstore.fs import require_local
from hiddenstore.index.table import SPLITS
from hiddenstore.inspect.forecast import EXPECTED_DRAFTER, expectation
from hiddenstore.process import Drain, drain_on_signal, from_environment, peak_bytes
from trainer.parallel.data_parallel import unsharded
from trainer.parallel.group import ProcessGroup, process_group
from trainer.presets import settings_file
from trainer.settings import derived, derived_lr, rank_settings, value_text, view_of
from trainer.train import checkpoint
from trainer.train.log import METRICS, RunLog, read_curves
from trainer.train.optim import orthogonal
from trainer.train.run_folder import CONFIG, TrainOptions, drafter_name, keep_settings, read_facts
from trainer.train.state import TrainState, build_state, inputs_of, save_checkpoint, told_what_helps
from trainer.train.step import autocast, some_of, steps, validate
from trainer.train.storage import CACHE_BYTES, Mirror
from trainer.train.track import Tracked, TrackedRun, tracker_names

_COLUMNS = 2
_BATCHES_LOOKED_AT = 32


@dataclass(frozen=True)
class Forecast:
    """What a run will take: seconds in all and of a step, bytes of memory at most (resident, on a GPU allocated) and of
    the checkpoints that stay. Of one among several processes only the last is known before it starts."""

    checkpoint_bytes: int
    seconds: float | None = None
    step_seconds: float | None = None
    memory_bytes: int | None = None


def print_summary(state: TrainState) -> Forecast | None:
    """What the run is and the settings that follow from the target, on stderr in human mode; ``*`` marks those that
    were set otherwise. What it will take, but for those who are told neither."""
    out = output()
    if out.mode not in ("human", "json"):
        return None
    estimate = forecast(state)
    if not out.is_human:
        return estimate
    from rich.padding import Padding

    for line in _summary_lines(state):
        out.note(line)
    out.err.print(Padding(_settings_grid(state), (0, 0, 0, 2), expand=False))
    tokens = step_tokens(state)
    out.note(forecast_text(estimate, tokens))
    if state.config.drafter.name == EXPECTED_DRAFTER:
        out.note(f"for scale: {expectation(state.total_steps * tokens)}")
    return estimate


def _summary_lines(state: TrainState) -> list[str]:
    steps = state.total_steps
    position = f"continues at step {state.step + 1:,} of {steps:,}" if state.step else plural(steps, "step")
    samples = plural(len(state.batches.sample_ids), "sample")
    init = state.config.train.init_from
    vocab = state.target.vocab
    return [
        f"{state.config.drafter.name}, {amount(state.trainable)} trainable parameters: {position} over {samples}, "
        f"{amount(state.batches.tokens)} tokens; {_device_text(state)}",
        *(["each epoch reads what the store holds when it begins"] if state.config.train.follow else []),
        f"draft vocabulary of {vocab.size:,} tokens: {state.vocab_coverage:.2%} of the supervised ones",
        *([f"weights, draft vocabulary and drafter.* from {init}"] if init is not None else []),
        "from the target, * as you set it:",
    ]


def _device_text(state: TrainState) -> str:
    ranks = state.group.rank.world_size
    each = f"{plural(ranks, 'rank')} of " if ranks > 1 else ""
    if state.device.type == "cpu":
        return f"{each}{plural(torch.get_num_threads(), 'CPU thread')}, {state.config.train.precision}"
    return f"{each}one {torch.cuda.get_device_name(state.device)}"


def _settings_grid(state: TrainState) -> Any:
    """The settings that have a derived default, down the first pair of columns, then down the next."""
    from rich.table import Table
    from rich.text import Text

    defaults = derived(state.store, state.config.drafter.name, view_of(state.config))
    if state.config.train.init_from is not None:
        defaults["drafter"] = state.config.drafter.model_dump(mode="json", include=set(defaults["drafter"]))
    resolved = state.config.model_dump(mode="json")
    # A run that goes on keeps its rate, whatever the steps it now has.
    defaults["optim"]["lr"] = resolved["optim"]["lr"] if state.step else derived_lr(state.store, state.config)
    cells = []
    for section, values in defaults.items():
        for key, default in values.items():
            text = _value_text(resolved[section][key])
            cells.append((f"{section}.{key}", text + ("" if text == _value_text(default) else " *")))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(_COLUMNS):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
    height = -(-len(cells) // _COLUMNS)
    for row in range(height):
        table.add_row(*(Text(text) for cell in cells[row::height] for text in cell))
    return table


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        kind, factor = value.get("rope_type"), value.get("factor")
        return f"{kind} x{factor:g}" if factor else str(kind)
    return value_text(value)


@dataclass(frozen=True)
class TrainReport:
    """How a run ended. loss, acc: of the last step that taught; validation: the last one (`step.validate`), empty
    without a validation split; validation_samples: of the store; best_checkpoint: None where it was not kept;
    skipped_steps: loss spikes. was_finished: there was nothing left to do. ``forecast``: the members of the `Forecast`
    that was made before the first step."""

    run: Path
    checkpoint: Path
    steps: int
    loss: float
    acc: list[float]
    validation: dict[str, Any]
    validation_samples: int
    best_checkpoint: Path | None
    skipped_steps: int
    stopped_early: bool
    seconds: float
    trainable_parameters: int
    vocab_coverage: float
    was_finished: bool
    forecast: dict[str, Any] | None = None


def train(
    store_location: str | Path,
    run: str | Path,
    *,
    drafter: str | None = None,
    file: str | Path | None = None,
    words: Sequence[str] = (),
    resume: bool = False,
    snapshot: str | None = None,
    cache: str | Path | None = None,
    cache_bytes: int = CACHE_BYTES,
    mirror: str | None = None,
    prepare: Callable[[], Sequence[str]] = tuple,
) -> TrainReport:
    """Train a drafter on a store into a new folder ``run``, or continue one exactly.

    ``file`` is YAML settings or the name of a preset; ``drafter`` is eagle3 when neither it nor the words say. A new
    run reads what ``snapshot`` of the store names, by default what it holds now. A store on object storage is read
    through the folder ``cache`` of at most ``cache_bytes``. ``mirror`` is an address that gets a copy of each
    checkpoint, and that a resume begins from where ``run`` is not there. ``prepare`` is done by rank 0 before all else,
    while the others wait; it gives further words.

    Under torchrun, or srun with MASTER_ADDR and MASTER_PORT, every process calls this; the batches are those of a
    single process. Rank 0 alone writes; a resume reads ``run`` on every rank. Raises ConfigError: a wrong setting, or a
    store that lacks what the drafter reads; ConflictError: ``run`` exists and ``resume`` is not set, or it was trained
    on another store; NotFoundError: no store, or nothing to resume; CaptureError: the loss or the gradient is not
    finite, or the loss stays a spike; names the samples; InterruptError: a signal asked any rank to stop; a checkpoint
    was saved; HiddenstoreError: ``another-rank``, another rank failed and said why.
    """
    local, room = require_local(run, "RUN"), (cache, cache_bytes, mirror)
    named = file and settings_file(file)
    if resume and (local / CONFIG).is_file():
        named = local / CONFIG
        # A damaged one is no wrong setting.
        drafter_name(local)
    with process_group(from_environment(), rank_settings(named, words)) as group:
        # Before a signal waits for the end of a step: this may copy or download for long.
        with group.all_or_none():
            words = (*words, *prepare()) if group.is_first else tuple(words)
        return _run(TrainOptions(store_location, local, drafter, file, words, resume, snapshot, *room), group)


def _run(options: TrainOptions, group: ProcessGroup) -> TrainReport:
    with drain_on_signal() as drain, FolderLock(options.run) as lock:
        copied = options.open_mirror() if group.is_first else None
        with group.all_or_none():
            if copied is not None:
                restores = options.resume and not options.run.exists()
                copied.check(restores)
                if restores:
                    copied.restore()
        state = build_state(options, group, lock)
        with group.all_or_none():
            if copied is not None:
                copied.claim()
            if group.is_first:
                keep_settings(options, state.config)
        began = time.monotonic()
        if state.step >= state.total_steps or state.best.is_out_of_patience:
            if copied is not None:
                _bring(copied)
                if copied.behind is not None:
                    raise copied.behind
            logged = read_curves(state.path)
            if logged.validations:
                state.validation = {name: value for name, value in logged.validations[-1].items() if name != "step"}
            return _report(state, logged.taught[-1] if logged.taught else {}, began, was_finished=True)
        estimate = print_summary(state) if group.is_first else None
        if state.device.type == "cuda":
            walk_largest(state)
        report = replace(_train(state, drain, began, copied), forecast=asdict(estimate) if estimate else None)
        if copied is not None and copied.behind is not None:
            raise copied.behind
        return report


def _train(state: TrainState, drain: Drain, began: float, mirror: Mirror | None) -> TrainReport:
    config, total = state.config.train, state.total_steps
    last: dict[str, Any] = {}
    writes = state.group.is_first
    with state.group.all_or_none():
        tracked = _open_trackers(state) if writes else None
        log = RunLog(state.path, total, start=state.step, clip=state.config.optim.clip, tracked=tracked, writes=writes)
    with log, closing(steps(state)) as each:
        for batch, metrics in each:
            last = metrics.__dict__ if metrics.taught else last
            if state.begun is not None:
                log.epoch(state.step, state.begun, len(state.batches.sample_ids))
                state.begun = None
            log.step(metrics)
            if metrics.skipped:
                log.skip(state.step, _skip_text(state, metrics.loss, batch), batch.all_sample_ids)
            stop = state.group.any(drain.requested)
            at_end = state.step == total
            is_best = False
            if config.validate_every and (at_end or state.step % config.validate_every == 0):
                validate(state)
                is_best = state.best.add(state.step, state.validation)
                log.validation(state.step, state.validation, _validation_text(state, is_best))
            at_end = at_end or state.best.is_out_of_patience
            is_due = config.checkpoint_every and state.step % config.checkpoint_every == 0
            if stop or at_end or is_best or is_due:
                log.sync()
                save_checkpoint(state, batch.cursor)
                if mirror is not None:
                    _bring(mirror)
            if stop and not at_end:
                raise InterruptError(
                    f"stopped by {drain.signal_name or 'another rank'} after step {state.step} of {total}; "
                    "a checkpoint is saved",
                    kind=Kind.INTERRUPTED,
                    hint=state.options.resume_command,
                )
            if at_end:
                break
            del batch
    return _report(state, last, began)


def _open_trackers(state: TrainState) -> Tracked | None:
    names = tracker_names(state.config.train)
    if not names:
        return None
    settings, facts = state.config.model_dump(mode="json"), read_facts(state.path)
    return Tracked(names, TrackedRun(state.path, state.step, settings, facts.id))


def _bring(mirror: Mirror) -> None:
    mirror.bring()
    if mirror.behind is not None:
        output().warn(f"{mirror.behind.message}: {mirror.location} lacks this checkpoint; the next one brings it too")


def _skip_text(state: TrainState, loss: float, batch: GlobalBatch) -> str:
    median = state.spikes.median
    assert median is not None
    return (
        f"step {state.step:,} skipped: its loss of {loss:.3f} is {loss / median:.1f} times the median of the last "
        f"ones; samples {some_of(batch.all_sample_ids, most=3)} ({METRICS} has all)"
    )


def _validation_text(state: TrainState, is_best: bool) -> str:
    values = state.validation
    if not values:
        return ""
    accepted = "" if values["accepted_length"] is None else f", accepted length {values['accepted_length']:.3f}"
    mark = " (kept as best)" if is_best else ""
    return f"step {state.step:,}: validation loss {values['loss']:.4f} (mean over depths){accepted}{mark}"


def _report(state: TrainState, last: dict[str, Any], began: float, was_finished: bool = False) -> TrainReport:
    folder = state.path / checkpoint.FOLDER
    best = [folder / name for name in state.best.names[:1]]
    return TrainReport(
        run=state.path,
        checkpoint=folder / f"step-{state.step}",
        steps=state.step,
        loss=float(last.get("loss", "nan")),
        acc=list(last.get("acc", [])),
        seconds=time.monotonic() - began,
        trainable_parameters=state.trainable,
        vocab_coverage=state.vocab_coverage,
        validation=state.validation,
        validation_samples=int((state.store.catalog.table.split == SPLITS.index("validation")).sum()),
        best_checkpoint=next((path for path in best if path.is_dir()), None),
        skipped_steps=state.spikes.skipped,
        stopped_early=state.step < state.total_steps and state.best.is_out_of_patience,
        was_finished=was_finished,
    )


def seconds_per_step(state: TrainState) -> float:
    """Forward and backward of the longest of the first packs, scaled to a whole batch, and Muon's iterations. Weights,
    order and random draws of the run stay as they are. For a single process."""
    plans = islice(state.batches.plan(0), _BATCHES_LOOKED_AT)
    pack = _largest_pack(state.batches, list(plans), attrgetter("tokens")).to(state.device)
    rounds = 1 if state.device.type == "cpu" else 2
    for _ in range(rounds):
        # What a device does first it does slowly.
        began = time.perf_counter()
        _walk(state, pack)
        _synchronize(state.device)
    of_pack = time.perf_counter() - began
    share = step_tokens(state) / max(1, pack.tokens)
    began = time.perf_counter()
    for matrix in state.optimizer.matrices:
        orthogonal(matrix.detach(), bf16=state.config.train.precision == "bf16" or None)
    _synchronize(state.device)
    return of_pack * share + time.perf_counter() - began


def step_tokens(state: TrainState) -> int:
    """Tokens of a step, the mean of the first: a sample longer than a batch is one alone, and others fill it partly."""
    first = [sum(plan.lengths) for plan, _ in islice(state.batches.plan(0), _BATCHES_LOOKED_AT)]
    return sum(first) // max(1, len(first))


def forecast(state: TrainState) -> Forecast:
    """An estimate, measured on one pack: packs differ in length and supervised share, and other processes in what they
    leave of the machine."""
    loop, moments = state.config.train, _moment_bytes(state)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in state.model.state_dict().values())
    checkpoints = (loop.keep + loop.keep_best) * (weights + moments)
    if not state.group.is_single:
        return Forecast(checkpoints)
    with told_what_helps("the forward and backward of one pack", state.device):
        seconds = seconds_per_step(state)
    peak = torch.cuda.max_memory_allocated(state.device) if state.device.type == "cuda" else peak_bytes()
    return Forecast(checkpoints, seconds * (state.total_steps - state.step), seconds, peak + _missing_moments(state))


def forecast_text(estimate: Forecast, step_tokens: int) -> str:
    """One line: ``about 12 min: 2.1 s a step of 4.6 k tokens, measured on one pack; 1.9 GB of memory, …``."""
    disk = f"checkpoints of {size(estimate.checkpoint_bytes)} on disk"
    if estimate.seconds is None or estimate.step_seconds is None or estimate.memory_bytes is None:
        return disk
    duration = (
        f"about {duration_text(estimate.seconds)}: {estimate.step_seconds:.2g} s a step of {amount(step_tokens)} tokens"
    )
    return f"{duration}, measured on one pack; {size(estimate.memory_bytes)} of memory, {disk}"


def walk_largest(state: TrainState) -> None:
    """Forward and backward of the largest pack, tokens and final rows counted, on every rank alike: what does not fit
    into a GPU is told before the first step and not where it is drawn. Weights, order and random draws of the run stay
    as they are. Raises StorageError: ``out-of-memory``."""
    group = state.group
    with group.all_or_none(), told_what_helps("the states of the largest pack and of those beside it", state.device):
        plans = state.batches.plan(0)
        first = list(islice(plans, _BATCHES_LOOKED_AT))
        # What a later epoch may give to any rank.
        holder = max(chain(first, plans), key=lambda batch: max(map(_rows, batch[1])))
        pack = _largest_pack(state.batches, [*first, holder], _rows).to(state.device)
    what = f"the largest pack has {pack.tokens:,} tokens, and its forward and backward"
    with told_what_helps(what, state.device), unsharded(state.parallel), group.all_or_none():
        room = _missing_moments(state) // state.parallel.shards
        beside = torch.empty(room, dtype=torch.uint8, device=state.device)
        _walk(state, pack)
        del beside
    if state.device.type == "cuda":
        torch.cuda.empty_cache()


def _rows(slot: SampleSlot) -> int:
    # The final rows are those of the whole sample, of which a part may be read.
    return slot.tokens + min(slot.tokens, slot.final_rows)


def _largest_pack(
    batches: TokenBatches,
    plans: Sequence[tuple[BatchPlan, Sequence[SampleSlot]]],
    size_of: Callable[[SampleSlot], int],
) -> PackedBatch:
    """Of all ranks in these batches of the first epoch."""
    _, rank, start, index = max(
        (sum(size_of(slots[position - plan.start]) for position in pack), rank, plan.start, index)
        for plan, slots in plans
        for rank in range(batches.world_size)
        for index, pack in enumerate(plan.packs_of(rank, batches.world_size))
    )
    cursor = replace(Cursor.from_json(batches.state_dict()), epoch=0, samples=start)
    return next(iter(replace(batches, rank=rank, cursor=cursor, epochs=None))).packs[index]


def _moment_bytes(state: TrainState) -> int:
    """Of the optimizer: a moment of every matrix under Muon, two of everything else."""
    matrices = sum(p.numel() for p in state.optimizer.matrices)
    return 8 * sum(p.numel() for p in state.optimizer.named.values()) - 4 * matrices


def _missing_moments(state: TrainState) -> int:
    """Bytes that the first step makes, beside which every later one works; none where they were loaded."""
    return 0 if state.optimizer.tensors() else _moment_bytes(state)


def _walk(state: TrainState, pack: PackedBatch) -> None:
    state.begin_step()
    (inputs,) = inputs_of(state, [pack])
    with autocast(state):
        losses = state.objective.losses(inputs, state.objective.denominators(inputs))
    if losses.total.requires_grad:
        losses.total.backward()
    state.model.zero_grad(set_to_none=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
