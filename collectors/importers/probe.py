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

from collectors.importers import PeerFormat
from collectors.importers.columns import Columns
from collectors.importers.peer import PeerSample, Unusable
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.head import HeadBundle
from hiddenstore.records import Sample
from hiddenstore.verify.probes import Held, Prediction, combined, predict, unigram_nats
from schemas.capture import NormState

SAMPLES = 16
TRIES = 64
# bf16 moves the root mean square of a row by less than 1e-3, FP8 by 1e-2.
NORMED_RMS = 0.02
NORMED_SHARE = 0.9
ENOUGH_ROWS = 100
KNOWS_ITS_OWN_SIGMAS = 8.0
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
    weight = head.norm_weight.float()
    if head.spec.norm_flavour == "rms_plus_one":
        weight = 1.0 + weight
    rows = final.float()
    if head.norm_bias is not None:
        rows = rows - head.norm_bias.float()
    # A channel that the norm silences says nothing.
    heard = weight.abs() > 1e-2 * weight.abs().max()
    rms = (rows[:, heard] / weight[heard]).square().mean(-1).sqrt()
    return float(((rms - 1).abs() <= NORMED_RMS).float().mean())


def settle_norm(
    peer: PeerFormat, asked: NormState | None, filed: set[NormState | None], share: float | None
) -> NormState:
    """The norm state to stamp: what was asked, else what the files say, else the format's; the data must agree.

    Raises:
        ConfigError: ``norm-mixed``: the files disagree among themselves.
        FormatError: ``norm-contradicted``, with what was measured.
    """
    said = {state for state in filed if state is not None}
    if len(said) > 1:
        raise ConfigError(
            "some files say their final hidden is before the norm, others after it; import them as two stores",
            kind="norm-mixed",
        )
    state: NormState = asked or (said.pop() if said else None) or peer.final or "pre_norm"
    if share is None:
        return state
    found: NormState | None = None
    if share >= NORMED_SHARE:
        found = "post_norm"
    elif share <= 1 - NORMED_SHARE:
        found = "pre_norm"
    if found == state:
        return state
    who = "--norm says" if asked else "the files say" if filed - {None} else f"{peer.name} means"
    word = "after" if state == "post_norm" else "before"
    measured = f"{share:.0%} of its rows have the root mean square that this target's norm leaves (all would, after it)"
    if found is None:
        verdict = "it is neither before nor after it, or mixed"
    else:
        verdict = f"it is {found.partition('_')[0]}-norm"
    if state == "post_norm":
        verdict += ", or of another target"
    raise FormatError(
        f"{who} that the final hidden is {word} the target's final norm, but {measured}: {verdict}",
        kind="norm-contradicted",
        hint=None if found is None else _norm_hint(peer, found),
    )


def _norm_hint(peer: PeerFormat, found: NormState) -> str:
    option = f"--norm {found.partition('_')[0]}"
    if peer.name.startswith("modelopt") and found == "pre_norm":
        return f"{option}, or --from modelopt-vllm if vLLM made it"
    return option


def check_meaning(head: HeadBundle, norm: NormState, probed: Sequence[Probed], columns: Columns) -> Evidence:
    """Do the states belong to their tokens, at their places?

    Raises:
        FormatError: ``row-shift``: the final hidden predicts another place than the next token; ``layers-differ``: what
            is named embeddings is not.
    """
    evidence = Evidence(samples=len(probed), typical_norms=_typical(probed))
    if -1 in columns.aux_layers:
        _require_embeddings(head, probed, columns.aux_layers.index(-1))
    found = [item for item in (_predicted(head, norm, one) for one in probed) if item is not None]
    rows = sum(item.matching.rows for item in found)
    if not found:
        return evidence
    weights = np.array([item.matching.rows for item in found]) / rows
    own, following, beyond = (float(weights @ np.array([item.nll[k] for item in found])) for k in range(3))
    chance = unigram_nats(np.concatenate([item.next_tokens for item in found]))
    evidence.next_token_top1 = round(float(weights @ np.array([item.hits for item in found])), 4)
    evidence.next_token_nats, evidence.unigram_nats = round(following, 3), round(chance, 3)
    if rows < ENOUGH_ROWS:
        evidence.notes.append(
            f"{rows} supervised rows are too few to tell whether the states predict their next tokens"
        )
    elif min(own, beyond) < following and min(own, beyond) < chance:
        raise _shifted(own, following, beyond)
    elif following >= chance:
        own_sigmas = combined([item.matching for item in found]).sigmas
        knows = (
            "though it tells them from others" if own_sigmas > KNOWS_ITS_OWN_SIGMAS else "nor tells them from others"
        )
        evidence.notes.append(
            f"the final hidden gives the next tokens {following:.2f} nats, their bare frequencies {chance:.2f}, "
            f"{knows}: the text is foreign to the target, or the dump is of another one"
        )
    return evidence


def require_fit(head: HeadBundle, samples: Sequence[PeerSample]) -> None:
    """Refuse a dump of another target.

    Raises:
        FormatError: ``target-width``, ``target-vocabulary``.
    """
    for sample in samples:
        highest = int(sample.input_ids.max())
        if highest >= head.vocab_size:
            raise FormatError(
                f"the dump holds token {highest}, but the target has {head.vocab_size} tokens: it is of another target",
                kind="target-vocabulary",
            )
        width = sample.column_width if sample.final is None else int(sample.final.shape[1])
        if width % head.hidden_size or (sample.final is not None and width != head.hidden_size):
            raise wrong_width(f"{width} wide", head)


def wrong_width(found: str, head: HeadBundle) -> FormatError:
    """``target-width``: states that cannot be this target's."""
    return FormatError(
        f"the states of the dump are {found}, the target is {head.hidden_size} wide: it is of another target",
        kind="target-width",
    )


def nothing_usable(refused: Sequence[Unusable], places: int, head: HeadBundle) -> FormatError | ConfigError:
    """What to raise when none of the first samples can be read."""
    first = refused[0]
    if all(item.reason == "wrong-width" for item in refused):
        return wrong_width(f"of another width ({first.detail})", head)
    reasons = sorted({f"{item.reason}: {item.detail}" for item in refused})
    shown = "\n".join(f"  {reason}" for reason in reasons[:5])
    hint = None
    if any(item.reason == "mask-missing" for item in refused):
        hint = (
            "--tokens-from DATA takes masks from prepared conversations of the same tokens (hiddenstore prepare); "
            "--loss-on all trains on every token"
        )
    return ConfigError(
        f"none of the first {len(refused)} of {places} samples can be imported\n{shown}",
        kind="nothing-usable",
        hint=hint,
    )


def _predicted(head: HeadBundle, norm: NormState, one: Probed) -> Prediction | None:
    if one.final is None:
        return None
    # The rows whose next token is supervised: text that the target wrote, or was asked to.
    places = np.flatnonzero(one.sample.loss_mask[1:]).astype(np.int32)
    if len(places) < 3:
        return None
    return predict(head, Held(one.final[torch.from_numpy(places.astype(np.int64))], places, one.sample.input_ids), norm)


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
                kind="layers-differ",
                hint="check --layers against the ids that the dump was made with",
            )


def _shifted(own: float, following: float, beyond: float) -> FormatError:
    place, nats = ("own", own) if own < beyond else ("next but one", beyond)
    return FormatError(
        f"the final hidden predicts its {place} token ({nats:.2f} nats) rather than the next ({following:.2f}): tokens "
        "and states of the dump are shifted against each other",
        kind="row-shift",
        hint="import what the peer wrote, not what its loader gives: loaders shift",
    )
