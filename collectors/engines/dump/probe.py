"""Before anything is written: do the first samples of a dump mean what its format says, and are they this target's?

The final norm leaves a trace: divided by its weight, a row after the norm has a root mean square of one. So which side
of the norm a dump was taken from is read from the data, and what is stamped must agree with it.

Shapes: T tokens, R final rows, D target width, n rows looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collectors.engines.dump.columns import Columns
from collectors.engines.dump.peer import PeerSample, PeerSource
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.records import Sample
from hiddenstore.targets.head import HeadBundle
from hiddenstore.verify.probes import Prediction, Rows, combined, predict, unigram_nats, unit_scale_error
from schemas.capture import NormState

SAMPLES = 16
TRIES = 64
# bf16 moves the root mean square of a row by less than 1e-3, FP8 by 1e-2.
NORMED_RMS = 0.02
NORMED_SHARE = 0.9
ENOUGH_ROWS = 100
MATCHING_SIGMAS = 8.0
EMBEDDING_ERROR = 0.02


@dataclass(frozen=True, eq=False)
class Probed:
    """A sample and its states in bf16: aux [L, T, D], final [T, D] or None."""

    sample: Sample
    aux: Tensor
    final: Tensor | None


@dataclass
class Evidence:
    """What the probe measured; ``notes`` for people.

    ``normed_share``: rows of the final hidden that are after the norm; ``next_token_top1`` on supervised spans;
    ``typical_norms``: median row norm per aux layer.
    """

    samples: int = 0
    normed_share: float | None = None
    next_token_top1: float | None = None
    next_token_nats: float | None = None
    unigram_nats: float | None = None
    typical_norms: tuple[float, ...] = ()
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        """The numbers, for ``--json``."""
        measured = ("samples", "normed_share", "next_token_top1", "next_token_nats", "unigram_nats")
        return {name: getattr(self, name) for name in measured}


def normed_share(head: HeadBundle, final: Tensor) -> float:
    """Share of rows [n, D] that have been through the target's final norm."""
    return float((unit_scale_error(head, final) <= NORMED_RMS).mean())


def settle_norm(
    source: PeerSource, claimed: NormState | None, filed: set[NormState | None], share: float | None
) -> NormState:
    """The norm state to stamp: what a person claims, else what the files say, else the format's; the data must agree.

    Raises:
        ConfigError: ``dump-unclear``: the files disagree among themselves.
        FormatError: ``dump-norm``, with what was measured.
    """
    stated = filed - {None}
    if len(stated) > 1:
        raise ConfigError(
            "some files say their final hidden is before the norm, others after it; import them as two stores",
            kind=Kind.DUMP_UNCLEAR,
        )
    state: NormState = claimed or next(iter(stated), None) or source.final or "pre_norm"
    if share is None:
        return state
    measured: NormState | None = None
    if share >= NORMED_SHARE:
        measured = "post_norm"
    elif share <= 1 - NORMED_SHARE:
        measured = "pre_norm"
    if measured == state:
        return state
    who = "--norm says" if claimed else "the files say" if stated else f"{source.name} means"
    side = "after" if state == "post_norm" else "before"
    verdict, hint = "it is neither before nor after it, or mixed", None
    if measured is not None:
        word = measured.partition("_")[0]
        verdict = f"it is {word}-norm"
        hint = f"--norm {word}" + (source.pre_norm_hint if measured == "pre_norm" else "")
    if state == "post_norm":
        verdict += ", or of another target"
    raise FormatError(
        f"{who} that the final hidden is {side} the target's final norm, but {share:.0%} of its rows have the root "
        f"mean square that this target's norm leaves (all would, after it): {verdict}",
        kind=Kind.DUMP_NORM,
        hint=hint,
    )


