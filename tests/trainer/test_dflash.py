"""DFlash against the plain restatement: states, losses, gradients, anchors, and its use over text and live."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from hiddenstore.targets.head import HeadBundle
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH, make_batch, make_head
from tests.trainer.dflash_plain import dense_mask, plain_loss, plain_states
from trainer.attention import block as attention
from trainer.drafters import live
from trainer.drafters.base import DrafterInUse, TargetFacts, Verified
from trainer.drafters.dflash import DFLASH, BlockLoss, DFlash, DFlashConfig
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.simulate import evaluate_packs
from trainer.evaluate.speculate import DecodeLimits, decode
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface
from trainer.slots import candidate_anchors, draw_anchors, map_blocks
from trainer.vocab import DraftVocab

BLOCK, MASK_ID = 4, 3


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks a group, so that packs of a test have several."""
    monkeypatch.setattr(attention, "GROUP_ROWS", 3 * BLOCK)
    monkeypatch.setattr(attention, "GROUP_ROWS_DEVICE", 2 * BLOCK)
    monkeypatch.setattr(live, "SLOT_BUDGET", 5 * BLOCK)


@dataclass
class Case:
    target: TargetInterface
    model: DFlash
    batch: PackedBatch


def config(**changes: object) -> DFlashConfig:
    shape: dict[str, object] = {
        "aux_layers": (1, 2, 4), "hidden_size": WIDTH, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "vocab_size": VOCAB, "num_layers": 2, "block_size": BLOCK, "mask_token_id": MASK_ID, **changes,
    }  # fmt: skip
    return DFlashConfig.model_validate(shape)


def make_case(lengths: list[int], known: int = VOCAB, dtype: torch.dtype = torch.float64, **changes: object) -> Case:
    return case_of(DFLASH, config(**changes), lengths, known, dtype)


def case_of(kind: Any, settings: DFlashConfig, lengths: list[int], known: int, dtype: torch.dtype) -> Case:
    """Every weight of the drafter random, norms unequal; ``known`` tokens in the draft vocabulary."""
    head: HeadBundle = make_head(dtype=dtype)
    vocab = DraftVocab.full(VOCAB) if known == VOCAB else DraftVocab.of_ids(torch.randperm(VOCAB)[:known], VOCAB)
    target = TargetInterface(head, vocab)
    model = kind.build(settings, target, 0).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.25
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    model.tie_weights(head)
    if model.frozen_head is not None:
        model.frozen_head = model.frozen_head.to(dtype)
    return Case(target, model, make_batch(lengths, dtype=dtype))


def as_lists(batch: PackedBatch) -> dict[str, list[int]]:
    return {
        "ids": batch.input_ids.tolist(),
        "positions": batch.positions.tolist(),
        "document": batch.document.tolist(),
        "mask": batch.loss_mask.int().tolist(),
    }


def plain(case: Case, anchors: list[int], block: int | None = None) -> Tensor:
    """States of every slot [N, B, D], differentiable in the model's own parameters; ``block``: of fewer slots."""
    c = case.model.config
    how = {
        "block": block or c.block_size, "mask_id": c.mask_token_id, "heads": c.num_heads, "kv_heads": c.num_kv_heads,
        "eps": c.rms_norm_eps, "theta": c.rope_theta,
        "sights": [(window, c.causal or (c.sliding_causal and window is not None)) for window in c.windows],
    }  # fmt: skip
    weights = dict(case.model.named_parameters())
    table = case.target.head.embed_tokens
    return plain_states(weights, table, as_lists(case.batch), case.batch.aux, anchors, how)


def our_loss(case: Case, loss: BlockLoss, anchors: list[int]) -> StepLosses:
    objective = DFLASH.objective(case.model, case.target, loss)
    work = objective.prepare_at(case.batch, torch.tensor(anchors))
    return objective.losses(work, objective.denominators(work))


def expected_loss(case: Case, loss: BlockLoss, anchors: list[int]) -> tuple[Tensor, list[Tensor]]:
    vocab, head, batch = case.target.vocab, case.target.head, case.batch
    known = vocab.target_ids.tolist()
    target_logits = head.logits(batch.final).double()
    labels = {}
    for row, token in enumerate(batch.input_ids.tolist()):
        wanted = int(target_logits[row - 1].argmax()) if loss.labels == "target" and row else token
        if wanted in known:
            labels[row] = known.index(wanted)
    own = dict(case.model.named_parameters()).get("lm_head.weight")
    weight = head.output_weight[vocab.target_ids] if own is None else own
    how = {
        "gamma": loss.gamma or 4.0,
        "alpha": loss.dpace_alpha if loss.weighting == "dpace" else None,
        "distil": loss.distil,
        "by_count": loss.reduction == "kept" or loss.weighting == "dpace",
    }
    logits = plain(case, anchors) @ weight.T.double()
    return plain_loss(logits, anchors, as_lists(batch), labels, target_logits[:, known].softmax(-1), how)


