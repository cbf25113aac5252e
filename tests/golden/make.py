"""Makes the golden stores: ``python -m tests.golden.make``, by hand.

Run it only to add stores of a NEW format version, beside those that are there. A store that exists is never written
again, and its entry in ``expected.json`` stays as it is: that bytes written long ago still read is what they are for.
"""

import json
import shutil
import sys
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.index.publish import publish_index
from hiddenstore.store import Store
from hiddenstore.targets.calibration import take_slice, write_slice
from hiddenstore.testing import builders
from hiddenstore.writer import create_store, register_input, write_unit
from schemas.manifest import Engine, Reject
from tests.collectors.tiny import tiny_tokenizer
from tests.collectors.tiny_images import about, data_uri, noise, openai_part, save_image_target
from tests.golden.reading import (
    CHATS,
    DATA,
    EXPECTED,
    EXPECTED_REBUILT,
    GOLDEN,
    REBUILT,
    STORES,
    TARGET,
    command,
    files_of,
    lines_of,
    rebuilt_facts,
    store_facts,
)

REPAIRED_AT = Path("/tmp/golden-store")
ALL_DRAFTERS = (1, 2, 3, 4, 5)
OTHER_WRITER = Engine(name="other", version="2", versions={"torch": "2.9.0"}, settings={"attention": "eager"})


@dataclass(frozen=True)
class Plan:
    """One store of random states; ``inputs`` are seeds, each by another writer; ``odd`` values stand in one sample."""

    recipe: str
    container: str
    final: str = "supervised"
    layers: tuple[int, ...] = (1, 3)
    samples: int = 4
    width: int = 64
    inputs: tuple[int, ...] = (0,)
    odd: bool = False
    reject: bool = False
    repair: bool = False
    snapshot: str | None = None
    index: bool = False


PLANS = {
    "raw-zarr": Plan("raw", "zarr", layers=(-1, 3), odd=True, reject=True),
    "lossless-zarr": Plan("lossless", "zarr", final="all", odd=True),
    "safe-zarr": Plan("safe", "zarr", inputs=(0, 1), odd=True, snapshot="before-the-second"),
    "compact-zarr": Plan("compact", "zarr", odd=True),
    "tiny-zarr": Plan("tiny", "zarr", final="all"),
    "no-final-zarr": Plan("safe", "zarr", final="none"),
    "raw-webdataset": Plan("raw", "webdataset", final="all", width=32),
    "lossless-webdataset": Plan("lossless", "webdataset", odd=True),
    "safe-webdataset": Plan("safe", "webdataset", final="all", layers=ALL_DRAFTERS, samples=8, width=32),
    "compact-webdataset": Plan("compact", "webdataset", reject=True, repair=True),
    "tiny-webdataset": Plan("tiny", "webdataset", layers=(1, 3, 4), samples=7, width=32),
    "no-final-webdataset": Plan("lossless", "webdataset", final="none", layers=(0,)),
    # Files of more than one piece of a digest's tree, and more records than are read without an index.
    "wide-webdataset": Plan("raw", "webdataset", layers=(1, 2, 3), samples=2, width=4096),
    "indexed-webdataset": Plan("safe", "webdataset", samples=140, width=16, index=True),
}


REBUILT_PLANS = {
    "rebuilt-zarr": Plan("rebuilt", "zarr", width=16),
    "rebuilt-webdataset": Plan("rebuilt", "webdataset", final="all", layers=(-1, 2, 5), width=16),
    "rebuilt-q3-zarr": Plan("rebuilt-q3", "zarr", samples=5, width=36),
    "rebuilt-q3-webdataset": Plan("rebuilt-q3", "webdataset", samples=5, width=36),
    "rebuilt-q3-all-zarr": Plan("rebuilt-q3-all", "zarr", samples=5, width=36),
    "rebuilt-q3-all-webdataset": Plan("rebuilt-q3-all", "webdataset", samples=5, width=36),
    "rebuilt-klt-zarr": Plan("rebuilt-klt", "zarr", samples=5, width=36),
    "rebuilt-klt-webdataset": Plan("rebuilt-klt", "webdataset", layers=(1, 3, 6), samples=5, width=16),
}


