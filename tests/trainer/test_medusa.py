"""The trainer's Medusa against a plain restatement; its use over recorded text and live; what it asks of a store."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_target import make_model, make_tokenizer
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.records import final_row_positions
from hiddenstore.store import Store
from hiddenstore.testing.builders import capture_spec, make_store
from schemas.capture import Codecs, HeadSpec
from tests.trainer.conftest import VOCAB, WIDTH, make_batch, make_head
from tests.trainer.live import assert_live_equals_eval, identity_in_memory
from trainer.drafters import check_store, drafter_kind
from trainer.drafters.base import DrafterInUse, Verified
from trainer.drafters.medusa import MEDUSA, Medusa, MedusaConfig, MedusaLoss, MedusaObjective
from trainer.evaluate.acceptance import DraftShape, drafting_positions
from trainer.evaluate.simulate import evaluate
from trainer.evaluate.speculate import DecodeLimits
from trainer.evaluate.target import LiveTarget, bundle_of
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface
from trainer.train.loop import train
from trainer.train.run_folder import load_drafter
from trainer.vocab import DraftVocab

WORDS = [
    "data.batch_tokens=160", "data.pack_tokens=80", "drafter.medusa_heads=3", "drafter.vocab_size=40",
    "train.max_steps=60", "train.checkpoint_every=0", "train.validate_every=0",
]  # fmt: skip


@dataclass
class Setting:
    target: TargetInterface
    model: Medusa
    batch: PackedBatch


def make_setting(lengths: list[int], vocab: int = VOCAB, known: int | None = None, **changes: object) -> Setting:
    """Every weight random; the pack holds the rows of ``final: supervised``. ``known``: draft vocabulary."""
    head = replace(make_head(vocab), lm_head_bias=torch.randn(vocab) if changes.pop("bias", False) else None)
    shape: dict[str, object] = {
        "hidden_size": WIDTH, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": vocab, "medusa_heads": 3, "medusa_layers": 2, **changes,
    }  # fmt: skip
    target = TargetInterface(head, DraftVocab.of_ids(torch.randperm(vocab)[: known or vocab], vocab))
    model = MEDUSA.build(MedusaConfig.model_validate(shape), target, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    batch = make_batch(lengths)
    rows = torch.cat([
        torch.from_numpy(final_row_positions(batch.loss_mask[at].numpy(), "supervised")).long() + int(at[0])
        for at in torch.arange(sum(lengths)).split(lengths)
    ])  # fmt: skip
    batch = replace(batch, input_ids=batch.input_ids % vocab, final=batch.final[rows], final_rows=rows)
    return Setting(target, model, batch)


def ours(setting: Setting, **loss: object) -> StepLosses:
    objective = MedusaObjective(setting.model, setting.target, MedusaLoss.model_validate(loss))
    work = objective.prepare(setting.batch)
    return objective.losses(work, objective.denominators(work))


def residual(weights: dict[str, Tensor], head: int, x: Tensor) -> Tensor:
    layer = 0
    while f"blocks.{head}.layers.{layer}.weight" in weights:
        inner = weights[f"blocks.{head}.layers.{layer}.weight"] @ x + weights[f"blocks.{head}.layers.{layer}.bias"]
        x = x + inner * torch.sigmoid(inner)
        layer += 1
    return x


def plain(setting: Setting, *, ahead: int = 2, norm: bool = True, share: float = 0.0):  # type: ignore[no-untyped-def]
    """The restatement in fp64, row by row: parameters by name, mean loss and slots of each head.

    Row t of a document teaches head k where t+1 and t+2+k are supervised and the draft vocabulary has the label.
    """
    weights = {name: p.detach().double().requires_grad_() for name, p in setting.model.named_parameters()}
    head, batch, known = setting.target.head, setting.batch, setting.target.vocab.target_ids.tolist()
    bias = torch.zeros(head.vocab_size) if head.lm_head_bias is None else head.lm_head_bias
    stored = {}
    for row, x in zip(batch.final_rows.tolist(), batch.final.double(), strict=True):
        scaled = x / ((x * x).mean() + 1e-5).sqrt() * head.norm_weight.double()
        stored[row] = scaled if norm else x
    losses: list[list[Tensor]] = [[] for _ in range(setting.model.config.medusa_heads)]
    for t in range(batch.tokens):
        for k, found in enumerate(losses):
            label = t + ahead + k
            if label >= batch.tokens or batch.document[label] != batch.document[t]:
                continue
            if not (batch.loss_mask[t + 1] and batch.loss_mask[label]) or int(batch.input_ids[label]) not in known:
                continue
            state = residual(weights, k, stored[t])
            if f"lm_heads.{k}.weight" in weights:
                log_p = (weights[f"lm_heads.{k}.weight"] @ state).log_softmax(0)
            else:
                log_p = (head.output_weight.double() @ state + bias.double()).log_softmax(0)
            loss = -(1 - share) * log_p[known.index(int(batch.input_ids[label]))]
            if share:
                q = (head.output_weight.double() @ stored[label - 1] + bias.double())[known].softmax(0)
                loss = loss - share * (q * log_p).sum()
            found.append(loss)
    return weights, [torch.stack(found).mean() for found in losses], [len(found) for found in losses]


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.0),
        ({"known": 17}, 0.0),
        ({"original_head": True}, 0.0),
        ({"original_head": True, "bias": True}, 0.5),
        ({"medusa_layers": 1, "medusa_heads": 5}, 0.0),
        ({"known": 17}, 0.3),
        ({}, 1.0),
    ],
)
def test_losses_and_gradients_agree_with_the_plain_restatement(changes: dict[str, object], share: float) -> None:
    setting = make_setting([23, 2, 14], **changes)  # type: ignore[arg-type]
    result = ours(setting, teacher_share=share)
    weights, losses, slots = plain(setting, share=share)
    assert result.counts.tolist() == slots
    for found, expected in zip((result.sums / result.counts).tolist(), losses, strict=True):
        assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    total = torch.stack([0.2 * 0.8**k * loss for k, loss in enumerate(losses)]).sum()
    assert float(result.value) == pytest.approx(float(total.detach()), rel=1e-5)
    parameters = dict(setting.model.named_parameters())
    found = torch.autograd.grad(result.total, list(parameters.values()))
    expected = torch.autograd.grad(total, list(weights.values()))
    for name, a, b in zip(parameters, found, expected, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()), name


def test_heads_are_weighed_as_the_settings_say() -> None:
    setting = make_setting([20])
    _, losses, _ = plain(setting)
    expected = sum(0.5 * 0.9**k * float(loss.detach()) for k, loss in enumerate(losses))
    assert float(ours(setting, head_weight=0.5, decay=0.9).value) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrong", [{"ahead": 1}, {"norm": False}])
def test_another_shift_or_norm_is_another_loss(wrong: dict[str, object]) -> None:
    """Negative control: the restatement sees each of the mistakes that are easy to make."""
    setting = make_setting([30])
    _, losses, _ = plain(setting, **wrong)  # type: ignore[arg-type]
    assert abs(float(ours(setting).sums[0] / ours(setting).counts[0]) - float(losses[0].detach())) > 1e-2


def test_packing_changes_nothing() -> None:
    setting = make_setting([10, 4, 17])
    together, sums = ours(setting).sums, torch.zeros(3, dtype=torch.float64)
    for index in range(3):
        sums += ours(replace(setting, batch=part_of(setting.batch, index))).sums
    assert torch.allclose(together, sums, rtol=1e-5)


def part_of(batch: PackedBatch, index: int) -> PackedBatch:
    rows = torch.nonzero(batch.document == index)[:, 0]
    begin, kept = int(rows[0]), batch.document[batch.final_rows] == index
    return PackedBatch(
        batch.input_ids[rows], batch.loss_mask[rows], batch.positions[rows], batch.document[rows] * 0,
        batch.aux[:, rows], batch.final[kept], batch.final_rows[kept] - begin, [batch.sample_ids[index]],
    )  # fmt: skip


def test_a_store_with_more_rows_teaches_the_same() -> None:
    setting = make_setting([40])
    every = torch.randn(40, WIDTH)
    every[setting.batch.final_rows] = setting.batch.final
    fuller = replace(setting.batch, final=every, final_rows=torch.arange(40))
    first, second = ours(setting), ours(replace(setting, batch=fuller))
    assert torch.equal(first.sums, second.sums)
    assert first.counts.tolist() == second.counts.tolist()


def test_accuracy_counts_labels_off_the_draft_vocabulary_as_open() -> None:
    setting = make_setting([40], known=9)
    objective = MedusaObjective(setting.model, setting.target, MedusaLoss())
    work = objective.prepare(setting.batch)
    whole = MedusaObjective(setting.model, replace(setting.target, vocab=DraftVocab.full(VOCAB)), MedusaLoss()).prepare(
        setting.batch
    )
    assert torch.equal(work.open, whole.counts)
    assert bool((work.counts < work.open).all())


def test_a_pack_that_teaches_nothing_costs_nothing() -> None:
    setting = make_setting([6])
    setting.batch.loss_mask[:] = False
    assert float(ours(setting).value) == 0


@pytest.mark.parametrize("name", ["medusa", "eagle1"])
def test_a_store_of_top_tokens_is_refused_with_the_command_that_captures_hiddens(name: str) -> None:
    capture = capture_spec(final="all")
    target = capture.target.model_copy(update={"name": "org/a; touch pwned"})
    capture = capture.model_copy(update={"codecs": Codecs(aux="q8", final="topk"), "target": target})
    kind = drafter_kind(name)
    needs = kind.needs(make_setting([4]).model.config, None)
    with pytest.raises(ConfigError, match="the final hidden itself") as caught:
        check_store(name, needs, capture, "there")
    assert f"--target 'org/a; touch pwned' --layers {name} --final {needs.final}" in str(caught.value.hint)


def test_a_row_that_is_missing_is_named() -> None:
    setting = make_setting([30])
    setting.batch.loss_mask[10:14] = True
    lacking = setting.batch.final_rows != 10
    batch = replace(setting.batch, final=setting.batch.final[lacking], final_rows=setting.batch.final_rows[lacking])
    with pytest.raises(FormatError, match="pack row 10") as caught:
        ours(replace(setting, batch=batch))
    assert "--layers medusa" in str(caught.value.hint)


def test_fresh_heads_say_what_the_target_s_head_says() -> None:
    setting = make_setting([9], known=17)
    fresh = MEDUSA.build(setting.model.config, setting.target, 0)
    features = torch.randn(5, WIDTH)
    wanted = setting.target.head.logits(features, "post_norm", setting.target.vocab.target_ids)
    for index in range(3):
        assert torch.allclose(fresh.states(features, index) @ fresh.head_weight(index).T, wanted, atol=1e-4)


def test_checkpoint_names_are_those_engines_load() -> None:
    blocks = {f"blocks.{k}.layers.{i}.{part}" for k in range(3) for i in range(2) for part in ("weight", "bias")}
    heads = {f"lm_heads.{k}.weight" for k in range(3)}
    assert set(make_setting([4]).model.state_dict()) == blocks | heads
    assert set(make_setting([4], original_head=True).model.state_dict()) == blocks


def test_another_width_and_a_draft_vocabulary_under_the_original_head_are_refused() -> None:
    setting = make_setting([4], known=7)
    config = setting.model.config
    for update, said in (({"hidden_size": 8}, "hidden_size"), ({"original_head": True}, "draft vocabulary 7")):
        with pytest.raises(ConfigError, match=said) as caught:
            MEDUSA.build(config.model_copy(update=update), setting.target, 0)
        assert caught.value.kind == "drafter-shape"


def in_use(setting: Setting) -> DrafterInUse:
    return DrafterInUse(MEDUSA, setting.model.eval(), setting.target)


@pytest.mark.parametrize("changes", [{}, {"known": 2}, {"original_head": True, "bias": True}])
@pytest.mark.parametrize("draft_len", [2, 3])
def test_the_hits_of_every_slot_are_those_of_drafting_from_it_alone(changes: dict[str, object], draft_len: int) -> None:
    setting = make_setting([60, 2, 51, 9], vocab=3, **changes)  # type: ignore[arg-type]
    drafter, pack = in_use(setting), setting.batch
    hits, found = drafter.hits(pack, draft_len), []
    for index in range(4):
        part = part_of(pack, index)
        ids, allowed = part.input_ids, set(drafting_positions(part.loss_mask.numpy()).tolist())
        begin = int(torch.nonzero(pack.document == index)[0, 0])
        for n in range(len(ids)):
            expected = 0
            if n in allowed:
                final = part.final[part.final_rows == n - 1]
                proposals = drafter.live().propose(Verified(torch.empty(0), final, [int(ids[n])]), draft_len)
                assert len(proposals) == draft_len
                truth = ids[n + 1 : n + 1 + len(proposals)].tolist()
                while expected < len(truth) and proposals[expected] == truth[expected]:
                    expected += 1
            assert int(hits[begin + n]) == expected
            found.append(expected)
    assert len(set(found)) >= 3


@pytest.fixture(scope="module")
def target() -> LiveTarget:
    model, tokenizer = make_model(vocab=12), make_tokenizer()
    return LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), ())


@pytest.mark.parametrize("draft_len", [1, 3])
def test_it_decodes_the_greedy_text_and_eval_on_that_text_counts_the_same(target: LiveTarget, draft_len: int) -> None:
    head = bundle_of(target.model, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False))
    interface = TargetInterface(head, DraftVocab.full(12))
    config = MedusaConfig(
        hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=12, medusa_heads=3
    )
    model = MEDUSA.build(config, interface, 0).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, 12, (9,), generator=generator).tolist() for _ in range(12)]
    assert_live_equals_eval(
        target, DrafterInUse(MEDUSA, model, interface), prompts, [DraftShape(draft_len)], DecodeLimits(3, 24)
    )


def test_it_drafts_no_trees() -> None:
    with pytest.raises(ConfigError, match="medusa drafts no trees") as caught:
        in_use(make_setting([4])).tree(4)
    assert (caught.value.kind, caught.value.hint) == ("no-tree", "--draft-len 3")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("medusa"), samples=30, layers=())


def test_a_store_of_supervised_rows_alone_trains_it_and_eval_walks_it(store: Store, tmp_path: Path) -> None:
    train(store.path, tmp_path / "run", drafter="medusa", words=WORDS)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    loaded = load_drafter(tmp_path / "run")
    assert len(loaded.vocab.target_ids) == 40
    (result,) = evaluate([loaded], store, "validation", [DraftShape(3)])
    assert result.tally.drafts > 0
