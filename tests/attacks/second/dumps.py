"""Attempts on dumps of other projects: subtle lies about what the numbers are."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hiddenstore.store import Store
from tests.attacks.second.lab import Attempt, Lab, Outcome, rewrite
from tests.collectors import peer_dumps
from tests.collectors.peer_dumps import Spoken
from tests.collectors.tiny import save_target

SAMPLES = 8
LAYERS = (0, 1, 2)
Lie = Callable[[Spoken], Spoken]


def imported(
    make: Callable[[Path, list[Spoken]], object], format_: str, *more: str, lie: Lie | None = None, kept: int = SAMPLES
) -> Callable[[Lab], Outcome]:
    """A dump, of lies where there is one, into a new store of the target it claims; then all of it verified."""

    def do(lab: Lab) -> Outcome:
        target, dump, store = lab.folder / "peer_target", lab.folder / "dump", lab.folder / "store"
        save_target(target, dtype=torch.bfloat16)
        spoken = peer_dumps.speak(SAMPLES)
        make(dump, [lie(one) for one in spoken] if lie is not None else spoken)
        words = ("import", dump, "--from", format_, "-o", store, "--target", target, "--layers", "0,1,2")
        ended = lab.run(*words, *(more or ("--check", "hf")), "-q")
        if ended.code == 0:
            assert len(Store.open(store)) == kept, f"silent: {len(Store.open(store))} samples of {kept}"
            return lab.run("verify", store, "--full")
        return ended

    return do


def modelopt(folder: Path, spoken: list[Spoken]) -> None:
    peer_dumps.modelopt(folder, spoken, LAYERS)


def then(spoil: Callable[[Path], object]) -> Callable[[Path, list[Spoken]], None]:
    def make(folder: Path, spoken: list[Spoken]) -> None:
        modelopt(folder, spoken)
        spoil(folder)

    return make


def states(change: Callable[[torch.Tensor], torch.Tensor], normed: bool = False) -> Lie:
    if normed:
        return lambda one: replace(one, normed=change(one.normed))
    return lambda one: replace(one, states=change(one.states))


def as_half(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of bf16 read as fp16."""
    return tensor.view(torch.int16).view(torch.float16).to(torch.bfloat16)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[[0, 2, 1, *range(3, len(tensor))]]


def entry(change: Callable[[dict[str, object]], object], which: str = "c0.pt") -> Callable[[Path], None]:
    """One file's entries changed."""

    def spoil(folder: Path) -> None:
        content = torch.load(folder / which, weights_only=True)
        change(content)
        peer_dumps.saved(folder / which, content)

    return spoil


