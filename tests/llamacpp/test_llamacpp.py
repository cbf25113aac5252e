"""EAGLE-3, DFlash, DFlash2, JetSpec, DSpark and n-gram lookup in a real llama.cpp: what was exported drafts there as
it does here, and a mistake shows."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from tests.engines.engine_world import NEW_TOKENS, EngineWorld, hiddenstore
from tests.engines.lookup import accepted_length, as_llamacpp, as_vllm, continued
from tests.llamacpp.llama_server import Served, answers, convert, counted, llama_server
from trainer.evaluate.server import WARM_UP_TOKENS
from trainer.serve.llamacpp import NGRAM

pytestmark = [pytest.mark.llamacpp, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

OF_DECODE = 0.02
"""How far llama.cpp's accepted length may lie from ``decode``'s, as a share of it."""
END = 2


@pytest.fixture(scope="session")
def plain(engine_world: EngineWorld, target: str, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(target, engine_world.prompts, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def eagle3(engine_world: EngineWorld, target: str) -> str:
    return exported(engine_world.trained("eagle3", "eagle3", "loss.steps=3"), target)


@pytest.fixture(scope="session")
def dflash(engine_world: EngineWorld, target: str) -> str:
    return exported(engine_world.trained("dflash", "dflash", "drafter.block_size=6", steps=40), target)


@pytest.fixture(scope="session")
def jetspec(engine_world: EngineWorld, target: str) -> str:
    words = ("drafter.block_size=6", "drafter.causal=true")
    return exported(engine_world.trained("jetspec", "dflash", *words, steps=40), target)


@pytest.fixture(scope="session")
def dspark(engine_world: EngineWorld, target: str) -> str:
    return exported(engine_world.trained("dspark", "dspark", "drafter.block_size=5", steps=40), target)


@pytest.fixture(scope="session")
def filled_in(engine_world: EngineWorld, target: str) -> str:
    settings = ("drafter.block_size=6", "drafter.sample_from_anchor=false", "drafter.causal=true")
    return exported(engine_world.trained("filled-in", "dspark", *settings, steps=40), target)


@pytest.fixture(scope="session")
def dflash2(engine_world: EngineWorld, target: str) -> str:
    return exported(engine_world.trained("dflash2", "dflash2", "drafter.block_size=6", steps=40), target)


def exported(run: str, target: str) -> str:
    out = f"{run}.gguf"
    hiddenstore("export", run, "--engine", "llamacpp", "--target", target, "-o", out, "--dtype", "float32")
    return out


def served(target: str, prompts: list[list[int]], room: Path, drafter: str | None = None, **how: Any) -> Served:
    with llama_server(target, room / "server.log", drafter, **how) as url:
        return answers(url, prompts, NEW_TOKENS)


def spoiled(drafter: str, name: str, spoil: Callable[[GGUFReader], Any]) -> str:
    """A copy with a mistake, made in place."""
    copy = shutil.copy(drafter, drafter.replace(".gguf", f"-{name}.gguf"))
    reader = GGUFReader(copy, "r+")
    spoil(reader)
    reader.data.flush()
    return str(copy)


def numbers(reader: GGUFReader, name: str) -> list[Any]:
    """The numbers of a field, which can be written to."""
    field = reader.fields[name]
    return [field.parts[i] for i in field.data]


def without_end(answer: list[int]) -> list[int]:
    return answer[: answer.index(END)] if END in answer else answer


class Agreement:
    """A drafter in llama.cpp beside our own loop, over the same questions."""

    def __init__(self, world: EngineWorld, target: str, plain: Served, room: Path, record: Any) -> None:
        self.world, self.target, self.plain, self.room, self.record = world, target, plain, room, record

    def of(self, drafter: str, run: str, length: int) -> float:
        """How far the accepted length lies from ``decode``'s, as a share of it; every answer must be the plain one."""
        decoded = self.world.decoded(f"{self.world.root}/runs/{run}", (length,))
        found = served(self.target, decoded.prompts, self.room, drafter, length=length)
        assert found.answers == self.plain.answers
        assert [without_end(answer) for answer in found.answers] == [without_end(row) for row in decoded.answers]
        ours = decoded.by_length[length]["accepted_length"]
        row = {"drafter": Path(drafter).stem, "draft_len": length, "engine": found.counts.accepted_length}
        self.record("agreement", {**row, "decode": ours, "drafts": found.counts.drafts})
        assert found.counts.accepted == sum(found.counts.accepted_at)
        assert found.counts.accepted_length is not None
        return abs(found.counts.accepted_length - ours) / ours


