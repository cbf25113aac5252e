"""Where a copy gets the decoder blocks that rebuild its states."""

from collections.abc import Sequence

from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.blocks import BLOCKS_FILE, block_files
from hiddenstore.targets.folder import open_target
from hiddenstore.targets.identity import target_argument
from hiddenstore.targets.tensors import checkpoint_sha256
from schemas.capture import CaptureSpec

_COMPARED = ("model_type", "num_layers", "config_sha256", "checkpoint_sha256")


def bundled_blocks(stores: Sequence[Store], capture: CaptureSpec, target: str | None) -> dict[str, bytes]:
    """``blocks.safetensors`` for a copy: of the first store that keeps the same, else of the checkpoint ``target``.

    Raises:
        ConfigError: ``blocks-unsupported``: no store keeps them and no target is named; or as ``block_files``.
        FormatError: ``target-mismatch``.
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
            hint=f"--target {target_argument(identity)}, the checkpoint it was captured from",
        )
    folder = open_target(target)
    found = folder.identity(identity.hidden_size, identity.vocab_size, checkpoint_sha256=checkpoint_sha256(folder))
    for field in _COMPARED:
        expected, actual = getattr(identity, field), getattr(found, field)
        if expected != actual and None not in (expected, actual):
            raise FormatError(
                f"target {folder.label} is not the one of {stores[0].path}: {field} is {actual}, expected {expected}",
                kind=Kind.TARGET_MISMATCH,
                hint=f"--target {target_argument(identity)}, the checkpoint it was captured from",
            )
    return block_files(folder, capture.blocks, identity.dtype)
