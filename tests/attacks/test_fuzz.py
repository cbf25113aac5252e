"""Bytes of others, mutated: every parser gives what it can read or an error of ours, never hangs, never fills memory.

``corpus/<parser>/`` holds whole documents to start from and every one that once did harm.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors

from collectors.conversations.files import open_file
from collectors.conversations.mix import read_mix
from collectors.engines.dump import FORMATS
from collectors.engines.dump.peer import Unusable
from collectors.regenerate.server import _read_reply
from collectors.targets.images import ImageError, _upright
from hiddenstore.cli import main
from hiddenstore.cli.run import Pipeline, stages_of
from hiddenstore.conversation import parse_row
from hiddenstore.errors import HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, sha256_hex, unseal
from hiddenstore.index.file import HEADER_KEY
from hiddenstore.index.publish import publish_index
from hiddenstore.inputs import PreparedInput, parse_registered
from hiddenstore.servers.http import HttpClient, ServerAccess
from hiddenstore.settings import load as load_settings
from hiddenstore.share.remote import parse_sums
from hiddenstore.store import Store
from hiddenstore.targets import calibration, checkpoint, gguf
from hiddenstore.targets.folder import TargetFolder, open_adapter
from hiddenstore.targets.head import HeadBundle
from hiddenstore.testing.builders import HEAD, capture_spec, make_data, make_samples, make_store, random_records
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import contents
from schemas.advice import Advice, AdviceRow
from schemas.manifest import CommitRecord, Snapshot, StoreManifest
from tests.collectors import peer_dumps
from tests.faults import FaultFilesystem
from tests.reliability.figures import Figures
from trainer.config import OptimConfig
from trainer.evaluate.server import (
    LLAMACPP_PREFIX,
    _iterations,
    _read_chat_with_meta,
    _read_completion,
    _read_generated,
    trtllm_counts,
    vllm_counts,
    with_choices,
)
from trainer.settings import check_settings
from trainer.train import checkpoint as saved
from trainer.train.guard import BestState
from trainer.train.log import read_curves
from trainer.train.optim import Optimizer
from trainer.train.run_folder import RunFacts, read_facts
from trainer.vocab import DraftVocab

CORPUS = Path(__file__).parent / "corpus"
SHAPES = st.sampled_from(
    [b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"1e999", b"NaN", b"9" * 40, b'"\\ud800"', b"\xff", b"\x00",
     b"../", b"!!python/object/apply:os.system", b"&a [*a]", b"\n", b",", b":", b'"']
)  # fmt: skip
NUMBERS = st.sampled_from([b"-1", b"0", b"1", b"2147483648", b"9007199254740993", b"1" + b"0" * 18, b"1e308", b"0.5"])

FEW, MANY = 40, 10_000
"""Mutations of each parser's documents."""

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Parser:
    """What reads the bytes, and bytes that it reads."""

    parse: Parse
    seeds: list[bytes]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of the seeds with one to four changes: a bit, a number, a word, a cut or a repeated piece."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        change = draw(st.integers(0, 5))
        numbers = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", data)] if change == 0 else []
        if numbers:
            first, last = draw(st.sampled_from(numbers))
            data = data[:first] + draw(NUMBERS) + data[last:]
        elif change <= 1:
            data = data[:at] + draw(SHAPES) + data[end:]
        elif change == 2 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif change == 3:
            data = data[:at] + data[end:]
        elif change == 4:
            data = data[:end] + data[at:]
        else:
            data = data[:at]
    return data


def document(model: type) -> Parser:
    """A sealed document, whose digest fits whatever it says."""
    store = a_store("zarr")
    value = {CommitRecord: store.commits()[0], StoreManifest: store.manifest, Snapshot: store.snapshot("s")}[model]
    return Parser(lambda data: unseal(sealed(data), model, "x"), [canonical(value.model_dump(mode="json"))])


def sealed(body: bytes) -> bytes:
    return body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode()


@cache
def a_store(container: str) -> Store:
    return make_store(FaultFilesystem(), samples=2, layers=(1,), width=8, codec="q8", container=container)


def in_a_store(container: str, file: str) -> Parser:
    """A file of a segment, of which the record says what is true of it now: whoever writes one writes the other."""
    store = a_store(container)
    record = store.commits()[0]
    path, commit_path = f"{record.segment}/{file}", layout.commit_path(record.unit)

    def read(data: bytes) -> object:
        fs = store.fs.copy()
        fs.disk.overwrite(f"{fs.root}/{path}", data)
        content = record.model_dump(mode="json")
        for entry in content["files"]:
            if entry["path"] == file:
                entry.pop("tree", None)
                entry |= {"size": len(data), "sha256": sha256_hex(data)}
        fs.disk.overwrite(f"{fs.root}/{commit_path}", sealed(canonical(content)))
        return contents(Store.open(fs))

    return Parser(read, [store.fs.read(path)])