LENGTHS = [17, 3, 12]
ANCHORS = [0, 2, 3, 4, 9, 14, 16, 18, 21, 25, 26, 31]


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("layers", [1, 3])
def test_states_of_packed_documents_equal_those_under_a_dense_mask(window: int | None, layers: int) -> None:
    case = make_case(LENGTHS, num_layers=layers, sliding_window=window)
    plan = map_blocks(torch.tensor(ANCHORS), case.batch.document, window)
    found = case.model.block_states(case.batch, plan).view(len(ANCHORS), BLOCK - 1, WIDTH)
    # Rotary tables are fp32 in ours.
    assert torch.allclose(found, plain(case, ANCHORS)[:, 1:], rtol=1e-5, atol=2e-6)


SIGHTS = {
    "causal": {"causal": True},
    "causal, windowed": {"causal": True, "sliding_window": 2},
    "causal windows": {"sliding_window": 3, "sliding_causal": True},
    "the last layers of a longer list": {
        "sliding_window": 3,
        "sliding_causal": True,
        "layer_types": ("full_attention", "sliding_attention", "full_attention", "sliding_attention"),
    },
}


@pytest.mark.parametrize("sight", SIGHTS)
def test_causal_slots_and_layers_of_several_kinds_see_what_a_dense_mask_shows(sight: str) -> None:
    case = make_case(LENGTHS, num_layers=3, **SIGHTS[sight])
    plan = map_blocks(torch.tensor(ANCHORS), case.batch.document, case.model.window)
    found = case.model.block_states(case.batch, plan).view(len(ANCHORS), BLOCK - 1, WIDTH)
    assert torch.allclose(found, plain(case, ANCHORS)[:, 1:], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sight", ["causal", "causal, windowed"])
@pytest.mark.parametrize("known", [VOCAB, 25])
def test_jetspec_s_loss_and_gradients_equal_the_plain_restatement(sight: str, known: int) -> None:
    case, loss = make_case(LENGTHS, known=known, **SIGHTS[sight]), BlockLoss(distil=1.0)
    result, (expected, sums) = our_loss(case, loss, ANCHORS), expected_loss(case, loss, ANCHORS)
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(result.sums, torch.stack(sums), rtol=1e-5)
    weights = list(case.model.parameters())
    for a, b in zip(*(torch.autograd.grad(x, weights) for x in (result.total, expected)), strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_a_causal_block_says_the_same_of_its_first_slots_however_many_follow() -> None:
    case = make_case(LENGTHS, causal=True)
    plan = map_blocks(torch.tensor(ANCHORS), case.batch.document)
    context = case.model.context(case.batch.aux, case.batch.positions, plan.context)
    anchors = plan.anchors
    fill = (case.batch.input_ids[anchors], case.batch.positions[anchors], context, plan.blocks)
    two, three = (case.model.fill(*fill, (1, last)).view(len(ANCHORS), -1, WIDTH) for last in (3, 4))
    assert torch.allclose(two, three[:, :2], atol=1e-12)


def test_types_of_layers_that_contradict_the_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="names 1 layers of 2"):
        config(layer_types=("full_attention",))
    with pytest.raises(ValueError, match="no sliding_window"):
        config(layer_types=("full_attention", "sliding_attention"))


@pytest.mark.parametrize(
    ("shape", "windows", "causal"),
    [
        ({"sliding_window": 64}, (64, 64), True),
        ({"sliding_window": 64, "use_sliding_window": False}, (None, None), False),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 8}, (None, None), False),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 4}, (None, 64), True),
    ],
)
def test_windows_follow_from_the_target(shape: dict, windows: tuple, causal: bool) -> None:
    facts = TargetFacts(WIDTH, 8, VOCAB, shape, (1, 2, 3, 4, 5))
    found = config(**{**DFLASH.derive(facts)["drafter"], "aux_layers": (1, 2, 4), "num_layers": 2})
    assert found.windows == windows
    assert found.is_causal(windows[1]) is causal


