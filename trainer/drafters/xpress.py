"""XPress: DFlash with a head that corrects the logits of a block by its own tokens, all slots at once, some times over.

The head sees the states h of the block, their mean g, and the token before each slot, the newest one before slot 0 too.
It mixes slots with those before them, per channel, L [R, B, B]:

    a_k = W_in [W_h h_k; W_g g; W1[x_{k-1}]],   c_k = a_k + sum_{j<=k} L_kj a_j,   u_k = c_k + MLP(c_k)

and adds W2 u_k to the logits of slots 1 ... B-1. A draft begins as the most probable tokens without the head, and
``num_jacobi_passes`` times it is read and made anew: after i passes its first i tokens are those that choosing in turn
would give.
Sources: docs/design/016; speculators 0.9 ``models/xpress``; vLLM 0.33 ``qwen3_xpress.py``, ``spec_decode/xpress``,
which hands slot 0 the newest token, where speculators trains with the one before it.

Trained by DSpark's loss of the tokens in three places: after the text's own tokens, in ``rounds`` passes that read what
the one before them chose, and without the head.

Shapes: D target width (and the drafter's), V vocabulary, R rank, N blocks, S slots of a block from its opening on,
K = S-1 proposals, n rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear, linear
from trainer.drafters.base import TargetFacts, require_every_token
from trainer.drafters.blocks import GatedMLP
from trainer.drafters.dflash import DFLASH, BlockInputs, DFlash, DFlashConfig
from trainer.drafters.dspark import BlendLoss, BlendObjective
from trainer.drafters.live import KeyValues, block_tokens, draft_logits, draft_tokens
from trainer.formats.xpress import XPRESS as XPRESS_EXPORT
from trainer.losses.fused_head import StepLosses
from trainer.slots import Blocks
from trainer.vocab import DraftVocab

PUBLISHED_RANK, LEAST_RANK, PUBLISHED_PASSES = 256, 32, 6


class XPressLoss(BlendLoss):
    """What the slots of a block are taught."""

    consistency: float = Field(0.3, ge=0)
    """Weight of the mean loss of the passes that read their own choices."""
    rounds: int = Field(3, ge=0)
    """How many of these passes there are."""
    base: float = Field(0.6, ge=0)
    """Weight of the loss of the logits without the head."""

    @model_validator(mode="after")
    def _teaches_something(self) -> Self:
        if not (self.cross_entropy or self.overlap):
            raise ValueError("cross_entropy and overlap are both 0")
        return self


class XPressConfig(DFlashConfig):
    """Settings of XPress."""

    name: str = "xpress"
    """The kind of drafter."""
    xpress_rank: int = Field(PUBLISHED_RANK, gt=0)
    """Width of the head."""
    xpress_mlp_ratio: int = Field(2, gt=0)
    """Width of the head's MLP over its own."""
    num_jacobi_passes: int = Field(PUBLISHED_PASSES, gt=0)
    """How often a draft is read and made anew."""

    @property
    def weights(self) -> int:
        """DFlash's and the head's."""
        rank = self.xpress_rank
        tables, inner = self.vocab_size + self.hidden_size, 3 * (1 + self.xpress_mlp_ratio)
        return super().weights + rank * (2 * tables + inner * rank + self.block_size**2)


class RefinerHead(nn.Module):
    """The head: W1 [V, R], W_h and W_g [R, D], W_in [R, 3R], L [R, B, B], which starts as no mixing, the MLP, and W2
    [V, R]."""

    def __init__(self, config: XPressConfig, tokens: int) -> None:
        super().__init__()
        rank, width, size = config.xpress_rank, config.hidden_size, config.block_size
        self.w1 = nn.Embedding(tokens, rank)
        self.down_h, self.down_g = Linear(width, rank), Linear(width, rank)
        self.in_proj = Linear(3 * rank, rank)
        self.mix = nn.ParameterDict({"L": torch.zeros(rank, size, size)})
        self.mlp = GatedMLP(rank, rank * config.xpress_mlp_ratio)
        self.w2 = Linear(rank, tokens)
        for name, weight in self.named_parameters():
            if name != "mix.L":
                nn.init.normal_(weight, std=0.02)

    def of_states(self, states: Tensor, newest: Tensor) -> Tensor:
        """What no pass changes of c: of states [N, S, D] and the newest tokens int64 [N], [N, S, R]."""
        mean = self.down_g(states.mean(1, keepdim=True))
        features = torch.cat([self.down_h(states), mean.expand(-1, states.shape[1], -1)], -1)
        x = linear(features, self.in_proj.weight[:, : features.shape[-1]])
        return self._mixed(torch.cat([x[:, :1] + self._of_token(newest)[:, None], x[:, 1:]], 1), 0)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """The rest of it, of the tokens int64 [N, K] before slots 1 ... K: [N, K, R]."""
        return self._mixed(self._of_token(tokens), 1)

    def refined(self, x: Tensor) -> Tensor:
        """u of c [..., R]."""
        out: Tensor = x + self.mlp(x)
        return out

    def _of_token(self, tokens: Tensor) -> Tensor:
        rank = self.w1.embedding_dim
        return linear(F.embedding(tokens, self.w1.weight), self.in_proj.weight[:, 2 * rank :])

    def _mixed(self, x: Tensor, first: int) -> Tensor:
        """Slots [N, S, R], the ``first`` of which stands there in its block, each with what it takes of those before
        it."""
        span = slice(first, first + x.shape[1])
        weights = self.mix["L"][:, span, span].tril().to(x.dtype)
        return x + torch.einsum("rkj,njr->nkr", weights, x)