def in_a_file(name: str, read: Callable[[Path], object], folder: Path) -> Parse:
    def parse(data: bytes) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return parse


def conversations(path: Path) -> object:
    return [parse_row(row) for row in open_file(path, path.name).rows()]


def pipeline(path: Path) -> object:
    with click.Context(main):
        return stages_of(load_settings(Pipeline, path))


def answer(read: Callable[[bytes], object]) -> Parse:
    """As it comes from a server, whose client says what is no answer."""
    from httpx2 import Request, Response

    client = HttpClient(ServerAccess("http://127.0.0.1:9"))
    return lambda data: client._read(Response(200, request=Request("GET", client.url)), data, read)


def prepared(folder: Path) -> Parser:
    make_data(folder / "data")
    path = folder / "data" / layout.DATA_JSON
    seed = path.read_bytes()[:-78] + b"}"
    read = in_a_file(path.name, lambda path: list(PreparedInput.open(path.parent).units()), path.parent)
    return Parser(lambda data: read(sealed(data)), [seed])


def part(folder: Path) -> Parser:
    """Rows of DATA, which data.json names as they now are."""
    make_data(folder / "data", samples=4)
    path = folder / "data" / layout.part_name(0)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        about = json.loads((path.parent / layout.DATA_JSON).read_bytes())
        del about["sha256"]
        about["files"] = [{"path": path.name, "size": len(data), "sha256": sha256_hex(data)}]
        (path.parent / layout.DATA_JSON).write_bytes(sealed(canonical(about)))
        return list(PreparedInput.open(path.parent).samples())

    return Parser(read, [path.read_bytes()])


def index(is_header: bool) -> Parser:
    """An index file, or what the header of one says under a digest that fits."""
    store = a_store("zarr")
    fs = store.fs.copy()
    number = publish_index(fs, [layout.commit_path(record.unit).rpartition("/")[2] for record in store.commits()])
    path = layout.index_path(number)
    file = fs.read(path)
    table = pq.read_table(pa.BufferReader(file))

    def read(data: bytes) -> object:
        if is_header:
            sink = io.BytesIO()
            pq.write_table(table.replace_schema_metadata({HEADER_KEY: sealed(data)}), sink)
            data = sink.getvalue()
        fs.disk.overwrite(f"{fs.root}/{path}", data)
        return contents(Store.open(fs))

    header = table.schema.metadata[HEADER_KEY]
    return Parser(read, [header[: header.rindex(b',"sha256"')] + b"}" if is_header else file])


def small_slice(is_document: bool) -> Parser:
    """The calibration slice: its document, or the states that the document names as they now are."""
    fs, capture = a_store("zarr").fs.copy(), capture_spec((1,), 8)
    states = calibration.take_slice(random_records(make_samples(2), capture), capture)
    assert states is not None
    assert calibration.write_slice(fs, states, capture)
    document = calibration.slice_document(fs)
    assert document is not None
    file = calibration.slice_bytes(fs, document)

    def read(data: bytes) -> object:
        if not is_document:
            fs.disk.overwrite(f"{fs.root}/{layout.slice_path(sha256_hex(data))}", data)
            named = document.model_copy(update={"file_sha256": sha256_hex(data), "size": len(data)})
            data = canonical(named.model_dump(mode="json"))
        fs.disk.overwrite(f"{fs.root}/{calibration.SLICE_PATH}", sealed(data))
        return calibration.read_slice(fs, capture)

    return Parser(read, [canonical(document.model_dump(mode="json")) if is_document else file])


def advice() -> Parser:
    numbers = dict.fromkeys(
        ("bytes_per_token", "kl", "overlap", "top1_flips", "channel_error", "raw_rows", "clipped"), 1.0
    )
    row = AdviceRow(recipe="safe", channel_errors={"layer_1": 0.1}, within=True, chosen=True, **numbers)
    value = Advice(tokens=1, final_rows=1, max_kl=0.1, max_channel_error=0.1, chosen="safe", rows=(row,))
    return Parser(lambda data: unseal(sealed(data), Advice, "x"), [canonical(value.model_dump(mode="json"))])


