"""One check for every drafter: live decoding is greedy, and `eval` on the decoded text counts the same."""

from collections.abc import Sequence
from typing import Any

from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.identity import chat_template_sha256, config_sha256, tokenizer_sha256
from schemas.capture import TargetIdentity
from trainer.drafters.base import DrafterInUse
from trainer.evaluate.acceptance import DraftShape
from trainer.evaluate.simulate import evaluate_packs
from trainer.evaluate.speculate import DecodeLimits, DecodeResult, decode, recorded_packs
from trainer.evaluate.target import identity_of


def identity_in_memory(model: Any, tokenizer: Any) -> TargetIdentity:
    """Who a model is that lies in no folder."""
    digests = {
        "config_sha256": config_sha256(model.config.to_dict()),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "chat_template_sha256": chat_template_sha256(tokenizer.chat_template),
    }
    return identity_of(TargetFolder("tiny", None, model.config, tokenizer, **digests), model)


def assert_live_equals_eval(
    target: Any, drafter: DrafterInUse, prompts: list[list[int]], shapes: Sequence[DraftShape], limits: DecodeLimits
) -> DecodeResult:
    live = decode(target, drafter, prompts, shapes, limits)
    assert live.prompts
    for run in live.by_shape:
        assert run.differences == []
        assert run.target_forwards == run.tally.drafts + len(live.prompts)
        (simulated,) = evaluate_packs([drafter], recorded_packs(target, live.prompts, run), [run.tally.shape])
        assert run.tally.tokens > run.tally.drafts
        assert (simulated.tally.drafts, simulated.tally.tokens) == (run.tally.drafts, run.tally.tokens)
        assert simulated.tally.accepted_at == run.tally.accepted_at
    return live
