"""The choice of a recipe: measured rows against a person's limits, and why each smaller recipe was not taken.

``advise`` and ``collect --recipe auto`` choose here. Trained pairs decide where they can tell: a recipe whose interval
lies under the limit is taken whatever its errors say, one that loses more than the limit is not. Where the interval is
too wide for either, or nothing was trained, KL and channel error decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from hiddenstore.codecs.recipes import RECIPES, get_recipe
from schemas.advice import Advice, AdviceRow, PairedRow
from schemas.capture import REBUILT, TOPK

FP8 = "fp8-per-token"
"""A peer's format, measured beside the recipes and never chosen."""
_EXACT = ("raw", "lossless")


@dataclass(frozen=True)
class RecipeLimits:
    """What a recipe may cost: KL in nats through the LM head, channel-normalised error of the worst aux layer, and
    acceptance lost (a share: 0.005 are 0.5 points) at the far end of the interval of trained pairs."""

    kl: float = 1e-3
    channel_error: float = 0.03
    loss: float = 0.005


def choose(
    rows: Sequence[AdviceRow], limits: RecipeLimits, tokens: int, final_rows: int, paired: Sequence[PairedRow] = ()
) -> Advice:
    """Advice from measured rows, of so many ``tokens`` and ``final_rows``: the smallest recipe that keeps the limits.

    ``tiny`` is never chosen: top tokens cannot become the final hidden again, so that choice is a person's.
    """
    trained = {row.recipe: row for row in paired}
    judged = []
    for row in rows:
        # Exact recipes return every bit: what pairs say against them is noise, and one recipe is always left.
        within = row.recipe in _EXACT or _is_within(row, trained.get(row.recipe), limits, _is_unmeasured(row, rows))
        judged.append(row.model_copy(update={"within": within}))
    able = [row for row in judged if row.within and _is_choosable(row.recipe)]
    chosen = min(able, key=lambda row: row.bytes_per_token).recipe
    return Advice(
        tokens=tokens,
        final_rows=final_rows,
        max_kl=limits.kl,
        max_channel_error=limits.channel_error,
        max_loss=limits.loss if paired else None,
        chosen=chosen,
        rows=tuple(row.model_copy(update={"chosen": row.recipe == chosen}) for row in judged),
        paired=tuple(paired),
    )


def _is_choosable(recipe: str) -> bool:
    return recipe != FP8 and get_recipe(recipe).final != TOPK


def _is_within(row: AdviceRow, trained: PairedRow | None, limits: RecipeLimits, unmeasured: bool) -> bool:
    if trained is not None and (trained.most_lost <= limits.loss or -trained.difference > limits.loss):
        return trained.most_lost <= limits.loss
    small = (row.kl or 0.0) <= limits.kl and (row.channel_error or 0.0) <= limits.channel_error
    return small and not unmeasured


def _is_unmeasured(row: AdviceRow, rows: Sequence[AdviceRow]) -> bool:
    """Whether a final hidden is captured, which ``raw`` keeps, and nothing says what this recipe does to it."""
    return row.kl is None and any(other.kl is not None for other in rows)


def verdict(advice: Advice) -> str:
    """What was chosen and under which limits."""
    trained = next((row for row in advice.paired if row.recipe == advice.chosen), None)
    if advice.max_loss is not None and trained is not None and trained.most_lost <= advice.max_loss:
        lost = f"at most {max(0.0, 100 * trained.most_lost):.2f} points lost"
        return f"{advice.chosen} is the smallest recipe within {100 * advice.max_loss:g} points of acceptance: {lost}"
    limits = f"KL ≤ {advice.max_kl:g} and channel error ≤ {100 * advice.max_channel_error:g} %"
    beside = ", and not refused by pairs" if advice.paired else ""
    return f"{advice.chosen} is the smallest recipe with {limits}{beside}"