def of_a_run(folder: Path, file: str) -> Parser:
    """A file of a run, which its neighbours name as it now is."""
    spec = saved.DrafterSpec(
        config={"name": "medusa"}, target=a_store("zarr").capture.target, head=HEAD, store="s", seed=0, step=1
    )
    state = saved.CheckpointState(step=1, cursor={"epoch": 0}, total_steps=2, standing=BestState(), files={})
    moments = {"exp_avg.w": torch.zeros(2, 3), "step.w": torch.ones(()), **saved.rng_tensors()}
    step = saved.save(folder, spec, state, ({"w": torch.ones(2, 3)}, moments))
    facts = RunFacts(store="s", capture=a_store("zarr").capture, vocab_coverage=1.0)
    contents_of_it = {
        "state.json": canonical(saved.read_state(step).model_dump(mode="json")),
        "drafter.json": canonical(spec.model_dump(mode="json")),
        "optimizer": (step / saved.OPTIMIZER).read_bytes(),
        "run.json": canonical(facts.model_dump(mode="json")),
    }

    def read(data: bytes) -> object:
        if file == "run.json":
            (folder / file).write_bytes(sealed(data))
            return read_facts(folder)
        name, data = (saved.OPTIMIZER, data) if file == "optimizer" else (file, sealed(data))
        (step / name).write_bytes(data)
        if name != saved.STATE_JSON:
            about = json.loads(contents_of_it["state.json"])
            about["files"][name] = sha256_hex(data)
            (step / saved.STATE_JSON).write_bytes(sealed(canonical(about)))
        found = saved.load(saved.resolve(folder))
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(torch.zeros(2, 3)))
        saved.fill(model, found)
        Optimizer(model, OptimConfig(), 1).load(found.optimizer)
        saved.restore_rng(found.optimizer)
        return saved.read_spec(step).target

    return Parser(read, [contents_of_it[file]])


def dump(peer: str, folder: Path) -> Parser:
    """A dump of two samples; the bytes stand in for each of its files in turn."""
    layers, write = (0, 1, 2), DUMPS[peer]
    rng = torch.Generator().manual_seed(0)
    said = []
    for tokens in (9, 12):
        states = torch.randn(5, tokens, peer_dumps.WIDTH, generator=rng).bfloat16()
        ids, mask = torch.arange(1, tokens + 1), (torch.arange(tokens) > 4).long()
        said.append(peer_dumps.Spoken(ids, mask, states, states[-1] / 2))
    write(folder / "dump", said, layers)
    files = {path: path.read_bytes() for path in sorted((folder / "dump").rglob("*")) if path.is_file()}

    def read(data: bytes) -> object:
        found = []
        for path, whole in files.items():
            path.write_bytes(data)
            try:
                source = FORMATS[peer](peer, folder / "dump", peer_dumps.WIDTH)
                for location in source.locations():
                    with suppress(Unusable):
                        found.append(source.read(location, states=True))
            except HiddenstoreError:
                pass
            finally:
                path.write_bytes(whole)
        return found or None

    return Parser(read, list(dict.fromkeys(files.values())))


DUMPS: dict[str, Callable[..., None]] = {
    "specforge-eagle3": peer_dumps.specforge,
    "specforge-dflash": partial(peer_dumps.specforge, suffix=".ckpt.gz", strategy="dflash"),
    "specforge-dspark": partial(peer_dumps.specforge, strategy="dspark"),
    "speculators": peer_dumps.speculators,
    "vllm-extract": peer_dumps.vllm_extract,
    "modelopt-hf": peer_dumps.modelopt,
    "modelopt-trtllm": peer_dumps.modelopt,
    "modelopt-vllm": partial(peer_dumps.modelopt, post=False),
    "trtllm-raw": peer_dumps.trtllm_raw,
    "automodel-eagle3": partial(peer_dumps.automodel, kind="eagle3"),
    "automodel-dspark": partial(peer_dumps.automodel, kind="dspark"),
    "deepspec": peer_dumps.deepspec,
    "eagle1": lambda folder, said, _layers: peer_dumps.eagle1(folder, said),
}


def in_a_target(folder: Path, name: str, read: Callable[[TargetFolder], object]) -> Parse:
    (folder / "target").mkdir(exist_ok=True)
    target = TargetFolder(str(folder / "target"), None, None, None, "", "", "")
    return in_a_file(name, lambda _path: read(target), folder / "target")


def whole_index(target: TargetFolder) -> object:
    found = checkpoint.weights_bytes(target), checkpoint.weight_files(target), checkpoint.file_of_tensor(target)
    checkpoint.damage(target)
    return found


