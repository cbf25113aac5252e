"""The choice of a recipe: trained pairs where they can tell, else errors; and why each smaller recipe was not taken."""

import pytest

from hiddenstore.inspect.choice import FP8, RecipeLimits, choose, paired_lines, refusal_lines, verdict
from schemas.advice import Advice, AdviceRow, PairedRow, SourceLoss

SIZES = {"raw": 4608.0, "safe": 2300.0, FP8: 2310.0, "compact": 1300.0, "tiny": 900.0, "rebuilt": 640.0}
ERRORS = {
    "raw": (0.0, 0.0), "safe": (9e-4, 0.008), FP8: (1e-4, 0.026), "compact": (9e-4, 0.088), "tiny": (1e-6, 0.088),
    "rebuilt": (4.7e-3, 0.088),
}  # fmt: skip
LIMITS = RecipeLimits()


def row(recipe: str, kl: float | None) -> AdviceRow:
    return AdviceRow(
        recipe=recipe, bytes_per_token=SIZES[recipe], kl=kl, overlap=None, top1_flips=None,
        channel_error=ERRORS[recipe][1], channel_errors={}, raw_rows=0.0, clipped=0.0, within=False, chosen=False,
    )  # fmt: skip


ROWS = [row(recipe, kl) for recipe, (kl, _) in ERRORS.items()]


def trained(recipe: str, points: float, half_width: float | None, *sources: SourceLoss) -> PairedRow:
    return PairedRow(
        recipe=recipe, drafter="eagle3", steps=80, seeds=(0, 1), acceptance=(0.5, 0.5), original_acceptance=(0.5, 0.5),
        difference=points / 100, standard_error=0.001, half_width=None if half_width is None else half_width / 100,
        minutes=12.34, sources=sources,
    )  # fmt: skip


def chosen(*pairs: PairedRow, limits: RecipeLimits = LIMITS) -> Advice:
    return choose(ROWS, limits, 4096, 2500, pairs)


def test_without_pairs_errors_choose_and_with_them_the_smallest_whose_interval_lies_under_the_limit() -> None:
    assert chosen().chosen == "safe"
    pairs = trained("compact", -0.1, 0.2), trained("rebuilt", -0.2, 0.29)
    assert chosen(*pairs).chosen == "rebuilt"
    assert chosen(*pairs, limits=RecipeLimits(loss=0.004)).chosen == "compact"
    assert chosen(trained("rebuilt", -0.2, 0.31)).chosen == "safe"
    assert chosen(*pairs, limits=RecipeLimits(loss=0.0)).chosen == "safe"


def test_a_recipe_that_loses_more_than_the_limit_is_refused_though_its_errors_are_small() -> None:
    assert chosen(trained("safe", -0.6, 0.05)).chosen == "raw"
    # An interval too wide to tell leaves the errors to decide.
    assert chosen(trained("safe", -0.4, 3.0)).chosen == "safe"


def test_exact_recipes_are_within_whatever_the_noise_of_pairs_says() -> None:
    everything = tuple(trained(recipe, -2.0, 0.1) for recipe in ERRORS)
    assert chosen(*everything).chosen == "raw"


def test_pairs_without_an_interval_admit_nothing() -> None:
    advice = chosen(trained("rebuilt", 0.0, None))
    assert advice.chosen == "safe"
    assert "it may lose any number of points of acceptance, 0.5 are allowed (more held-out" in refusal_lines(advice)[0]
    assert "rebuilt: +0.00 ± unknown points of acceptance" in paired_lines(advice.paired)[0]


def test_top_tokens_and_a_peers_format_are_never_chosen_whatever_pairs_say() -> None:
    pairs = trained("tiny", 1.0, 0.1), trained(FP8, 1.0, 0.1)
    assert chosen(*pairs, limits=RecipeLimits(100.0, 0.03)).chosen == "safe"


