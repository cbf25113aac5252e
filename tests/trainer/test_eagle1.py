"""The trainer's EAGLE-1 against the plain restatement; its noise, its use over recorded text, live and after a kill."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_target import make_model, make_tokenizer
from torch import Tensor

from hiddenstore.cli import main
from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.records import TopK
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.testing.builders import make_store
from schemas.capture import HeadSpec, NormState
from tests.trainer.conftest import VOCAB, WIDTH, make_batch, make_head
from tests.trainer.eagle1_plain import PlainEagle1, plain_losses
from tests.trainer.live import assert_live_equals_eval, identity_in_memory
from trainer.attention.ttt import KVCache
from trainer.drafters.base import DrafterInUse, Verified
from trainer.drafters.eagle1 import EAGLE1, Eagle1, Eagle1Config, RegressionLoss, RegressionObjective
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape, drafting_positions, walk
from trainer.evaluate.simulate import evaluate
from trainer.evaluate.speculate import DecodeLimits, replay
from trainer.evaluate.target import LiveTarget, bundle_of
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface
from trainer.train import step as step_module
from trainer.train.loop import train
from trainer.train.run_folder import describe, load_drafter
from trainer.vocab import DraftVocab

WORDS = [
    "data.batch_tokens=160", "data.pack_tokens=80", "drafter.intermediate_size=32", "drafter.num_heads=2",
    "drafter.num_kv_heads=1", "drafter.head_dim=8", "train.max_steps=10", "train.checkpoint_every=4",
    "train.validate_every=0", "train.keep=9",
]  # fmt: skip


@dataclass
class Setting:
    target: TargetInterface
    model: Eagle1
    batch: PackedBatch


GEMMA = HeadSpec(
    norm_flavour="rms_plus_one", norm_eps=1e-5, tied=True, embed_scale=4.0, logit_scale=0.5, final_logit_softcap=3.0
)


def make_setting(
    lengths: list[int], vocab: int = VOCAB, bias: bool = False, gemma: bool = False, **changes: object
) -> Setting:
    """Every weight of the drafter random, norms unequal, states as large as a target's."""
    head = make_head(vocab)
    if bias:
        head = replace(head, lm_head_bias=torch.randn(vocab))
    if gemma:
        head = replace(head, spec=GEMMA, lm_head=None)
    shape: dict[str, object] = {
        "hidden_size": WIDTH, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": vocab, **changes,
    }  # fmt: skip
    target = TargetInterface(head, DraftVocab.full(vocab))
    model = EAGLE1.build(Eagle1Config.model_validate(shape), target, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    batch = make_batch(lengths)
    return Setting(target, model, replace(batch, input_ids=batch.input_ids % vocab))


def ours(setting: Setting, **loss: object) -> StepLosses:
    """Without noise unless asked for."""
    objective = RegressionObjective(setting.model, setting.target, RegressionLoss.model_validate({"noise": 0} | loss))
    work = objective.prepare(setting.batch)
    return objective.losses(work, objective.denominators(work))


def plain(setting: Setting, *, mask_offset: int = 1, squared: bool = False, shift: int = 1, norm: bool = True):  # type: ignore[no-untyped-def]
    """The restatement in fp64: parameters by name, regression, cross-entropy, slots."""
    weights = {name: p.detach().double().requires_grad_() for name, p in setting.model.named_parameters()}
    head, batch, config = setting.target.head, setting.batch, setting.model.config
    model = PlainEagle1(
        weights | {"embed_tokens.weight": head.embed_tokens.double()},
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
    )
    model.token_shift = shift
    features = batch.final.double()
    if norm:
        plus = 1.0 if head.spec.norm_flavour == "rms_plus_one" else 0.0
        features = (
            features / (features.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (plus + head.norm_weight.double())
        )
    documents = []
    for index in range(len(batch.sample_ids)):
        rows = torch.nonzero(batch.document == index)[:, 0]
        documents.append((batch.input_ids[rows].tolist(), features[rows], batch.loss_mask[rows].int().tolist()))
    bias = torch.zeros(head.vocab_size) if head.lm_head_bias is None else head.lm_head_bias
    logits = (head.output_weight.double() * head.spec.logit_scale, bias.double())
    return weights, *plain_losses(model, documents, logits, mask_offset=mask_offset, squared=squared)


def assert_agree(setting: Setting, **loss: object) -> None:
    result = ours(setting, **loss)
    weights, distance, crossed, slots = plain(
        setting,
        mask_offset=int(loss.get("mask_offset", 1)),  # type: ignore[call-overload]
        squared=loss.get("regression") == "mse",
    )
    assert result.counts.tolist() == [slots]
    assert float(result.sums[0]) / slots == pytest.approx(float(crossed.detach()), rel=1e-5)
    total = distance * float(loss.get("regression_weight", 1)) + crossed * float(loss.get("ce_weight", 0.1))  # type: ignore[arg-type]
    assert float(result.value) == pytest.approx(float(total.detach()), rel=1e-5)
    assert float(result.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    parameters = dict(setting.model.named_parameters())
    found = torch.autograd.grad(result.total, list(parameters.values()))
    expected = torch.autograd.grad(total, list(weights.values()))
    for name, a, b in zip(parameters, found, expected, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()), name


@pytest.mark.parametrize("mask_offset", [-1, 0, 1])
@pytest.mark.parametrize("regression", ["smooth_l1", "mse"])
def test_losses_and_gradients_agree_with_the_plain_restatement(mask_offset: int, regression: str) -> None:
    assert_agree(make_setting([13, 2, 9]), mask_offset=mask_offset, regression=regression)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 2},
        {"num_layers": 3, "last_norm": True},
        {"first_norm": True},
        {"last_norm": True},
        {"bias": True},
    ],
)
def test_losses_and_gradients_agree_under_each_option(changes: dict[str, object]) -> None:
    assert_agree(make_setting([9, 6], **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [{"ce_weight": 0}, {"regression_weight": 0}, {"ce_weight": 1.0}])
def test_either_part_may_be_weighed(weights: dict[str, float]) -> None:
    assert_agree(make_setting([11]), **weights)


def test_idle_slots_are_skipped_and_their_keys_are_not() -> None:
    setting = make_setting([36], num_layers=2)
    setting.batch.loss_mask[:] = False
    setting.batch.loss_mask[3:6] = True
    setting.batch.loss_mask[28:34] = True
    assert_agree(setting)


@pytest.mark.parametrize("wrong", [{"shift": 0}, {"norm": False}, {"mask_offset": 0}, {"squared": True}])
def test_another_shift_norm_mask_or_distance_is_another_loss(wrong: dict[str, object]) -> None:
    """Negative control: the restatement sees each of the mistakes that are easy to make."""
    setting = make_setting([14, 9])
    setting.batch.loss_mask[::3] = False
    _, distance, crossed, _ = plain(setting, **wrong)  # type: ignore[arg-type]
    assert abs(float(ours(setting).value) - float((distance + 0.1 * crossed).detach())) > 1e-3


def part_of(batch: PackedBatch, index: int) -> PackedBatch:
    rows = torch.nonzero(batch.document == index)[:, 0]
    return PackedBatch(
        batch.input_ids[rows], batch.loss_mask[rows], batch.positions[rows], batch.document[rows] * 0,
        batch.aux[:, rows], batch.final[rows], torch.arange(len(rows)), [batch.sample_ids[index]],
    )  # fmt: skip


def test_packing_changes_neither_losses_nor_noise() -> None:
    setting = make_setting([10, 4, 7], num_layers=2)
    together, sums = ours(setting, noise=0.2), 0.0
    for index in range(3):
        sums += float(ours(replace(setting, batch=part_of(setting.batch, index)), noise=0.2).sums[0])
    assert float(together.sums[0]) == pytest.approx(sums, rel=1e-5)
    assert float(ours(setting).sums[0]) != pytest.approx(sums, rel=1e-4)


def test_recomputed_layers_give_the_same_gradients() -> None:
    setting = make_setting([10, 4], num_layers=2)
    found = []
    for setting.model.recompute in (False, True):
        found.append(torch.autograd.grad(ours(setting).total, list(setting.model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_pack_that_teaches_nothing_costs_nothing() -> None:
    setting = make_setting([6, 1])
    setting.batch.loss_mask[:] = False
    result = ours(setting, noise=0.2)
    assert float(result.value) == 0
    assert result.counts.tolist() == [0]


def test_hits_count_the_target_s_own_token() -> None:
    setting = make_setting([30], vocab=3)
    setting.batch.loss_mask[:] = True
    head, final = setting.target.head, setting.batch.final
    model = setting.model
    g, cache = model.begin(Verified(setting.batch.aux, final, [])), KVCache()
    _, logits = model.step(g[:-1], setting.batch.input_ids[1:], torch.arange(29), cache)
    wanted = head.logits(final).argmax(-1)[1:]
    result = ours(setting, mask_offset=0)
    assert result.hits.tolist() == [int((logits.argmax(-1) == wanted).sum())]
    assert 0 < int(result.hits) < 29


def noise_of(setting: Setting, **loss: object) -> Tensor:
    settings = RegressionLoss.model_validate(loss)
    taken: list[Tensor] = []
    real = setting.model.unroll

    class Spy:
        rng_key = setting.model.rng_key

        def unroll(self, batch, features, plan, steps):  # type: ignore[no-untyped-def]
            taken.append(features)
            return real(batch, features, plan, steps)

    objective = RegressionObjective(Spy(), setting.target, settings)
    work = objective.prepare(setting.batch)
    objective.losses(work, objective.denominators(work))
    return taken[0] - work.features


def test_noise_follows_from_seed_step_and_sample_alone() -> None:
    setting = make_setting([12, 9])
    setting.model.rng_key = (3, 70)
    first = noise_of(setting)
    torch.manual_seed(99)
    assert torch.equal(noise_of(setting), first)
    assert torch.equal(noise_of(replace(setting, batch=part_of(setting.batch, 1))), first[12:])
    for other in ((3, 71), (4, 70)):
        setting.model.rng_key = other
        assert not torch.isclose(noise_of(setting), first).any(-1).all()


@pytest.mark.parametrize(("tokens", "halves"), [(512, (0.1 * 512 / 12, 0.1 * 512 / 25)), (None, (0.1, 0.1))])
def test_noise_is_uniform_and_as_wide_as_the_length_of_the_sample_says(
    tokens: int | None, halves: tuple[float, float]
) -> None:
    noise = noise_of(make_setting([12, 25]), noise_tokens=tokens)
    for part, half in zip(noise.split((12, 25)), halves, strict=True):
        assert 0.9 * half < float(part.abs().max()) <= half + 1e-5
        assert abs(float(part.mean())) < 0.2 * half


def test_nothing_is_noisy_without_gradients() -> None:
    setting = make_setting([12])
    with torch.no_grad():
        assert not noise_of(setting).any()


def test_a_draft_vocabulary_another_width_and_aux_layers_are_refused() -> None:
    setting = make_setting([4])
    config = setting.model.config
    with pytest.raises(ConfigError, match="draft vocabulary") as caught:
        EAGLE1.build(config, replace(setting.target, vocab=DraftVocab.of_ids(torch.arange(7), VOCAB)), 0)
    assert (caught.value.kind, caught.value.hint) == ("drafter-shape", f"drafter.vocab_size={VOCAB}")
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        EAGLE1.build(config.model_copy(update={"hidden_size": 8}), setting.target, 0)
    assert (caught.value.kind, caught.value.hint) == ("drafter-shape", f"drafter.hidden_size={WIDTH}")
    with pytest.raises(ValueError, match="aux_layers"):
        Eagle1Config.model_validate(config.model_dump() | {"aux_layers": (1,)})


def test_a_pack_without_every_final_hidden_is_refused() -> None:
    setting = make_setting([9])
    batch = setting.batch
    top = TopK(torch.zeros(9, 2, dtype=torch.int64), torch.zeros(9, 2), torch.zeros(9))
    for lacking in (
        replace(batch, final=batch.final[1:], final_rows=batch.final_rows[1:]),
        replace(batch, final=batch.final[:0], topk=top),
    ):
        with pytest.raises(FormatError) as caught:
            ours(replace(setting, batch=lacking))
        assert caught.value.kind == "final-missing"
        assert "--layers eagle1" in str(caught.value.hint)
        with pytest.raises(FormatError):
            EAGLE1.hits(setting.model, setting.target, lacking, 3)


def test_checkpoint_names_are_those_engines_load() -> None:
    layer = {
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    first = {f"layers.0.{name}" for name in layer}
    assert set(make_setting([4]).model.state_dict()) == {"fc.weight"} | first
    second = {f"layers.1.{name}" for name in {*layer, "input_layernorm.weight"}}
    assert set(make_setting([4], num_layers=2).model.state_dict()) == {"fc.weight"} | first | second
    extra = {"layers.0.input_layernorm.weight", "norm.weight"}
    assert set(make_setting([4], first_norm=True, last_norm=True).model.state_dict()) == {"fc.weight"} | first | extra


OPTIONS = [{}, {"num_layers": 2, "last_norm": True}, {"first_norm": True, "bias": True}, {"gemma": True}]


@pytest.mark.parametrize("changes", OPTIONS)
def test_decoding_slot_by_slot_repeats_the_plain_restatement(changes: dict[str, object]) -> None:
    setting = make_setting([12], **changes)  # type: ignore[arg-type]
    model, batch, head = setting.model, setting.batch, setting.target.head
    weights = dict(model.named_parameters()) | {"embed_tokens.weight": head.embed_tokens}
    ids, features = batch.input_ids, head.norm(batch.final)
    expected = PlainEagle1(weights, heads=4, kv_heads=2).predicted(ids.tolist(), features, 3)
    with torch.no_grad():
        for t in (0, 4, 8):
            cache = KVCache()
            g, logits = model.step(features[: t + 1], ids[1 : t + 2], torch.arange(t + 1), cache)
            for s in range(t + 1):
                assert torch.allclose(g[s], expected[0][s], atol=1e-4)
                assert torch.allclose(logits[s], head.logits(expected[0][s], "post_norm"), atol=1e-3)
            for i in (1, 2):
                g, _ = model.step(g[-1:], ids[t + 1 + i][None], torch.tensor([t + i]), cache)
                assert torch.allclose(g[0], expected[i][t], atol=1e-4)


def in_use(setting: Setting) -> DrafterInUse:
    return DrafterInUse(EAGLE1, setting.model.eval(), setting.target)


def drafted(drafter: DrafterInUse, ids: Tensor, final: Tensor, n: int, draft_len: int) -> list[int]:
    """Proposals after token n of one text, from a chain that has seen nothing before."""
    return drafter.live().propose(Verified(torch.empty(0), final[:n], ids[1 : n + 1].tolist()), draft_len)


@pytest.mark.parametrize("changes", OPTIONS)
def test_the_hits_of_every_slot_are_those_of_drafting_from_it_alone(changes: dict[str, object]) -> None:
    setting = make_setting([45, 2, 33, 9], vocab=3, **changes)  # type: ignore[arg-type]
    drafter, pack = in_use(setting), setting.batch
    hits, found = drafter.hits(pack, 4), []
    for index in range(4):
        part = part_of(pack, index)
        ids, allowed = part.input_ids, set(drafting_positions(part.loss_mask.numpy()).tolist())
        begin = int(torch.nonzero(pack.document == index)[0, 0])
        for n in range(len(ids)):
            expected = 0
            if n in allowed:
                proposals, truth = drafted(drafter, ids, part.final, n, 4), ids[n + 1 : n + 5].tolist()
                while expected < len(truth) and proposals[expected] == truth[expected]:
                    expected += 1
            assert int(hits[begin + n]) == expected
            found.append(expected)
    assert len(set(found)) >= 3


def test_a_live_chain_proposes_the_same_after_many_calls_as_after_one() -> None:
    setting = make_setting([40], vocab=7, num_layers=2)
    drafter, ids, final = in_use(setting), setting.batch.input_ids, setting.batch.final
    chain, n = drafter.live(), 0
    for step in (5, 1, 3, 1, 2, 4, 1, 7):
        seen = Verified(torch.empty(0), final[n : n + step], ids[n + 1 : n + step + 1].tolist())
        proposals = chain.propose(seen, 3)
        n += step
        assert proposals == drafted(drafter, ids, final, n, 3)


@pytest.mark.parametrize("side", ["pre_norm", "post_norm"])
def test_a_tree_of_one_branch_over_recorded_text_accepts_what_the_chain_does_on_either_side_of_the_norm(
    side: NormState,
) -> None:
    torch.manual_seed(1)
    setting = make_setting([40], vocab=3)
    setting.batch.loss_mask[:] = True
    drafter = replace(in_use(setting), target=replace(setting.target, final_norm=side))
    pack = replace(setting.batch, final=setting.batch.final.bfloat16())
    chain, tree = AcceptanceTally(3), AcceptanceTally(3)
    walk(drafter.hits(pack, 3).numpy(), pack.loss_mask.numpy(), chain)
    replay(drafter, pack, slice(0, 40), tree)
    assert tree.accepted_at == chain.accepted_at
    assert chain.accepted_at[1] > 0


@pytest.fixture(scope="module")
def target() -> LiveTarget:
    model, tokenizer = make_model(vocab=12), make_tokenizer()
    return LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), ())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 12, (9,), generator=generator).tolist() for _ in range(12)]


@pytest.mark.parametrize(("draft_len", "layers"), [(1, 1), (4, 2)])
def test_it_decodes_the_greedy_text_and_eval_on_that_text_counts_the_same(
    target: LiveTarget, draft_len: int, layers: int
) -> None:
    head: HeadBundle = bundle_of(target.model, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False))
    interface = TargetInterface(head, DraftVocab.full(12))
    config = Eagle1Config(
        hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=12, num_layers=layers
    )
    drafter = DrafterInUse(EAGLE1, EAGLE1.build(config, interface, 1).eval(), interface)
    assert_live_equals_eval(target, drafter, prompts(), [DraftShape(draft_len)], DecodeLimits(3, 24))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("eagle1"), samples=30, layers=(), final="all")


