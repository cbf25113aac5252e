"""Speculative decoding with a live target: lossless, counted, and refusing what makes no sense."""

import random

import click
import pytest
import torch
from tiny_target import make_model, make_tokenizer, save_target
from transformers import LlamaConfig

from hiddenstore.errors import CaptureError, ConfigError, FormatError
from hiddenstore.records import repeated_share
from hiddenstore.targets.folder import TargetFolder, open_target
from hiddenstore.targets.matmul import FEWEST_TIMES, bf16_speedup
from schemas.capture import HeadSpec
from tests.collectors.tiny import tiny_target
from tests.trainer.live import assert_live_equals_eval, identity_in_memory
from trainer.cli.decode import _row
from trainer.drafters.base import DrafterInUse
from trainer.drafters.eagle3 import EAGLE3, Eagle3Config
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape, hits_of_next_token, walk
from trainer.evaluate.speculate import DecodeLimits, decode, plain, speculative
from trainer.evaluate.target import (
    CHECKED_ROWS,
    LiveTarget,
    bundle_of,
    decoding_dtype,
    identity_of,
    load_live_target,
)
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

AUX_LAYERS = (0, 1, 2)


class Scripted:
    """Proposes from a known answer, wrong wherever ``miss`` says so; checks what it is handed."""

    def __init__(self, prompt, answer, miss=lambda index: False, vocab=99):
        self.prompt, self.answer, self.miss, self.vocab = prompt, answer, miss, vocab

    def reset(self):
        self.read = 0

    def propose(self, seen, draft_len, pick=None):
        aux, next_ids = seen.aux, seen.next_ids
        assert seen.final.shape == (len(next_ids), 64)
        assert aux.shape == (len(AUX_LAYERS), len(next_ids), 64)
        assert aux.dtype == torch.bfloat16
        text = [*self.prompt, *self.answer]
        assert list(next_ids) == text[self.read + 1 : self.read + 1 + len(next_ids)]
        self.read += len(next_ids)
        known = self.read + 1 - len(self.prompt)
        proposals = []
        for index in range(known, known + draft_len):
            truth = self.answer[index] if index < len(self.answer) else 0
            proposals.append((truth + 1) % self.vocab if self.miss(index) else truth)
        return proposals


@pytest.fixture(scope="module")
def target():
    model, tokenizer = make_model(), make_tokenizer()
    return LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), AUX_LAYERS)


def prompt_of(seed, length=12):
    return [random.Random(seed).randrange(5, 99) for _ in range(length)]


@pytest.mark.parametrize("draft_len", [1, 3, 7])
@pytest.mark.parametrize("miss_share", [0.0, 0.4, 1.0])
def test_speculative_output_is_the_greedy_output_for_good_and_bad_drafters(target, draft_len, miss_share):
    for seed in range(4):
        prompt, dice = prompt_of(seed), random.Random(seed)
        misses = {i for i in range(80) if dice.random() < miss_share}
        baseline = plain(target, prompt, 40)
        tally, before = AcceptanceTally(draft_len), target.forwards
        answer = speculative(target, Scripted(prompt, baseline.tokens, misses.__contains__), prompt, 40, tally)
        assert answer.tokens == baseline.tokens
        assert target.forwards - before == tally.drafts + 1
        assert tally.tokens == len(answer.tokens) - 1


@pytest.mark.parametrize("miss_every", [1, 2, 3, 100])
def test_live_counts_equal_the_walk_over_the_recorded_answer(target, miss_every):
    prompt = prompt_of(9)
    answer = plain(target, prompt, 50).tokens
    live, walked = AcceptanceTally(3), AcceptanceTally(3)
    speculative(target, Scripted(prompt, answer, lambda i: i % miss_every == 0), prompt, 50, live)
    correct = torch.tensor([True] * len(prompt) + [False] * len(answer))
    for index in range(len(answer) - 1):
        correct[len(prompt) + index] = (index + 1) % miss_every != 0
    mask = torch.tensor([0] * len(prompt) + [1] * len(answer)).numpy()
    walk(hits_of_next_token(correct.numpy(), 3), mask, walked)
    assert (live.drafts, live.tokens, live.accepted_at) == (walked.drafts, walked.tokens, walked.accepted_at)


def test_decoding_stops_at_the_stop_token_inside_an_accepted_draft(target):
    prompt = prompt_of(3)
    free = plain(target, prompt, 30).tokens
    stop = free[10]
    target.model.config.eos_token_id, kept = stop, target.model.config.eos_token_id
    try:
        baseline = plain(target, prompt, 30).tokens
        assert baseline == free[: free.index(stop) + 1]
        tally = AcceptanceTally(7)
        assert speculative(target, Scripted(prompt, free), prompt, 30, tally).tokens == baseline
        assert tally.tokens == len(baseline) - 1
    finally:
        target.model.config.eos_token_id = kept


