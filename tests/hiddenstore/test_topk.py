"""Top tokens in place of the final hidden: what they are, what comes back, and what refuses to be without the hidden.

Shapes: R final rows, k top tokens, D width, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.codecs.topk import TOPK_CODEC, pack_rows, top_tokens, unpack_rows, with_top_tokens
from hiddenstore.data import TokenBatches
from hiddenstore.dumps.common import export_samples
from hiddenstore.dumps.speculators import LAYOUT
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.inspect.compare import FieldError, compare
from hiddenstore.records import TopK
from hiddenstore.segments.encode import encode_records
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.testing.builders import HEAD, VOCAB, capture_spec, make_samples, make_store, random_records
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from tests.accepting import repair_all

WIDTH, K = 32, 4


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("raw"), codec="raw")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("tiny"), codec="tiny")


def plain_top_tokens(store: Store, sample_id: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [R, k], log-probs and lse in float64 from the stored final hidden; a Llama rounds its norm to bf16 twice."""
    tensors = store.head()
    h = store[sample_id].final.double()
    scaled = (h / (h.square().mean(-1, keepdim=True) + HEAD.norm_eps).sqrt()).bfloat16()
    normed = (scaled.double() * tensors.norm_weight.double()).bfloat16()
    logits = normed.double() @ tensors.output_weight.double().T
    log_probs, ids = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    return ids[:, :K], log_probs[:, :K], torch.logsumexp(logits, dim=-1)


def test_a_tiny_store_holds_the_targets_most_probable_tokens(raw: Store, tiny: Store) -> None:
    for sample_id in raw.sample_ids:
        record = tiny[sample_id]
        ids, log_probs, lse = plain_top_tokens(raw, sample_id)
        assert record.topk is not None
        assert record.final.shape == (0, WIDTH)
        assert torch.equal(record.topk.ids, ids)
        assert (record.topk.log_probs - log_probs).abs().max() < 0.01
        assert (record.topk.lse - lse).abs().max() < 0.05
        assert np.array_equal(record.final_rows, raw[sample_id].final_rows)


def test_both_containers_give_the_same_top_tokens(tiny: Store, tmp_path: Path) -> None:
    assert contents(make_store(tmp_path, codec="tiny", container="webdataset")) == contents(tiny)


def test_without_final_rows_the_recipe_tiny_holds_no_top_tokens(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="tiny", final="none")
    record = store[store.sample_ids[0]]
    assert record.topk is None
    assert record.final.shape == (0, WIDTH)
    assert verify(store.path, "bytes").ok


def test_a_record_without_its_final_has_no_top_tokens_either(tiny: Store) -> None:
    record = tiny.read(tiny.sample_ids[0], final=False)
    assert record.topk is None
    assert record.final_rows.shape == (0,)


def test_batches_carry_top_tokens_at_their_rows_and_move_them(tiny: Store) -> None:
    packs = [pack for batch in TokenBatches(tiny, batch_tokens=128, epochs=1) for pack in batch.packs]
    seen = 0
    for pack in packs:
        moved = pack.to("meta")
        assert moved.topk is not None
        assert moved.topk.ids.device.type == "meta"
        assert pack.final.shape == (0, WIDTH)
        for document, sample_id in enumerate(pack.sample_ids):
            record = tiny[sample_id]
            assert record.topk is not None
            assert pack.topk is not None
            start = int((pack.document < document).sum())
            rows = (pack.document[pack.final_rows] == document).nonzero().flatten()
            assert torch.equal(pack.final_rows[rows] - start, torch.from_numpy(record.final_rows).long())
            mine = pack.topk.at(rows)
            assert (mine.ids.dtype, mine.log_probs.dtype, mine.lse.dtype) == (torch.int64, torch.float32, torch.float32)
            assert torch.equal(mine.ids, record.topk.ids)
            assert torch.equal(mine.log_probs, record.topk.log_probs)
            assert torch.equal(mine.lse, record.topk.lse)
            seen += 1
    assert seen == len([entry for _, entry in tiny.entries if entry.split == "train"])
    without = next(iter(TokenBatches(tiny, batch_tokens=128, final=False, epochs=1)))
    assert without.packs[0].topk is None