def all_entries(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    return lambda folder: [entry(change, path.name)(folder) for path in sorted(folder.glob("*.pt"))] and None


def deepspec(spoil: Callable[[Path], object] = lambda folder: None) -> Callable[[Path, list[Spoken]], None]:
    def make(folder: Path, spoken: list[Spoken]) -> None:
        peer_dumps.deepspec(folder, spoken, LAYERS)
        spoil(folder)

    return make


def manifest(**values: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


MISFIT = "dump-shift|dump-norm|dump-unclear|layers-differ|target-mismatch|too-many-rejects|nothing-usable|cross-check|norm-state|input-unreadable"
ANY = ("--check", "hf", "--max-rejects", "100%")

# fmt: off
ATTEMPTS = (
    Attempt("a sound dump", imported(modelopt, "modelopt-hf"), "held"),
    *(
        Attempt(f"a dump lies: {what}", imported(modelopt, "modelopt-hf", lie=lie), MISFIT)
        for what, lie in (
            ("two layers changed places", states(swapped)),
            ("every layer is the one before", states(lambda s: s.roll(1, 0))),
            ("states are a token late", states(lambda s: s.roll(1, 1))),
            ("states are a token early", states(lambda s: s.roll(-1, 1))),
            ("bf16 read as fp16", states(as_half)),
            ("states times two", states(lambda s: s * 2)),
            ("states of the sample backwards", states(lambda s: s.flip(1))),
            ("channels backwards", states(lambda s: s.flip(2))),
            ("states are zeros", states(torch.zeros_like)),
            ("one value is NaN", states(lambda s: s.index_fill(2, torch.tensor([3]), float("nan")))),
            ("the final is a token late", states(lambda s: s.roll(1, 0), normed=True)),
            ("the final is before the norm", lambda one: replace(one, normed=one.states[-1])),
            ("the final is the last aux layer", lambda one: replace(one, normed=one.states[3])),
            ("tokens are a token late", lambda one: replace(one, ids=one.ids.roll(1))),
            ("tokens of another tokenizer", lambda one: replace(one, ids=(one.ids * 7) % 90 + 1)),
            ("tokens beyond the vocabulary", lambda one: replace(one, ids=one.ids + 1000)),
            ("tokens are negative", lambda one: replace(one, ids=-one.ids)),
            ("the last token is cut off", lambda one: replace(one, states=one.states[:, :-1], normed=one.normed[:-1])),
            ("a mask of nothing", lambda one: replace(one, mask=torch.zeros_like(one.mask))),
            ("a mask of twos", lambda one: replace(one, mask=one.mask * 2)),
        )
    ),
    *(
        Attempt(f"a dump by files: {what}", imported(then(spoil), "modelopt-hf", kept=kept), word)
        for what, spoil, kept, word in (
            ("a file copied under another name", lambda f: shutil.copy(f / "c0.pt", f / "c99.pt"), SAMPLES, "held|input-unreadable|too-many-rejects"),
            ("a file cut in half", lambda f: rewrite(f / "c3.pt", lambda d: d[: len(d) // 2]), SAMPLES - 1, "held"),
            ("a file of no bytes", lambda f: (f / "c3.pt").write_bytes(b""), SAMPLES - 1, "held"),
            ("a file that is a link in a circle", lambda f: ((f / "c3.pt").unlink(), (f / "c3.pt").symlink_to("c3.pt")), SAMPLES - 1, "held"),
            ("noise beside the files", lambda f: [(f / name).write_bytes(b"x") for name in (".DS_Store", "._c0.pt", "c0.pt.tmp", "Thumbs.db")] and None, SAMPLES, "held"),
            ("one sample of other states", entry(lambda e: e.update(aux_hidden_states=torch.randn_like(e["aux_hidden_states"]))), SAMPLES, MISFIT),
            ("one sample of float64", entry(lambda e: e.update(aux_hidden_states=e["aux_hidden_states"].double())), SAMPLES - 1, "held"),
            ("ids as floats", all_entries(lambda e: e.update(input_ids=e["input_ids"].float())), SAMPLES, MISFIT),
            ("ids as a list", all_entries(lambda e: e.update(input_ids=e["input_ids"].tolist())), SAMPLES, f"held|{MISFIT}"),
            ("a mask as bool", all_entries(lambda e: e.update(loss_mask=e["loss_mask"].bool())), SAMPLES, f"held|{MISFIT}"),
            ("no mask", all_entries(lambda e: e.pop("loss_mask")), SAMPLES, MISFIT),
            ("states of one width less", all_entries(lambda e: e.update(aux_hidden_states=e["aux_hidden_states"][:, 1:])), SAMPLES, MISFIT),
            ("states on the meta device", entry(lambda e: e.update(aux_hidden_states=e["aux_hidden_states"].to("meta"))), SAMPLES - 1, "held"),
            ("states that are not contiguous", all_entries(lambda e: e.update(aux_hidden_states=e["aux_hidden_states"].T.contiguous().T)), SAMPLES, "held"),
        )
    ),
    *(
        Attempt(f"a dump of raw shards: {what}", imported(deepspec(spoil), "deepspec", kept=kept), word)
        for what, spoil, word, kept in (
            ("sound", lambda f: None, "held", SAMPLES),
            ("bf16 said to be fp16", manifest(hidden_dtype="float16"), f"{MISFIT}|dump-version", SAMPLES),
            ("tokens said to be int64", manifest(token_dtype="int64"), f"{MISFIT}|dump-version", SAMPLES),
            ("layers named in another order", manifest(target_layer_ids=[2, 1, 0]), f"{MISFIT}|layers-invalid", SAMPLES),
            ("layers one higher", manifest(target_layer_ids=[1, 2, 3]), MISFIT, SAMPLES),
            ("more samples than there are", manifest(num_samples=99), MISFIT, SAMPLES),
            ("another width", manifest(hidden_size=32), MISFIT, SAMPLES),
            ("the width of text", manifest(hidden_size="x"), MISFIT, SAMPLES),
            ("a shard that leaves", lambda f: rewrite(f / "manifest.json", lambda d: d.replace(b"shard-00000.bin", b"../../secret.bin")), f"{MISFIT}|path-unsafe", SAMPLES),
            ("shards changed places", lambda f: ((f / "shard-00000.bin").rename(f / "t"), (f / "shard-00001.bin").rename(f / "shard-00000.bin"), (f / "t").rename(f / "shard-00001.bin")), MISFIT, SAMPLES),
            ("the last sample cut", lambda f: rewrite(f / "shard-00001.bin", lambda d: d[:-100]), "held", SAMPLES - 1),
            ("an index cut in a row", lambda f: rewrite(f / "samples.idx", lambda d: d[:-10]), MISFIT, SAMPLES),
            ("an index of huge offsets", lambda f: rewrite(f / "samples.idx", lambda d: d[:16] + b"\xff" * 40 + d[56:]), "held", SAMPLES - 1),
            ("an index of a huge length", lambda f: rewrite(f / "samples.idx", lambda d: d[:12] + b"\xff" * 4 + d[16:]), "held", SAMPLES - 1),
        )
    ),
)