def records(run: Path) -> list[str]:
    """Everything but the times, as text, so that equality is equality of bits."""
    timed = {"tokens_per_s", "data_wait_fraction"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({key: value for key, value in line.items() if key not in timed}) for line in lines]


def test_a_store_of_final_hiddens_alone_trains_it_and_eval_walks_it(store: Store, tmp_path: Path) -> None:
    words = [*WORDS, "train.max_steps=60", "train.checkpoint_every=0"]
    train(store.path, tmp_path / "run", drafter="eagle1", words=words)
    losses = [json.loads(line)["loss"] for line in records(tmp_path / "run")]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    loaded = load_drafter(tmp_path / "run")
    assert loaded.config.vocab_size == 64
    (result,) = evaluate([loaded], store, "validation", [DraftShape(3)])
    assert result.tally.drafts > 0


def test_a_run_cut_off_and_resumed_repeats_the_uninterrupted_one_with_its_noise(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    train(store.path, straight, drafter="eagle1", words=WORDS)
    real = step_module.train_step

    def dying(session, *rest):  # type: ignore[no-untyped-def]
        if session.step == 7:
            raise RuntimeError("killed")
        return real(session, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(step_module, "train_step", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(store.path, cut, drafter="eagle1", words=WORDS)
    torch.manual_seed(12345)
    train(store.path, cut, resume=True)
    assert records(cut) == records(straight)
    weights = [(run / "checkpoints/step-10/drafter.safetensors").read_bytes() for run in (straight, cut)]
    assert weights[0] == weights[1]
    quiet = tmp_path / "quiet"
    train(store.path, quiet, drafter="eagle1", words=[*WORDS, "loss.noise=0", "train.max_steps=2"])
    assert json.loads(records(quiet)[0])["loss"] != json.loads(records(straight)[0])["loss"]


def test_a_store_of_supervised_rows_is_refused_with_the_command_that_captures_all(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=3)
    with pytest.raises(ConfigError, match="final hidden at every token") as caught:
        train(store.path, tmp_path / "run", drafter="eagle1", words=WORDS)
    assert "--layers eagle1 --final all" in str(caught.value.hint)


def test_eagle2_is_the_name_of_the_same_weights(tmp_path: Path) -> None:
    store = make_store(tmp_path, final="all")
    words = ["train", store.path, "-o", str(tmp_path / "run"), "--drafter", "eagle2", "train.max_steps=1", "-q"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert describe(tmp_path / "run").spec.drafter.name == "eagle1"
