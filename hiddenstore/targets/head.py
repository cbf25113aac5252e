"""The head bundle: what turns a final hidden into logits and token ids into embeddings, without the target.

Shapes: N rows, D target width, V target vocabulary, U a restricted vocabulary.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.errors import ConfigError, CorruptionError, Kind
from hiddenstore.targets.matmul import linear, linear_in_fp32, without_autocast
from schemas.capture import HeadSpec, NormState

HEAD_FILE = "head.safetensors"
ROW_CHUNK = 2048
VOCAB_CHUNK = 16384


@dataclass(eq=False)
class HeadBundle:
    """Embeddings, final norm and LM head of a target, in the target's own dtype.

    embed_tokens [V, D]; lm_head [V, D], None when tied; norm_weight [D]; norm_bias [D] (LayerNorm only);
    lm_head_bias [V]. The arithmetic follows transformers 5.23: the norm is taken in fp32 and cast where the family
    casts it, products are accumulated and returned in fp32.
    """

    spec: HeadSpec
    embed_tokens: Tensor
    lm_head: Tensor | None
    norm_weight: Tensor
    norm_bias: Tensor | None = None
    lm_head_bias: Tensor | None = None
    _narrowed: tuple[Tensor, Tensor, Tensor | None] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        problems = []
        if self.embed_tokens.ndim != 2:
            raise ConfigError(
                f"embed_tokens has shape {list(self.embed_tokens.shape)}, expected [V, D]", kind=Kind.HEAD_INVALID
            )
        width = self.embed_tokens.shape[1]
        if self.spec.tied != (self.lm_head is None):
            problems.append(f"tied is {self.spec.tied} but lm_head is {'absent' if self.lm_head is None else 'given'}")
        if self.lm_head is not None and (self.lm_head.ndim != 2 or self.lm_head.shape[1] != width):
            problems.append(f"lm_head has shape {list(self.lm_head.shape)}, expected [V, {width}]")
        for name, length in (("norm_weight", width), ("norm_bias", width), ("lm_head_bias", self.vocab_size)):
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != (length,):
                problems.append(f"{name} has shape {list(tensor.shape)}, expected [{length}]")
        if problems:
            raise ConfigError("head bundle: " + "; ".join(problems), kind=Kind.HEAD_INVALID)

    @property
    def hidden_size(self) -> int:
        return int(self.embed_tokens.shape[1])

    @property
    def output_weight(self) -> Tensor:
        """The LM head [V, D]: the embeddings when tied."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head; may exceed the tokenizer's size where the target pads it."""
        return int(self.output_weight.shape[0])

    @classmethod
    def from_bytes(cls, data: bytes, spec: HeadSpec, where: str = HEAD_FILE) -> "HeadBundle":
        """The inverse of ``save_bytes``."""
        try:
            tensors = load_tensors(data)
        except SafetensorError as error:
            message = f"{where} is no safetensors file: {error}"
            raise CorruptionError(message, kind=Kind.HEAD_CORRUPT, path=where) from error
        missing = [name for name in ("embed_tokens", "norm_weight") if name not in tensors]
        if not spec.tied and "lm_head" not in tensors:
            missing.append("lm_head")
        if missing:
            raise CorruptionError(f"{where} lacks {', '.join(missing)}", kind=Kind.HEAD_CORRUPT, path=where)
        return cls(
            spec,
            tensors["embed_tokens"],
            None if spec.tied else tensors["lm_head"],
            tensors["norm_weight"],
            tensors.get("norm_bias"),
            tensors.get("lm_head_bias"),
        )

    def save_bytes(self) -> bytes:
        """safetensors bytes with the tensors that are present; equal bundles give equal bytes."""
        return bytes(save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors()}))

    def to(self, device: torch.device | str) -> "HeadBundle":
        """A bundle with every tensor on ``device``."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors()}
        return replace(self, **moved)

    def norm(self, h: Tensor) -> Tensor:
        """Final norm over the last axis, in the wider dtype of ``h`` and the norm weight."""
        dtype = torch.promote_types(h.dtype, self.norm_weight.dtype)
        x, weight = h.float(), self.norm_weight
        if self.spec.norm_flavour == "layer":
            bias = None if self.norm_bias is None else self.norm_bias.float()
            return F.layer_norm(x, (x.shape[-1],), weight.float(), bias, self.spec.norm_eps).to(dtype)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        if self.spec.norm_flavour == "rms_plus_one":
            return (x * (1.0 + weight.float())).to(dtype)
        return weight * x.to(dtype)

    def logits(self, h: Tensor, norm_state: NormState = "pre_norm", token_ids: Tensor | None = None) -> Tensor:
        """Target logits fp32 [..., V] of final hiddens [..., D]; [..., U] when ``token_ids`` [U] restricts them.

        ``norm_state`` says what ``h`` is: a ``pre_norm`` hidden passes the final norm first. Gradients
        reach ``h``; the head is frozen.
        """
        weight, bias = self._output(token_ids)
        rows = h.reshape(-1, h.shape[-1])
        with without_autocast(h.device):
            out = self._products(rows, weight, norm_state)
            return self._finished(out, bias).reshape(*h.shape[:-1], weight.shape[0])

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] in the target's dtype, scaled as the family scales them (cast before scaling)."""
        rows = F.embedding(ids, self.embed_tokens)
        scale = self.spec.embed_scale
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)

    def _products(self, rows: Tensor, weight: Tensor, norm_state: NormState) -> Tensor:
        """Normed rows [N, D] times the head: fp32 [N, V]."""

        def normed(x: Tensor) -> Tensor:
            return (self.norm(x) if norm_state == "pre_norm" else x).float()

        if rows.is_cuda and weight.dtype is torch.bfloat16 and not rows.requires_grad:
            return linear_in_fp32(self.norm(rows) if norm_state == "pre_norm" else rows, weight.detach())
        if rows.shape[0] <= ROW_CHUNK and weight.shape[0] <= VOCAB_CHUNK:
            return linear(normed(rows), weight.detach().float())
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.float32, device=rows.device)
        for start in range(0, rows.shape[0], ROW_CHUNK):
            x = normed(rows[start : start + ROW_CHUNK])
            # Converting a slice at a time keeps a 150,000-token bf16 head from doubling in memory.
            for v in range(0, weight.shape[0], VOCAB_CHUNK):
                columns = weight[v : v + VOCAB_CHUNK].detach().float()
                into = out[start : start + ROW_CHUNK, v : v + VOCAB_CHUNK]
                if x.requires_grad or x.device.type == "cpu":
                    into.copy_(linear(x, columns))
                else:
                    torch.mm(x, columns.T, out=into)
        return out

    def _finished(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Bias, scale and softcap, in place where it can be."""
        if bias is not None:
            logits.add_(bias.detach().float())
        if self.spec.logit_scale != 1.0:
            logits.mul_(self.spec.logit_scale)
        cap = self.spec.final_logit_softcap
        if cap is None:
            return logits
        # tanh keeps its result for the backward, so that nothing may be written over it.
        return torch.tanh(logits / cap) * cap if logits.requires_grad else logits.div_(cap).tanh_().mul_(cap)

    def _output(self, token_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if token_ids is None:
            return self.output_weight, self.lm_head_bias
        if self._narrowed is None or self._narrowed[0] is not token_ids:
            bias = None if self.lm_head_bias is None else self.lm_head_bias[token_ids]
            self._narrowed = (token_ids, self.output_weight[token_ids], bias)
        return self._narrowed[1], self._narrowed[2]

    def _tensors(self) -> list[tuple[str, Tensor]]:
        named = [(f.name, getattr(self, f.name)) for f in fields(self) if not f.name.startswith("_")]
        return [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor)]
