"""What a GPU computes, beside what a CPU does."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

from collectors.capture.job import CollectOptions, CollectReport, collect
from hiddenstore.codecs.klt import KLT
from hiddenstore.codecs.recipes import RECIPES
from hiddenstore.data import PackedBatch, TokenBatches
from hiddenstore.data.packed import small_on
from hiddenstore.segments.encode import RowStats
from hiddenstore.store import Store
from hiddenstore.targets.rebuild import TOLERANCE
from hiddenstore.testing.builders import NUM_LAYERS, make_store
from hiddenstore.verify import verify
from tests.accepting import repair_all
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.engines.engine_world import hiddenstore
from tests.forked import Forked
from tests.trainer.runs import WORDS, tiny_store
from tests.trainer.test_dflash import ANCHORS, BLOCK, LENGTHS
from tests.trainer.test_group import ended, losses, start_two
from tests.trainer.test_mtp import make_world
from tests.trainer.test_train_presets import FROM_RANDOM, SMALL, extra
from tests.trainer.test_ttt_attention import dense, problem
from tests.trainer.two_ranks import free_ports
from trainer.attention.block import Sight, block_attention
from trainer.attention.ttt import ttt_attention
from trainer.parallel.group import ProcessGroup
from trainer.slots import Blocks, map_blocks
from trainer.train import checkpoint
from trainer.train.loop import train

DEVICE = "cuda"
"""For a try without a GPU: ``cpu``."""

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]

STEADY = [
    "train.precision=fp32", "optim.kind=adamw", "optim.lr=1e-3", "optim.schedule=constant", "optim.warmup_ratio=0",
]  # fmt: skip
"""What makes two runs comparable: no rounding to bf16, nor a rate that depends on the number of steps."""


def test_statistics_of_rows_are_those_of_a_cpu_broken_rows_too() -> None:
    states = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    states[0] *= 900.0
    states[3, 1], states[5] = float("nan"), 3e38
    here, there = RowStats(), RowStats()
    here.measure(states)
    there.measure(states.to(DEVICE))
    assert here.peak == there.peak > 1e38
    assert there.norms == pytest.approx(here.norms, rel=1e-6)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tiny_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def for_all(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that every drafter can be trained on."""
    return make_store(tmp_path_factory.mktemp("all"), samples=12, layers=range(-1, NUM_LAYERS), final="all")


@pytest.mark.parametrize("drafter", FROM_RANDOM)
def test_training_takes_the_losses_of_a_cpu_in_fp32(drafter: str, for_all: Store, tmp_path: Path) -> None:
    # The noise of EAGLE-1 is drawn on the device.
    words = [*SMALL, *STEADY, *extra(drafter), *(["loss.noise=0"] if drafter == "eagle1" else []), "train.max_steps=4"]
    for run, device in (("ours", DEVICE), ("theirs", "cpu")):
        train(for_all.path, tmp_path / run, drafter=drafter, words=[*words, f"train.device={device}"])
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "theirs"), rel=1e-3)


def test_training_a_target_s_own_layer_takes_the_losses_of_a_cpu_in_fp32(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    words = ("data.batch_tokens=300", "data.pack_tokens=300", "train.validate_every=0", "train.max_steps=4", *STEADY)
    for run, device in (("ours", DEVICE), ("theirs", "cpu")):
        where = ("-o", str(tmp_path / run), "--target", world.target, f"train.device={device}")
        hiddenstore("train", world.store, *where, *words)
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "theirs"), rel=1e-3)


def test_a_run_that_is_stopped_and_resumed_goes_on_as_if_it_had_not_been(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, *STEADY, f"train.device={DEVICE}", "train.max_steps=12", "train.validate_every=0"]
    train(store.path, tmp_path / "whole", words=words)
    train(store.path, tmp_path / "halves", words=[*words, "train.max_steps=6"])
    train(store.path, tmp_path / "halves", words=["train.max_steps=12"], resume=True)
    # Sums of atomic additions, as of gradients of equal tokens, come in no certain order.
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    whole, halves = (checkpoint.load(tmp_path / run / "checkpoints/step-12") for run in ("whole", "halves"))
    assert halves.state.cursor == whole.state.cursor
    for name, weight in whole.drafter.items():
        torch.testing.assert_close(halves.drafter[name], weight, rtol=1e-4, atol=1e-4)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CollectOptions:
    """A capture in fp32 whose units are small."""
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", 80)
    data, target = data_for_tiny(tmp_path / "data"), save_target(tmp_path / "target")
    return CollectOptions(
        data, tmp_path / "store", str(target), recipe="raw", layers="-1,1,3", device=DEVICE, dtype="fp32"
    )