@pytest.fixture
def agreement(engine_world, target, plain, tmp_path, record_property) -> Agreement:
    return Agreement(engine_world, target, plain, tmp_path, record_property)


def test_without_a_drafter_nothing_is_counted_and_answers_are_those_of_transformers(engine_world, plain):
    assert (plain.counts.drafts, plain.counts.accepted) == (0, 0)
    expected = [without_end(answer) for _, answer in engine_world.greedy]
    assert [without_end(answer) for answer in plain.answers] == expected


@pytest.mark.parametrize("length", [3, 5])
def test_an_eagle3_chain_is_accepted_as_decode_foretells(agreement, eagle3, length):
    assert agreement.of(eagle3, "eagle3", length) <= OF_DECODE


def test_a_small_draft_vocabulary_is_mapped_back_to_the_target_s(engine_world, target, agreement):
    name = "eagle3-small-vocabulary"
    run = engine_world.trained(name, "eagle3", "loss.steps=3", "drafter.vocab_size=300")
    drafter = exported(run, target)
    assert agreement.of(drafter, name, 3) <= OF_DECODE

    def shift(reader):
        ids = next(tensor for tensor in reader.tensors if tensor.name == "d2t")
        ids.data[:] = (ids.data + 1) % 1024

    assert agreement.of(spoiled(drafter, "shifted", shift), name, 3) > OF_DECODE


def test_eagle3_layers_read_one_off_are_caught(agreement, eagle3):
    def shift(reader):
        for layer in numbers(reader, "eagle3.target_layers"):
            layer[0] -= 1

    assert agreement.of(spoiled(eagle3, "layers-one-off", shift), "eagle3", 3) > OF_DECODE


def test_a_norm_at_the_wrong_side_of_the_residual_is_caught(agreement, eagle3):
    def move(reader):
        numbers(reader, "eagle3.norm_before_residual")[0][0] = True

    assert agreement.of(spoiled(eagle3, "norm-moved", move), "eagle3", 3) > OF_DECODE


def test_dflash_fills_a_block_from_the_layers_it_was_trained_on(agreement, dflash):
    assert agreement.of(dflash, "dflash", 5) <= OF_DECODE

    def shift(reader):
        for layer in numbers(reader, "dflash.target_layers"):
            layer[0] -= 1

    assert agreement.of(spoiled(dflash, "layers-one-off", shift), "dflash", 5) > OF_DECODE


def test_a_causal_block_is_a_chain_that_llama_cpp_drafts_causally(agreement, jetspec):
    assert agreement.of(jetspec, "jetspec", 5) <= OF_DECODE

    def forget(reader):
        numbers(reader, "dflash.attention.causal")[0][0] = False

    assert agreement.of(spoiled(jetspec, "not-causal", forget), "jetspec", 5) > OF_DECODE


def test_dspark_proposes_from_every_slot_and_knows_the_token_before(agreement, dspark):
    assert agreement.of(dspark, "dspark", 5) <= OF_DECODE

    def forget(reader):
        head = next(tensor for tensor in reader.tensors if tensor.name == "markov_w2.weight")
        head.data[:] = 0

    assert agreement.of(spoiled(dspark, "markov-forgotten", forget), "dspark", 5) > OF_DECODE


def test_a_causal_dspark_of_mask_slots_alone_proposes_from_those(agreement, filled_in):
    assert agreement.of(filled_in, "filled-in", 5) <= OF_DECODE

    def misread(reader):
        numbers(reader, "dflash.sample_from_anchor")[0][0] = True

    assert agreement.of(spoiled(filled_in, "misread", misread), "filled-in", 5) > OF_DECODE


