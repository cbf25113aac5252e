"""Attention of the newest token of each row on a CPU: as torch computes it, where it is understood, and only there."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from collectors.regenerate import attention, generate
from collectors.regenerate.generate import Answer, Sampling, generate_batch
from collectors.targets.load import LoadedTarget
from tests.collectors.tiny import CONFIGS, tiny_target
from tests.collectors.tiny_families import MORE

PROMPTS = [[1, *range(30, 30 + n)] for n in (40, 33, 20, 7, 1)]
GREEDY = Sampling(0, 24)


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WORTH_COMPILING", 1)


class Heads:
    is_causal = True

    def __init__(self, shared: int) -> None:
        self.num_key_value_groups = shared


def states(rows: int, heads: int, groups: int, width: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A query [B, H, 1, E], and keys and values that are the first columns of rooms."""
    torch.manual_seed(0)
    query = torch.randn(rows, 1, heads, width).bfloat16().transpose(1, 2)
    keys, values = torch.randn(2, rows, groups, columns + 9, width).bfloat16()
    return query, keys[:, :, :columns], values[:, :, :columns]


def padded(rows: int, columns: int) -> Tensor:
    """A mask [B, 1, 1, T]: the first row sees all columns, the last one only its own."""
    starts = torch.linspace(0, columns - 1, rows).long()
    return (torch.arange(columns) >= starts[:, None])[:, None, None]


def attend(*given: Any, threads: int = 1, **options: Any) -> Tensor | None:
    pool = attention.Threads(threads - 1) if threads > 1 else None
    return attention._NewestToken(threads, pool).attend(*given, **options)