def a_gguf(folder: Path) -> Parser:
    from gguf import GGUFWriter

    path = folder / "whole.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_uint32("split.count", 1)
    writer.add_string("llama.rope.scaling.type", "none")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def read(path: Path) -> object:
        reader = gguf._reader(path)
        gguf._require_whole(path, reader, Counter(tensor.tensor_type.name for tensor in reader.tensors))
        return gguf._digest(path, reader), gguf._split_rule(path, reader)

    return Parser(in_a_file("x.gguf", read, folder), [path.read_bytes()])


def adapter(folder: Path, name: str) -> Parser:
    seeds = {
        "adapter_config.json": b'{"peft_type":"LORA","lora_alpha":16,"alpha_pattern":{"q_proj":8}}',
        "adapter_model.safetensors": save_tensors(
            {f"base_model.model.q_proj.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
        ),
    }
    for file, data in seeds.items():
        (folder / file).write_bytes(data)
    return Parser(in_a_file(name, lambda path: open_adapter(str(path.parent)), folder), [seeds[name]])


def rows_of_parquet(folder: Path) -> Parser:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"messages": messages}] * 3), sink)
    return Parser(in_a_file("x.parquet", conversations, folder), [sink.getvalue()])


def pictures() -> Parser:
    from PIL import Image

    def read(data: bytes) -> object:
        try:
            return _upright(data)
        except ImageError:
            return None

    seeds = []
    for form in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000"):
        sink = io.BytesIO()
        Image.new("RGB", (9, 7), "red").save(sink, form)
        seeds.append(sink.getvalue())
    return Parser(read, seeds)


def registered() -> Parser:
    fs = a_store("zarr").fs
    ((digest, _),) = a_store("zarr").inputs().items()
    return Parser(lambda data: parse_registered(data, digest, "x"), [fs.read(layout.input_path(digest))])


def text_parsers(folder: Path) -> dict[str, Parse]:
    """Parsers whose whole documents lie in the corpus."""
    return {
        "conversations.jsonl": in_a_file("x.jsonl", conversations, folder),
        "conversations.json": in_a_file("x.json", conversations, folder),
        "config.yaml": in_a_file("x.yaml", lambda path: check_settings(None, path, ()), folder),
        "mix.yaml": in_a_file("m.yaml", read_mix, folder),
        "answer.json": answer(lambda body: _read_reply(json.loads(body))),
        "sglang.json": answer(lambda body: _read_chat_with_meta(json.loads(body))),
        "generate.json": answer(lambda body: _read_generated(json.loads(body))),
        "metrics.txt": answer(lambda body: vllm_counts(body.decode())),
        "llamacpp.txt": answer(lambda body: vllm_counts(body.decode(), LLAMACPP_PREFIX)),
        "llamacpp.json": answer(lambda body: with_choices(_read_completion)(json.loads(body))),
        "trtllm.json": answer(lambda body: trtllm_counts(_iterations(json.loads(body)))),
        "metrics.jsonl": in_a_file("metrics.jsonl", lambda path: read_curves(path.parent), folder),
        "pipeline.yaml": in_a_file("p.yaml", pipeline, folder),
        "SHA256SUMS": lambda data: parse_sums(data, "x"),
        "safetensors-index.json": in_a_target(folder, checkpoint.INDEX_FILE, whole_index),
        "hf_quant_config.json": in_a_target(
            folder, checkpoint.QUANTISATION_FILE, lambda target: checkpoint.require_applied(target, "hint")
        ),
    }


def binary_parsers(folder: Path) -> dict[str, Callable[[], Parser]]:
    vocab = DraftVocab.full(64).save_bytes()
    head = a_store("zarr").target_file(layout.HEAD_NAME)
    return {
        "commit record": partial(document, CommitRecord),
        "store.json": partial(document, StoreManifest),
        "snapshot": partial(document, Snapshot),
        "data.json": partial(prepared, folder),
        "input parquet": registered,
        "zarr.json of an array": partial(in_a_store, "zarr", "layer_1/zarr.json"),
        "zarr.json of a group": partial(in_a_store, "zarr", "zarr.json"),
        "zarr shard": partial(in_a_store, "zarr", "layer_1/c/0/0"),
        "zarr small array": partial(in_a_store, "zarr", "spans/c/0/0"),
        "tar index": partial(in_a_store, "webdataset", "index.json"),
        "tar": partial(in_a_store, "webdataset", "samples.tar"),
        "data parquet": partial(part, folder),
        "index parquet": partial(index, False),
        "header of an index": partial(index, True),
        "document of a slice": partial(small_slice, True),
        "safetensors of a slice": partial(small_slice, False),
        "advice": advice,
        "gguf": partial(a_gguf, folder),
        "parquet conversations": partial(rows_of_parquet, folder),
        "images": pictures,
        **{f"{file} of a run": partial(of_a_run, folder, file) for file in RUN_FILES},
        **{name: partial(adapter, folder, name) for name in ADAPTER_FILES},
        **{f"dump of {peer}": partial(dump, peer, folder) for peer in DUMPS},
        "safetensors of a head": lambda: Parser(lambda data: HeadBundle.from_bytes(data, HEAD, "x"), [head]),
        "safetensors of a vocabulary": lambda: Parser(
            in_a_file("v.safetensors", lambda path: DraftVocab.load(path, 64), folder), [vocab]
        ),
    }