def main() -> None:
    if not TARGET.exists():
        make_target(TARGET)
        write_chats(CHATS)
        with chdir(GOLDEN):
            command("prepare", "chats.jsonl", "-o", DATA.name, "--target", "target", "--val", "20%")
    for name, plan in PLANS.items():
        if not (STORES / name).exists():
            make_store(STORES / name, plan)
    if not (STORES / "collected-zarr").exists():
        collect(STORES / "collected-zarr")
    for container in ("zarr", "webdataset"):
        if not (STORES / f"images-{container}").exists():
            collect_images(STORES / f"images-{container}", container)
    for name, recipe in {"compact-zarr-shared": "compact", "q4q3-zarr-shared": "aux=q4q3,final=q8"}.items():
        if not (STORES / name).exists():
            collect_shared(STORES / name, recipe)
    for name, plan in REBUILT_PLANS.items():
        if not (REBUILT / name).exists():
            make_store(REBUILT / name, plan)
    recorded = json.loads(EXPECTED_REBUILT.read_text()) if EXPECTED_REBUILT.exists() else {}
    facts = {name: recorded.get(name) or rebuilt_facts(REBUILT / name) for name in REBUILT_PLANS}
    EXPECTED_REBUILT.write_text(lines_of(facts))
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    expected.setdefault("data", {"files": files_of(DATA)})
    for store in sorted(STORES.iterdir()):
        if store.name not in expected:
            expected[store.name] = store_facts(store)
    EXPECTED.write_text(lines_of(expected))


def make_store(folder: Path, plan: Plan) -> None:
    capture = builders.capture_spec(plan.layers, plan.width, plan.recipe, plan.final)
    files = builders.rebuilding_files(capture) if capture.blocks else builders.target_files(plan.width)
    capture, fitted = builders.fitted_to(capture, builders.random_records(builders.make_samples(9), capture))
    files |= fitted
    store = create_store(folder, capture, builders.HEAD, recipe_name(capture.codecs), files, plan.container)
    for place, seed in enumerate(plan.inputs):
        if place and plan.snapshot:
            Store.open(folder).save_snapshot(plan.snapshot)
        add_input(store, plan, seed, OTHER_WRITER if place else builders.ENGINE)
    if plan.repair:
        Store.open(folder).save_snapshot("before-the-repair")
        repair(folder)
    if plan.index:
        publish_index(store.fs, [path.name for path in (folder / "commits").iterdir()])


def add_input(store: Store, plan: Plan, seed: int, engine: Engine) -> None:
    prepared = builders.memory_input(plan.samples, seed)
    register_input(store, prepared)
    for unit in prepared.units():
        records = builders.random_records(unit.samples, store.capture, seed)
        rejects: tuple[Reject, ...] = ()
        if plan.reject and unit.index == 0:
            refused = records.pop().sample
            rejects = (Reject(id=refused.id, tokens=refused.tokens, reason="not-finite", detail="layer_3 holds NaN"),)
        if plan.odd and unit.index == 0:
            records[0] = with_odd_values(records[0])
        if store.capture.states and (first := take_slice(records, store.capture)) is not None:
            write_slice(store.fs, first, store.capture)
        write_unit(store, unit.name, prepared.info.digest, records, rejects, engine)


def with_odd_values(record: "builders.Record") -> "builders.Record":
    """Infinities, NaN with a payload, a negative zero, a subnormal, and a row of one large and many small values."""
    aux = record.aux.clone()
    bits = aux.view(torch.int16)
    bits[0, 1, :5] = torch.tensor([0x7F80, -0x80, 0x7FC1, -0x8000, 0x0001], dtype=torch.int16)
    aux[-1, 2] *= 1e-3
    aux[-1, 2, 7] = 3e4
    return replace(record, aux=aux)


