"""A published drafter as a run: a folder with one checkpoint at step 0 that eval, decode, export and train take."""

from dataclasses import dataclass
from pathlib import Path

import torch

from hiddenstore.data.batches import Cursor
from hiddenstore.data.order import Order
from hiddenstore.errors import ConflictError, Kind, NotFoundError
from hiddenstore.store import Store
from schemas.layers import LayerConvention
from trainer.drafters import check_store, drafter_kind
from trainer.export.published import read_published
from trainer.losses.teacher import TargetInterface
from trainer.settings import config_class, derived
from trainer.train import checkpoint
from trainer.train.run_folder import RUN_JSON, create, load_weights
from trainer.vocab import count_store, coverage


@dataclass(frozen=True)
class Imported:
    """What was made of it."""

    checkpoint: Path
    drafter: str
    aux_layers: tuple[int, ...]
    parameters: int
    vocab_size: int
    vocab_coverage: float


def import_drafter(
    folder: str | Path, run: str | Path, store_location: str | Path, convention: LayerConvention | None = None
) -> Imported:
    """Read ``folder`` for the target of a store and write it as the run folder ``run``.

    Raises:
        NotFoundError: no such folder or store.
        ConflictError: ``run`` holds a run already.
        ConfigError: not a drafter of this target, or the store lacks what it reads.
    """
    source, path = Path(folder), Path(run)
    if not source.is_dir():
        raise NotFoundError(f"{source} is no folder", kind=Kind.PATH_MISSING)
    if (path / RUN_JSON).exists() or checkpoint.latest(path) is not None:
        raise ConflictError(f"{path} holds a run already", kind=Kind.OUTPUT_EXISTS, hint="give another -o folder")
    store = Store.open(store_location)
    head, target = store.head(), store.capture.target
    found = read_published(source, head, target.num_layers, convention)
    name = found.config.name
    kind = drafter_kind(name)
    check_store(name, kind.needs(found.config, None), store.capture, store.path)
    interface = TargetInterface(head, found.vocab, store.capture.final_norm)
    model = kind.build(found.config, interface, 0)
    load_weights(model, found.weights, f"{source} is no {name} drafter of {target.name}")
    values = derived(store, name) | {"drafter": found.config.model_dump(mode="json")}
    config = config_class(name).model_validate(values)
    covered = coverage(found.vocab, count_store(store, head.vocab_size))
    create(path, store, config, found.vocab, covered, imported_from=str(source.resolve()))
    train_ids = [entry.id for _, entry in store.entries if entry.split == "train"]
    spec = checkpoint.DrafterSpec(
        config=found.config.model_dump(mode="json"),
        target=target,
        head=store.manifest.head,
        store=str(Path(store.path).resolve()),
        seed=config.train.seed,
        step=0,
    )
    cursor = Cursor(config.data.seed, 0, 0, Order(train_ids).digest)
    state = checkpoint.CheckpointState(step=0, cursor=cursor.to_json(), total_steps=0, files={})
    torch.manual_seed(config.train.seed)
    at = checkpoint.save(path, spec, state, (dict(model.state_dict()), checkpoint.rng_tensors()))
    parameters = sum(tensor.numel() for tensor in model.state_dict().values())
    return Imported(at, name, found.config.aux_layers, parameters, found.vocab.size, covered)
