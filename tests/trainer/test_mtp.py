"""An MTP layer against its plain restatement, from a target's checkpoint through training to an engine's folder."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from hiddenstore.cli import main
from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError
from schemas.capture import HeadSpec
from tests.engines.engine_world import hiddenstore
from tests.trainer.conftest import VOCAB, WIDTH, make_batch, make_head
from tests.trainer.eagle3_plain import normalised, turned
from tests.trainer.live import assert_live_equals_eval, identity_in_memory
from tests.trainer.mtp_target import PREFIX, make_mimo, save_mimo
from tests.trainer.tiny_target import make_tokenizer
from trainer.attention.ttt import KVCache
from trainer.drafters.base import DrafterInUse
from trainer.drafters.mtp import MTP, Mtp, MtpConfig, MtpLoss
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.speculate import DecodeLimits
from trainer.evaluate.target import LiveTarget, bundle_of
from trainer.formats.base import Target
from trainer.formats.mtp import LAYOUTS, published_layout
from trainer.losses.teacher import TargetInterface
from trainer.train.run_folder import load_drafter
from trainer.vocab import DraftVocab

SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB, "layout": "mimo",
}  # fmt: skip


@dataclass
class Case:
    target: TargetInterface
    model: Mtp
    batch: PackedBatch


QWEN: dict[str, Any] = {**SHAPE, "layout": "qwen3.5", "rotary_share": 0.5}


def make_case(lengths: list[int], shape: Mapping[str, Any] = SHAPE) -> Case:
    """Every weight random, norms unequal, in fp64."""
    head = make_head(dtype=torch.float64)
    target = TargetInterface(head, DraftVocab.full(VOCAB))
    model = MTP.build(MtpConfig.model_validate(shape), target, 0).double()
    around = 0.0 if model.layout.one_plus else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (around if "norm" in name else 0.0))
    model.tie_weights(head)
    return Case(target, model, make_batch(lengths, dtype=torch.float64))


def slot(
    case: Case, w: Mapping[str, Tensor], g: Tensor, token: int, at: int, seen: list[tuple[list[Tensor], list[Tensor]]]
) -> Tensor:
    """The layer's output after its last norm at one slot; its keys and values are added to ``seen``."""
    c, layout = case.model.config, case.model.layout
    attention = "layers.0.self_attn."

    def normed(x: Tensor, name: str) -> Tensor:
        return normalised(x, w[f"{name}.weight"] + layout.one_plus, c.rms_norm_eps)

    def heads(n: str, h: Tensor) -> list[Tensor]:
        found = w[f"{attention}{n}_proj.weight"] @ h + (w[f"{attention}{n}_proj.bias"] if layout.qkv_bias else 0)
        return list(found.view(-1, c.head_dim))

    def placed(n: str, head: Tensor) -> Tensor:
        head, turning = normed(head, f"{attention}{n}_norm") if layout.gated else head, int(8 * c.rotary_share)
        return torch.cat([turned(head[:turning], at, c.rope_theta), head[turning:]])

    embedded = case.target.head.embed_tokens[token] * (at > 0 or not layout.blind_first)
    halves = [normed(embedded, "token_norm"), normed(g, "hidden_norm")]
    x = w["fc.weight"] @ torch.cat(halves[::-1] if layout.hidden_first else halves)
    h = normed(x, "layers.0.input_layernorm")
    seen.append(([placed("k", key) for key in heads("k", h)], heads("v", h)))
    mixed: list[Any] = []
    for n, query in enumerate(heads("q", h)):
        query, group = placed("q", query), n // (c.num_heads // c.num_kv_heads)
        scores = torch.stack([query @ keys[group] for keys, _ in seen]) / math.sqrt(c.head_dim)
        mixed.append(sum(s * values[group] for s, (_, values) in zip(scores.softmax(0), seen, strict=True)))
    attended = torch.cat(mixed)
    if layout.gated:
        attended = attended * (w[f"{attention}gate_proj.weight"] @ h).sigmoid()
    x = x + w[f"{attention}o_proj.weight"] @ attended
    m = normed(x, "layers.0.post_attention_layernorm")
    gate, up = w["layers.0.mlp.gate_proj.weight"] @ m, w["layers.0.mlp.up_proj.weight"] @ m
    return normed(x + w["layers.0.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up), "norm")


def plain_states(case: Case, begin: int, end: int, steps: int, shift: int = 1) -> list[list[Tensor]]:
    """[step][slot] of the document at rows ``begin`` … ``end``, fed back as engines do."""
    w, ids = dict(case.model.named_parameters()), case.batch.input_ids[begin:end].tolist()
    final = case.batch.final[begin:end]
    g = list(case.target.head.norm(final) if case.model.layout.final == "post_norm" else final)
    text, own = [], [[] for _ in ids]
    result = []
    for i in range(steps):
        row = []
        for t in range(len(ids) - shift - i):
            seen = text if i == 0 else [*text[: t + 1], *own[t]]
            row.append(slot(case, w, g[t], ids[t + shift + i], t + i, seen))
            if i > 0:
                own[t].append(seen[-1])
        result.append(row)
        g = row
    return result


def plain_loss(case: Case, steps: int, kind: str = "soft_ce", shift: int = 1) -> Tensor:
    """Mean of each step over its taught slots, weighed by 0.6 to the power of the step."""
    head, batch, sums, counts = case.target.head, case.batch, [0.0] * steps, [0] * steps
    total: list[Any] = list(sums)
    for n in range(len(batch.sample_ids)):
        rows = torch.nonzero(batch.document == n)[:, 0].tolist()
        begin, end = rows[0], rows[-1] + 1
        for i, states in enumerate(plain_states(case, begin, end, steps, shift)):
            for t, state in enumerate(states):
                p = begin + t + 1 + i
                if p + 1 >= end or not batch.loss_mask[p + 1]:
                    continue
                log_p = (head.output_weight @ state).log_softmax(0)
                q = head.logits(batch.final[p]).double().softmax(0)
                total[i] += -log_p[batch.input_ids[p + 1]] if kind == "text_ce" else -(q * log_p).sum()
                counts[i] += 1
    return sum(0.6**i * total[i] / counts[i] for i in range(steps))


@pytest.mark.parametrize(("kind", "shape"), [("soft_ce", SHAPE), ("text_ce", SHAPE), ("soft_ce", QWEN)])
def test_losses_and_gradients_agree_with_the_plain_restatement(kind: str, shape: Mapping[str, Any]) -> None:
    case = make_case([11, 3, 8], shape)
    objective = MTP.objective(case.model, case.target, MtpLoss(kind=kind))
    work = objective.prepare(case.batch)
    result = objective.losses(work, objective.denominators(work))
    expected = plain_loss(case, 3, kind)
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    weights = dict(case.model.named_parameters())
    found, wanted = (torch.autograd.grad(x, list(weights.values())) for x in (result.total, expected))
    for name, a, b in zip(weights, found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(1e-2, float(b.abs().max())), name


def test_another_shift_or_a_first_token_that_is_seen_is_another_loss() -> None:
    """Negative control: the restatement sees the mistakes that are easy to make."""
    case = make_case([11, 3, 8])
    objective = MTP.objective(case.model, case.target, MtpLoss())
    work = objective.prepare(case.batch)
    ours = float(objective.losses(work, objective.denominators(work)).value.detach())
    assert abs(ours - float(plain_loss(case, 3, shift=0).detach())) > 1e-3
    case.model.layout = replace(case.model.layout, blind_first=False)
    assert abs(ours - float(objective.losses(work, objective.denominators(work)).value)) > 1e-4


def test_recomputing_the_layer_in_the_backward_changes_no_gradient() -> None:
    case, gradients = make_case([9, 7]), []
    for recompute in (False, True):
        case.model.recompute = recompute
        objective = MTP.objective(case.model, case.target, MtpLoss())
        work = objective.prepare(case.batch)
        total = objective.losses(work, objective.denominators(work)).total
        gradients.append(torch.autograd.grad(total, list(case.model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_published_layer_of_qwen_3_5_computes_what_transformers_own_does() -> None:
    """The order of queries and gate, norms of 1 + weight, and the share of a head that is turned."""
    own = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="transformers 4 lacks it")
    torch.manual_seed(0)
    config = own.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    layer, norms = (
        own.Qwen3_5DecoderLayer(config, 0),
        [own.Qwen3_5RMSNorm(WIDTH, config.rms_norm_eps) for _ in range(3)],
    )
    fc = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
    for module in (layer, fc, *norms):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    published = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    published |= {f"mtp.{name}.weight": norm.weight for name, norm in zip(names, norms, strict=True)}
    document = {**config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}
    target = TargetInterface(make_head(), DraftVocab.full(VOCAB))
    settings, weights = MTP.export.read(
        document, {**published, "mtp.fc.weight": fc.weight}, Target(target.head, target.vocab, 1, None)
    )
    model = MTP.build(MtpConfig.model_validate({**settings, "vocab_size": VOCAB}), target, 0)
    model.load_state_dict(weights)
    g, ids, at = torch.randn(7, WIDTH), torch.arange(3, 10), torch.arange(7)
    with torch.no_grad():
        x = fc(torch.cat([norms[0](target.head.embed_tokens[ids].float()), norms[1](g)], -1))[None]
        mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
        tables = own.Qwen3_5TextRotaryEmbedding(config)(x, at[None])
        expected = norms[2](layer(x, position_embeddings=tables, attention_mask=mask))[0]
        found, _ = model.step(g, ids, at, KVCache())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def in_memory(request: pytest.FixtureRequest) -> tuple[LiveTarget, DrafterInUse]:
    model, tokenizer = make_mimo(vocab=12), make_tokenizer()
    target = LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), ())
    head = bundle_of(model, HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False))
    interface = TargetInterface(head, DraftVocab.full(12))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    config = MtpConfig.model_validate(request.param | shape | {"vocab_size": 12})
    return target, DrafterInUse(MTP, MTP.build(config, interface, 1).eval(), interface)


@pytest.mark.parametrize(("in_memory", "draft_len"), [(SHAPE, 1), (SHAPE, 4), (QWEN, 4)], indirect=["in_memory"])
def test_it_decodes_the_greedy_text_and_eval_on_that_text_counts_the_same(in_memory: Any, draft_len: int) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, 12, (9,), generator=generator).tolist() for _ in range(8)]
    assert_live_equals_eval(*in_memory, prompts, [DraftShape(draft_len)], DecodeLimits(3, 24))