def test_what_is_accepted_past_the_end_of_an_answer_is_counted_as_engines_do_and_emitted_by_none(target):
    prompt = prompt_of(9)
    text = plain(target, prompt, 40).tokens
    assert len(text) == 40
    tally = AcceptanceTally(7)
    answer = speculative(target, Scripted(prompt, text), prompt, 20, tally)
    assert answer.tokens == text[:20]
    # 1 token of the prefill, then drafts of 7 + 1 tokens: 8, 8 and 3 of the last 8.
    assert (tally.drafts, tally.tokens, tally.past_end) == (3, 19, 4)
    assert tally.accepted_length == pytest.approx(19 / 3)
    assert tally.engine_accepted_length == 8.0


class Drafting:
    """A drafter in use that is its own ``live()``."""

    def __init__(self, chain):
        self.chain = chain

    def require_length(self, tokens):
        """Any number."""

    def live(self):
        return self.chain


class AlwaysZero:
    def reset(self):
        pass

    def propose(self, seen, draft_len, pick=None):
        return [0] * draft_len


def run(target, prompts, count=4, max_new_tokens=24):
    return decode(target, Drafting(AlwaysZero()), prompts, [DraftShape(3)], DecodeLimits(count, max_new_tokens))


def test_forwards_equal_drafts_and_prefills_and_every_answer_is_greedy(target):
    result = run(target, [prompt_of(seed) for seed in range(12)])
    (only,) = result.by_shape
    assert len(only.answers) == 4
    assert only.target_forwards == only.tally.drafts + 4
    assert only.differences == []
    assert only.tokens == only.tally.tokens + 4


@pytest.mark.parametrize("prefill", [0.0, 500.0])
def test_the_break_even_length_is_a_draft_s_time_in_plain_steps_whatever_the_prefills_take(
    target, monkeypatch, prefill
):
    now, real = [0.0], target.forward

    def forward(ids, cache, **options):
        now[0] += prefill if cache.get_seq_length() == 0 else 2.0 if len(ids) > 1 else 1.0
        return real(ids, cache, **options)

    monkeypatch.setattr(target, "forward", forward)
    monkeypatch.setattr("trainer.evaluate.speculate.time.perf_counter", lambda: now[0])
    result = run(target, [prompt_of(seed) for seed in range(12)])
    (only,) = result.by_shape
    assert (only.draft_seconds, result.token_seconds) == (2.0, 1.0)
    assert _row(only, None, 0.0, result.token_seconds)["break_even_length"] == 2.0
    assert _row(only, None, 0.0, None)["break_even_length"] is None


def test_looping_answers_are_left_out_and_counted(target, monkeypatch):
    monkeypatch.setattr("trainer.evaluate.speculate.LOOP_SHARE", -1.0)
    with pytest.raises(ConfigError) as caught:
        run(target, [prompt_of(0), prompt_of(1)])
    assert caught.value.kind == "nothing-decoded"
    assert "2 greedy answers loop" in str(caught.value)


def test_a_prompt_that_does_not_fit_the_target_is_counted(target):
    result = run(target, [prompt_of(0, 240), *[prompt_of(seed) for seed in range(1, 9)]], count=2)
    assert result.too_long == 1
    assert len(result.prompts) == 2


def test_a_decode_that_drafts_nothing_fails(target):
    with pytest.raises(CaptureError) as caught:
        run(target, [prompt_of(0)], max_new_tokens=1)
    assert caught.value.kind == "nothing-drafted"


def test_a_drafter_that_runs_the_target_for_itself_is_found_out(target):
    class Peeking(AlwaysZero):
        def propose(self, seen, draft_len, pick=None):
            target.forward([7], target.new_cache())
            return super().propose(seen, draft_len, pick)

    with pytest.raises(CaptureError, match=r"\d+ target forwards, expected \d+ drafts \+ 1 prefills") as caught:
        decode(target, Drafting(Peeking()), [prompt_of(1)], [DraftShape(3)], DecodeLimits(1, 24))
    assert caught.value.kind == "forward-count"


def test_without_forgetting_rejected_tokens_the_output_is_not_the_greedy_one(target, monkeypatch):
    """Negative control: the comparison with greedy sees a cache that is not cropped."""
    prompt = prompt_of(2)
    baseline = plain(target, prompt, 30).tokens
    monkeypatch.setattr(LiveTarget, "drop_last", staticmethod(lambda cache, tokens: None))
    assert speculative(target, AlwaysZero(), prompt, 30, AcceptanceTally(3)).tokens != baseline


def eagle3_for(target, answers, seed=0):
    """A random drafter whose vocabulary is what the target says most, so that some drafts are accepted."""
    config = Eagle3Config(
        aux_layers=AUX_LAYERS,
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=4,
    )
    counts = torch.bincount(torch.tensor([token for answer in answers for token in answer]), minlength=99)
    vocab = DraftVocab.of_counts(counts.numpy(), 4)
    spec = HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)
    interface = TargetInterface(bundle_of(target.model, spec), vocab)
    return DrafterInUse(EAGLE3, EAGLE3.build(config, interface, seed).eval(), interface)


