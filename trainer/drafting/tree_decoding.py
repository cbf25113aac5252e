"""Trees in use: greedy speculative decoding with one target forward per tree, and the same walk over recorded text.

Shapes: T tokens of one sample.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from hiddenstore.data import PackedBatch
from trainer.drafters.base import Seen
from trainer.drafting.acceptance import Tally, answers
from trainer.drafting.speculate import Generation, until_stop
from trainer.drafting.target import LiveTarget
from trainer.drafting.tree import DraftTree, LiveTree


def speculative_tree(
    target: LiveTarget, drafter: LiveTree, prompt: Sequence[int], max_new_tokens: int, tally: Tally
) -> Generation:
    """The greedy answer drafted in trees of ``tally.draft_len`` levels; adds every draft to ``tally``."""
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    drafter.reset()
    prefill = target.forward(prompt, cache, last_only=True)
    tokens = [int(prefill.logits[-1].argmax())]
    seen = prefill.seen([*prompt[1:], tokens[0]])
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        tree = drafter.grow(seen, tally.draft_len)
        check = target.forward_tree(tokens[-1], tree, cache)
        choices = check.logits.argmax(-1).tolist()
        # Row 0 is the newest known token, row i + 1 is node i.
        path, found = [0], [choices[0]]
        while (node := tree.follow(path[-1] - 1, found[-1])) is not None:
            path.append(node + 1)
            found.append(choices[node + 1])
        target.keep_rows(cache, len(tree.tokens) + 1, path)
        seen = Seen(check.aux[:, path], check.final[path], found)
        emitted = until_stop(found, stop)[: max_new_tokens - len(tokens)]
        tally.add_checked(len(found) - 1, len(emitted))
        tokens += emitted
    return Generation(tokens, time.perf_counter() - started)


def replay(drafter: LiveTree, pack: PackedBatch, rows: slice, tally: Tally) -> None:
    """Add one recorded sample to ``tally``, drafting where a server would; the slot average is not made.

    ``pack`` holds the final hidden at every row the drafter reads it at; rows it lacks are zero.
    """
    ids, mask = pack.input_ids[rows].tolist(), pack.loss_mask[rows].cpu().numpy()
    aux, final = pack.aux[:, rows], _final(pack, rows)
    drafter.reset()
    read = 0
    for start, end in answers(mask):
        n = max(start, 1)
        while n < end - 1:
            tree = drafter.grow(Seen(aux[:, read:n], final[read:n], ids[read + 1 : n + 1]), tally.draft_len)
            read = n
            remaining = end - 1 - n
            accepted = min(_agreed(tree, ids[n + 1 : end]), remaining)
            emitted = min(accepted + 1, remaining)
            tally.add_draft(accepted, emitted)
            n += emitted


def _agreed(tree: DraftTree, text: Sequence[int]) -> int:
    """Levels of the tree that hold the text, from the root down."""
    node, depth = -1, 0
    while depth < len(text) and (child := tree.follow(node, text[depth])) is not None:
        node, depth = child, depth + 1
    return depth


def _final(pack: PackedBatch, rows: slice) -> torch.Tensor:
    whole = pack.aux.new_zeros(rows.stop - rows.start, pack.final.shape[-1], dtype=torch.bfloat16)
    if len(pack.final):
        first, last = np.searchsorted(pack.final_rows.cpu().numpy(), [rows.start, rows.stop])
        whole[pack.final_rows[first:last] - rows.start] = pack.final[first:last].to(whole.dtype)
    return whole