def captured(options: CollectOptions) -> CollectReport:
    return collect(options, None, None, note=lambda _text: None)


def assert_near(found: Tensor, expected: Tensor, share: float) -> None:
    """The difference is at most a share of what was expected, both by their norms."""
    difference = (found.double().cpu() - expected.double().cpu()).norm()
    assert difference <= share * expected.double().norm()


def test_a_captured_store_holds_what_a_cpu_captures_and_means_the_same(options: CollectOptions, tmp_path: Path) -> None:
    captured(options)
    captured(replace(options, store=tmp_path / "cpu", device="cpu"))
    ours, theirs = Store.open(options.store), Store.open(tmp_path / "cpu")
    assert ours.sample_ids == theirs.sample_ids
    for sample_id in ours.sample_ids:
        found, expected = ours[sample_id], theirs[sample_id]
        for ours_of_field, theirs_of_field in ((found.aux, expected.aux), (found.final, expected.final)):
            # Both round fp32 to bf16: a value between two of its numbers may go to either.
            torch.testing.assert_close(ours_of_field.float(), theirs_of_field.float(), rtol=2**-7, atol=1e-4)
            assert_near(ours_of_field, theirs_of_field, 1e-3)
    found_in, expected_in = (
        sorted(finding.kind for finding in verify(place, "meaning").findings)
        for place in (options.store, tmp_path / "cpu")
    )
    assert found_in == expected_in


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_repair_dropped_is_captured_again_beside_what_stayed(recipe: str, options: CollectOptions) -> None:
    options = replace(options, recipe=recipe, container="webdataset", layers="0,1,2")
    captured(options)
    store = Store.open(options.store)
    before = {sample_id: store[sample_id] for sample_id in store.sample_ids}
    record = max(store.commits(), key=lambda one: len(one.samples))
    path, victim = Path(store.path, record.segment, "samples.tar"), record.samples[0].id
    data = bytearray(path.read_bytes())
    data[data.index(f"{victim}.layer_2".encode()) + 512 + 130] ^= 1
    path.write_bytes(data)
    assert repair_all(options.store).dropped == 1
    report = captured(options)
    assert (report.units, report.samples, report.pending_units) == (1, 1, 0)
    again = Store.open(options.store)
    assert again.sample_ids == store.sample_ids
    for sample_id, expected in before.items():
        # In a batch of another shape a value may be rounded to the code beside.
        assert_near(again[sample_id].aux, expected.aux, 0.05)
        assert_near(again[sample_id].final, expected.final, 0.05)
    assert verify(options.store, "bytes").findings == []


def packs_on(device: str, store: Store) -> list[PackedBatch]:
    batches: Iterable = TokenBatches(store, batch_tokens=128, pack_tokens=64, epochs=1, device=device)
    return [pack for batch in batches for pack in batch.packs]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int16), other.cpu().view(torch.int16))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pack_has_the_bits_that_a_cpu_decodes_and_near_them_what_is_rebuilt(recipe: str, tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=12, layers=(1, 3, 4), codec=recipe)
    is_stored = [layer in store.capture.stored_layers for layer in store.capture.aux_layers]
    for found, expected in zip(packs_on(DEVICE, store), packs_on("cpu", store), strict=True):
        assert found.aux.device.type == DEVICE
        assert found.sample_ids == expected.sample_ids
        assert torch.equal(found.input_ids.cpu(), expected.input_ids)
        assert torch.equal(found.final_rows.cpu(), expected.final_rows)
        for ours, theirs, stored in zip(found.aux, expected.aux, is_stored, strict=True):
            assert_near(ours, theirs, TOLERANCE)
            assert same_bits(ours, theirs) or not stored
        if store.capture.rebuilds_final:
            assert_near(found.final, expected.final, TOLERANCE)
        elif found.topk is not None:
            assert expected.topk is not None
            assert torch.equal(found.topk.ids.cpu(), expected.topk.ids)
        else:
            assert same_bits(found.final, expected.final)