def test_a_recipe_whose_final_hidden_could_not_be_measured_is_not_chosen() -> None:
    rows = [row(recipe, 0.0 if recipe == "raw" else None) for recipe in ERRORS]
    advice = choose(rows, RecipeLimits(1.0, 1.0), 4096, 0)
    assert advice.chosen == "raw"
    assert any("no final hidden" in line for line in refusal_lines(advice))
    # Limits alone never take what was not measured.
    assert not any("would take it" in line for line in refusal_lines(choose(rows, LIMITS, 4096, 0)))
    rescued = choose(rows, RecipeLimits(), 4096, 0, [trained("rebuilt", 0.0, 0.1)])
    assert rescued.chosen == "rebuilt"
    # Where none is captured there is nothing to measure.
    assert choose([row(recipe, None) for recipe in ERRORS], RecipeLimits(1.0, 1.0), 4096, 0).chosen == "rebuilt"


def test_every_smaller_recipe_is_named_with_its_reason_and_what_would_let_it_pass() -> None:
    advice = chosen()
    rebuilt, tiny, compact = refusal_lines(advice)
    assert rebuilt.startswith("not rebuilt (640 B/token): KL 4.7e-03 > 0.001, channel error 8.8 % > 3 %; ")
    assert "--max-kl 0.0047 --max-channel-error 0.088 would take it" in rebuilt
    assert "advise --paired --recipe compact" in compact
    assert "person's choice" in tiny
    assert "advise --paired --recipe rebuilt --target T tells" in rebuilt
    assert not any("--paired" in line for line in refusal_lines(advice, can_train=False))
    (forced, *_) = refusal_lines(advice, has_limits=False)
    assert forced.endswith("channel error 8.8 % > 3 %; --recipe rebuilt takes it all the same")
    assert choose(ROWS, RecipeLimits(0.0047, 0.088), 4096, 2500).chosen == "rebuilt"
    assert verdict(advice) == "safe is the smallest recipe with KL ≤ 0.001 and channel error ≤ 3 %"


def test_pairs_that_lose_too_much_and_pairs_that_cannot_tell_are_told_apart() -> None:
    advice = chosen(trained("rebuilt", -0.9, 0.1), trained("compact", -0.1, 0.7))
    rebuilt, _, compact = refusal_lines(advice)
    assert "it may lose 1.00 points of acceptance, 0.5 are allowed (--max-loss)" in rebuilt
    assert "it may lose 0.80 points of acceptance, 0.5 are allowed (more --seeds" in compact
    won = chosen(trained("rebuilt", 0.1, 0.25))
    assert refusal_lines(won) == []
    assert "within 0.5 points of acceptance: at most 0.15 points lost" in verdict(won)


def test_the_interval_the_minutes_and_each_input_are_shown() -> None:
    sources = (
        SourceLoss(source="5fa1c0de93b7", samples=30, difference=-0.001, half_width=0.002),
        SourceLoss(source="e07d11a4c2f8", samples=8, difference=0.004, half_width=0.009),
    )
    whole, chat, code = paired_lines([trained("compact", -0.1, 0.2, *sources)])
    assert whole == "compact: -0.10 ± 0.20 points of acceptance (original 50.0 %, 2 × 80 steps, 12.3 min)"
    assert chat == "  input 5fa1c0de93b7: -0.10 ± 0.20 points (30 held-out samples)"
    assert code == "  input e07d11a4c2f8: +0.40 ± 0.90 points (8 held-out samples)"
    assert len(paired_lines([trained("compact", -0.1, 0.2, sources[0])])) == 1


@pytest.mark.parametrize("pairs", [(), (trained("compact", -0.1, 0.2),)])
def test_advice_says_its_limit_of_acceptance_only_where_something_was_trained(pairs: tuple[PairedRow, ...]) -> None:
    written = chosen(*pairs).model_dump(mode="json")
    assert ("max_loss" in written) == bool(pairs)
    assert Advice.model_validate(written) == chosen(*pairs)