def test_dflash2_mixes_the_slots_of_a_block_and_selects_after_the_token_before(agreement, dflash2):
    assert agreement.of(dflash2, "dflash2", 5) <= OF_DECODE

    def tensor(reader, name):
        return next(tensor for tensor in reader.tensors if tensor.name == name).data

    def unmix(reader):
        tensor(reader, "blk.0.ffn_conv_base")[:] = 0

    def misselect(reader):
        tensor(reader, "selector_successor.weight")[:] *= -20

    assert agreement.of(spoiled(dflash2, "unmixed", unmix), "dflash2", 5) > OF_DECODE
    assert agreement.of(spoiled(dflash2, "misselected", misselect), "dflash2", 5) > OF_DECODE


def test_ngram_lookup_is_accepted_as_its_plain_restatement_says(engine_world, target, plain, tmp_path, record_property):
    found = served(target, engine_world.prompts, tmp_path, method="ngram", length=3)
    assert found.answers == plain.answers
    assert 0 < found.counts.accepted <= found.counts.drafted <= 3 * found.counts.drafts
    texts = continued(engine_world.target, engine_world.greedy, 3)
    ours, drafts = accepted_length(as_llamacpp(3, NGRAM), texts, NEW_TOKENS)
    row = {"drafter": "n-gram", "draft_len": 3, "engine": found.counts.accepted_length, "plain lookup": ours}
    record_property("agreement", {**row, "drafts": found.counts.drafts})
    assert found.counts.accepted_length == pytest.approx(ours, rel=OF_DECODE)
    assert found.counts.drafts == pytest.approx(drafts, rel=OF_DECODE)
    other, _ = accepted_length(as_vllm(3), texts, NEW_TOKENS)
    assert found.counts.accepted_length != pytest.approx(other, rel=OF_DECODE), "another lookup would have passed too"


def test_the_target_as_its_own_draft_is_accepted_whole(engine_world, target, plain, tmp_path):
    found = served(target, engine_world.prompts[:6], tmp_path, target, method="draft-target", length=3)
    assert found.answers == plain.answers[:6]
    # What a draft holds behind the end of an answer is not accepted: less than a draft an answer.
    assert 0 <= found.counts.drafted - found.counts.accepted <= 3 * len(found.answers)
    assert found.counts.drafts > len(found.answers)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "jetspec", "dspark", "dflash2"])
def test_the_file_is_what_llama_cpp_s_own_converter_makes_of_the_export_for_vllm(engine_world, kind, request, tmp_path):
    ours = GGUFReader(request.getfixturevalue(kind))
    folder = engine_world.exported(f"{engine_world.root}/runs/{kind}")
    words = ("--target-model-dir", engine_world.target, "--outtype", "f32")
    theirs = GGUFReader(convert(folder, tmp_path / "theirs.gguf", "gpt-2", *words))
    own, other = ({tensor.name: tensor for tensor in reader.tensors} for reader in (ours, theirs))
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.tensor_type == other[name].tensor_type, name
        assert (tensor.data == other[name].data).all(), name
    said = {name: field.contents() for name, field in theirs.fields.items()}
    architecture = said["general.architecture"]
    kept = {name: value for name, value in said.items() if name.startswith((f"{architecture}.", "tokenizer."))}
    assert {name: field.contents() for name, field in ours.fields.items() if name in kept} == kept


def test_eval_reads_what_the_server_counts(engine_world, target, eagle3, tmp_path):
    with (
        llama_server(target, tmp_path / "drafting.log", eagle3) as url,
        llama_server(target, tmp_path / "plain.log") as at,
    ):
        before = counted(url)
        words = ("--prompts", engine_world.questions, "-n", "4", "--max-new-tokens", "48")
        document = hiddenstore("eval", "--engine", "llamacpp", "--server", url, "--baseline-server", at, *words)
        moved = counted(url) - before
    assert document["draft_len"] == 3
    assert document["rows"][0]["same_as_baseline"] == document["answers"]
    # The server counts the answer that warms it up too, which is in no figure.
    drafts, accepted = document["drafts"], document["drafts"] * (document["accepted_length"] - 1)
    assert 0 <= moved.drafts - drafts <= WARM_UP_TOKENS
    assert -1e-6 <= moved.accepted - accepted <= WARM_UP_TOKENS
    assert drafts > 4 * WARM_UP_TOKENS
