"""The program printed in ``docs/format.md`` reads a real store with stock tools only."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import schemas
from hiddenstore.files.documents import canonical
from hiddenstore.store import Store
from hiddenstore.targets.folder import open_target
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.writer import write_unit
from tests.accepting import repair_all
from tests.golden.reading import STORES, TARGET

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.mark.parametrize("codec", ["q8", "q4", "q4q3", "q3", "aux=klt,final=q8", "lossless"])
def test_the_stock_reader_of_the_format_page_gives_the_states_the_store_gives(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, codec=codec, width=40)
    wanted = max(store.sample_ids, key=lambda name: int(store.sample(name).loss_mask.argmax()))
    assert_the_program_reads(store, wanted, 3, tmp_path)


@pytest.mark.parametrize("name", ["compact-zarr-shared", "q4q3-zarr-shared"])
def test_it_gives_rows_that_stand_with_another_sample(tmp_path: Path, name: str) -> None:
    store = Store.open(STORES / name)
    (record,) = store.commits()
    shared = store.zarr(record.unit)["shared_rows"][:, 1]
    assert_the_program_reads(store, record.samples[int(shared.argmax())].id, 1, tmp_path)


def test_it_reads_of_two_units_the_first_by_name(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_unit(store, "zz", "1" * 64, random_records(make_samples(6)[1:4], store.capture, seed=9), (), ENGINE)
    store = Store.open(store.path)
    assert store.duplicates == 3
    assert_the_program_reads(store, make_samples(6)[2].id, 3, tmp_path)


def test_it_reads_no_sample_that_a_repair_left_out(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=8)
    record = max(store.commits(), key=lambda record: len(record.samples))
    path = Path(store.path) / record.segment / "spans/c/0/0"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    names = [name for unit in repair_all(store.path).units for name in unit.dropped]
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_the_program(store, names[0], 3, tmp_path)
    assert f"{names[0]} is in no unit" in error.value.stderr


def assert_the_program_reads(store: Store, wanted: str, layer: int, tmp_path: Path) -> None:
    found = torch.from_numpy(np.load(run_the_program(store, wanted, layer, tmp_path))).bfloat16()
    assert torch.equal(found.view(torch.int16), store.read(wanted, layers=[layer]).aux[0].view(torch.int16))


def run_the_program(store: Store, wanted: str, layer: int, tmp_path: Path) -> Path:
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    program = tmp_path / "reader.py"
    program.write_text(match[1], encoding="utf-8")
    out = tmp_path / "states.npy"
    command = [sys.executable, "-P", str(program), store.path, wanted, str(layer), str(out)]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    return out


@pytest.mark.parametrize("name", ["store", "commit"])
def test_the_page_names_every_member_that_the_schema_of_a_document_has(name: str) -> None:
    path = Path(schemas.__file__).parent / "json" / f"{name}.schema.json"
    schema = json.loads(path.read_bytes())
    parts = [schema, *schema["$defs"].values()]
    pieces = PAGE.read_text(encoding="utf-8").split("```")
    formulas = [block for block in pieces[1::2] if block.startswith("\n")]
    named = " ".join(re.findall(r"`([^`]*)`", " ".join(pieces[::2])) + formulas)
    assert {member for part in parts for member in part["properties"]} - set(re.findall(r"\w+", named)) == set()


def test_the_digests_of_a_target_follow_from_the_page_alone() -> None:
    target = Store.open(STORES / "collected-zarr").capture.target
    tokens = json.loads((TARGET / "tokenizer.json").read_bytes())
    model, tokenizer = tokens["model"], AutoTokenizer.from_pretrained(TARGET)
    (texts,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    probes = [tokenizer.encode(text, add_special_tokens=False) for text in json.loads(texts)]
    rules = {
        "vocab": model.pop("vocab"),
        "merges": [merge.split(" ") for merge in model.pop("merges", ())] or None,
        "added_tokens": sorted(canonical(with_something(token)).decode() for token in tokens["added_tokens"]),
        **{name: with_something(tokens[name]) for name in ("model", "normalizer", "pre_tokenizer")},
    }
    assert sha256(canonical(of_the_model(json.loads((TARGET / "config.json").read_bytes())))) == target.config_sha256
    assert sha256(canonical({"vocab": tokenizer.get_vocab(), "probes": probes})) == target.tokenizer_sha256
    assert sha256((TARGET / "chat_template.jinja").read_bytes()) == target.chat_template_sha256
    assert sha256(canonical(rules)) == open_target(str(TARGET)).tokenizer_rules_sha256
    assert sha256(b"".join(weights())) == target.weights_sha256


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of_the_model(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    volatile = {"transformers_version", "torch_dtype", "dtype", "use_cache", "name_or_path", "model_name"}
    return {name: of_the_model(v) for name, v in value.items() if name[0] != "_" and name not in volatile}


def with_something(value: Any) -> Any:
    if isinstance(value, list):
        return [with_something(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: with_something(v) for name, v in value.items() if not (v is None or v is False or v == "")}


def weights() -> Iterator[bytes]:
    tensors = load_file(TARGET / "model.safetensors")
    for name, key in (("embed_tokens", "model.embed_tokens"), ("norm", "model.norm"), ("lm_head", "lm_head")):
        tensor = tensors.get(f"{key}.weight")
        shape = "tied" if tensor is None else "x".join(map(str, tensor.shape))
        yield f"{name} {shape}\n".encode()
        yield b"" if tensor is None else tensor.bfloat16().view(torch.uint16).numpy().tobytes()


def test_an_input_names_its_file_in_the_metadata_of_parquet() -> None:
    path = next((STORES / "collected-zarr" / "inputs").iterdir())
    digest = pq.read_metadata(path).metadata[b"hiddenstore.sha256"][-64:]
    assert sha256(path.read_bytes().replace(digest, b"0" * 64)).encode() == digest
