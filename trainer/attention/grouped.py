"""Attention with fewer key heads than query heads, by a kernel of torch that keeps no scores.

Shapes: N query heads, G key heads, S rows queried, J keys, E head width.
"""

from torch import Tensor
from torch.nn import functional as F

from trainer.attention.ttt import fits


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attended values [1, N, S, E] of q [1, N, S, E] over k, v [1, G, J, E]; ``mask`` bool [S, J], None for all."""
    shares = shares_keys(q, mask)
    if not shares:
        group = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shares)


def shares_keys(q: Tensor, mask: Tensor | None) -> bool:
    """Whether the query heads of a group read one copy of their keys. Beside the CPU's only flash attention lets them,
    which takes no mask; otherwise torch falls back to a kernel that keeps every score in fp32. transformers asks the
    same (``use_gqa_in_sdpa``)."""
    return q.device.type == "cpu" or (mask is None and fits(q))
