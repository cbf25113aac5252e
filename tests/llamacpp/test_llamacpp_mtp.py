"""A target's own MTP layer in a real llama.cpp: trained on here, it drafts there as ``eval`` foretells over the same
text (`decode` takes no token back from a running state), and a mistake shows."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from tests.engines.engine_world import EngineWorld, hiddenstore
from tests.llamacpp.llama_server import Served, answers, convert, llama_server
from tests.llamacpp.qwen_target import make_qwen_world
from tests.llamacpp.test_llamacpp import NEW_TOKENS, OF_DECODE, exported, spoiled, without_end

pytestmark = [pytest.mark.llamacpp, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

STEPS = 25
LENGTH = 3


@pytest.fixture(scope="module")
def qwen(engine_world: EngineWorld, tmp_path_factory: pytest.TempPathFactory) -> EngineWorld:
    return make_qwen_world(engine_world, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen_target(qwen: EngineWorld) -> str:
    """Its GGUF file, the MTP layer as the target has it inside."""
    return convert(qwen.target, qwen.root / "target.gguf", "gpt-2", "--outtype", "f32")


@pytest.fixture(scope="module")
def run(qwen: EngineWorld) -> str:
    return qwen.trained("mtp", "mtp", "--target", qwen.target, steps=STEPS)


@pytest.fixture(scope="module")
def drafter(run: str, qwen_target: str) -> str:
    return exported(run, qwen_target)


def served(world: EngineWorld, target: str, log: Path, drafter: str | None = None, method: str = "none") -> Served:
    with llama_server(target, log, drafter, method, LENGTH) as url:
        return answers(url, world.prompts, NEW_TOKENS)


def test_a_tuned_mtp_layer_drafts_as_eval_foretells(qwen, qwen_target, run, drafter, tmp_path, record_property):
    plain = served(qwen, qwen_target, tmp_path / "plain.log")
    assert [without_end(answer) for answer in plain.answers] == [without_end(answer) for _, answer in qwen.greedy]

    def swap(reader):
        fc = next(tensor for tensor in reader.tensors if tensor.name.endswith("nextn.eh_proj.weight"))
        fc.data[:] = np.roll(fc.data, fc.data.shape[1] // 2, axis=1)

    found = {}
    for name, file in (("tuned", drafter), ("start", None), ("halves swapped", spoiled(drafter, "swapped", swap))):
        method = "mtp" if file is None else "none"
        answered = served(qwen, qwen_target, tmp_path / "server.log", file, method)
        assert answered.answers == plain.answers
        found[name] = answered.counts.accepted_length
    expected = {name: qwen.evaluated(at, (LENGTH,))[LENGTH] for name, at in (("tuned", run), ("start", f"{run}/start"))}
    for name, length in found.items():
        record_property("agreement", {"mtp": name, "engine": length, "eval": expected.get(name)})
    for name, length in expected.items():
        assert abs(found[name] - length) <= OF_DECODE * length, name
    assert abs(found["halves swapped"] - expected["tuned"]) > OF_DECODE * expected["tuned"]
    assert found["start"] < found["tuned"]


def test_the_file_is_what_llama_cpp_s_own_converter_makes_of_a_target_with_the_trained_layer(
    qwen, run, drafter, tmp_path
):
    folder = shutil.copytree(qwen.target, tmp_path / "target")
    trained = load_file(Path(qwen.exported(run), "model.safetensors"))
    trained = {name: tensor for name, tensor in trained.items() if name.startswith("mtp.")}
    tensors = load_file(folder / "model.safetensors")
    assert trained.keys() == {name for name in tensors if name.startswith("mtp.")}
    save_file(tensors | trained, folder / "model.safetensors", {"format": "pt"})
    theirs = GGUFReader(convert(str(folder), tmp_path / "theirs.gguf", "gpt-2", "--mtp", "--outtype", "f32"))
    ours = GGUFReader(drafter)
    own, other = ({tensor.name: tensor for tensor in reader.tensors} for reader in (ours, theirs))
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.tensor_type == other[name].tensor_type, name
        assert (tensor.data == other[name].data).all(), name
    kept, said = (
        {name: field.contents() for name, field in reader.fields.items() if name.startswith(("qwen35.", "tokenizer."))}
        for reader in (ours, theirs)
    )
    assert kept == said


def test_a_target_s_file_without_mtp_layers_is_served_with_the_trained_one(qwen, run, drafter, tmp_path):
    words = ("--no-mtp", "--outtype", "f32")
    bare = convert(qwen.target, tmp_path / "bare.gguf", "gpt-2", *words)
    assert not any("nextn" in tensor.name for tensor in GGUFReader(bare).tensors)
    out = str(tmp_path / "drafter.gguf")
    hiddenstore("export", run, "--engine", "llamacpp", "--target", bare, "-o", out, "--dtype", "float32")
    ours, other = (GGUFReader(file).fields for file in (out, drafter))
    names = [name for name in other if name.startswith("qwen35.")]
    assert {name: ours[name].contents() for name in names} == {name: other[name].contents() for name in names}
    with llama_server(bare, tmp_path / "server.log", out, length=LENGTH) as url:
        document = hiddenstore(
            *("eval", "--engine", "llamacpp", "--server", url, "--prompts", qwen.questions),
            *("-n", "4", "--max-new-tokens", "48"),
        )
    assert document["draft_len"] == LENGTH
    assert document["accepted_length"] > 2