class XPress(DFlash):
    """The drafter: DFlash's weights and the head. A state is [h; what no pass changes of c], [D+R]."""

    config: XPressConfig

    def __init__(self, config: XPressConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.xpress_head = RefinerHead(config, vocab.size)

    @classmethod
    def build(cls, config: DFlashConfig, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """See `DFlash.build`. Raises ConfigError: also where the draft vocabulary is not the target's."""
        require_every_token(vocab, "xpress corrects the logits of")
        return super().build(config, head, vocab, seed)

    def fill(
        self, tokens: Tensor, positions: Tensor, context: list[KeyValues], blocks: Blocks, slots: tuple[int, int]
    ) -> Tensor:
        """See `DFlash.fill`. The last layer is computed from the block's opening on, which the head reads too."""
        first, last = slots
        states = super().fill(tokens, positions, context, blocks, (0, last)).unflatten(0, (-1, last))
        latent = self.xpress_head.of_states(states, tokens).to(states.dtype)
        return torch.cat([states, latent], -1)[:, first:].flatten(0, 1)

    def before(self, tokens: Tensor) -> Tensor:
        """What slots 1 ... K take of the tokens before them: [N*K, R]."""
        return self.xpress_head.of_tokens(tokens).flatten(0, 1)

    def refined(self, states: Tensor, before: Tensor) -> Tensor:
        """[h; u] of states [n, D+R] and what they take of tokens [n, R]: what the head and W2 make logits of."""
        h, latent = self._parts(states)
        return torch.cat([h, self.xpress_head.refined(latent + before.to(latent.dtype)).to(h.dtype)], -1)

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        h, u = self._parts(self.refined(states, before))
        return super().logits(h, before) + draft_logits(u, self.xpress_head.w2.weight)

    @torch.no_grad()
    def passes(self, states: Tensor, newest: Tensor, count: int) -> Iterator[Tensor]:
        """The tokens int64 [N, K] that each of ``count`` passes reads, of states [N*K, D+R] of blocks that open with
        the tokens int64 [N, 1]: at first the most probable ones without the head, then what the pass before chose."""
        choice = draft_tokens(self._parts(states)[0], self.head_weight())
        for number in range(count):
            read = torch.cat([newest, choice.view(len(newest), -1)[:, :-1]], 1)
            yield read
            if number + 1 < count:
                choice = block_tokens(self, states, read)

    def guesses(self, states: Tensor, tokens: Tensor) -> Tensor:
        # Behind as many passes as slots nothing moves, however many a file asks for.
        count = min(self.config.num_jacobi_passes, len(states) // len(tokens))
        *_, read = self.passes(states, tokens[:, :1], count)
        return read

    def _parts(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split([self.config.hidden_size, self.config.xpress_rank], -1))


class XPressObjective(BlendObjective):
    """What the loop optimises: DFlash's slots after the text's tokens, after the drafter's own, and without the
    head."""

    model: XPress
    loss: XPressLoss

    def losses(self, inputs: BlockInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch. Sums and hits are those after the text's own tokens."""
        model, loss, ids = self.model, self.loss, inputs.batch.input_ids
        states, scales = model.block_states(inputs.batch, inputs.block_map), self.scales(denominators)
        slots = torch.arange(self.depths, device=ids.device)
        text = ids[(inputs.block_map.anchors[:, None] + slots).clamp(max=len(ids) - 1)]

        def after(tokens: Tensor, weight: float) -> StepLosses:
            refined = model.refined(states, model.before(tokens))
            return self.losses_of(refined, inputs, scales * weight, model.xpress_head.w2.weight)

        taught = after(text, 1.0)
        terms = []
        if loss.consistency:
            passes = model.passes(states, text[:, :1], loss.rounds)
            terms += [after(read, loss.consistency / loss.rounds) for read in passes]
        if loss.base:
            terms.append(self.losses_of(states[:, : model.config.hidden_size], inputs, scales * loss.base))
        total = sum((term.total for term in terms), taught.total)
        return replace(taught, total=total, value=sum((term.value for term in terms), taught.value))


class _XPressKind(type(DFLASH)):  # type: ignore[misc]
    name = "xpress"
    config, loss, model, teaching = XPressConfig, XPressLoss, XPress, XPressObjective
    export = XPRESS_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """DFlash's, and a head no wider than the target, of a power of two, as vLLM's kernels take it."""
        defaults: dict[str, dict[str, Any]] = super().derive(facts)
        widest = 1 << (min(PUBLISHED_RANK, facts.hidden_size).bit_length() - 1)
        defaults["drafter"]["xpress_rank"] = max(LEAST_RANK, widest)
        return defaults

    def depends_on_length(self, config: XPressConfig) -> bool:
        """Always: the head reads the mean of the block."""
        return True


XPRESS = _XPressKind()