@pytest.mark.parametrize("width", [97, 576, 4096])
def test_klt_has_the_codes_and_the_values_of_a_cpu_whatever_multiplies_it(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    mixing = torch.randn(width, width, generator=generator) * torch.exp(-5 * torch.rand(width, 1, generator=generator))
    states = (torch.randn(2, 3000, width, generator=generator) @ mixing + mixing[:1]).bfloat16()
    data = KLT.fit(list(states.to(DEVICE)))
    codec = KLT.of("klt-test", lambda: data)
    here, there = (codec.encode(states[:, -300:].to(device)) for device in ("cpu", DEVICE))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here.codes, there.codes, strict=True))
    assert all(np.array_equal(here.small[field], there.small[field]) for field in codec.small)
    expected = codec.decode(here)
    assert same_bits(codec.decode(there), expected)
    codes = torch.stack(list(there.codes))
    out = torch.zeros(2, 300, width, dtype=torch.bfloat16, device=DEVICE)
    with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
        codec.decode_pack(codes, [slice(0, 300)], small_on([there.small], out.device), out)
    assert same_bits(out, expected)


BF16_SHARE = 2**-7
"""By norm: some roundings to eight bits, one after the other."""


def assert_as_in_fp32(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Values and gradients of bf16 tensors on the device, and of the same numbers in fp32 on the CPU."""
    on_device, wide = (
        [x.detach().to(*place).requires_grad_() for x in tensors] for place in ((DEVICE,), ("cpu", torch.float32))
    )
    found, expected = ours(*on_device), theirs(*wide)
    assert_near(found, expected, BF16_SHARE)
    weights = torch.randn_like(expected).bfloat16()
    ours_back = torch.autograd.grad(found, on_device, weights.to(found.device, found.dtype))
    for x, y in zip(ours_back, torch.autograd.grad(expected, wide, weights.float()), strict=True):
        assert_near(x, y, 4 * BF16_SHARE)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_attention_of_training_time_test_in_bf16_is_a_dense_softmax_in_fp32(steps: int) -> None:
    tensors, runs = problem(steps, torch.bfloat16)

    def by(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k0, v0, *flat: attention(q, k0, v0, list(zip(flat[0::2], flat[1::2], strict=True)), runs)

    assert_as_in_fp32(by(ttt_attention), by(dense), tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_blocks_in_bf16_is_a_cpu_s_in_fp32(window: int | None, causal: bool) -> None:
    document = torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS)])
    bounds = map_blocks(torch.tensor(ANCHORS), document, window).blocks.bounds
    rows, slots = max(end for _, end in bounds), len(ANCHORS) * BLOCK
    shapes = [(len(ANCHORS) * (BLOCK - 1), 4, 8), *[(count, 2, 8) for count in (rows, rows, slots, slots)]]

    def on(device: str) -> Callable[..., Tensor]:
        sight = Sight(Blocks.of(bounds, torch.device(device)), BLOCK, 1, BLOCK, window, causal)
        return lambda q, *kv: block_attention(q, (kv[0], kv[1]), (kv[2], kv[3]), sight)

    assert_as_in_fp32(on(DEVICE), on("cpu"), [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes])


def _alone_among_ranks(store: str, run: str, words: list[str], port: int) -> None:
    """The body of a run of one rank that asks its group for everything that several ask for."""
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ProcessGroup.is_single = False  # type: ignore[assignment,method-assign]
    distributed.init_process_group(backend, rank=0, world_size=1)
    train(store, run, words=words)
    distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nccl_carries_what_ranks_tell_each_other(strategy: str, store: Store, tmp_path: Path) -> None:
    words = [*WORDS, *STEADY, f"train.device={DEVICE}"]
    train(store.path, tmp_path / "plain", words=words)
    words = [*words, f"train.parallel={strategy}"]
    process = Forked(_alone_among_ranks, store.path, str(tmp_path / "run"), words, free_ports(1)[0])
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


def test_two_ranks_on_one_gpu_are_refused_by_its_name(store: Store, tmp_path: Path) -> None:
    processes = start_two(store.path, "-o", str(tmp_path / "run"), "-q", *WORDS, f"train.device={DEVICE}:0")
    codes, _, said = ended(processes)
    assert codes == [2, 1], said
    assert "[devices-too-few]" in said[0]
    assert "ranks 0, 1 on GPU " in said[0]
    assert not said[1]


def test_two_ranks_on_one_gpu_shard_no_parameters_over_gloo(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, f"train.device={DEVICE}:0", "train.dist_backend=gloo", "train.parallel=fsdp"]
    codes, _, said = ended(start_two(store.path, "-o", str(tmp_path / "run"), "-q", *words))
    assert 2 in codes
    assert "[option-invalid]" in said[0] + said[1]


def test_two_ranks_on_one_gpu_train_over_gloo(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, *STEADY, f"train.device={DEVICE}:0"]
    train(store.path, tmp_path / "one", words=words)
    words = [*words, "train.dist_backend=gloo"]
    codes, _, said = ended(start_two(store.path, "-o", str(tmp_path / "two"), "-q", *words))
    assert codes == [0, 0], said
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