def by_torch(module: Heads, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    out: Tensor = AttentionInterface()["sdpa"](module, query.float(), key.float(), value.float(), mask)[0]
    return out


def answers_of(target: LoadedTarget, sampling: Sampling = GREEDY) -> list[Answer]:
    return [answer for _, answer in sorted(generate_batch(target, PROMPTS, sampling, "t"), key=itemgetter(0))]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every layer at every step, whether the kernel computed it."""
    kept, inner = list[bool](), attention._NewestToken.attend

    def watched(*given: Any, **options: Any) -> Tensor | None:
        out = inner(*given, **options)
        kept.append(out is not None)
        return out

    monkeypatch.setattr(attention._NewestToken, "attend", watched)
    return kept


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "columns"),
    [
        (5, 9, 3, 64, 77),
        (3, 4, 4, 16, 16),
        (1, 8, 1, 32, 40),
        (4, 8, 2, 128, 33),
        (7, 7, 1, 80, 130),
        (2, 3, 3, 64, 31),
    ],
)
def test_it_is_what_torch_computes_in_float32_rounded_once(
    rows: int, heads: int, groups: int, width: int, columns: int
) -> None:
    module, (query, key, value) = Heads(heads // groups), states(rows, heads, groups, width, columns)
    for mask in (padded(rows, columns), None):
        out = attend(module, query, key, value, mask)
        exact = by_torch(module, query, key, value, mask)
        assert out is not None
        assert out.shape == exact.shape == (rows, 1, heads, width)
        # Half a step of bf16, and what float32 sums in another order.
        assert ((out.float() - exact).abs() <= 2.0**-8 * exact.abs() + 2e-6).all()


def test_a_row_that_sees_one_column_gets_its_values() -> None:
    query, key, value = states(3, 4, 2, 64, 50)
    out = attend(Heads(2), query, key, value, padded(3, 50))
    assert out is not None
    assert torch.equal(out[2, 0], value[2, :, -1].repeat_interleave(2, dim=0))


def test_what_lies_in_the_padding_is_never_looked_at() -> None:
    query, key, value = states(4, 4, 2, 64, 50)
    mask = padded(4, 50)
    before = attend(Heads(2), query, key, value, mask)
    for room in (key, value):
        room.masked_fill_(~mask[:, 0, 0, :, None].unsqueeze(1), float("nan"))
    after = attend(Heads(2), query, key, value, mask)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_scores_far_apart_and_large_ones_are_no_infinity_and_nan_stays_nan() -> None:
    query, key, value = states(2, 4, 2, 64, 50)
    out, exact = attend(Heads(2), 300 * query, key, value, None), by_torch(Heads(2), 300 * query, key, value, None)
    assert out is not None
    assert ((out.float() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-3).all()
    key[0, 0, 7] = float("nan")
    out = attend(Heads(2), query, key, value, None)
    assert out is not None
    assert out[0, 0, :2].isnan().all()
    assert not out[0, 0, 2:].isnan().any()
    assert not out[1].isnan().any()


def test_powers_of_two_are_right_to_3e_7() -> None:
    from collectors.regenerate.attention_kernel import largest, powers

    exponents = np.linspace(-118, 0, 100_001, dtype=np.float32)
    values = exponents.copy()
    powers(values, np.float32(0.0))
    exact = np.exp2(exponents.astype(np.float64))
    assert (np.abs(values - exact) <= 3e-7 * exact).all()
    least = np.array([-1e30, -np.inf], np.float32)
    powers(least, np.float32(0.0))
    assert np.allclose(least, 2.0**-120, rtol=3e-7, atol=0)
    for numbers in ([-3.0, -1.5, -2.0], [-0.0, 0.0], [5.0, -7.0, 2.0], [-np.inf, -1e38]):
        assert largest(np.array(numbers, np.float32)) == np.float32(max(numbers))
    assert np.isnan(largest(np.array([1.0, np.nan, 2.0], np.float32)))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LEAST_BYTES", 1)
    module, (query, key, value) = Heads(2), states(6, 4, 2, 64, 60)
    for mask in (padded(6, 60), None):
        one, many = (attend(module, query, key, value, mask, threads=n) for n in (1, threads))
        assert one is not None
        assert many is not None
        assert torch.equal(one, many)


def test_rows_are_parted_evenly_among_as_many_threads_as_have_enough_to_read() -> None:
    newest, column = attention._NewestToken(4, None), attention._LEAST_BYTES // 128

    def parts(*columns: int) -> list[tuple[int, int]]:
        return newest._parts(np.cumsum(columns), column)

    assert parts(*[64] * 8) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert parts(*[16] * 16) == [(0, 8), (8, 16)]
    assert parts(*[16] * 15) == [(0, 15)]
    assert parts(512, 4, 4) == [(0, 1), (1, 3)]
    assert parts(4, 4, 512) == [(0, 3)]
    assert parts(900) == [(0, 1)]


def test_few_rows_wake_no_other_thread() -> None:
    query, key, value = states(4, 4, 2, 64, 60)
    with attention.Threads(7) as pool:
        assert attention._NewestToken(8, pool).attend(Heads(2), query, key, value, None) is not None
        assert not pool._threads


def holed(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[0, 0, 0, 3] = False
    return mask


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "two new tokens": lambda q, k, v, m: ((q.repeat(1, 1, 2, 1), k, v, m.repeat(1, 1, 2, 1)), {}),
    "float32": lambda q, k, v, m: ((q.float(), k.float(), v.float(), m), {}),
    "a hole in the mask": lambda q, k, v, m: ((q, k, v, holed(m)), {}),
    "a row that sees nothing": lambda q, k, v, m: ((q, k, v, m & (torch.arange(len(m)) > 0)[:, None, None, None]), {}),
    "a mask that is added": lambda q, k, v, m: ((q, k, v, torch.zeros(m.shape).bfloat16()), {}),
    "a mask of every head": lambda q, k, v, m: ((q, k, v, m.expand(-1, q.shape[1], -1, -1)), {}),
    "soft cap": lambda q, k, v, m: ((q, k, v, m), {"softcap": 5.0}),
    "sinks": lambda q, k, v, m: ((q, k, v, m), {"s_aux": torch.zeros(q.shape[1])}),
    "position bias": lambda q, k, v, m: ((q, k, v, m), {"position_bias": torch.zeros(1, 1, 1, k.shape[2])}),
    "dropout": lambda q, k, v, m: ((q, k, v, m), {"dropout": 0.5}),
    "a paged cache": lambda q, k, v, m: ((q, k, v, m), {"cache": object()}),
    "states by columns": lambda q, k, v, m: ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v, m), {}),
    "a part of a room": lambda q, k, v, m: ((q, k[:, :, 1:], v[:, :, 1:], m[..., 1:]), {}),
    "heads of rooms": lambda q, k, v, m: ((q[:, :2], k[:, :1], v[:, :1], m), {}),
    "narrow values": lambda q, k, v, m: ((q, k, v[..., :32].contiguous(), m), {}),
    "few columns": lambda q, k, v, m: ((q, k[:, :, :15], v[:, :, :15], m[..., 36 - 15 :]), {}),
    "an odd width": lambda q, k, v, m: ((q[..., :40], *(s[..., :40].contiguous() for s in (k, v)), m), {}),
    "other groups": lambda q, k, v, m: ((q[:, :3], k, v, m), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_understood_is_left_to_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = object()
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *_given, **_options: (own, None))
    given, options = OTHERS[name](*states(4, 4, 2, 64, 36), padded(4, 36))
    newest = attention._newest.set(attention._NewestToken(1, None))
    try:
        assert attention._attention(Heads(2), *given, **options)[0] is own
        plain = (*states(4, 4, 2, 64, 36), padded(4, 36))
        assert attention._attention(Heads(2), *plain)[0] is not own
    finally:
        attention._newest.reset(newest)
    assert attention._attention(Heads(2), *plain)[0] is own


def gap(target: LoadedTarget, prompt: list[int], one: Answer, other: Answer) -> float:
    """How far apart the logits are, as a share of the largest, where two answers part."""
    pairs = zip([*one.token_ids, 2], [*other.token_ids, 2], strict=False)
    place = next(n for n, (mine, theirs) in enumerate(pairs) if mine != theirs)
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt + one.token_ids[:place]])).logits[0, -1].float()
    mine, theirs = (([*answer.token_ids, 2])[place] for answer in (one, other))
    return float((logits[mine] - logits[theirs]).abs() / logits.abs().max())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "granite", "cohere", "olmo2"])
def test_greedy_answers_are_those_of_torchs_attention_or_part_at_a_tie(
    family: str, any_size: None, computed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family, dtype=torch.bfloat16)
    with_kernel = answers_of(target)
    assert computed
    assert all(computed)
    monkeypatch.setattr(attention, "WORTH_COMPILING", 1 << 62)
    for prompt, one, other in zip(PROMPTS, with_kernel, answers_of(target), strict=True):
        assert one == other or gap(target, prompt, one, other) < 0.1


def test_the_kernel_computes_every_layer_of_every_step(
    any_size: None, computed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(type(target), "eos_token_ids", lambda _self: [])
    answers_of(target)
    assert computed == [True] * (GREEDY.max_new_tokens - 1) * len(target.blocks)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("mistral", torch.bfloat16), ("gpt-oss", torch.bfloat16), ("qwen3.5", torch.bfloat16)],
)
def test_a_target_of_another_dtype_or_whose_cache_slides_or_keeps_a_state_never_comes_here(
    family: str, dtype: torch.dtype, any_size: None, computed: list[bool]
) -> None:
    if family not in {*CONFIGS, *MORE}:
        pytest.skip(f"this transformers has no {family}")
    assert answers_of(tiny_target(family, dtype=dtype))
    assert computed == []


def test_a_target_that_attends_otherwise_never_comes_here(any_size: None, computed: list[bool]) -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    target.model.set_attn_implementation("eager")
    answers_of(target)
    assert computed == []
    assert target.model.config._attn_implementation == "eager"


def test_batches_of_several_threads_share_a_target(any_size: None, computed: list[bool]) -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    alone = answers_of(target)
    one, other = (generate_batch(target, PROMPTS, GREEDY, name) for name in ("one", "other"))
    both = [list[tuple[int, Answer]](), list[tuple[int, Answer]]()]

    def take(batch: Iterator[tuple[int, Answer]], into: list[tuple[int, Answer]]) -> None:
        into.extend(batch)

    computed.clear()
    threads = [Thread(target=take, args=pair) for pair in zip((one, other), both, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [True] * 2 * (GREEDY.max_new_tokens - 1) * len(target.blocks)
    assert [[answer for _, answer in sorted(of, key=itemgetter(0))] for of in both] == [alone, alone]
    assert target.model.config._attn_implementation == "sdpa"


def test_a_target_with_an_indexer_keeps_its_attention() -> None:
    backbone = tiny_target("llama").parts.backbone
    assert attention._can_replace(backbone)
    backbone.config.index_topk = 8
    assert not attention._can_replace(backbone)


def test_a_batch_that_reads_little_compiles_nothing(computed: list[bool]) -> None:
    answers_of(tiny_target("llama", dtype=torch.bfloat16))
    assert computed == []


def test_the_targets_own_attention_is_back_after_every_step_and_after_an_error(
    any_size: None, computed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    used, seen = list[str](), list[str]()
    forward = type(target.blocks[0]).forward

    def watched(*given: Any, **options: Any) -> Any:
        used.append(target.model.config._attn_implementation)
        if len(used) == 10 * len(target.blocks):
            raise RuntimeError("a block breaks")
        return forward(*given, **options)

    monkeypatch.setattr(type(target.blocks[0]), "forward", watched)
    own = lambda *_counts: seen.append(target.model.config._attn_implementation)  # noqa: E731
    with pytest.raises(RuntimeError, match="a block breaks"):
        list(generate_batch(target, PROMPTS, GREEDY, "t", own))
    assert attention.NAME in used
    assert set(seen) == {"sdpa"}
    assert target.model.config._attn_implementation == "sdpa"
    assert attention._newest.get() is None


def test_without_numba_torch_does_it(any_size: None, computed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "find_spec", lambda _name: None)
    assert answers_of(target)
    assert computed == []


def test_a_numba_that_does_not_compile_is_told_once_and_torch_does_it(
    any_size: None, computed: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from collectors.regenerate import attention_kernel

    def refuse(*_: object) -> None:
        raise RuntimeError("Unable to find target for this triple")

    target = tiny_target("llama", dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "find_spec", lambda _name: None)
        expected = answers_of(target, Sampling(0, 2))
    monkeypatch.setattr(attention_kernel, "attend_of", refuse)
    attention._kernel.cache_clear()
    for _ in range(2):
        assert answers_of(target, Sampling(0, 2)) == expected
    attention._kernel.cache_clear()
    assert computed
    assert not any(computed)
    assert capsys.readouterr().err.count("Unable to find target for this triple") == 1


def test_threads_of_torch_share_the_rows_of_a_batch(any_size: None, computed: list[bool]) -> None:
    target = tiny_target("llama", dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        # Which answers they are is torch's, whose products part otherwise among threads.
        assert len(answers_of(target)) == len(PROMPTS)
    finally:
        torch.set_num_threads(threads)
    assert all(computed)


@pytest.mark.parametrize("family", ["llama", "granite", "qwen3-moe", "deepseek-v3"])
def test_prompts_that_begin_alike_get_the_answers_that_they_get_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family)
    monkeypatch.setattr(generate, "OPENING_WORTH", 1)
    opening = [1, 40, 41, 42, 43, 44, 45]
    prompts = [[*opening, *range(50, 50 + n)] for n in (9, 6, 6, 3, 1)]
    alone = [next(generate_batch(target, [prompt], Sampling(0, 14), "t"))[1] for prompt in prompts]
    for tokens in (1, 20, 10_000):
        monkeypatch.setitem(generate.PREFILL_TOKENS, "cpu", tokens)
        answers = sorted(generate_batch(target, prompts, Sampling(0, 14), "t"), key=itemgetter(0))
        assert [answer for _, answer in answers] == alone


def test_what_all_prompts_begin_with_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = tiny_target("llama"), list[tuple[int, ...]]()
    forward = target.parts.backbone.forward

    def watched(*given: Any, input_ids: Tensor, **options: Any) -> Any:
        read.append(tuple(input_ids.shape))
        return forward(*given, input_ids=input_ids, **options)

    monkeypatch.setattr(target.parts.backbone, "forward", watched)
    prompts = [[1, *range(20, 80), last] for last in (81, 82, 83, 84)]
    list(generate_batch(target, prompts, Sampling(0, 1), "t"))
    assert read == [(1, 61), (4, 1)]


def test_an_opening_leaves_a_token_of_every_prompt_and_is_worth_a_forward() -> None:
    long = list(range(200))
    assert generate.common_opening([long, long]) == 199
    assert generate.common_opening([long[:150], long]) == 149
    assert generate.common_opening([long, [9, *long]]) == 0
    assert generate.common_opening([long]) == 0
    assert generate.common_opening([long[:100], long[:100]]) == 0
    assert generate.common_opening([[*long[:60], 7], [*long[:60], 8], [*long[:60], 9]]) == 0
    assert generate.common_opening([[*long[:70], 7], [*long[:70], 8], [*long[:70], 9]]) == 70


def test_prompts_that_are_read_alone_keep_torchs_causal_attention_behind_a_short_opening() -> None:
    """Behind an opening each has a mask of all products: 3 prompts of 1,900 tokens took 1.37 times as long."""
    prompts = [[*range(24), *range(1000 * n, 1000 * n + 1900)] for n in range(1, 20)]
    assert generate.common_opening(prompts) == 0
    assert generate.common_opening(prompts, 16384) == 24
    assert generate.common_opening([[*range(12_000), n] for n in range(9)]) == 12_000
    assert generate.common_opening([[1, 2, 3, *range(n, n + 12_000)] for n in range(64)]) == 0
    assert generate.common_opening([[*range(900), *prompt[24:124]] for prompt in prompts]) == 900


def test_behind_a_long_opening_fewer_rows_are_read_at_once() -> None:
    lengths = [4] * 40
    assert [rows.stop - rows.start for rows, _ in generate.prefill_parts(lengths, 80)] == [20, 20]
    assert [rows.stop - rows.start for rows, _ in generate.prefill_parts(lengths, 80, 60)] == [10] * 4
    assert [rows.stop - rows.start for rows, _ in generate.prefill_parts(lengths, 80, 9000)] == [1] * 40


@pytest.mark.parametrize(
    "rope", [{"rope_parameters": {"rope_type": "dynamic"}}, {"rope_scaling": {"type": "longrope"}}]
)
def test_where_rotations_depend_on_the_length_of_a_text_no_opening_is_read_apart(
    rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    prompts = [[1, *range(20, 80), last] for last in (81, 82, 83, 84)]
    assert generate._Batch(target, prompts, GREEDY, "t")._opening == 61
    turns = generate._turns_by_length
    assert not turns(SimpleNamespace(rope_parameters={"rope_type": "default"}))
    monkeypatch.setattr(generate, "_turns_by_length", lambda _config: turns(SimpleNamespace(**rope)))
    assert generate._Batch(target, prompts, GREEDY, "t")._opening == 0


def test_sums_of_a_few_rows_at_a_time_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    drawn = answers_of(target, Sampling(1.0, 10))
    monkeypatch.setattr(generate, "SUMS_BYTES", 2 * 8 * 96)
    assert answers_of(target, Sampling(1.0, 10)) == drawn
