"""The errors, grouped by what the reader of the message does next, and their kinds.

Each carries a stable kebab-case ``kind`` for scripts, an optional ``hint`` (the command that fixes it) and the exit
code of the command line.
"""

import copyreg
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Self


class HiddenstoreError(Exception):
    """Base of every error a user can cause or meet. ``message`` says what, where, expected and found. Raises TypeError:
    ``kind`` belongs to another class of error."""

    exit_code = 1

    def __init__(self, message: str, *, kind: "Kind", hint: str | None = None) -> None:
        super().__init__(message)
        if not isinstance(self, kind.error):
            raise TypeError(f"an error of kind {kind} is a {kind.error.__name__}, not a {type(self).__name__}")
        self.message = message
        self.kind = kind
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Whole in another process: an exception's own pickling would call the class without its keywords."""
        return copyreg.__newobj__, (type(self), self.message), vars(self)  # type: ignore[attr-defined]


class ConfigError(HiddenstoreError, ValueError):
    """What was asked for cannot be: wrong option, bad input file, unknown setting.

    ``problems``: where there are several, each in a line of its own.
    """

    exit_code = 2

    def __init__(self, message: str, *, kind: "Kind", hint: str | None = None, problems: Sequence[str] = ()) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.problems = tuple(problems) or (message,)


class NotFoundError(HiddenstoreError, KeyError):
    """A file, store, sample or command that does not exist."""

    exit_code = 2


class FormatError(HiddenstoreError):
    """A document or store that this version cannot read, or a target that does not fit."""

    exit_code = 4


