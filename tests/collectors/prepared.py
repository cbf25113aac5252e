"""Prepared DATA folders that fit a tiny target."""

from collections.abc import Sequence
from pathlib import Path

from hiddenstore.files import layout
from hiddenstore.files.documents import seal, unseal
from hiddenstore.records import Sample
from hiddenstore.store import Store
from hiddenstore.targets.identity import chat_template_sha256, tokenizer_sha256
from hiddenstore.testing.builders import make_data
from schemas.prepared import PreparedData
from tests.collectors.tiny import TEMPLATE, VOCAB, tiny_tokenizer


def data_for_tiny(folder: Path, *, samples: int | Sequence[Sample] = 12, seed: int = 0, **change: object) -> Path:
    """These or so many random conversations under the digests of ``tiny_tokenizer``; ``change``: other of data.json."""
    make_data(folder, samples=samples, seed=seed)
    path = folder / layout.DATA_JSON
    info = unseal(path.read_bytes(), PreparedData, str(path))
    own: dict[str, object] = {
        "tokenizer_sha256": tokenizer_sha256(tiny_tokenizer()),
        "chat_template_sha256": chat_template_sha256(TEMPLATE),
        "vocab_size": VOCAB,
    }
    path.write_bytes(seal(info.model_copy(update=own | change)))
    return folder


def segment_bytes(store: str | Path) -> dict[str, bytes]:
    """Every committed file of a store by unit and name, without the random part of a segment's name."""
    opened = Store.open(store)
    return {
        f"{record.unit}/{file.path}": (Path(store) / record.segment / file.path).read_bytes()
        for record in opened.commits()
        for file in record.files
    }