RUN_FILES = ("state.json", "drafter.json", "optimizer", "run.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TEXTS = (
    "SHA256SUMS", "answer.json", "config.yaml", "conversations.json", "conversations.jsonl", "generate.json",
    "hf_quant_config.json", "llamacpp.json", "llamacpp.txt", "metrics.jsonl", "metrics.txt", "mix.yaml",
    "pipeline.yaml", "safetensors-index.json", "sglang.json", "trtllm.json",
)  # fmt: skip
BINARIES = (
    "commit record", "store.json", "snapshot", "data.json", "input parquet", "zarr.json of an array",
    "zarr.json of a group", "zarr shard", "zarr small array", "tar index", "tar", "safetensors of a head",
    "safetensors of a vocabulary", "data parquet", "index parquet", "header of an index", "document of a slice",
    "safetensors of a slice", "advice", "gguf", "parquet conversations", "images",
    *(f"{file} of a run" for file in RUN_FILES), *ADAPTER_FILES, *(f"dump of {peer}" for peer in DUMPS),
)  # fmt: skip


def check(parse: Parse, data: bytes) -> None:
    """Whatever is raised is ours."""
    with suppress(HiddenstoreError):
        parse(data)


def corpus_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name.replace(" ", "-")).glob("*"))]


def parser_of(name: str, folder: Path) -> Parser:
    if name in BINARIES:
        return binary_parsers(folder)[name]()
    return Parser(text_parsers(folder)[name], corpus_of(name))


def fuzz(name: str, folder: Path, examples: int, figures: Figures) -> None:
    parser, tally = parser_of(name, folder), Tally()
    seeds = [*parser.seeds, *(corpus_of(name) if name in BINARIES else ())]
    for seed in seeds:
        check(parser.parse, seed)

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(data=mutated(seeds))
    def mutate(data: bytes) -> None:
        tally.points += 1
        check(parser.parse, data)

    mutate()
    figures.add("mutated documents", name, tally)


def test_every_importer_has_a_dump_to_start_from() -> None:
    assert set(DUMPS) == set(FORMATS)


def test_every_parser_of_a_text_has_a_corpus_and_every_corpus_a_parser(tmp_path: Path) -> None:
    assert set(text_parsers(tmp_path)) == set(TEXTS)
    assert set(binary_parsers(tmp_path)) == set(BINARIES)
    corpora = {path.name for path in CORPUS.iterdir()}
    assert set(TEXTS) <= corpora <= {name.replace(" ", "-") for name in (*TEXTS, *BINARIES)}


@pytest.mark.parametrize("name", BINARIES)
def test_what_a_parser_starts_from_is_read(name: str, tmp_path: Path) -> None:
    parser = parser_of(name, tmp_path)
    assert all(parser.parse(seed) is not None for seed in parser.seeds)


@pytest.mark.parametrize("name", TEXTS)
def test_the_first_text_of_a_parser_is_read(name: str, tmp_path: Path) -> None:
    if name != "hf_quant_config.json":  # which is refused whatever it says
        parser_of(name, tmp_path).parse((CORPUS / name / "whole").read_bytes())


@pytest.mark.parametrize("name", [*TEXTS, *BINARIES])
def test_mutated_bytes_are_read_or_refused_by_an_error_of_ours(name: str, tmp_path: Path, figures: Figures) -> None:
    fuzz(name, tmp_path, FEW, figures)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*TEXTS, *BINARIES])
def test_mutated_bytes_at_length_are_read_or_refused(name: str, tmp_path: Path, figures: Figures) -> None:
    fuzz(name, tmp_path, MANY, figures)