def test_a_store_whose_final_hidden_is_normed_is_refused_where_the_layer_reads_it_before() -> None:
    case = make_case([9])
    target = replace(case.target, final_norm="post_norm")
    model = MTP.build(case.model.config, target, 0).double()
    objective = MTP.objective(model, target, MtpLoss())
    work = objective.prepare(case.batch)
    with pytest.raises(FormatError, match="before the final norm") as caught:
        objective.losses(work, objective.denominators(work))
    assert caught.value.kind == "final-norm"
    assert "--final all" in str(caught.value.hint)


@dataclass(frozen=True)
class World:
    target: str
    store: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("mimo"))


def make_world(root: Path) -> World:
    """A target with an MTP layer, and a store captured from it for that layer."""
    target = save_mimo(root / "target")
    lines = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "abcdefgh"[n % 5 :] * 3}]}
        for n in range(16)
    ]
    (root / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    hiddenstore("prepare", str(root / "chats.jsonl"), "-o", str(root / "data"), "--target", target, "--val", "0")
    how = ("--layers", "eagle1", "--final", "all", "--engine", "hf", "--dtype", "fp32", "--recipe", "lossless")
    hiddenstore("collect", str(root / "data"), "-o", str(root / "store"), "--target", target, *how)
    return World(target, str(root / "store"))


WORDS = ("data.batch_tokens=300", "data.pack_tokens=300", "train.validate_every=0", "optim.lr=3e-3")


def trained(world: World, run: Path, *words: str) -> str:
    hiddenstore("train", world.store, "-o", str(run), "--target", world.target, "train.max_steps=25", *WORDS, *words)
    return str(run)


def test_the_target_s_own_layer_is_trained_on_and_written_back_under_its_names(world: World, tmp_path: Path) -> None:
    run = trained(world, tmp_path / "run")
    before = load_drafter(f"{run}/start").model.state_dict()
    published = load_file(Path(world.target, "model.safetensors"))
    names = {LAYOUTS["mimo"].names(name): name for name in before}
    assert {name for name in published if name.startswith(PREFIX)} == names.keys()
    assert all(torch.equal(published[name], before[ours]) for name, ours in names.items())
    assert torch.equal(load_drafter(run, untrained=True).model.state_dict()["fc.weight"], before["fc.weight"])
    losses = [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    out = tmp_path / "vllm"
    hiddenstore("export", run, "--engine", "vllm", "-o", str(out), "--dtype", "float32")
    written, after = load_file(out / "model.safetensors"), load_drafter(run).model.state_dict()
    assert all(torch.equal(written[name], after[ours]) for name, ours in names.items())
    assert written.keys() - names.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(written["lm_head.weight"], published["lm_head.weight"])
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    again = hiddenstore("import-drafter", str(out), "-o", str(tmp_path / "again"), "--store", world.store)
    assert again["drafter"] == "mtp"
    assert torch.equal(load_drafter(tmp_path / "again").model.state_dict()["fc.weight"], after["fc.weight"])
    served = hiddenstore("serve", str(out), "--target", world.target, "--engine", "vllm", "--print-only")
    assert '"method": "mtp", "model": ' in " ".join(served["command"])


def test_the_target_s_own_layer_is_judged_before_and_after_training(world: World, tmp_path: Path) -> None:
    run = trained(world, tmp_path / "run", "loss.kind=text_ce")
    before, after = (hiddenstore("eval", at, world.store, "--split", "train") for at in (f"{run}/start", run))
    assert before["per_position"][0] < after["per_position"][0]
    prompts = str(Path(world.store).parent / "chats.jsonl")
    words = ("--target", world.target, "--prompts", prompts, "-n", "3", "--max-new-tokens", "12", "--draft-len", "3")
    decoded = hiddenstore("decode", run, *words)
    assert decoded["identical_to_greedy"] is True
    assert decoded["accepted_length"] > 1


def refused(*words: str) -> tuple[str, str]:
    """The kind and the message of a refusal."""
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code != 0
    error = json.loads(result.stderr)
    return error["kind"], f"{error['message']} {error['fix']}"


def train_words(world: World, run: Path, *words: str) -> tuple[str, ...]:
    return ("train", world.store, "-o", str(run), *words)


def test_without_the_checkpoint_that_holds_the_layer_training_is_refused(world: World, tmp_path: Path) -> None:
    kind, text = refused(*train_words(world, tmp_path / "run", "--drafter", "mtp"))
    assert kind == "start-missing"
    assert "--drafter mtp --target TARGET" in text


def test_another_target_than_the_store_s_is_refused(world: World, tmp_path: Path) -> None:
    other = save_mimo(tmp_path / "other", make_mimo(seed=5))
    kind, text = refused(*train_words(world, tmp_path / "run", "--target", other))
    assert kind == "target-mismatch"
    assert "checkpoint_sha256" in text
    assert not (tmp_path / "run/run.json").exists()


def test_only_a_drafter_that_is_a_part_of_the_target_starts_from_it(world: World, tmp_path: Path) -> None:
    kind, text = refused(*train_words(world, tmp_path / "run", "--drafter", "eagle1", "--target", world.target))
    assert kind == "option-invalid"
    assert "(mtp)" in text


def test_a_second_start_of_a_run_that_never_began_takes_the_layer_that_lies_there(world: World, tmp_path: Path) -> None:
    words = train_words(world, tmp_path / "run", "--target", world.target, "train.max_steps=1", *WORDS)
    assert refused(*words, "drafter.layout=unknown")[0] == "config-invalid"
    assert refused(*words, "drafter.intermediate_size=8")[0] == "init-differs"
    assert (tmp_path / "run/start/run.json").exists()
    # What a kill leaves between the settings of the start and its weights.
    shutil.rmtree(tmp_path / "run/start/checkpoints")
    hiddenstore(*words)
    assert refused(*words)[0] == "output-exists"


def test_a_store_that_lacks_the_final_hidden_is_refused_with_the_command_that_captures_it(
    world: World, tmp_path: Path
) -> None:
    store, data = str(tmp_path / "store"), str(Path(world.store).parent / "data")
    hiddenstore("collect", data, "-o", store, "--target", world.target, "--layers", "eagle3", "--engine", "hf")
    kind, text = refused("train", store, "-o", str(tmp_path / "run"), "--target", world.target)
    assert kind == "store-lacks-states"
    assert "--layers eagle1 --final all" in text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mlp.experts.0.up_proj.weight"], "mixture of experts"),
        (["self_attn.kv_a_proj_with_mqa.weight"], "MLA"),
        ([], "hold no tensor mtp_layers.0."),
    ],
)
def test_a_layer_of_another_kind_is_refused_with_the_reason(names: list[str], said: str) -> None:
    case = make_case([4])
    config = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    tensors = {f"mtp_layers.0.{name}": torch.ones(1) for name in names}
    with pytest.raises(ValueError, match=said):
        MTP.export.read(config, tensors, Target(case.target.head, case.target.vocab, 4, None))


def test_queries_without_a_gate_and_half_a_pair_of_channels_are_refused() -> None:
    case = make_case([4])
    text = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 64, "mtp_num_hidden_layers": 1}  # fmt: skip
    tensors = {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(16, 16)}
    config = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    with pytest.raises(ValueError, match="q_proj has 16 rows; 2 heads of 8 with a gate have 32"):
        MTP.export.read(config, tensors, Target(case.target.head, case.target.vocab, 4, None))
    with pytest.raises(ValueError, match="rope turns pairs of channels"):
        MtpConfig.model_validate({**QWEN, "rotary_share": 0.4})


def test_a_target_without_an_mtp_layer_has_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="MTP layers are read of MiMoForCausalLM"):
        published_layout({"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ValueError, match="num_nextn_predict_layers is None"):
        published_layout({"architectures": ["MiMoForCausalLM"]})