class CorruptionError(HiddenstoreError):
    """Bytes disagree with their digest, or a named file is missing or has another size.

    ``samples`` names the sample ids that cannot be read because of it.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, kind: "Kind", hint: str | None = None, path: str = "", samples: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.path = path
        self.samples = samples


class ConflictError(HiddenstoreError):
    """Something is there already and disagrees."""

    exit_code = 6


class StorageError(HiddenstoreError, OSError):
    """The disk, network or permissions refused."""

    exit_code = 5


class CaptureError(HiddenstoreError):
    """The target or its engine misbehaved: too many rejects, wrong tokens, non-finite states."""

    exit_code = 4


class InterruptError(HiddenstoreError):
    """A signal asked to stop; what is committed stays and the same command resumes."""

    exit_code = 75


class Kind(StrEnum):
    """What went wrong, for scripts: the word in brackets behind an error, and ``error.kind`` of ``--json``.

    ``error`` is the class that it is raised as, which gives its exit code; ``meaning`` is one sentence.
    """

    error: type[HiddenstoreError]
    meaning: str

    def __new__(cls, word: str, error: type[HiddenstoreError], meaning: str) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.error = error
        member.meaning = meaning
        return member

    USAGE = "usage", ConfigError, "The command line has no such command, option or argument."
    OPTION_INVALID = "option-invalid", ConfigError, "An option or setting has a value that cannot be."
    NAME_UNKNOWN = "name-unknown", ConfigError, "No codec, engine, drafter, data set or preset has that name."
    PATH_MISSING = "path-missing", NotFoundError, "A file or folder that was named does not exist."
    CONFIG_INVALID = "config-invalid", ConfigError, "A setting has a value of the wrong type or out of range."
    CONFIG_UNKNOWN_KEY = "config-unknown-key", ConfigError, "A setting does not exist; the nearest name is printed."
    CONFIG_UNREADABLE = "config-unreadable", ConfigError, "A settings file is not the YAML or JSON that its name says."
    NOT_INSTALLED = "not-installed", ConfigError, "A program or package that this command needs is not installed."
    PACKAGES_SCATTERED = "packages-scattered", StorageError, "Files of another distribution lie where ours should be."
    PLUGIN_BROKEN = "plugin-broken", ConfigError, "An entry point cannot be loaded or lacks a fact its table wants."
    PLUGIN_MISSING = "plugin-missing", FormatError, "The store needs another package's codec or container."
    DEVICE_UNAVAILABLE = "device-unavailable", ConfigError, "The device that was named is not on this machine."
    ENGINE_VERSION = "engine-version", ConfigError, "The installed engine is a release that is not driven."
    OUT_OF_MEMORY = "out-of-memory", StorageError, "Memory of the machine or the GPU is used up."
    TOO_MANY_THREADS = "too-many-threads", StorageError, "The system starts no more threads for this user or container."
    DISK_FULL = "disk-full", StorageError, "A disk, quota or memory file system is full."
    INODES_USED_UP = "inodes-used-up", StorageError, "The disk has room for bytes and for no further file."
    PERMISSION_DENIED = (
        "permission-denied",
        StorageError,
        "The operating system or the server does not allow it.",
    )
    IO_ERROR = "io-error", StorageError, "Disk or network refused a read or write; the bytes may be sound."
    TOO_MANY_OPEN_FILES = "too-many-open-files", StorageError, "The process may open no more files."
    INTERRUPTED = "interrupted", InterruptError, "A signal stopped the command; the same command goes on."
    INTERNAL = "internal", HiddenstoreError, "A bug: a log file holds the traceback."
    ANOTHER_RANK = "another-rank", HiddenstoreError, "This rank stopped because another one failed; that one says why."
    RANK_INVALID = (
        "rank-invalid",
        ConfigError,
        "RANK, WORLD_SIZE or LOCAL_RANK is missing or contradicts the others, or srun started no task.",
    )
    RANK_LOST = "rank-lost", StorageError, "A rank ended or did not answer in time."
    RANK_RENDEZVOUS = "rank-rendezvous", ConfigError, "The ranks did not meet at MASTER_ADDR and MASTER_PORT."
    RANKS_FAILED = "ranks-failed", CaptureError, "One or more processes of this command failed."
    WORKER_DIED = "worker-died", StorageError, "A worker process was killed from outside, mostly for its memory."
    OUTPUT_EXISTS = "output-exists", ConflictError, "What would be written is there already."
    ABSENCE_UNKNOWN = "absence-unknown", StorageError, "Whether a file is gone or only out of reach cannot be told."
    REPLY_LOST = "reply-lost", StorageError, "Whether a file was written is not known: the answer was lost."
    FILE_EXISTS = "file-exists", ConflictError, "A file of that name was written by somebody else first."
    NO_HARD_LINKS = "no-hard-links", StorageError, "The file system has no hard links, which commits need."
    NO_ATOMIC_PUT = "no-atomic-put", StorageError, "The object storage lacks conditional puts, which commits need."
    PATH_INVALID = "path-invalid", StorageError, "The operating system takes no such path."
    PATH_UNSAFE = "path-unsafe", ConfigError, "A name leads out of its folder, or holds `:` or a backslash."
    NAME_INVALID = "name-invalid", ConfigError, "A name has characters that names in a store cannot have."
    ADDRESS_INVALID = "address-invalid", ConfigError, "An address has a user, a password or a query, or no bucket."
    SCHEME_UNSUPPORTED = "scheme-unsupported", ConfigError, "An address of a kind that this version cannot open."
    STORE_MISSING = "store-missing", NotFoundError, "There is no store at that path."
    STORE_INVALID = "store-invalid", CorruptionError, "store.json is damaged."
    STORE_EMPTY = "store-empty", ConfigError, "The store holds no sample yet."
    STORE_MISMATCH = "store-mismatch", ConflictError, "The store was begun with another target, layers or codecs."
    STORE_READ_ONLY = "store-read-only", StorageError, "The store cannot be written, and the command writes into it."
    STORE_REMOTE = "store-remote", ConfigError, "Software that opens local files cannot open a store that is elsewhere."
    STORE_NOT_SHARED = "store-not-shared", ConfigError, "The machines of the cluster do not see one store folder."
    CODEC_UNFIT = "codec-unfit", ConfigError, "A codec that is fitted to states is not, or does not go with them."
    STORE_LACKS_STATES = "store-lacks-states", ConfigError, "The store does not hold what that drafter reads."
    CONTAINER_MISMATCH = "container-mismatch", ConfigError, "The store has another container than was asked of it."
    DOCUMENT_INVALID = "document-invalid", FormatError, "A document of the store breaks its schema."
    DOCUMENT_CORRUPT = "document-corrupt", CorruptionError, "A document is not what its digest says, or another one."
    DOCUMENT_UNWRITABLE = "document-unwritable", ConfigError, "A value that a document of the store cannot hold."
    FORMAT_FUTURE = "format-future", FormatError, "A later version wrote this; this one cannot read it."
    COMMIT_INVALID = "commit-invalid", CorruptionError, "A commit record cannot be read."
    COMMIT_MISSING = "commit-missing", CorruptionError, "A commit record that a snapshot or index names is not there."
    INDEX_CORRUPT = "index-corrupt", CorruptionError, "An index file is damaged; what it covers is read without it."
    INDEX_STALE = "index-stale", CorruptionError, "An index file says other than the commit records it covers."
    SNAPSHOT_MISSING = "snapshot-missing", NotFoundError, "There is no snapshot of that name."
    SNAPSHOT_CORRUPT = "snapshot-corrupt", CorruptionError, "A snapshot is damaged."
    SNAPSHOT_MISMATCH = "snapshot-mismatch", CorruptionError, "A snapshot names a commit record of other bytes."
    LOSS_NOT_ACCEPTED = "loss-not-accepted", ConfigError, "A repair would drop over 1 % of the samples, or some unseen."
    SAMPLE_MISSING = "sample-missing", NotFoundError, "There is no sample of that id."
    SAMPLE_AMBIGUOUS = "sample-ambiguous", ConfigError, "Several samples' ids begin like that."
    RECORD_INVALID = "record-invalid", ConfigError, "A record to be written is not what capture or format allow."
    SAMPLE_SHAPE = "sample-shape", CorruptionError, "A sample has another number of rows than its record says."
    SAMPLE_TOO_LONG = "sample-too-long", ConfigError, "A sample is longer than a pack."
    TOO_MANY_REJECTS = "too-many-rejects", CaptureError, "Too many samples were rejected while collecting."
    UNIT_MISSING = "unit-missing", NotFoundError, "There is no unit of that name."
    SELECTION_EMPTY = "selection-empty", ConfigError, "No sample of the store is among those selected."
    SPLIT_EMPTY = "split-empty", ConfigError, "The split, or this rank's share of it, holds no sample."
    LAYER_MISSING = "layer-missing", ConfigError, "A layer was asked for that the store, target or dump does not have."
    LAYERS_INVALID = "layers-invalid", ConfigError, "Layers are empty, out of order, doubled or beyond the target."
    LAYERS_DIFFER = "layers-differ", FormatError, "The layers are not the ones that were named for them."
    AUX_MISSING = "aux-missing", FormatError, "Nothing but the final hidden is stored; that layout needs aux layers."
    FINAL_MISSING = "final-missing", FormatError, "The final hidden is not stored, or not at every row that is read."
    FINAL_UNFIT = "final-unfit", ConfigError, "The final hidden as stored is not what its readers need."
    FINAL_NORM = "final-norm", FormatError, "The final hidden is on the other side of the norm."
    MEMBER_TOO_LARGE = "member-too-large", ConfigError, "An array is larger than a member of a tar file can be."
    ARRAY_INVALID = "array-invalid", FormatError, "An array is whole and not the one that the store describes."
    ARRAY_CORRUPT = "array-corrupt", CorruptionError, "A small array does not have its checksum."
    TOKEN_RANGE = "token-range", FormatError, "A stored token id is beyond the vocabulary of the target."
    CHUNK_CORRUPT = "chunk-corrupt", CorruptionError, "A chunk does not have its checksum: one sample is lost."
    SHARD_INDEX = "shard-index", CorruptionError, "The index at the end of a shard is damaged: the unit is lost."
    FILE_MISSING = "file-missing", CorruptionError, "A file that a record names is not there."
    FILE_SIZE = "file-size", CorruptionError, "A file has another length than its record says."
    FILE_SHORT = "file-short", CorruptionError, "A file ends before the bytes that its record names."
    FILE_CORRUPT = "file-corrupt", CorruptionError, "A file does not have the digest that was written with it."
    FILE_UNNAMED = "file-unnamed", CorruptionError, "A file that no record names was asked for."
    INPUT_UNITS_DIFFER = "input-units-differ", ConflictError, "The same DATA was cut into other units before."
    INPUT_EMPTY = "input-empty", ConfigError, "An input holds no row."
    INPUT_UNREADABLE = "input-unreadable", ConfigError, "An input is not of a kind that is read, or is broken."
    INPUT_COLUMNS = "input-columns", ConfigError, "The rows of an input lack the columns that are read."
    NOTHING_ANSWERED = "nothing-answered", CaptureError, "No conversation was answered."
    NOTHING_USABLE = "nothing-usable", ConfigError, "Every row was rejected; nothing was written."
    DATASET_SPEC = "dataset-spec", ConfigError, "Expected NAME, NAME:SPLIT, NAME[CONFIG]:SPLIT or FILE:train[:1000]."
    DATASET_SPLIT = "dataset-split", ConfigError, "The data set does not have that split, or has several."
    DATASET_UNREACHABLE = "dataset-unreachable", StorageError, "The data set is neither here nor in reach."
    DATASET_PROMPTS_ONLY = "dataset-prompts-only", ConfigError, "The data set has questions without answers."
    MIX_TOO_LARGE = "mix-too-large", ConfigError, "A mix asks for more rows than its inputs have."
    TEMPLATE_INVALID = "template-invalid", ConfigError, "The chat template cannot be rendered."
    TEMPLATE_MISSING = "template-missing", ConfigError, "The target's tokenizer has no chat template."
    TEMPLATE_ENDLESS = "template-endless", FormatError, "The chat template does not end."
    TEMPLATE_UNSTABLE = "template-unstable", ConfigError, "The chat template rewrites earlier turns or answers."
    MASK_EMPTY = "mask-empty", ConfigError, "No token of an answer would be taught."
    TOKENIZER_MISMATCH = "tokenizer-mismatch", FormatError, "Tokens and target are of different tokenizers."
    TARGET_MISSING = "target-missing", NotFoundError, "There is no target of that name."
    TARGET_INCOMPLETE = "target-incomplete", ConfigError, "The target lacks its config, tokenizer or safetensors."
    TARGET_UNREADABLE = "target-unreadable", ConfigError, "A file of the target cannot be read."
    TARGET_DAMAGED = "target-damaged", ConfigError, "A file of the target's weights is not whole, or is another thing."
    TARGET_MISMATCH = "target-mismatch", FormatError, "This is not the target that store, dump or drafter name."
    TARGET_FILE_MISSING = "target-file-missing", NotFoundError, "The store holds no such file of the target."
    TARGET_FILE_CORRUPT = "target-file-corrupt", CorruptionError, "The store's copy of a file of the target is damaged."
    TARGET_FILES_DIFFER = "target-files-differ", ConflictError, "The store holds other files of the target."
    CODE_UNPINNED = (
        "code-unpinned",
        ConfigError,
        "Code of a model is run only at a commit or from a folder.",
    )
    ADAPTER_UNFIT = "adapter-unfit", ConfigError, "The adapter is no plain LoRA, or not one of this target."
    FAMILY_UNSUPPORTED = "family-unsupported", ConfigError, "The layers of this architecture are not known."
    QUANTISATION_UNSUPPORTED = (
        "quantisation-unsupported",
        ConfigError,
        "transformers does not apply this quantisation.",
    )
    ROPE_DYNAMIC = "rope-dynamic", ConfigError, "The rotary frequencies depend on the length of the batch."
    ROPE_SCALING = "rope-scaling", ConfigError, "The engine computes this rotary scaling differently from the target."
    BLOCKS_UNSUPPORTED = "blocks-unsupported", ConfigError, "The target's blocks cannot bring its states back."
    HEAD_INVALID = "head-invalid", ConfigError, "Embeddings, norm and LM head do not fit each other."
    HEAD_CORRUPT = "head-corrupt", CorruptionError, "The store's embeddings, norm, LM head or blocks are damaged."
    CALIBRATION_MISSING = "calibration-missing", ConfigError, "The store has no calibration slice."
    CALIBRATION_CORRUPT = "calibration-corrupt", CorruptionError, "The calibration slice is damaged."
    CALIBRATION_REJECTED = "calibration-rejected", CaptureError, "The first samples were all rejected."
    SEGMENT_SWEPT = "segment-swept", StorageError, "A segment was swept before its record was written."
    REPAIR_RACED = "repair-raced", ConflictError, "The store changed while it was repaired."
    CROSS_CHECK = "cross-check", CaptureError, "Two ways of capturing one sample disagree."
    NORM_STATE = "norm-state", CaptureError, "The states come from the other side of the norm."
    NON_FINITE = "non-finite", CaptureError, "A state is infinite or not a number."
    ENGINE_FILE = "engine-file", CaptureError, "An engine's file for a sample is missing or wrong."
    ENGINE_LAYERS = "engine-layers", CaptureError, "An engine wrote other layers than were asked of it."
    ENGINE_REQUEST = "engine-request", CaptureError, "An engine refused or ended a request."
    ENGINE_SHAPE = "engine-shape", CaptureError, "An engine gave states of another shape."
    ENGINE_START = "engine-start", ConfigError, "An engine could not start."
    ENGINE_TOKENS = "engine-tokens", CaptureError, "An engine ran other tokens than it was given."
    ENGINE_ARG = "engine-arg", ConfigError, "An argument for the engine is not one that can be passed."
    STATES_LATE = "states-late", CaptureError, "An engine's states did not come in time."
    REQUEST_TOO_LONG = "request-too-long", ConfigError, "A sample is longer than the engine was started for."
    SCRATCH_INVALID = "scratch-invalid", ConfigError, "The folder for an engine's files is missing or too small."
    DEVICES_TOO_FEW = "devices-too-few", ConfigError, "An engine, or the ranks of a run, want more GPUs than there are."
    LAUNCHER_RESOURCES = "launcher-resources", ConfigError, "The cluster cannot give what each worker asks for."
    RAY_UNREACHABLE = "ray-unreachable", ConfigError, "There is no Ray cluster at that address."
    WORKERS_LOST = "workers-lost", CaptureError, "Workers of the cluster ended and did not come back."
    API_KEY_MISSING = "api-key-missing", ConfigError, "The environment variable for the key holds none."
    HUB_LIMIT = "hub-limit", ConfigError, "A repository of the hub does not take so many, or so large, files."
    PUSH_UNFINISHED = "push-unfinished", NotFoundError, "Nothing was pushed there, or the push did not come to its end."
    SERVER_URL = "server-url", ConfigError, "The address is not one of an HTTP server."
    SERVER_UNREACHABLE = "server-unreachable", StorageError, "No server answers at that address."
    SERVER_TIMEOUT = "server-timeout", StorageError, "The server did not answer in time."
    SERVER_FAILING = "server-failing", StorageError, "The server answered with an error of its own, again and again."
    SERVER_REFUSED = "server-refused", ConfigError, "The server refused the request."
    SERVER_ANSWER = "server-answer", CaptureError, "The server's answer is not one that can be read."
    SERVER_UNFIT = "server-unfit", ConfigError, "The server's model, layers or length are not those needed."
    NO_SPECULATION = "no-speculation", ConfigError, "The server does not draft."
    MODEL_UNCLEAR = "model-unclear", ConfigError, "The server has several models and none was named."
    ANSWERS_DIFFER = "answers-differ", ConflictError, "The answers were begun with another input or settings."
    ANSWERS_RUNNING = "answers-running", ConflictError, "Another process writes that file of answers."
    DUMP_UNCLEAR = "dump-unclear", ConfigError, "The layout, layers or norm of a dump are not certain."
    DUMP_VERSION = "dump-version", FormatError, "A dump is of a version that is not read."
    DUMP_SHIFT = "dump-shift", FormatError, "States and tokens of a dump are shifted against each other."
    DUMP_NORM = "dump-norm", FormatError, "The final hidden of a dump is not on the side of the norm that was named."
    PICKLE_REFUSED = "pickle-refused", ConfigError, "A file could run code when loaded, and is not loaded."
    READ_BACK = "read-back", CorruptionError, "A sample does not come back as it was written."
    SOURCE_UNDELETED = "source-undeleted", StorageError, "Imported files could not be removed."
    RUN_IN_USE = "run-in-use", ConflictError, "Another process writes that folder of a run or a pipeline."
    RUN_MISSING = "run-missing", NotFoundError, "There is no training run to resume."
    RUN_CORRUPT = "run-corrupt", CorruptionError, "A file of a training run is damaged."
    TRACKER_START = "tracker-start", ConfigError, "A tracker of training runs could not be opened."
    CHECKPOINT_MISSING = "checkpoint-missing", NotFoundError, "There is no such checkpoint."
    CHECKPOINT_CORRUPT = "checkpoint-corrupt", CorruptionError, "A checkpoint is damaged."
    RESUME_SETTINGS = "resume-settings", ConfigError, "A run goes on with the settings that it began with."
    RESUME_STORE = "resume-store", ConflictError, "A run goes on with the store that it began with."
    CURSOR_INVALID = "cursor-invalid", ConfigError, "A cursor is not one that this version wrote."
    CURSOR_MISMATCH = "cursor-mismatch", ConflictError, "A cursor belongs to other samples or another order."
    RANKS_DIFFER = "ranks-differ", ConflictError, "Ranks would train on unlike samples, settings or checkpoints."
    INIT_CHANGED = "init-changed", ConflictError, "The checkpoint that a run was initialised from has changed."
    START_MISSING = "start-missing", ConfigError, "That drafter starts as a part of its target, and none is named."
    INIT_DIFFERS = "init-differs", ConfigError, "The checkpoint to initialise from is of another shape."
    PACK_INVALID = "pack-invalid", ConfigError, "Ranks, workers, readers or tokens a pack cannot be arranged like that."
    DRAFTER_CONTRADICTION = "drafter-contradiction", ConfigError, "Settings of the drafter contradict each other."
    DRAFTER_SHAPE = "drafter-shape", ConfigError, "The drafter's shape does not fit the target."
    VOCAB_INVALID = "vocab-invalid", ConfigError, "A draft vocabulary is not one, or does not fit the target."
    VOCAB_CORRUPT = "vocab-corrupt", CorruptionError, "A draft vocabulary is damaged."
    VALIDATION_MISSING = "validation-missing", ConfigError, "The store has no validation split to judge by."
    LOSS_NOT_FINITE = "loss-not-finite", CaptureError, "The loss is infinite or not a number."
    LOSS_STAYS_HIGH = "loss-stays-high", CaptureError, "The loss stays above that of knowing nothing."
    STATES_ROUNDED = "states-rounded", ConfigError, "A comparison needs a store of the original states."
    NO_TREE = "no-tree", ConfigError, "That drafter, target or temperature does not go with a draft tree."
    NOTHING_DECODED = "nothing-decoded", ConfigError, "Every prompt is too long to decode an answer."
    NOTHING_DRAFTED = "nothing-drafted", CaptureError, "Every answer ended before anything was drafted."
    FORWARD_COUNT = "forward-count", CaptureError, "The number of target passes contradicts the accepted lengths."
    EXPORT_UNSUPPORTED = "export-unsupported", ConfigError, "The engine does not load that drafter."
    EXPORT_DIFFERS = "export-differs", CorruptionError, "The exported files do not give the drafter's logits."
    EXPORT_UNREADABLE = "export-unreadable", CorruptionError, "The exported files cannot be read back."
    DRAFTER_UNFIT = "drafter-unfit", ConfigError, "A published drafter cannot be read or does not fit."
    SERVE_ENGINE = "serve-engine", FormatError, "The drafter was exported for another engine or release."
    SERVE_SETTING = "serve-setting", ConfigError, "A serving option cannot be, or contradicts another."
    SERVE_UNSUPPORTED = "serve-unsupported", ConfigError, "The engine does not serve that drafter."
    STAGE_CHANGED = "stage-changed", ConflictError, "A stage of the pipeline ran with other settings before."
