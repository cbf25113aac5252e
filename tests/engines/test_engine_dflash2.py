"""DFlash2's convolution and selector as vLLM's own code computes them on a CPU. Its V2 runner, which drafts with them,
needs Triton."""

import pytest
import torch

from tests.trainer.conftest import VOCAB, WIDTH
from tests.trainer.test_dflash2 import CANDIDATES, SIZES, dflash2_case

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

BLOCKS, SLOTS, TAPS = 5, 4, 3
GROUP = SIZES["conv_group_size"]


@torch.no_grad()
def test_vllm_mixes_the_slots_of_a_block_and_scores_candidates_as_ours():
    from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv, _score_edges

    torch.manual_seed(0)
    model = dflash2_case([24], dtype=torch.float32, conv_kernel_size=TAPS).model
    convolution, groups = model.layers[0].attention_conv, WIDTH // GROUP
    entering, leaving = torch.randn(2, BLOCKS, SLOTS, WIDTH)
    mixed, delta = convolution.before(entering)
    kernels = convolution.kernel_projection(entering).view(-1, 2, TAPS, groups)
    for side, x, ours in ((0, entering, mixed), (1, leaving, convolution.after(leaving, delta))):
        base = convolution.base_kernel[side]
        theirs = _grouped_conv(x.flatten(0, 1), kernels[:, side], base, SLOTS, groups, GROUP, TAPS)
        torch.testing.assert_close(ours.flatten(0, 1), theirs, rtol=0, atol=1e-5)

    selector, states = model.candidate_selector, torch.randn(BLOCKS, SLOTS - 1, WIDTH)
    unary, candidates = (states @ model.head_weight().T).topk(CANDIDATES)
    newest = torch.randint(VOCAB, (BLOCKS,))
    tables = selector.predecessor_codebook, selector.successor_codebook
    edges = _score_edges(*tables, candidates, unary, selector.hidden_projection(states), newest, CANDIDATES)
    previous, place = newest, torch.zeros(BLOCKS, dtype=torch.long)
    for slot in range(SLOTS - 1):
        logits, walked = model.logits(states[:, slot], previous), edges[torch.arange(BLOCKS), slot, place]
        torch.testing.assert_close(logits.gather(1, candidates[:, slot]), walked, rtol=0, atol=1e-5)
        place = walked.argmax(1)
        previous = candidates[torch.arange(BLOCKS), slot, place]
        assert torch.equal(previous, logits.argmax(1))
