"""Exports in speculators' own format, loaded by the installed speculators 0.9: equal weights and equal logits."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

speculators = pytest.importorskip("speculators")

import torch  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402
from torch import Tensor  # noqa: E402

from hiddenstore.targets.head import HeadBundle  # noqa: E402
from schemas.capture import HeadSpec  # noqa: E402
from tests.trainer.export_cases import LAYERS, D, E, F, G, N, V, make  # noqa: E402
from trainer.attention.ttt import KVCache  # noqa: E402
from trainer.export.published import read_published  # noqa: E402
from trainer.export.write import export  # noqa: E402
from trainer.slots import Blocks  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOKENS, ANCHOR = 14, 8


@pytest.fixture(scope="module", name="target")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A verifier on disk, from which speculators takes what a drafter's file leaves out, and its head bundle."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS, num_attention_heads=N,
            num_key_value_heads=G, head_dim=E, rms_norm_eps=1e-6, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)
    tensors = (model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight)
    return SimpleNamespace(path=str(folder), head=HeadBundle(spec, *(tensor.detach() for tensor in tensors)))


def loaded(folder: Path) -> Any:
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(str(folder), config=config).eval()


def states(layers: int = 3) -> tuple[Tensor, Tensor]:
    """aux fp32 [layers, T, D] and ids int64 [T + 1]."""
    generator = torch.Generator().manual_seed(2)
    aux = torch.randn(layers, TOKENS, D, generator=generator)
    return aux, torch.randint(1, V, (TOKENS + 1,), generator=generator)


FLAGS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "plain": (20, {}),
    "whole vocabulary": (None, {}),
    "eagle 3.1": (20, {"fc_norm": True, "norm_output": True}),
    "norm before residual": (20, {"norm_before_residual": True}),
    "two layers": (20, {"num_layers": 2}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", FLAGS)
def test_speculators_loads_our_eagle_3_and_gives_its_logits_and_those_of_the_next_step(
    name: str, target: Any, tmp_path: Path
) -> None:
    known, flags = FLAGS[name]
    ours = replace(make("eagle3", known, head=target.head, **flags), target_name=target.path)
    export(ours, "speculators", tmp_path / "out", "float32")
    theirs = loaded(tmp_path / "out")
    assert theirs.config.speculators_config.verifier.name_or_path == target.path
    assert theirs.target_layer_ids == [layer + 1 for layer in ours.config.aux_layers]
    if known is not None:
        assert torch.equal(theirs.d2t, ours.vocab.d2t)
    said: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, output: said.append(output[0]))
    aux, ids = states()
    theirs(
        hidden_states=aux.transpose(0, 1).reshape(1, TOKENS, -1),
        input_ids=ids[None, 1:],
        document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        ttt_steps=2,
    )
    model: Any = ours.model
    cache, positions = KVCache(), torch.arange(TOKENS + 1)
    g, logits = model.step(model.start(aux), ids[1:], positions[:TOKENS], cache)
    torch.testing.assert_close(said[0], logits, rtol=0, atol=2e-5)
    # Their last slot reads the padding token 0 in the second step.
    _, logits = model.step(g[-1:], torch.zeros(1, dtype=torch.long), positions[-1:], cache)
    torch.testing.assert_close(said[1][-1:], logits, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(("known", "flags"), [(None, {}), (20, {}), (20, {"train_head": True})])
def test_speculators_loads_our_dflash_and_gives_its_logits(
    known: int | None, flags: dict[str, Any], target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.models.dflash import core

    ours = replace(make("dflash", known, head=target.head, **flags), target_name=target.path)
    export(ours, "speculators", tmp_path / "out", "float32")
    theirs = loaded(tmp_path / "out")
    aux, ids = states()
    anchors = torch.tensor([ANCHOR])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(1, dtype=torch.bool)))
    _, said, *_ = theirs._backbone_forward(
        hidden_states=aux.transpose(0, 1).reshape(1, TOKENS, -1),
        input_ids=ids[None, :TOKENS],
        loss_mask=torch.ones(1, TOKENS),
        verifier_last_hidden_states=torch.zeros(1, TOKENS, D),
        document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        max_anchors=1,
    )
    model: Any = ours.model
    context = model.context(aux[:, :ANCHOR], torch.arange(ANCHOR))
    blocks = Blocks.of([(0, ANCHOR)], torch.device("cpu"))
    filled = model.fill(ids[ANCHOR : ANCHOR + 1], anchors, context, blocks, (0, model.block_size))
    torch.testing.assert_close(said[0], filled @ model.head_weight().T, rtol=0, atol=2e-5)


def assert_comes_back(theirs: Any, ours: Any, folder: Path) -> None:
    """What speculators saves again is read as the drafter it was."""
    theirs.save_pretrained(folder)
    back = read_published(folder, ours.head, LAYERS)
    written = ours.config.model_dump(exclude={"name", "sliding_causal"})
    assert {name: getattr(back.config, name) for name in written} == written
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(back.weights[name], tensor), name


@torch.no_grad()
@pytest.mark.parametrize(("known", "flags"), [(None, {}), (20, {}), (20, {"confidence_head": False})])
def test_speculators_loads_our_dspark_gives_its_logits_and_confidence_and_saves_it_again(
    known: int | None, flags: dict[str, Any], target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.models.dflash import core

    ours = replace(make("dspark", known, head=target.head, **flags), target_name=target.path)
    export(ours, "speculators", tmp_path / "out", "float32")
    theirs = loaded(tmp_path / "out")
    aux, ids = states()
    anchors, block = torch.tensor([ANCHOR]), ours.model.block_size
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(1, dtype=torch.bool)))
    hidden, said, *_ = theirs._backbone_forward(
        hidden_states=aux.transpose(0, 1).reshape(1, TOKENS, -1),
        input_ids=ids[None, :TOKENS],
        loss_mask=torch.ones(1, TOKENS),
        verifier_last_hidden_states=torch.zeros(1, TOKENS, D),
        document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        max_anchors=1,
    )
    previous, model = ids[ANCHOR : ANCHOR + block], ours.model
    bias = theirs.markov_head.block_bias(prev_token_ids=previous[None], hidden_states=hidden)
    filled = model.fill(
        ids[ANCHOR : ANCHOR + 1],
        anchors,
        model.context(aux[:, :ANCHOR], torch.arange(ANCHOR)),
        Blocks.of([(0, ANCHOR)], torch.device("cpu")),
        (0, block),
    )
    torch.testing.assert_close((said + bias)[0], model.logits(filled, previous), rtol=0, atol=2e-5)
    if ours.config.confidence_head:
        joined = torch.cat([hidden, theirs.markov_head.prev_embeddings(previous[None])], -1)
        expected = theirs.confidence_head(joined).sigmoid()[0]
        torch.testing.assert_close(expected, model.confidence(model.joined(filled, previous)), rtol=0, atol=2e-5)
    assert_comes_back(theirs, ours, tmp_path / "again")


@torch.no_grad()
def test_speculators_loads_our_dflash2_gives_its_scores_and_saves_it_again(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.models.dflash import core

    ours = replace(make("dflash2", head=target.head), target_name=target.path)
    export(ours, "speculators", tmp_path / "out", "float32")
    theirs = loaded(tmp_path / "out")
    aux, ids = states()
    anchors, block = torch.tensor([ANCHOR]), ours.model.block_size
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(1, dtype=torch.bool)))
    hidden, said, *_ = theirs._backbone_forward(
        hidden_states=aux.transpose(0, 1).reshape(1, TOKENS, -1),
        input_ids=ids[None, :TOKENS],
        loss_mask=torch.ones(1, TOKENS),
        verifier_last_hidden_states=torch.zeros(1, TOKENS, D),
        document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        max_anchors=1,
    )
    previous, model = ids[ANCHOR : ANCHOR + block - 1], ours.model
    candidates, scores = theirs.candidate_selector.select(said[:, 1:], hidden[:, 1:], previous[None])
    filled = model.fill(
        ids[ANCHOR : ANCHOR + 1],
        anchors,
        model.context(aux[:, :ANCHOR], torch.arange(ANCHOR)),
        Blocks.of([(0, ANCHOR)], torch.device("cpu")),
        (1, block),
    )
    found = model.logits(filled, previous)
    torch.testing.assert_close(found.gather(1, candidates[0]), scores[0], rtol=0, atol=2e-5)
    assert int(torch.isfinite(found).sum()) == candidates.numel()
    assert_comes_back(theirs, ours, tmp_path / "again")


@torch.no_grad()
def test_speculators_loads_our_xpress_gives_its_logits_and_saves_it_again(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.models.dflash import core

    ours = replace(make("xpress", head=target.head), target_name=target.path)
    export(ours, "speculators", tmp_path / "out", "float32")
    theirs = loaded(tmp_path / "out")
    assert theirs.config.num_jacobi_passes == ours.config.num_jacobi_passes
    aux, ids = states()
    anchors, block = torch.tensor([ANCHOR]), ours.model.block_size
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(1, dtype=torch.bool)))
    hidden, said, *_ = theirs._backbone_forward(
        hidden_states=aux.transpose(0, 1).reshape(1, TOKENS, -1),
        input_ids=ids[None, :TOKENS],
        loss_mask=torch.ones(1, TOKENS),
        verifier_last_hidden_states=torch.zeros(1, TOKENS, D),
        document_ids=torch.zeros(1, TOKENS, dtype=torch.long),
        max_anchors=1,
    )
    text, model = ids[None, ANCHOR : ANCHOR + block - 1], ours.model
    # Its mask is in no file, and what a load leaves in its place is whatever the memory held.
    theirs.refiner_head.causal_tril.copy_(torch.ones(block, block).tril())
    bias = theirs.refiner_head.block_bias(torch.cat([text[:, :1], text], 1), hidden_states=hidden)
    filled = model.fill(
        text[0, :1],
        anchors,
        model.context(aux[:, :ANCHOR], torch.arange(ANCHOR)),
        Blocks.of([(0, ANCHOR)], torch.device("cpu")),
        (1, block),
    )
    torch.testing.assert_close((said + bias)[0, 1:], model.logits(filled, model.before(text)), rtol=0, atol=2e-5)
    assert_comes_back(theirs, ours, tmp_path / "again")


@torch.no_grad()
@pytest.mark.parametrize(("known", "flags"), [(20, {}), (None, {"num_layers": 2})])
def test_speculators_loads_our_p_eagle_gives_its_logits_and_saves_it_again(
    known: int | None, flags: dict[str, Any], target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.models.peagle import core

    ours = replace(make("peagle", known, head=target.head, **flags), target_name=target.path)
    export(ours, "speculators", tmp_path / "out", "float32")
    theirs = loaded(tmp_path / "out")
    chain = (torch.arange(TOKENS), torch.full((3,), TOKENS - 1))
    depth = torch.cat([torch.zeros(TOKENS, dtype=torch.long), torch.arange(1, 4)])
    # Their target rows are named by anchor + depth, so that the text goes on past what is looked at.
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (torch.cat(chain), depth))
    said: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, output: said.append(output[0]))
    aux, ids = states()
    longer, pad = torch.cat([aux, aux[:, :3]], 1), torch.zeros(3, dtype=torch.long)
    theirs(
        hidden_states=longer.transpose(0, 1).reshape(1, TOKENS + 3, -1),
        input_ids=torch.cat([ids[1:], pad])[None],
        document_ids=torch.zeros(1, TOKENS + 3, dtype=torch.long),
        loss_mask=torch.ones(1, TOKENS + 3),
        verifier_last_hidden_states=torch.zeros(1, TOKENS + 3, D),
        num_depths=4,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    model: Any = ours.model
    g = torch.cat([model.start(aux), model.mask_start().expand(3, -1)])
    tokens = torch.cat([ids[1:], model.mask_ids(3)])
    _, logits = model.step(g, tokens, torch.arange(TOKENS + 3), KVCache())
    torch.testing.assert_close(said[0], logits, rtol=0, atol=2e-5)
    assert_comes_back(theirs, ours, tmp_path / "again")