def check_meaning(head: HeadBundle, norm: NormState, probed: Sequence[Probed], columns: Columns) -> Evidence:
    """Do the states belong to their tokens, at their places?

    Raises:
        FormatError: ``dump-shift``: the final hidden predicts another place than the next token; ``layers-differ``:
            what is named embeddings is not.
    """
    evidence = Evidence(samples=len(probed), typical_norms=_typical(probed))
    if -1 in columns.aux_layers:
        _require_embeddings(head, probed, columns.aux_layers.index(-1))
    predictions = [item for item in (_predicted(head, norm, one) for one in probed) if item is not None]
    if not predictions:
        return evidence
    rows = sum(item.matching.rows for item in predictions)
    weights = np.array([item.matching.rows for item in predictions]) / rows
    same, following, beyond = (float(weights @ np.array([item.nll[k] for item in predictions])) for k in range(3))
    chance = unigram_nats(np.concatenate([item.next_tokens for item in predictions]))
    evidence.next_token_top1 = round(float(weights @ np.array([item.hits for item in predictions])), 4)
    evidence.next_token_nats, evidence.unigram_nats = round(following, 3), round(chance, 3)
    if rows < ENOUGH_ROWS:
        evidence.notes.append(
            f"{rows} supervised rows are too few to tell whether the states predict their next tokens"
        )
    elif min(same, beyond) < following and min(same, beyond) < chance:
        token, nats = ("own", same) if same < beyond else ("next but one", beyond)
        raise FormatError(
            f"the final hidden predicts its {token} token ({nats:.2f} nats) rather than the next ({following:.2f}): "
            "tokens and states of the dump are shifted against each other",
            kind=Kind.DUMP_SHIFT,
            hint="import what the peer wrote, not what its loader gives: loaders shift",
        )
    elif following >= chance:
        matches = combined([item.matching for item in predictions]).sigmas > MATCHING_SIGMAS
        evidence.notes.append(
            f"the final hidden gives the next tokens {following:.2f} nats, their bare frequencies {chance:.2f}, "
            f"{'though it tells' if matches else 'nor tells'} them from others: the text is foreign to the target, or "
            "the dump is of another one"
        )
    return evidence


def require_fit(head: HeadBundle, source: PeerSource, samples: Sequence[PeerSample] = ()) -> None:
    """Refuse a dump of another target: by what it states, then by its first ``samples``.

    Raises:
        FormatError: ``target-mismatch``.
    """
    width, vocab_size = source.stated.width, source.stated.vocab_size
    if width not in (None, head.hidden_size):
        raise wrong_width(f"{width} wide", head)
    if vocab_size is not None and vocab_size > head.vocab_size:
        raise FormatError(
            f"the dump is of a target with {vocab_size} tokens, this one has {head.vocab_size}",
            kind=Kind.TARGET_MISMATCH,
        )
    for sample in samples:
        highest = int(sample.input_ids.max())
        if highest >= head.vocab_size:
            raise FormatError(
                f"the dump holds token {highest}, but the target has {head.vocab_size} tokens: it is of another target",
                kind=Kind.TARGET_MISMATCH,
            )
        width = sample.column_width if sample.final is None else int(sample.final.shape[1])
        if width % head.hidden_size or (sample.final is not None and width != head.hidden_size):
            raise wrong_width(f"{width} wide", head)


def wrong_width(states: str, head: HeadBundle) -> FormatError:
    """``target-mismatch``: ``states`` that cannot be this target's."""
    return FormatError(
        f"the states of the dump are {states}, the target is {head.hidden_size} wide: it is of another target",
        kind=Kind.TARGET_MISMATCH,
    )


def _predicted(head: HeadBundle, norm: NormState, one: Probed) -> Prediction | None:
    if one.final is None:
        return None
    # The rows whose next token is supervised: text that the target wrote, or was asked to.
    rows = np.flatnonzero(one.sample.loss_mask[1:]).astype(np.int32)
    if len(rows) < 3:
        return None
    return predict(head, Rows(one.final[torch.from_numpy(rows.astype(np.int64))], rows, one.sample.input_ids), norm)


def _typical(probed: Sequence[Probed]) -> tuple[float, ...]:
    """Median row norm per aux layer without first tokens; empty when there are none."""
    rows = [torch.linalg.vector_norm(one.aux[:, 1:].float(), dim=-1) for one in probed if one.sample.tokens > 1]
    if not rows or not rows[0].shape[0]:
        return ()
    medians = torch.cat(rows, dim=1).median(dim=1).values
    return tuple(medians.tolist()) if bool((medians > 0).all() and medians.isfinite().all()) else ()


def _require_embeddings(head: HeadBundle, probed: Sequence[Probed], slot: int) -> None:
    for one in probed:
        expected = head.embed(torch.from_numpy(one.sample.input_ids.astype(np.int64))).float()
        error = (one.aux[slot].float() - expected).norm() / expected.norm().clamp_min(1e-9)
        if float(error) > EMBEDDING_ERROR:
            raise FormatError(
                f"the layer named -1 is not the embedding output: {one.sample.source} is off by {float(error):.0%}",
                kind=Kind.LAYERS_DIFFER,
                hint="check --layers against the ids that the dump was made with",
            )