def refusal_lines(advice: Advice, has_limits: bool = True, can_train: bool = True) -> list[str]:
    """Why each recipe smaller than the chosen one was not taken, the smallest first, and the options that change that.

    ``has_limits``: the command takes limits, else only ``--recipe``. ``can_train``: the store holds exact states, which
    pairs are trained on.
    """
    (chosen,) = (row for row in advice.rows if row.chosen)
    smaller = [row for row in advice.rows if row.bytes_per_token < chosen.bytes_per_token and row.recipe != FP8]
    return [
        f"not {row.recipe} ({row.bytes_per_token:,.0f} B/token): {_refusal(row, advice, has_limits, can_train)}"
        for row in sorted(smaller, key=lambda row: row.bytes_per_token)
    ]


def _refusal(row: AdviceRow, advice: Advice, has_limits: bool, can_train: bool) -> str:
    if not _is_choosable(row.recipe):
        return f"top tokens cannot become the final hidden again; --recipe {row.recipe} is a person's choice"
    reasons = []
    trained = next((one for one in advice.paired if one.recipe == row.recipe), None)
    if trained is not None and advice.max_loss is not None:
        most = f"{100 * trained.most_lost:.2f}" if isfinite(trained.most_lost) else "any number of"
        lost = f"it may lose {most} points of acceptance, {100 * advice.max_loss:g} are allowed"
        if -trained.difference > advice.max_loss:
            return f"{lost} (--max-loss)"
        narrow = (
            "more --seeds or train.max_steps narrow" if isfinite(trained.most_lost) else "more held-out samples tell"
        )
        reasons.append(f"{lost} ({narrow} that)")
    options, is_unmeasured = [], _is_unmeasured(row, advice.rows)
    if is_unmeasured:
        reasons.append("no final hidden was there to measure it on")
    if row.kl is not None and row.kl > advice.max_kl:
        reasons.append(f"KL {row.kl:.1e} > {advice.max_kl:g}")
        options.append(f"--max-kl {_above(row.kl):g}")
    if row.channel_error is not None and row.channel_error > advice.max_channel_error:
        reasons.append(f"channel error {100 * row.channel_error:.1f} % > {100 * advice.max_channel_error:g} %")
        options.append(f"--max-channel-error {_above(row.channel_error):g}")
    if not has_limits:
        return f"{', '.join(reasons)}; --recipe {row.recipe} takes it all the same"
    way = f"; {' '.join(options)} would take it" if options and not is_unmeasured else ""
    if can_train and trained is None and row.recipe in RECIPES:
        target = " --target T" if get_recipe(row.recipe).final == REBUILT else ""
        way += f"; advise --paired --recipe {row.recipe}{target} tells what it costs in acceptance"
    return ", ".join(reasons) + way


def _above(value: float) -> float:
    """The next number of two digits not below a value: what a person types as a limit."""
    unit = 10.0 ** (floor(log10(value)) - 1)
    return float(f"{ceil(value / unit - 1e-9) * unit:.2g}")


def points_of(difference: float, half_width: float | None) -> str:
    """A difference of acceptance and its interval; None where no interval is known."""
    width = "unknown" if half_width is None else f"{100 * half_width:.2f}"
    return f"{100 * difference:+.2f} ± {width} points"


def paired_lines(rows: Sequence[PairedRow]) -> list[str]:
    """What training on each recipe cost in acceptance, in percentage points, with the interval that was bought; a line
    per input where there are several."""
    lines = []
    for row in rows:
        mean = sum(row.original_acceptance) / len(row.seeds)
        bought = "" if row.minutes is None else f", {row.minutes:.1f} min"
        lines.append(
            f"{row.recipe}: {points_of(row.difference, row.half_width)} of acceptance (original {100 * mean:.1f} %, "
            f"{len(row.seeds)} × {row.steps} steps{bought})"
        )
        if len(row.sources) > 1:
            lines += [
                f"  input {one.source}: {points_of(one.difference, one.half_width)} ({one.samples} held-out samples)"
                for one in row.sources
            ]
    return lines
