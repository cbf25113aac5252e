"""Where a copy gets the decoder blocks that rebuild its states."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hiddenstore.codecs.recipes import get_recipe
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks, block_files, recoded
from hiddenstore.targets.calibration import read_slice
from hiddenstore.targets.folder import CONFIG_FILE, open_target
from hiddenstore.targets.identity import target_argument
from hiddenstore.targets.rebuild import Rebuilder
from hiddenstore.targets.tensors import checkpoint_sha256
from schemas.capture import REBUILT, CaptureSpec, TargetIdentity

_COMPARED = ("model_type", "num_layers", "config_sha256", "checkpoint_sha256")


def bundled_blocks(stores: Sequence[Store], capture: CaptureSpec, target: str | None) -> dict[str, bytes]:
    """``blocks.safetensors`` for a copy: of the first store that keeps the same, else of the checkpoint ``target``.

    Raises:
        ConfigError: ``blocks-unsupported``: no store keeps them and no target is named; or as ``block_files``.
            ``calibration-missing``: nothing shows that it is the store's target.
        FormatError: ``target-mismatch``.
        CaptureError: ``cross-check``: its blocks do not bring back what was captured.
    """
    if not capture.blocks:
        return {}
    for store in stores:
        if store.capture.blocks == capture.blocks:
            return {BLOCKS_FILE: store.target_file(BLOCKS_FILE)}
    identity = capture.target
    if target is None:
        raise ConfigError(
            f"{stores[0].path} does not keep the blocks of its target that rebuild states",
            kind=Kind.BLOCKS_UNSUPPORTED,
            hint=_way_out(identity),
        )
    folder = open_target(target)
    found = folder.identity(identity.hidden_size, identity.vocab_size, checkpoint_sha256=checkpoint_sha256(folder))
    for field in _COMPARED:
        expected, actual = getattr(identity, field), getattr(found, field)
        if expected != actual and None not in (expected, actual):
            raise FormatError(
                f"target {folder.label} is not the one of {stores[0].path}: {field} is {actual}, expected {expected}",
                kind=Kind.TARGET_MISMATCH,
                hint=_way_out(identity),
            )
    files = block_files(folder, capture.blocks, identity.dtype)
    rebuilder = _rebuilder(stores[0], capture, files)
    for store in stores:
        states = read_slice(store.fs, store.capture)
        if states is None or any(entry.id not in store for entry in states.samples):
            continue
        if not set(capture.aux_layers) <= set(store.capture.aux_layers):
            continue
        kept = [store.capture.aux_layers.index(layer) for layer in capture.aux_layers]
        states = replace(states, aux=states.aux[kept])
        if rebuilder.require_close(states, [store.sample(entry.id) for entry in states.samples]):
            return files
    if None in (identity.checkpoint_sha256, found.checkpoint_sha256):
        raise ConfigError(
            f"nothing shows that {folder.label} is the target of {stores[0].path}: it has no digest of the checkpoint "
            "and no slice of captured states",
            kind=Kind.CALIBRATION_MISSING,
            hint="--recipe compact, which needs no blocks",
        )
    return files


def rebuilder_for(store: Store, target: str | None) -> Rebuilder | None:
    """What would rebuild the states of a copy of ``store`` in the recipe ``rebuilt``; raises as ``bundled_blocks``.

    None where neither it nor ``target`` has the blocks.
    """
    capture = store.capture
    if target is None and not capture.states:
        return None
    rebuilt = recoded(capture, get_recipe(REBUILT))
    return _rebuilder(store, rebuilt, bundled_blocks([store], rebuilt, target))


def _way_out(identity: TargetIdentity) -> str:
    checkpoint = f"--target {target_argument(identity)}, the checkpoint it was captured from"
    return f"--recipe compact, if an adapter was merged; else {checkpoint}" if "+" in identity.name else checkpoint


def _rebuilder(store: Store, capture: CaptureSpec, files: Mapping[str, bytes]) -> Rebuilder:
    blocks = TargetBlocks.from_bytes(store.target_file(CONFIG_FILE), files.get(BLOCKS_FILE))
    return Rebuilder(capture, store.head(), blocks)