@pytest.mark.parametrize("window", [None, 3])
def test_a_group_of_blocks_sees_what_the_dense_mask_shows(window: int | None) -> None:
    case = make_case(LENGTHS)
    document = case.batch.document
    blocks = map_blocks(torch.arange(len(document)), document).blocks
    sight = attention.Sight(blocks, BLOCK, 0, BLOCK, window)
    dense = dense_mask(document.tolist(), list(range(len(document))), BLOCK, window)
    seen = torch.zeros_like(dense)
    # Context rows leave out what no block sees: the last row of each document.
    rows = torch.cat([torch.nonzero(document == i)[:-1, 0] for i in range(len(LENGTHS))])
    for group in attention._groups(sight, 3 * BLOCK):
        mask = attention.allowed(group, sight)
        assert mask is not None or group.last - group.first == 1
        keys = torch.cat([rows[group.begin : group.end], len(document) + torch.arange(*_slots(group))])
        shown = torch.ones(1, dtype=torch.bool) if mask is None else mask.expand(-1, BLOCK, -1).flatten(0, 1)
        seen[slice(*_slots(group)), keys] = shown
    assert torch.equal(seen, dense)


def _slots(group: attention._Group) -> tuple[int, int]:
    return group.first * BLOCK, group.last * BLOCK


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_device_path_equals_the_cpu_kernel_in_values_and_gradients(window: int | None, causal: bool) -> None:
    blocks = map_blocks(torch.tensor(ANCHORS), make_batch(LENGTHS).document, window).blocks
    sight = attention.Sight(blocks, BLOCK, 1, BLOCK, window, causal)
    rows, slots = max(end for _, end in blocks.bounds), len(ANCHORS) * BLOCK
    q = torch.randn(len(ANCHORS) * (BLOCK - 1), 4, 8, dtype=torch.float64, requires_grad=True)
    kv = [torch.randn(n, 2, 8, dtype=torch.float64, requires_grad=True) for n in (rows, rows, slots, slots)]
    outs = [
        call(q, (kv[0], kv[1]), (kv[2], kv[3]), sight) for call in (attention.block_attention, attention.attend_groups)
    ]
    assert torch.allclose(*outs, rtol=1e-9, atol=1e-11)
    seed = torch.randn_like(q)
    for a, b in zip(*(torch.autograd.grad(out, [q, *kv], seed) for out in outs), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


LOSSES = {
    "hard": {},
    "by count": {"reduction": "kept", "gamma": 2.0},
    "d-pace": {"weighting": "dpace", "dpace_alpha": 0.3},
    "target's choice": {"labels": "target"},
    "distillation": {"distil": 1.0},
    "mix": {"distil": 0.4},
    "d-pace of a mix": {"weighting": "dpace", "distil": 0.5},
}


@pytest.mark.parametrize("known", [VOCAB, 25])
@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES.keys())
def test_loss_and_gradients_equal_the_plain_restatement(settings: dict[str, object], known: int) -> None:
    case = make_case(LENGTHS, known=known, train_head=known < VOCAB)
    loss = BlockLoss.model_validate(settings)
    result = our_loss(case, loss, ANCHORS)
    expected, sums = expected_loss(case, loss, ANCHORS)
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(result.sums, torch.stack(sums), rtol=1e-5)
    parameters = dict(case.model.named_parameters())
    ours = torch.autograd.grad(result.total, list(parameters.values()))
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        # The teacher and the scales are fp32 in ours, hence not closer.
        assert torch.allclose(a, b, rtol=1e-5, atol=2e-6 * float(b.abs().max())), name