@pytest.mark.parametrize(
    "shapes", [[DraftShape(1)], [DraftShape(3), DraftShape(5)], [DraftShape(1, 2), DraftShape(4, 3)]]
)
def test_an_eagle3_drafter_decodes_the_greedy_text_and_eval_on_that_text_counts_the_same(target, shapes):
    prompts = [prompt_of(seed) for seed in range(6)]
    drafter = eagle3_for(target, [plain(target, prompt, 32).tokens for prompt in prompts])
    assert_live_equals_eval(target, drafter, prompts, shapes, DecodeLimits(5, 32))


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_trees_are_refused_of_a_target_whose_layers_see_a_window(family, monkeypatch):
    monkeypatch.setattr("trainer.evaluate.speculate.LOOP_SHARE", 1.0)
    loaded = tiny_target(family)
    identity = identity_in_memory(loaded.model, make_tokenizer())
    windowed = LiveTarget(loaded.model, make_tokenizer(), identity, AUX_LAYERS)
    drafter = eagle3_for(windowed, [[7, 8, 9, 10]])
    with pytest.raises(ConfigError, match="sliding-window layers checks no trees") as caught:
        decode(windowed, drafter, [prompt_of(0)], [DraftShape(2, 2)], DecodeLimits(1, 8))
    assert (caught.value.kind, caught.value.hint) == ("no-tree", "--draft-len 3")


@pytest.mark.parametrize(
    ("gap", "logit", "dtype", "fails"),
    [
        (1e-5, 20.0, "float32", False),
        (0.2, 20.0, "float32", True),
        (0.25, 20.0, "bfloat16", False),
        (0.375, 20.0, "bfloat16", True),
        (0.375, -40.0, "bfloat16", False),
    ],
)
def test_a_difference_from_greedy_is_forgiven_only_where_it_is_a_tie(gap, logit, dtype, fails):
    from trainer.cli.decode import _judge, split_ties

    ties, differences = split_ties([{"logit_gap": gap, "logit": logit}], dtype)
    document = {"ties": ties, "differences": differences}
    assert (len(ties), len(differences)) == ((0, 1) if fails else (1, 0))
    if not fails:
        _judge(document, dtype)
        return
    with pytest.raises(click.exceptions.Exit) as caught:
        _judge(document, dtype)
    assert caught.value.exit_code == 3


def test_repeated_share_is_zero_for_new_text_and_near_one_for_a_loop():
    assert repeated_share(list(range(20))) == 0.0
    assert repeated_share([1, 2] * 20) > 0.9
    assert repeated_share([1, 2, 3]) == 0.0


def test_another_target_than_the_store_s_is_refused_with_every_difference(tmp_path):
    first, second = save_target(tmp_path / "a", seed=0), save_target(tmp_path / "b", seed=1)
    identity = identity_of(open_target(first), make_model(0))
    loaded = load_live_target(first, AUX_LAYERS, identity, "cpu")
    assert loaded.stop_ids == {1}
    with pytest.raises(FormatError) as caught:
        load_live_target(second, AUX_LAYERS, identity, "cpu")
    assert caught.value.kind == "target-mismatch"
    assert "weights_sha256" in str(caught.value)
    assert "tokenizer_sha256" not in str(caught.value)


def test_a_target_loaded_in_bf16_is_still_the_same_target(tmp_path):
    folder = save_target(tmp_path / "a", seed=0)
    identity = identity_of(open_target(folder), make_model(0))
    assert load_live_target(folder, AUX_LAYERS, identity, "cpu", "bfloat16").identity.dtype == "bfloat16"


def folder_of(width, dtype, **more):
    config = LlamaConfig(hidden_size=width, intermediate_size=3 * width, dtype=dtype)
    return TargetFolder("x", None, config, None, "", "", "", **more)


def test_a_cpu_decodes_a_wide_checkpoint_in_its_own_bf16_where_it_multiplies_that_markedly_faster():
    times = bf16_speedup(768, 3 * 768, CHECKED_ROWS)
    dtype, why = decoding_dtype(folder_of(768, torch.bfloat16))
    if times > 1.2 * FEWEST_TIMES:
        assert dtype == "bfloat16"
        assert "times as fast as float32" in why
    elif times < FEWEST_TIMES / 1.2:
        assert dtype == "float32"
        assert "does not multiply markedly faster" in why
    else:
        pytest.skip(f"bf16 is {times:.2f} times as fast here: too close to the limit to say which it will be")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (folder_of(64, torch.bfloat16), "at its width"),
        (folder_of(768, torch.float32), "the checkpoint is float32"),
        (folder_of(768, torch.float16), "the checkpoint is float16"),
        (folder_of(768, torch.bfloat16, quantisation={"quant_method": "fp8"}), "quantised"),
    ],
)
def test_narrow_quantised_and_other_checkpoints_are_decoded_in_fp32_on_a_cpu(folder, reason):
    dtype, why = decoding_dtype(folder)
    assert dtype == "float32"
    assert reason in why


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_live_target(str(tmp_path), AUX_LAYERS, None, "cpu")
    assert caught.value.kind == "target-incomplete"
