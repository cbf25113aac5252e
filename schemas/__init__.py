"""What is true of a hiddenstore store: documents, fields and layer numbers. No I/O."""

from schemas.base import FORMAT_VERSION, Document
from schemas.capture import FINAL, CaptureSpec, Codecs, HeadSpec, TargetIdentity
from schemas.layers import default_aux_layers, field_name, from_convention, to_convention
from schemas.manifest import (
    CommitRecord,
    Engine,
    FileEntry,
    LayerStats,
    Reject,
    SampleEntry,
    Snapshot,
    SnapshotEntry,
    StoreManifest,
)

__all__ = [
    "FINAL",
    "FORMAT_VERSION",
    "CaptureSpec",
    "Codecs",
    "CommitRecord",
    "Document",
    "Engine",
    "FileEntry",
    "HeadSpec",
    "LayerStats",
    "Reject",
    "SampleEntry",
    "Snapshot",
    "SnapshotEntry",
    "StoreManifest",
    "TargetIdentity",
    "default_aux_layers",
    "field_name",
    "from_convention",
    "to_convention",
]
