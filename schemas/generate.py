"""Write the JSON Schema of every stored document to ``schemas/json``: ``python -m schemas.generate``."""

import json
from pathlib import Path

from schemas.advice import Advice, CalibrationSlice
from schemas.base import Document
from schemas.manifest import CommitRecord, IndexHeader, Snapshot, StoreManifest
from schemas.prepared import PreparedData

FOLDER = Path(__file__).parent / "json"
DOCUMENTS: dict[str, type[Document]] = {
    "store": StoreManifest,
    "commit": CommitRecord,
    "snapshot": Snapshot,
    "index": IndexHeader,
    "data": PreparedData,
    "slice": CalibrationSlice,
    "advice": Advice,
}


def schema_text(name: str) -> str:
    """The JSON Schema of one document as it is checked in; every stored document also carries its seal, ``sha256``."""
    schema = DOCUMENTS[name].model_json_schema()
    schema["properties"]["sha256"] = {"type": "string", "description": "seal over the canonical bytes of the rest"}
    schema["required"] = [*schema["required"], "sha256"]
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Regenerate every schema file."""
    for name in DOCUMENTS:
        (FOLDER / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
