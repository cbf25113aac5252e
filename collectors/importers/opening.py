"""What is settled before an import writes anything: layers, norm, masks, and that the dump is this target's.

Shapes: T tokens, L aux layers, D target width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from collectors.importers import PeerFormat
from collectors.importers.automodel import read_manifest
from collectors.importers.columns import Columns, LayersAsked, choose_columns
from collectors.importers.layer_check import check_layers
from collectors.importers.matching import ExportedSamples, Matcher, PreparedTokens, rows_of
from collectors.importers.peer import PeerSample, PeerSource, Unusable
from collectors.importers.probe import (
    SAMPLES,
    TRIES,
    Evidence,
    Probed,
    check_meaning,
    normed_share,
    nothing_usable,
    require_fit,
    settle_norm,
    wrong_width,
)
from collectors.job_open import require_data_fits
from collectors.reference import open_reference, parse_check
from collectors.target import EngineTarget, LoadedTarget, LoadOptions
from hiddenstore.codecs import DEFAULT_RECIPE, get_recipe
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.inputs import PreparedInput
from hiddenstore.interop.common import ABOUT_FILE
from hiddenstore.rank import Rank
from hiddenstore.records import Sample
from schemas.capture import CaptureSpec, NormState
from schemas.manifest import Container

MAX_REJECTS = 0.001


@dataclass(frozen=True)
class ImportOptions:
    """What a person asks of ``hiddenstore import``.

    ``layers`` and ``peer_layers`` name the dump's columns, in our numbers or the peer's. ``tokens_from`` is prepared
    DATA of the same conversations; ``loss_on`` ``all`` supervises every token of a dump without masks. ``check`` as in
    ``collectors.reference``: whether the layers are held against Hugging Face's.
    """

    source: str | Path
    peer: str
    store: str | Path
    target: str
    revision: str | None = None
    template: str | None = None
    layers: str | None = None
    peer_layers: str | None = None
    norm: NormState | None = None
    recipe: str = DEFAULT_RECIPE
    container: Container = "zarr"
    tokens_from: str | Path | None = None
    loss_on: str | None = None
    validation: float = 0.01
    max_rejects: float = MAX_REJECTS
    check: str = "auto"
    delete_source: bool = False


@dataclass(frozen=True, eq=False)
class OpenedDump:
    """A dump whose meaning is settled. ``reference``: the target as Hugging Face runs it, None where not loaded."""

    peer: PeerFormat
    source: PeerSource
    places: Sequence[str]
    matcher: Matcher
    columns: Columns
    capture: CaptureSpec
    evidence: Evidence
    explained: str
    reference: LoadedTarget | None


def open_dump(
    options: ImportOptions, peer: PeerFormat, target: EngineTarget, source: PeerSource, note: Callable[[str], None]
) -> OpenedDump:
    """Read the first samples, settle layers and norm, and probe what they mean.

    Raises:
        ConfigError: ``source-empty``, ``nothing-usable``, and as ``choose_columns`` and ``settle_norm``.
        FormatError: the dump is of another target (``target-width``, ``target-vocabulary``, ``layer-mismatch``) or does
            not mean what its format says (``norm-contradicted``, ``row-shift``).
    """
    head, num_layers = target.head, target.folder.num_layers
    checked = parse_check(options.check)
    _require_stated(source, target)
    places = source.places()
    # What an earlier run imported and deleted is still listed by formats with an index.
    present = [place for place in places if source.file_of(place).is_file()]
    if not present:
        raise ConfigError(
            f"{options.source} holds no {peer.name} samples"
            + (", its index lists some that are gone" if places else ""),
            kind="source-empty",
            hint="name the folder that the peer's own command wrote",
        )
    matcher = _matcher(options, target)
    samples, peers = _first(source, present, matcher, target)
    require_fit(head, peers)
    stated = source.stated.layers or _exported_layers(options, peer, target)
    asked = LayersAsked(options.layers, options.peer_layers)
    columns = choose_columns(peer, asked, stated, peers[0].column_width // head.hidden_size, num_layers)
    probed = [_probed(sample, one, columns, head.hidden_size) for sample, one in zip(samples, peers, strict=True)]
    finals = [one.final for one in probed if one.final is not None]
    share = normed_share(head, torch.cat(finals)) if finals else None
    norm = settle_norm(peer, options.norm, {one.final_norm for one in peers}, share)
    held = f"final hidden: every token, {norm.replace('_', '-')}" if peer.final else "no final hidden in this format"
    explained = f"{columns.explained(peer, num_layers)}; {held}"
    note(explained)
    evidence = check_meaning(head, norm, probed, columns)
    evidence.normed_share = None if share is None else round(share, 4)
    for line in evidence.notes:
        note(line)
    reference = open_reference(checked, target, LoadOptions(None, "auto"), Rank())
    if reference.target is not None:
        count = check_layers(reference.target, probed, columns, norm)
        note(f"{count} samples recomputed with Hugging Face: every column is the layer it is named")
    elif reference.explained is not None:
        note(reference.explained)
    capture = CaptureSpec(
        target=target.identity,
        aux_layers=columns.aux_layers,
        final="all" if peer.final else "none",
        final_norm=norm,
        codecs=get_recipe(options.recipe),
    )
    return OpenedDump(peer, source, places, matcher, columns, capture, evidence, explained, reference.target)


def states_of_sample(sample: Sample, peer: PeerSample, columns: Columns, aux: Tensor) -> Tensor | None:
    """A sample's own rows: columns into ``aux`` bf16 [L, T, D]; the final hidden [T, D] comes back in bf16.

    Raises:
        Unusable: ``changed``, ``layers-differ``, ``wrong-width``.
    """
    rows = rows_of(peer, sample)
    held = None if peer.columns is None else peer.columns[rows]
    final = None if peer.final is None else peer.final[rows]
    columns.take(held, final, aux)
    return None if final is None else final.to(torch.bfloat16)


def _require_stated(source: PeerSource, target: EngineTarget) -> None:
    stated, head = source.stated, target.head
    if stated.width not in (None, head.hidden_size):
        raise wrong_width(f"{stated.width} wide", head)
    if stated.vocab_size is not None and stated.vocab_size > head.vocab_size:
        raise FormatError(
            f"the dump is of a target with {stated.vocab_size} tokens, this one has {head.vocab_size}",
            kind="target-vocabulary",
        )


def _exported_layers(options: ImportOptions, peer: PeerFormat, target: EngineTarget) -> tuple[int, ...] | None:
    """What our own export left beside the peer's files: its layers, in the peer's numbering."""
    path = Path(options.source) / ABOUT_FILE
    if not path.is_file():
        return None
    about = read_manifest(path)
    layers, made_with = about.get("aux_hidden_state_layer_ids"), about.get("target")
    if about.get("layout", "speculators") != peer.name or not isinstance(layers, list):
        return None
    found = made_with.get("weights_sha256") if isinstance(made_with, dict) else None
    if found not in (None, target.identity.weights_sha256):
        raise FormatError(
            f"{path} names a target whose embeddings, norm and LM head have sha256 {str(found)[:8]}…, target "
            f"{target.folder.label} has {target.identity.weights_sha256[:8]}…",
            kind="target-mismatch",
        )
    return tuple(int(layer) for layer in layers)


def _matcher(options: ImportOptions, target: EngineTarget) -> Matcher:
    if options.tokens_from is not None and options.loss_on is not None:
        raise ConfigError("masks come from --tokens-from or from --loss-on all, not both", kind="option-invalid")
    prepared = None
    if options.tokens_from is not None:
        data = PreparedInput.open(options.tokens_from)
        require_data_fits(data.info, target.folder)
        prepared = PreparedTokens(data)
    exported = ExportedSamples(Path(options.source))
    return Matcher(prepared, exported, options.loss_on == "all", options.validation)


def _first(
    source: PeerSource, places: Sequence[str], matcher: Matcher, target: EngineTarget
) -> tuple[list[Sample], list[PeerSample]]:
    """The first samples that can be used, cut to their own rows."""
    samples, peers, refused = [], [], []
    for place in places[:TRIES]:
        try:
            peer = source.read(place, states=True)
            sample = matcher.sample(peer, place)
            if sample.tokens:
                samples.append(sample)
                peers.append(peer)
        except Unusable as unusable:
            refused.append(unusable)
        if len(samples) == SAMPLES:
            break
    if not samples:
        raise nothing_usable(refused or [Unusable("empty", "padding only")], len(places), target.head)
    return samples, peers


def _probed(sample: Sample, peer: PeerSample, columns: Columns, width: int) -> Probed:
    """Raises ConfigError ``layers-differ`` where a column is not what it should repeat: the layers are misnamed."""
    aux = torch.empty((len(columns.aux_layers), sample.tokens, width), dtype=torch.bfloat16)
    try:
        final = states_of_sample(sample, peer, columns, aux)
    except Unusable as unusable:
        raise ConfigError(
            f"{sample.source}: {unusable.detail}",
            kind=unusable.reason,
            hint="name the layers the dump was made with: --layers or --peer-layers",
        ) from unusable
    return Probed(sample, aux, final)