def repair(folder: Path) -> None:
    """Flip one byte of the last sample of the largest unit, and leave that sample out.

    In a folder of no machine's own, for the reason of the reject names the path.
    """
    store = Store.open(folder)
    segment = folder / max(store.commits(), key=lambda commit: len(commit.samples)).segment
    at = json.loads((segment / "index.json").read_text())["fields"]["layer_3.npy"]["offset"][-1]
    data = bytearray((segment / "samples.tar").read_bytes())
    data[at + 200] ^= 1
    (segment / "samples.tar").write_bytes(data)
    shutil.move(folder, REPAIRED_AT)
    command("repair", REPAIRED_AT, "-y", "--accept-loss", "1")
    shutil.move(REPAIRED_AT, folder)


def make_target(folder: Path) -> None:
    """A random Llama of three layers in bf16 and one token per printable character."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, initializer_range=0.15, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight) - 0.3)
    model.eval().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def write_chats(path: Path) -> None:
    """Six conversations, one of two turns, one a duplicate, one without an answer."""
    rows = []
    for number in range(5):
        question, answer = f"What is {number} and {number}?", f"It is {2 * number}, " + "of course " * (number % 3)
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    rows[1] += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    rows += [rows[0], [{"role": "user", "content": "Nobody answers."}]]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def collect(folder: Path) -> None:
    """What the commands write: calibration, advice, a second input, and the text of the target's own tokenizer."""
    more = folder.parent / "more"
    more.mkdir()
    chat = [{"role": "user", "content": "One more?"}, {"role": "assistant", "content": "Yes."}]
    (more / "more.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    words = ("--target", "target", "--layers", "0,1", "--final", "all", "--device", "cpu")
    try:
        with chdir(GOLDEN):
            store, second = folder.relative_to(GOLDEN), more.relative_to(GOLDEN)
            command("prepare", second / "more.jsonl", "-o", second / "data", "--target", "target", "--val", "0")
            for data in ("data", second / "data"):
                command("collect", data, "-o", store, *words)
            command("advise", store)
    finally:
        shutil.rmtree(more)


def collect_shared(folder: Path, recipe: str) -> None:
    """Conversations of which most begin alike, one of them with all that another holds."""
    more = folder.parent / "more"
    more.mkdir()
    rows = [about_numbers(number) for number in range(4)]
    again = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    rows += [[*rows[1], *again], [{"role": "user", "content": "Alone?"}, again[1]]]
    (more / "more.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ("--target", "target", "--layers", "0,1", "--device", "cpu", "--recipe", recipe)
    try:
        with chdir(GOLDEN):
            second = more.relative_to(GOLDEN)
            command("prepare", second / "more.jsonl", "-o", second / "data", "--target", "target", "--val", "0")
            command("collect", second / "data", "-o", folder, *words, "--container", "zarr-shared")
    finally:
        shutil.rmtree(more)


def about_numbers(number: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"You add what you are given. What is {number} and {number}?"}
    return [question, {"role": "assistant", "content": f"It is {2 * number}."}]


def collect_images(folder: Path, container: str) -> None:
    """A store of format 2: conversations about one image, two and none, by a target that is thrown away."""
    one, two = (openai_part(data_uri(noise(size, 24, seed=size))) for size in (16, 32))
    rows = [about(one), about(one, two, question="Both?"), about(question="Neither?", answer="No.")]
    with TemporaryDirectory() as scratch, chdir(scratch):
        save_image_target(Path("target"))
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command("prepare", "rows.jsonl", "-o", "data", "--target", "target", "--val", "0")
        words = ("--target", "target", "--layers", "0,1", "--device", "cpu", "--container", container)
        command("collect", "data", "-o", folder, *words)


if __name__ == "__main__":
    sys.exit(main())
