"""What is settled before an import writes anything: layers, norm, masks, and that the dump is this target's.

Shapes: T tokens, L aux layers, D target width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from collectors.engines.dump.columns import Claims, Columns, choose_columns
from collectors.engines.dump.engine import states_of_tokens
from collectors.engines.dump.matching import Matcher
from collectors.engines.dump.peer import PeerSample, PeerSource, Unusable, read_manifest
from collectors.engines.dump.probe import (
    SAMPLES,
    TRIES,
    Evidence,
    Probed,
    check_meaning,
    normed_share,
    require_fit,
    settle_norm,
    wrong_width,
)
from collectors.targets.load import EngineTarget
from hiddenstore.dumps.common import ABOUT_FILE
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, Kind
from hiddenstore.records import Sample
from hiddenstore.targets.head import HeadBundle
from schemas.capture import NormState


@dataclass(frozen=True, eq=False)
class DumpMeaning:
    """A dump whose meaning is settled; ``probed`` are the samples that it was settled on."""

    matcher: Matcher
    locations: Sequence[str]
    columns: Columns
    norm: NormState
    evidence: Evidence
    explained: str
    probed: Sequence[Probed]


def settle_meaning(
    source: PeerSource, claims: Claims, target: EngineTarget, matcher: Matcher, note: Callable[[str], None]
) -> DumpMeaning:
    """Read the first samples of a dump, settle layers and norm, and probe what they mean.

    Raises:
        ConfigError: ``input-empty``, ``nothing-usable``, and as ``choose_columns`` and ``settle_norm``.
        FormatError: the dump is of another target (``target-mismatch``) or does not mean what its
            format says (``dump-norm``, ``dump-shift``).
    """
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
    stated = source.stated.layers or _exported_layers(source, target)
    columns = choose_columns(source, claims, stated, peers[0].column_width // head.hidden_size, num_layers)
    probed = [_probed(sample, peer, columns, head.hidden_size) for sample, peer in zip(samples, peers, strict=True)]
    finals = [one.final for one in probed if one.final is not None]
    share = normed_share(head, torch.cat(finals)) if finals else None
    norm = settle_norm(source, claims.norm, {peer.final_norm for peer in peers}, share)
    final = f"final hidden: every token, {norm.replace('_', '-')}" if source.final else "no final hidden in this format"
    explained = f"{columns.explained(source, num_layers)}; {final}"
    note(explained)
    evidence = check_meaning(head, norm, probed, columns)
    evidence.normed_share = None if share is None else round(share, 4)
    for line in evidence.notes:
        note(line)
    return DumpMeaning(matcher, locations, columns, norm, evidence, explained, probed)


def _exported_layers(source: PeerSource, target: EngineTarget) -> tuple[int, ...] | None:
    """What our own export left beside the peer's files: its layers, in the peer's numbering."""
    path = source.folder / ABOUT_FILE
    if not path.is_file():
        return None
    about = read_manifest(path)
    layers, origin = about.get("aux_hidden_state_layer_ids"), about.get("target")
    if about.get("layout", "speculators") != source.name or not isinstance(layers, list):
        return None
    weights = origin.get("weights_sha256") if isinstance(origin, dict) else None
    if weights not in (None, target.identity.weights_sha256):
        raise FormatError(
            f"{path} names a target whose embeddings, norm and LM head have sha256 {str(weights)[:8]}…, target "
            f"{target.folder.label} has {target.identity.weights_sha256[:8]}…",
            kind=Kind.TARGET_MISMATCH,
        )
    return tuple(int(layer) for layer in layers)


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


def _probed(sample: Sample, peer: PeerSample, columns: Columns, width: int) -> Probed:
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
    return Probed(sample, aux, final)