@given(rows=st.integers(0, 9), k=st.integers(1, 64), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_packed_rows_give_back_ids_and_lse_exactly_and_log_probs_to_float16(rows: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given_rows = TopK(
        torch.randint(0, 2**31 - 1, (rows, k), generator=generator),
        -20 * torch.rand(rows, k, generator=generator),
        1e3 * torch.randn(rows, generator=generator),
    )
    half = torch.arange(rows) < rows // 2
    encoded = pack_rows([given_rows.at(half), given_rows.at(~half)], k)
    assert encoded.codes[0].shape == (rows, 6 * k + 4)
    found = unpack_rows(encoded)
    assert torch.equal(found.ids, given_rows.ids)
    assert torch.equal(found.lse, given_rows.lse)
    assert torch.equal(found.log_probs, given_rows.log_probs.half().float())


def test_stock_zarr_reads_the_rows_with_the_type_in_their_attributes(tiny: Store) -> None:
    record = tiny.commits()[0]
    array = zarr.open_group(Path(tiny.path) / record.segment, mode="r")["final"]
    kind = np.dtype([(name, dtype, tuple(shape)) for name, dtype, shape in array.attrs["row"]])
    rows = np.ascontiguousarray(array[:]).view(kind)[:, 0]
    held = [tiny[sample.id].topk for sample in record.samples]
    assert np.array_equal(rows["ids"], torch.cat([part.ids for part in held if part]).numpy())
    assert np.array_equal(rows["log_probs"].astype("f4"), torch.cat([part.log_probs for part in held if part]).numpy())
    assert np.array_equal(rows["lse"][:, 0], torch.cat([part.lse for part in held if part]).numpy())


def test_equal_logits_go_by_the_lower_id_and_do_not_depend_on_the_block() -> None:
    head = HeadBundle(HEAD.model_copy(update={"tied": True}), torch.ones(50, 8), None, torch.ones(8))
    found = top_tokens(head, torch.ones(3, 8), "post_norm", 5)
    assert found.ids.tolist() == [sorted(row) for row in found.ids.tolist()]
    assert torch.allclose(found.log_probs, torch.tensor(-np.log(50.0), dtype=torch.float32))


@pytest.mark.parametrize(("vocab", "k"), [(40, 2), (1000, 8), (5000, 64)])
def test_of_equal_logits_at_the_last_place_the_lowest_ids_are_taken(vocab: int, k: int) -> None:
    head = HeadBundle(
        HEAD.model_copy(update={"tied": True}), torch.randint(-1, 2, (vocab, 8)).float(), None, torch.ones(8)
    )
    final = torch.randint(-1, 2, (5, 8)).float()
    for found, row in zip(
        top_tokens(head, final, "post_norm", k).ids.tolist(), final @ head.embed_tokens.T, strict=True
    ):
        logits = row.tolist()
        assert found == sorted(range(vocab), key=lambda token: (-logits[token], token))[:k]


def test_a_copy_makes_the_same_top_tokens_as_a_capture(raw: Store, tiny: Store, tmp_path: Path) -> None:
    plan = open_copy([raw], tmp_path / "copy", "final=topk,aux=q4")
    assert plan.destination.manifest.recipe == "tiny"
    assert "final: bf16 → topk keeps the target's top tokens; the hidden cannot be brought back" in plan.notes
    run_copy(plan)
    copied = Store.open(tmp_path / "copy")
    result = compare(copied, tiny)
    assert not result.different
    assert result.fields[-1].rows > 0
    assert verify(tmp_path / "copy", "bytes").ok


def test_a_copy_of_top_tokens_keeps_them_as_they_are(tiny: Store, tmp_path: Path) -> None:
    plan = open_copy([tiny], tmp_path / "copy", "aux=bf16,final=topk")
    run_copy(plan)
    result = compare(tiny, Store.open(tmp_path / "copy"))
    assert result.fields[-1].different_rows == 0
    assert result.top1_share == 1.0


@pytest.mark.parametrize("recipe", ["safe", "raw", "compact", "aux=q4"])
def test_top_tokens_never_become_a_final_hidden_again(tiny: Store, tmp_path: Path, recipe: str) -> None:
    with pytest.raises(ConfigError, match="in place of the final hidden") as error:
        open_copy([tiny], tmp_path / "copy", recipe)
    assert error.value.kind == "final-unfit"
    assert not (tmp_path / "copy").exists()


def test_a_store_of_finals_alone_is_not_copied_to_top_tokens(tmp_path: Path) -> None:
    finals = make_store(tmp_path, layers=(), codec="q8", final="all")
    with pytest.raises(ConfigError, match="nothing to train from"):
        open_copy([finals], tmp_path / "copy", "tiny")


def test_a_hidden_and_top_tokens_are_compared_by_their_first_token(raw: Store, tiny: Store) -> None:
    result = compare(raw, tiny)
    assert [error.field for error in result.fields] == ["layer_1", "layer_3"]
    assert result.top1_rows > 0
    assert result.top1_share == 1.0


def test_one_other_log_prob_is_a_difference(tiny: Store) -> None:
    held = tiny[tiny.sample_ids[0]].topk
    assert held is not None
    log_probs = held.log_probs.clone()
    log_probs[1, 2] -= 0.01
    error = FieldError("final")
    error.add_top_tokens(held, replace(held, log_probs=log_probs))
    assert (error.rows, error.different_rows, error.document()["relative"]) == (held.rows, 1, None)


def test_what_needs_the_hidden_refuses_a_store_of_top_tokens(tiny: Store, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="only the target's top tokens in its place"):
        export_samples(tiny, tmp_path / "out", LAYOUT, missing_final="zeros")


def test_records_without_top_tokens_are_refused_by_name() -> None:
    capture = capture_spec(codec="tiny")
    records = random_records(make_samples(1), capture_spec(codec="raw"))
    with pytest.raises(ValueError, match="none was given"):
        with_top_tokens(records[0], None, capture)
    with pytest.raises(ValueError, match=r"final has shape .*, expected \[0, 32\]"):
        encode_records("u", records, capture)
    with pytest.raises(ValueError, match=r"top tokens has shape \[0, 0\], expected"):
        encode_records("u", [replace(records[0], final=records[0].final[:0])], capture)


def test_repair_keeps_the_top_tokens_of_the_samples_that_still_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="tiny")
    before = {sample_id: store[sample_id] for sample_id in store.sample_ids}
    record = max(store.commits(), key=lambda commit: len(commit.samples))
    path = Path(store.path) / record.segment / "layer_1" / "c" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))
    repair_all(store.path)
    after = Store.open(store.path)
    assert verify(store.path, "bytes").ok
    for sample_id in after.sample_ids:
        one, other = before[sample_id].topk, after[sample_id].topk
        assert one is not None
        assert other is not None
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.lse, other.lse)


def test_layout_is_six_bytes_a_token_and_four_a_row() -> None:
    assert TOPK_CODEC.code_columns(4096) == 388
    assert TOPK_CODEC.row_bits(4096) == 8 * 388
    assert VOCAB >= K
