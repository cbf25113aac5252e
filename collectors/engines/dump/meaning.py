"""What is settled before an import writes anything: layers, norm, masks, and that the dump is this target's.

The final norm leaves a trace: divided by its weight, a row after the norm has a root mean square of one. So which side
of the norm a dump was taken from is read from the data, and what is stamped must agree with it.

Shapes: T tokens, R final rows, L aux layers, N decoder layers, D target width, n rows looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collectors.engines.dump.engine import Claims, Columns, choose_columns, states_of_tokens
from collectors.engines.dump.matching import Matcher
from collectors.engines.dump.peer import PeerSample, PeerSource, Unusable, read_manifest, unreadable
from collectors.targets.load import EngineTarget, LoadedTarget, probe_states
from hiddenstore.dumps.common import ABOUT_FILE
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, Kind
from hiddenstore.records import Sample, final_row_positions
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import CHECKPOINT
from hiddenstore.verify.probes import Prediction, Rows, combined, predict, unigram_nats, unit_scale_error
from schemas.capture import FINAL, FinalMode, NormState
from schemas.layers import field_name

SAMPLES = 16
TRIES = 64
# bf16 moves the root mean square of a row by less than 1e-3, FP8 by 1e-2.
NORMED_RMS = 0.02
NORMED_SHARE = 0.9
ENOUGH_ROWS = 100
MATCHING_SIGMAS = 8.0
EMBEDDING_ERROR = 0.02
_FINALS: dict[FinalMode, str] = {
    "all": "final hidden: every token",
    "supervised": "final hidden: around supervised tokens",
    "none": "no final hidden in this format",
}


@dataclass(frozen=True, eq=False)
class Probed:
    """A sample and its states in bf16: aux [L, T, D], final [T, D] or None, zeros but at ``final_rows`` int64 [R]."""

    sample: Sample
    aux: Tensor
    final: Tensor | None
    final_rows: Tensor


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
    """What a person claims, else the files say, else the format; the data must agree. Raises ConfigError:
    ``dump-unclear``: the files disagree among themselves; FormatError: ``dump-norm``, with what was measured."""
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
    """Do the states belong to their tokens, at their places? Raises FormatError: ``row-shift``: the final hidden
    predicts another place than the next token; ``layers-differ``: what is named embeddings is not."""
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
    """Refuse a dump of another target: FormatError ``target-mismatch``."""
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


RECOMPUTED = 4
MOST_TOKENS = 512
# Another engine in another dtype, and FP8, move a row by a few percent; a neighbouring layer is further away.
FAR = 0.25


def check_layers(reference: LoadedTarget, probed: Sequence[Probed], columns: Columns, norm: NormState) -> int:
    """Recompute a few samples, returns how many; FormatError ``layers-differ`` names the layers that are nearest."""
    last = len(reference.blocks) - 1
    names = [*columns.aux_layers]
    if probed[0].final is not None:
        names.append(last if norm == "pre_norm" else last + 1)
    errors, counts = np.zeros((len(names), last + 3)), np.zeros(len(names))
    compared = probed[:RECOMPUTED]
    for one in compared:
        # Layers -1 … N-1 and the normed last one of the first tokens: fp32 [N+2, T, D] on the CPU.
        ids = torch.from_numpy(one.sample.input_ids[:MOST_TOKENS].astype(np.int64))[None].to(reference.device)
        probe = probe_states(reference.parts, ids, reference.identity.model_type)
        candidates = torch.cat([probe.states, probe.normed[None].to(probe.states.device)]).float().cpu()
        every = torch.arange(candidates.shape[1])
        fields = [(states, every) for states in one.aux]
        if one.final is not None:
            fields.append((one.final, one.final_rows[one.final_rows < len(every)]))
        for slot, (states, rows) in enumerate(fields):
            if not len(rows):
                continue
            expected = candidates[:, rows]
            distances = torch.linalg.vector_norm(states[rows].float() - expected, dim=-1)
            sizes = torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-9)
            errors[slot] += (distances / sizes).median(dim=-1).values.numpy()
            counts[slot] += 1
    errors /= np.maximum(counts, 1)[:, None]
    nearest = errors.argmin(axis=1) - 1
    wrong = [
        (slot, name)
        for slot, name in enumerate(names)
        if counts[slot] and (nearest[slot] != name or errors[slot, name + 1] > FAR)
    ]
    if wrong:
        raise _mismatch(wrong, errors, nearest, columns, last)
    return len(compared)


def _mismatch(
    wrong: Sequence[tuple[int, int]], errors: np.ndarray, nearest: np.ndarray, columns: Columns, last: int
) -> FormatError:
    lines = []
    for slot, name in wrong:
        best = int(nearest[slot])
        named = field_name(name) if slot < len(columns.aux_layers) else FINAL
        near = "the final hidden after its norm" if best > last else field_name(best)
        near += f" ({errors[slot, best + 1]:.1%} apart)"
        lines.append(f"what is named {named} is {errors[slot, name + 1]:.0%} from it, nearest to {near}")
    true_layers = {layer: int(nearest[slot]) for slot, layer in enumerate(columns.aux_layers)}
    order = [true_layers[layer] for layer in columns.layers if layer is not None]
    is_clear = errors.min(axis=1)[: len(columns.aux_layers)].max(initial=0.0) <= FAR and max(order, default=0) <= last
    hint = f"--layers {','.join(map(str, order))}" if is_clear and set(true_layers) != set(order) else None
    return FormatError(
        f"the states are not those of this target at these layers: {'; '.join(lines)}",
        kind=Kind.LAYERS_DIFFER,
        hint=hint or "check that --target is the dump's own, at its revision",
    )


@dataclass(frozen=True, eq=False)
class DumpMeaning:
    """A dump whose meaning is settled; ``probed`` are the samples that it was settled on, ``final`` the rows at which
    the final hidden is one."""

    matcher: Matcher
    locations: Sequence[str]
    columns: Columns
    norm: NormState
    final: FinalMode
    evidence: Evidence
    explained: str
    probed: Sequence[Probed]


def settle_meaning(
    source: PeerSource, claims: Claims, target: EngineTarget, matcher: Matcher, note: Callable[[str], None]
) -> DumpMeaning:
    """Read the first samples of a dump, settle layers and norm, and probe what they mean. Raises ConfigError:
    ``input-empty``, ``nothing-usable``, and as ``choose_columns`` and ``settle_norm``; FormatError: the dump is of
    another target (``target-mismatch``), does not mean what its format says (``dump-norm``, ``dump-shift``), or has
    zeros in the place of a final hidden that is to be learned (``final-missing``)."""
    head, num_layers = target.head, target.folder.num_layers
    require_fit(head, source)
    locations = source.locations()
    # What an earlier run imported and deleted is still listed by formats with an index.
    present = [location for location in locations if source.file_of(location).is_file()]
    if not present:
        raise ConfigError(
            f"{source.folder} holds no {source.name} samples"
            + (", its index lists some that are gone" if locations else ""),
            kind=Kind.INPUT_EMPTY,
            hint="name the folder that the peer's own command wrote",
        )
    samples, peers = _first_samples(source, present, matcher, head)
    require_fit(head, source, peers)
    layers, final = _export_facts(source, target, matcher.all_supervised)
    stated = source.stated.layers or layers
    columns = choose_columns(source, claims, stated, peers[0].column_width // head.hidden_size, num_layers)
    probed = [
        _probed(sample, peer, columns, head.hidden_size, final) for sample, peer in zip(samples, peers, strict=True)
    ]
    finals = [one.final[one.final_rows] for one in probed if one.final is not None and len(one.final_rows)]
    share = normed_share(head, torch.cat(finals)) if finals else None
    norm = settle_norm(source, claims.norm, {peer.final_norm for peer in peers}, share)
    side = f", {norm.replace('_', '-')}" if source.final else ""
    explained = f"{columns.explained(source, num_layers)}; {_FINALS[final]}{side}"
    note(explained)
    evidence = check_meaning(head, norm, probed, columns)
    evidence.normed_share = None if share is None else round(share, 4)
    for line in evidence.notes:
        note(line)
    return DumpMeaning(matcher, locations, columns, norm, final, evidence, explained, probed)


def _export_facts(
    source: PeerSource, target: EngineTarget, all_supervised: bool
) -> tuple[tuple[int, ...] | None, FinalMode]:
    """What our own export left beside the peer's files: its layers, in the peer's numbering, and the rows at which it
    wrote a final hidden and not zeros."""
    path = source.folder / ABOUT_FILE
    final: FinalMode = "all" if source.final else "none"
    if not path.is_file():
        return None, final
    about = read_manifest(path)
    layers, origin = about.get("aux_hidden_state_layer_ids"), about.get("target")
    if about.get("layout", "speculators") != source.name or not isinstance(layers, list):
        return None, final
    for name in ("weights_sha256", CHECKPOINT):
        digest, ours = origin.get(name) if isinstance(origin, dict) else None, getattr(target.identity, name)
        if None not in (digest, ours) and digest != ours:
            raise FormatError(
                f"{path} names a target of {name} {str(digest)[:8]}…, target {target.folder.label} has {ours[:8]}…",
                kind=Kind.TARGET_MISMATCH,
            )
    if not all(isinstance(layer, int) for layer in layers):
        raise unreadable(f"{path} names layers that are no numbers: {layers}")
    if source.final and about.get("final_rows_of_zeros"):
        final = "supervised"
        if all_supervised:
            raise FormatError(
                f"{source.folder} holds the final hidden around its supervised tokens alone and zeros for the rest "
                f"({path.name}): a loss at every token would learn those",
                kind=Kind.FINAL_MISSING,
                hint="leave --loss-on out",
            )
    return tuple(layers), final


def _first_samples(
    source: PeerSource, locations: Sequence[str], matcher: Matcher, head: HeadBundle
) -> tuple[list[Sample], list[PeerSample]]:
    """The first samples that can be used, cut to their own rows."""
    samples, peers, refused = [], [], []
    for location in locations[:TRIES]:
        try:
            peer = source.read(location, states=True)
            sample = matcher.sample(peer, location)
            if sample.tokens:
                samples.append(sample)
                peers.append(peer)
        except Unusable as unusable:
            refused.append(unusable)
        if len(samples) == SAMPLES:
            break
    if not samples:
        raise _nothing_usable(refused or [Unusable("empty", "padding only")], len(locations), head)
    return samples, peers


def _nothing_usable(refused: Sequence[Unusable], count: int, head: HeadBundle) -> HiddenstoreError:
    if all(item.reason == "wrong-width" for item in refused):
        return wrong_width(f"of another width ({refused[0].detail})", head)
    reasons = sorted({f"{item.reason}: {item.detail}" for item in refused})
    hint = None
    if any(item.reason == "mask-missing" for item in refused):
        hint = (
            "--tokens-from DATA takes masks from prepared conversations of the same tokens (hiddenstore prepare); "
            "--loss-on all trains on every token"
        )
    return ConfigError(
        "\n  ".join([f"none of the first {len(refused)} of {count} samples can be imported", *reasons[:5]]),
        kind=Kind.NOTHING_USABLE,
        hint=hint,
    )


def _probed(sample: Sample, peer: PeerSample, columns: Columns, width: int, final_mode: FinalMode) -> Probed:
    """Raises ConfigError ``layers-invalid`` where a column is not what it should repeat: the layers are misnamed."""
    aux = torch.empty((len(columns.aux_layers), sample.tokens, width), dtype=torch.bfloat16)
    try:
        final = states_of_tokens(sample.input_ids, peer, columns, aux)
    except Unusable as unusable:
        raise ConfigError(
            f"{sample.source}: {unusable.detail}",
            kind=Kind.LAYERS_INVALID,
            hint="name the layers the dump was made with: --layers or --peer-layers",
        ) from unusable
    return Probed(sample, aux, final, torch.from_numpy(final_row_positions(sample.loss_mask, final_mode)).long())