def test_gradients_agree_in_fp32() -> None:
    case, exact = make_case(LENGTHS, dtype=torch.float32), make_case(LENGTHS)
    exact.model.load_state_dict(case.model.state_dict())
    exact.target = TargetInterface(
        replace(
            case.target.head,
            embed_tokens=case.target.head.embed_tokens.double(),
            lm_head=case.target.head.output_weight.double(),
        ),
        case.target.vocab,
    )
    exact.batch = replace(case.batch, aux=case.batch.aux.double())
    expected = torch.autograd.grad(expected_loss(exact, BlockLoss(), ANCHORS)[0], list(exact.model.parameters()))
    found = torch.autograd.grad(our_loss(case, BlockLoss(), ANCHORS).total, list(case.model.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_products_in_bf16_change_the_loss_by_rounding_only() -> None:
    case = make_case([19, 11], dtype=torch.float32)
    anchors, loss = [2, 7, 21, 25], BlockLoss()
    exact = our_loss(case, loss, anchors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = our_loss(case, loss, anchors)
    rounded.total.backward()
    torch.testing.assert_close(rounded.total.float(), exact.total, rtol=2e-2, atol=0)


def test_recomputed_layers_give_the_same_gradients() -> None:
    case, found = make_case(LENGTHS), []
    for case.model.recompute in (False, True):
        found.append(torch.autograd.grad(our_loss(case, BlockLoss(), ANCHORS).total, list(case.model.parameters())))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_packing_changes_nothing() -> None:
    case = make_case(LENGTHS)
    together = our_loss(case, BlockLoss(), ANCHORS)
    starts, sums = [0, 17, 20, 32], torch.zeros(BLOCK - 1, dtype=torch.float64)
    for index in range(3):
        rows = slice(starts[index], starts[index + 1])
        alone = replace(
            case.batch, **{n: getattr(case.batch, n)[rows] for n in ("input_ids", "loss_mask", "positions")},
            document=case.batch.document[rows] * 0, aux=case.batch.aux[:, rows], sample_ids=["a"],
        )  # fmt: skip
        here = [a - starts[index] for a in ANCHORS if starts[index] <= a < starts[index + 1]]
        sums += our_loss(Case(case.target, case.model, alone), BlockLoss(), here).sums
    assert torch.allclose(together.sums, sums, rtol=1e-9)


def test_hits_count_the_label_and_open_the_slots_of_the_mask() -> None:
    case = make_case(LENGTHS, known=25)
    work = DFLASH.objective(case.model, case.target, BlockLoss()).prepare_at(case.batch, torch.tensor(ANCHORS))
    result = our_loss(case, BlockLoss(), ANCHORS)
    found = (plain(case, ANCHORS)[:, 1:] @ case.target.head.output_weight[case.target.vocab.target_ids].T).argmax(-1)
    assert result.hits.tolist() == ((found == work.labels) & (work.labels >= 0)).sum(0).tolist()
    lists, open_slots = as_lists(case.batch), [0] * (BLOCK - 1)
    for anchor in ANCHORS:
        for k in range(1, BLOCK):
            row = anchor + k
            if row < 32 and lists["document"][row] == lists["document"][anchor]:
                open_slots[k - 1] += lists["mask"][row]
    assert work.open.tolist() == open_slots
    assert bool((work.counts < work.open).any())


def test_anchors_follow_their_rules() -> None:
    batch = make_batch(LENGTHS)
    mask, document = batch.loss_mask.tolist(), batch.document.tolist()
    after = [s for s in range(31) if mask[s] and mask[s + 1] and document[s] == document[s + 1]]
    whole = [s for s in range(32) if mask[s] and s + BLOCK <= 32 and document[s] == document[s + BLOCK - 1]]
    assert candidate_anchors(batch, BLOCK, "next").tolist() == after
    assert candidate_anchors(batch, BLOCK, "whole").tolist() == whole


def test_anchors_depend_on_seed_step_and_sample_but_not_on_the_pack() -> None:
    batch = make_batch([40, 40], mask=torch.ones(80, dtype=torch.bool))
    rows = candidate_anchors(batch, BLOCK, "next")
    drawn = draw_anchors(batch, rows, 10, (1, 5))
    assert torch.equal(drawn, draw_anchors(batch, rows, 10, (1, 5)))
    assert torch.bincount(batch.document[drawn]).tolist() == [10, 10]
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    for rng_key in ((2, 5), (1, 6)):
        assert not torch.equal(drawn, draw_anchors(batch, rows, 10, rng_key))
    swapped = replace(batch, sample_ids=batch.sample_ids[::-1])
    other = draw_anchors(swapped, rows, 10, (1, 5))
    assert (drawn[:10] + 40).tolist() == other[10:].tolist()
    assert torch.equal(draw_anchors(batch, rows, 39, (1, 5)), rows)


def test_a_pack_without_anchors_has_no_loss_and_no_gradient() -> None:
    case = make_case([9], dtype=torch.float32)
    case.batch.loss_mask[:] = False
    objective = DFLASH.objective(case.model, case.target, BlockLoss())
    work = objective.prepare(case.batch)
    result = objective.losses(work, objective.denominators(work))
    result.total.backward()
    assert float(result.total.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in case.model.parameters())


def test_a_gamma_of_zero_weighs_every_slot_alike() -> None:
    assert BlockLoss.model_validate({"gamma": 0}).slot_weights(8).tolist() == [1.0] * 7


def test_dpace_refuses_to_divide_by_weights_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="reduction must be kept"):
        BlockLoss(weighting="dpace", reduction="weights")


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("known", [VOCAB, 30])
def test_hits_over_recorded_text_equal_live_drafting_one_by_one(window: int | None, known: int) -> None:
    case = make_case([23, 4, 18], known=known, dtype=torch.float32, sliding_window=window)
    case.batch.loss_mask[:] = torch.rand(45) < 0.9
    use, total = DrafterInUse(DFLASH, case.model, case.target), 0
    write_proposals_into_the_text(case, use)
    hits = use.hits(case.batch, 3)
    for document in range(3):
        rows = torch.nonzero(case.batch.document == document)[:, 0]
        ids, mask = case.batch.input_ids[rows].tolist(), case.batch.loss_mask[rows].tolist()
        aux, live, known_rows = case.batch.aux[:, rows], use.live(), 0
        for n in range(len(ids)):
            if n < 1 or n + 1 >= len(ids) or not (mask[n] and mask[n + 1]):
                assert int(hits[rows[n]]) == 0
                continue
            seen = Verified(aux[:, known_rows:n], aux[0, known_rows:n], ids[known_rows + 1 : n + 1])
            proposals, known_rows = live.propose(seen, 3), n
            text = ids[n + 1 : n + 4]
            agree = next((i for i, (a, b) in enumerate(zip(proposals, text, strict=False)) if a != b), len(text))
            assert int(hits[rows[n]]) == agree
            total += agree
    assert total > 0


def write_proposals_into_the_text(case: Case, use: DrafterInUse) -> None:
    """After every fourth token of a document come one to three that the drafter would propose, so that hits exist."""
    ids, document = case.batch.input_ids, case.batch.document
    for row in range(1, len(ids) - 3, 4):
        start = int(torch.nonzero(document == document[row])[0])
        if start < row and document[row + 3] == document[row]:
            seen = Verified(
                case.batch.aux[:, start:row], case.batch.final[start:row], ids[start + 1 : row + 1].tolist()
            )
            count = 1 + row // 4 % 3
            ids[row + 1 : row + 1 + count] = torch.tensor(use.live().propose(seen, count))


def test_proposals_equal_a_plain_block_as_long_as_they_and_every_logit_row_is_picked_in_order() -> None:
    case = make_case([12], dtype=torch.float32)
    live, picked = DrafterInUse(DFLASH, case.model, case.target).live(), []

    def pick(logits: Tensor) -> Tensor:
        picked.append(logits)
        return logits.argmin(-1)

    seen = Verified(case.batch.aux[:, :8], case.batch.final[:8], case.batch.input_ids[1:9].tolist())
    proposals = live.propose(seen, 2, pick)
    expected = plain(case, [8], block=3)[0, 1:3] @ case.target.head.output_weight.T
    assert torch.allclose(torch.cat(picked), expected, atol=1e-4)
    assert proposals == expected.argmin(-1).tolist()


def test_a_draft_longer_than_the_block_is_refused_with_the_length_that_fits() -> None:
    case = make_case([12])
    use = DrafterInUse(DFLASH, case.model, case.target)
    for attempt in (
        lambda: evaluate_packs([use], [case.batch], [DraftShape(2), DraftShape(4)]),
        lambda: decode(None, use, [], [DraftShape(4)], DecodeLimits(1, 8)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="at most 3 tokens at a time, not 4") as raised:
            attempt()
        assert raised.value.hint == "--draft-len 3"


def test_checkpoint_names_are_those_engines_load() -> None:
    layer = {
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    wanted = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    wanted |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    state = make_case([4]).model.state_dict()
    assert set(state) == wanted
    assert state["layers.0.self_attn.q_norm.weight"].shape == (8,)
    assert state["fc.weight"].shape == (WIDTH, LAYERS * WIDTH)
    assert set(make_case([4], known=25, train_head=True).model.state_dict()) == wanted | {"lm_head.weight"}


def test_a_drafter_of_another_width_or_without_the_mask_row_is_refused() -> None:
    target = TargetInterface(make_head(), DraftVocab.full(VOCAB))
    with pytest.raises(ConfigError, match="must be 16") as raised:
        DFLASH.build(config(hidden_size=32), target, 0)
    assert raised.value.hint == "drafter.hidden_size=16"
    with pytest.raises(ConfigError, match="has no embedding"):
        DFLASH.build(config(mask_token_id=VOCAB), target, 0)


@pytest.mark.parametrize(
    ("layers", "held", "depth"), [(36, (1, 9, 17, 25, 33), 5), (8, (1, 2, 3, 4, 5), 2), (3, (0, 1, 2), 1)]
)
def test_defaults_follow_from_the_depth_of_the_target(layers: int, held: tuple[int, ...], depth: int) -> None:
    found = DFLASH.derive(TargetFacts(64, layers, 50_000, {}, held))["drafter"]
    assert tuple(found["aux_layers"]) == held
    assert found["num_layers"] == depth
    assert found["vocab_size"] == 50_000
    assert "mask_token_id" not in found
