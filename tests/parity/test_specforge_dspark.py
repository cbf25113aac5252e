"""DSpark of the installed SpecForge 0.2 and ours: equal weights, states and anchors give equal losses and gradients.

It teaches the text's tokens, divides by the sum of the weights, and ends a block at its first unsupervised slot, which
we leave out alone, so masks here say the same of both. Its weight of the L1 distance is half of ours of the overlap.
Needs the environment of `make test-parity`.
"""

import pytest
import torch

from tests.parity.test_dflash_peers import GAMMA, assert_equal, specforge_parts, two_rows
from tests.trainer.test_dspark import BLOCK, RANK, dspark_case, our_loss
from trainer.drafters.dspark import DSparkLoss

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

HEADS = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("overlap", "confidence"), [(0.9, 1.0), (0.0, 0.5)])
def test_losses_and_gradients_are_equal(
    monkeypatch: pytest.MonkeyPatch, attention: str, overlap: float, confidence: float
) -> None:
    draft = pytest.importorskip("specforge.modeling.draft.dspark")
    family = pytest.importorskip("specforge.algorithms.common.dflash_family_model")
    torch.manual_seed(0)
    case = dspark_case([26, 26], dtype=torch.float32)
    case.batch.loss_mask[:] = (torch.arange(26) >= 3).repeat(2)
    anchors, placed, rows = two_rows(case, BLOCK)
    peer = family.OnlineDSparkModel(
        **specforge_parts(case, draft.DSparkDraftModel, attention, **HEADS),
        dspark_ce_loss_alpha=0.1, dspark_l1_loss_alpha=overlap / 2, dspark_confidence_head_alpha=confidence,
    )  # fmt: skip
    monkeypatch.setattr(peer, "_sample_anchor_positions", lambda *_: placed)
    loss, _, _ = peer(**rows, target_last_hidden_states=case.target.head.norm(case.batch.final).view(2, 26, -1))
    loss.backward()
    how = {"labels": "text", "reduction": "weights", "gamma": GAMMA, "overlap": overlap, "confidence": confidence}
    ours = our_loss(case, DSparkLoss.model_validate(how), anchors.tolist())
    assert_equal(ours.total, case, peer.draft_model, loss)
