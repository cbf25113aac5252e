"""speculators 0.9 trains from a store: the backend ``hiddenstore`` of its ``HiddenStatesBackend``.

``hiddenstore export-data STORE --to speculators-store -o ROWS`` writes tokens and masks (a few bytes a token), then

    python -m hiddenstore.dumps.speculators_backend --hidden-states-backend hiddenstore --store STORE \\
        --data-path ROWS --target-layer-ids … --on-missing raise --verifier-name-or-path TARGET

(or ``torchrun … -m`` the same) is ``speculators train`` with the states read, checked and decoded from STORE.
speculators finds backends by import alone and reads their flags when its own command line is imported, so ``register``
has to come first. ``hs_connectors`` comes with speculators.
"""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from torch import Tensor

from hiddenstore.dumps.common import SAMPLES_FILE, MissingFinal, PeerSamples
from hiddenstore.dumps.speculators import STORE_LAYOUT, peer_tensors
from hiddenstore.errors import ConfigError, HiddenstoreError, Kind, NotFoundError
from hiddenstore.store import Store
from schemas.layers import from_convention

try:
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
except ModuleNotFoundError as error:
    absent = ConfigError(
        "speculators is not in this environment", kind=Kind.NOT_INSTALLED, hint="pip install 'speculators>=0.9'"
    )
    if __name__ == "__main__":
        sys.exit(f"error: {absent}\n  try: {absent.hint}")
    raise absent from error


class StoreTransfer(HiddenStatesTransfer):
    """Reads what a store holds of each row of ``sample_ids``. Opened in the process that reads: loaders spawn workers.

    ``layers`` are in our numbers; the store has them, and final hiddens before the norm, or reading raises.
    """

    def __init__(self, store: str, sample_ids: list[str], layers: list[int], missing_final: MissingFinal) -> None:
        self._store, self._ids, self._layers, self._missing_final = store, sample_ids, layers, missing_final
        self._samples: PeerSamples | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_samples": None}

    def open(self) -> PeerSamples:
        """The samples as speculators reads them; raises as ``hiddenstore.dumps.common.export_samples``."""
        if self._samples is None:
            store = Store.open(self._store)
            self._samples = PeerSamples(store, STORE_LAYOUT, self._layers, self._missing_final)
        return self._samples

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        """``hidden_states`` bf16 [T, L+1, D], aux layers ascending, then the final hidden; ``token_ids`` int64 [T]."""
        return peer_tensors(self.open().read(self._ids[file_idx])[0])

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """A store holds every row of its export, so a server is never asked."""
        problem = f"the hiddenstore backend reads a store and takes nothing from a server: {sorted(hs_transfer_params)}"
        raise ConfigError(problem, kind=Kind.USAGE, hint="--on-missing raise")


class StoreBackend(HiddenStatesBackend):
    """Flags and construction, as speculators asks a backend for them."""

    @staticmethod
    def add_train_args(parser: ArgumentParser) -> None:
        """``--store`` and ``--missing-final``."""
        parser.add_argument("--store", type=str, help="The hiddenstore that --data-path was exported from.")
        parser.add_argument(
            "--missing-final",
            type=str,
            choices=["refuse", "zeros"],
            default="refuse",
            help="Rows whose final hidden the store does not hold; its losses read supervised rows alone.",
        )

    @staticmethod
    def add_launch_args(parser: ArgumentParser) -> None:
        """None: ``hiddenstore collect --engine vllm`` writes stores."""

    @staticmethod
    def from_train_args(args: Namespace, data_path: str) -> StoreTransfer:
        """The transfer of parsed arguments, opened once here so that what is wrong is said before training."""
        rows = Path(data_path) / SAMPLES_FILE
        if not args.store or not rows.exists():
            export = ["hiddenstore", "export-data", str(args.store or "STORE")]
            raise NotFoundError(
                f"--store is {args.store!r} and {rows} {'exists' if rows.exists() else 'is missing'}",
                kind=Kind.PATH_MISSING,
                hint=shlex.join([*export, "--to", STORE_LAYOUT.name, "-o", str(data_path)]),
            )
        if not args.target_layer_ids:
            raise ConfigError(
                "the layers of a store are named, not guessed: --target-layer-ids is missing",
                kind=Kind.LAYERS_INVALID,
                hint=f"its list stands in {Path(data_path) / 'hiddenstore.json'}, aux_hidden_state_layer_ids",
            )
        sample_ids = pq.read_table(rows, columns=["sample_id"])["sample_id"].to_pylist()
        layers = from_convention(args.target_layer_ids, STORE_LAYOUT.numbering)
        if layers != sorted(layers):
            raise ConfigError(f"--target-layer-ids {args.target_layer_ids} must ascend", kind=Kind.LAYERS_INVALID)
        transfer = StoreTransfer(args.store, sample_ids, layers, args.missing_final or "refuse")
        transfer.open()
        return transfer

    @staticmethod
    def build_kv_transfer_config(args: Namespace) -> dict[str, Any]:
        """Refused: this backend serves training."""
        problem = "the hiddenstore backend reads states, it captures none"
        raise ConfigError(problem, kind=Kind.USAGE, hint="hiddenstore collect DATA -o STORE --target T --engine vllm")


def register() -> None:
    """Make the backend known, once, before ``speculators.train`` is imported."""
    if "hiddenstore" not in HiddenStatesBackend.registry:
        HiddenStatesBackend.register("hiddenstore")(StoreBackend)


def main() -> None:
    """``speculators train`` with its own arguments and the backend; our errors in one line."""
    register()
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    try:
        cli.main(TrainConfig.resolve(sys.argv[1:]))
    except HiddenstoreError as error:
        sys.exit(f"error: {error}" + (f"\n  try: {error.hint}" if error.hint else ""))


if __name__ == "__main__":
    # Under its own name: workers that a loader spawns find the class by its module.
    from hiddenstore.dumps.speculators_backend import main as start

    start()
