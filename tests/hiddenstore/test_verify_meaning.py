"""verify --meaning names each sick store by its sickness, from the store alone, and finds nothing in a healthy one.

The target is a real Llama of random weights, sharp enough to predict the text that was sampled from it.

Shapes: N decoder layers, B conversations, T tokens, D width.
"""

import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hiddenstore.codecs import CODECS
from hiddenstore.codecs.recipes import get_recipe, recipe_name
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.records import Record, Sample, TopK, final_row_positions, sample_id
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import tokenizer_sha256, weights_sha256
from hiddenstore.verify import Report, meaning, verify
from hiddenstore.verify.meaning import affordable_share
from hiddenstore.verify.profile import LayerProfile, make_profile, write_profile
from hiddenstore.writer import create_store, write_unit
from schemas.capture import CaptureSpec, Codecs, FinalMode, HeadSpec, NormState, TargetIdentity
from schemas.manifest import ROLES, Engine

N, D, VOCAB, B, T = 6, 64, 96, 20, 72
AUX = (1, 2, 4)
HEAD = HeadSpec(norm_flavour="rms", norm_eps=1e-6, tied=False)
UNIT_SAMPLES = 5


@dataclass(frozen=True)
class Target:
    """States of every layer [N+1, T, D] (the last before the final norm) and after the norm, per sample."""

    head: HeadBundle
    files: dict[str, bytes]
    tokenizer_sha: str
    samples: list[Sample]
    layers: list[torch.Tensor]
    normed: list[torch.Tensor]
    run: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]


def tokenizer_files(words: Sequence[str]) -> tuple[dict[str, bytes], str]:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return files, tokenizer_sha256(folder)


def conversation(tokens: np.ndarray, index: int) -> Sample:
    answer = 6 + index % 5
    mask = (np.arange(len(tokens)) >= answer).astype(np.uint8)
    user, assistant = ROLES.index("user"), ROLES.index("assistant")
    spans = np.array([[user, 0, answer - 1], [assistant, answer, len(tokens)]], np.int32)
    ids = tokens.astype(np.int32)
    return Sample(sample_id(ids, mask), ids, mask, spans)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        intermediate_size=96,
        num_hidden_layers=N,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.4, 1.8))
        model.lm_head.weight.mul_(3.0)
    return model


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model()
    prompt = torch.tensor([[1, 2]]).repeat(B, 1)
    torch.manual_seed(0)
    with torch.no_grad():
        text = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=T - 2, use_cache=True).numpy()

    def run(ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        seen: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
        with torch.no_grad():
            states = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        hook.remove()
        return torch.cat([*states[:-1], seen[0]]), seen[1][0]

    samples = [conversation(row, index) for index, row in enumerate(text)]
    ran = [run(sample.input_ids) for sample in samples]
    head = HeadBundle(
        HEAD, model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach(), model.model.norm.weight.detach()
    )
    files, digest = tokenizer_files([f"w{i}" for i in range(VOCAB)])
    return Target(head, files, digest, samples, [a for a, _ in ran], [b for _, b in ran], run)


def record_of(
    sample: Sample,
    layers: torch.Tensor,
    normed: torch.Tensor,
    *,
    aux: Sequence[int] = AUX,
    last: int = N - 1,
    norm_state: NormState = "pre_norm",
    final: FinalMode = "supervised",
) -> Record:
    rows = final_row_positions(sample.loss_mask, final)
    source = normed if norm_state == "post_norm" else layers[last + 1]
    states = torch.stack([layers[k + 1] for k in aux]).bfloat16()
    return Record(sample, states, source[torch.from_numpy(rows).long()].bfloat16(), rows)


def healthy(target: Target, **options: object) -> list[Record]:
    triples = zip(target.samples, target.layers, target.normed, strict=True)
    return [record_of(sample, layers, normed, **options) for sample, layers, normed in triples]  # type: ignore[arg-type]


def profile_of(target: Target) -> LayerProfile:
    sample = target.samples[0]
    rows = final_row_positions(sample.loss_mask, "supervised")
    return make_profile(sample.id, sample.input_ids, target.layers[0], target.normed[0], rows)


def noted(report: Report) -> list[str]:
    """Kinds of notes, but for the one every store here has: no input is registered."""
    return [note.kind for note in report.notes if note.kind != "input-missing"]


def store_of(
    folder: Path,
    target: Target,
    records: Sequence[Record],
    *,
    codec: str = "q8",
    norm_state: NormState = "pre_norm",
    final: FinalMode = "supervised",
    profile: LayerProfile | None = None,
    files: dict[str, bytes] | None = None,
) -> Store:
    head = target.head
    identity = TargetIdentity(
        name="tiny",
        model_type="llama",
        hidden_size=D,
        num_layers=N,
        vocab_size=VOCAB,
        dtype="float32",
        config_sha256="1" * 64,
        tokenizer_sha256=target.tokenizer_sha,
        chat_template_sha256="3" * 64,
        weights_sha256=weights_sha256(head.embed_tokens, head.norm_weight, head.lm_head),
    )
    capture = CaptureSpec(
        target=identity,
        aux_layers=AUX,
        final=final,
        final_norm=norm_state,
        codecs=Codecs(aux=codec, final=codec) if codec in CODECS else get_recipe(codec),
    )
    records = [with_top_tokens(record, head, capture) for record in records]
    held = {"head.safetensors": head.save_bytes(), **(target.files if files is None else files)}
    store = create_store(folder, capture, HEAD, recipe_name(capture.codecs), held)
    if profile is not None:
        write_profile(store.fs, profile)
    for index in range(0, len(records), UNIT_SAMPLES):
        unit = f"unit-{index // UNIT_SAMPLES:06d}"
        write_unit(store, unit, "0" * 64, records[index : index + UNIT_SAMPLES], [], Engine(name="test", version="1"))
    return Store.open(folder)


def looked(store: Store) -> Report:
    return verify(store.path, "meaning")


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


@pytest.mark.parametrize("codec", ["bf16", "lossless", "q8", "q4", "aux=q4q3,final=q8"])
@pytest.mark.parametrize("norm_state", ["pre_norm", "post_norm"])
def test_a_healthy_store_gives_no_finding(tmp_path: Path, target: Target, codec: str, norm_state: NormState) -> None:
    records = healthy(target, norm_state=norm_state)
    store = store_of(tmp_path, target, records, codec=codec, norm_state=norm_state, profile=profile_of(target))
    report = looked(store)
    assert report.findings == []
    assert noted(report) == []
    assert report.samples_checked == B
    assert report.measures["next_token_nats"] < report.measures["unigram_nats"]
    assert report.measures["retokenised_share"] == 1.0


@pytest.mark.parametrize("final", ["all", "none"])
def test_a_healthy_store_with_another_final_mode_gives_no_finding(
    tmp_path: Path, target: Target, final: FinalMode
) -> None:
    store = store_of(tmp_path, target, healthy(target, final=final), final=final, profile=profile_of(target))
    assert looked(store).findings == []


@pytest.mark.parametrize("norm_state", ["pre_norm", "post_norm"])
def test_a_healthy_store_of_top_tokens_gives_no_finding_and_says_what_it_cannot_check(
    tmp_path: Path, target: Target, norm_state: NormState
) -> None:
    records = healthy(target, norm_state=norm_state)
    whole = looked(store_of(tmp_path / "raw", target, records, codec="bf16", norm_state=norm_state))
    store = store_of(tmp_path / "k", target, records, codec="tiny", norm_state=norm_state, profile=profile_of(target))
    report = looked(store)
    assert report.findings == []
    assert noted(report) == ["final-undecided"]
    assert report.measures["next_token_top1"] == whole.measures["next_token_top1"]
    assert abs(report.measures["next_token_nats"] - whole.measures["next_token_nats"]) < 0.4


def test_top_tokens_of_other_samples_are_named_other_sample(tmp_path: Path, target: Target) -> None:
    records = healthy(target)
    others = [torch.cat([records[at + 5].final] * 2) for at in range(3)]
    swapped = [replace(r, final=f[: len(r.final)]) for r, f in zip(records, others, strict=False)]
    report = looked(store_of(tmp_path, target, [*swapped, *records[3:]], codec="tiny", profile=profile_of(target)))
    assert kinds(report) == {"other-sample"}
    assert set(report.affected) == {record.sample.id for record in records[:3]}


def test_top_tokens_one_row_late_are_named_row_shift(tmp_path: Path, target: Target) -> None:
    records = [replace(record, final=record.final.roll(1, dims=0)) for record in healthy(target)]
    assert kinds(looked(store_of(tmp_path, target, records, codec="tiny", profile=profile_of(target)))) == {"row-shift"}


@pytest.mark.parametrize("what", ["order", "vocabulary", "nan"])
def test_top_tokens_that_no_distribution_has_are_named(tmp_path: Path, target: Target, what: str) -> None:
    store = store_of(tmp_path / "well", target, healthy(target), codec="tiny", profile=profile_of(target))
    records = [store[sample_id] for sample_id in store.sample_ids]
    topk = records[4].topk
    assert topk is not None
    ids, log_probs = topk.ids.clone(), topk.log_probs.clone()
    if what == "order":
        log_probs[2] = log_probs[2].flip(0)
    elif what == "vocabulary":
        ids[2, 1] = VOCAB
    else:
        log_probs[2, 1] = float("nan")
    records[4] = replace(records[4], topk=TopK(ids, log_probs, topk.lse))
    report = looked(store_of(tmp_path / "sick", target, records, codec="tiny", profile=profile_of(target)))
    assert kinds(report) == {{"order": "top-tokens", "vocabulary": "token-range", "nan": "array-invalid"}[what]}
    assert set(report.affected) == {records[4].sample.id}


def test_without_a_profile_meaning_says_what_it_cannot_see(tmp_path: Path, target: Target) -> None:
    report = looked(store_of(tmp_path, target, healthy(target)))
    assert report.findings == []
    assert noted(report) == ["profile-absent"]


@pytest.mark.parametrize(("by", "codec"), [(-1, "q8"), (1, "q8"), (1, "aux=q4q3,final=q8")])
def test_aux_layers_one_off_are_named_layer_shift(tmp_path: Path, target: Target, by: int, codec: str) -> None:
    records = healthy(target, aux=[k + by for k in AUX])
    report = looked(store_of(tmp_path, target, records, codec=codec, profile=profile_of(target)))
    assert kinds(report) == {"layer-shift"}
    assert {f.path.rpartition("/")[2] for f in report.findings} == {"layer_1", "layer_2", "layer_4"}
    assert len(report.affected) == B
    assert any(f"it holds layer {1 + by} " in f.detail for f in report.findings)


def test_one_unit_with_a_layer_off_is_named_with_its_samples(tmp_path: Path, target: Target) -> None:
    records = healthy(target)
    records[10:15] = healthy(target, aux=(1, 3, 4))[10:15]
    report = looked(store_of(tmp_path, target, records, profile=profile_of(target)))
    assert kinds(report) == {"layer-shift"}
    assert set(report.affected) == {r.sample.id for r in records[10:15]}
    assert all("unit-000002" in f.path and f.path.endswith("layer_2") for f in report.findings)


def test_a_final_hidden_one_layer_early_is_named_layer_shift(tmp_path: Path, target: Target) -> None:
    report = looked(store_of(tmp_path, target, healthy(target, last=N - 2), profile=profile_of(target)))
    assert kinds(report) == {"layer-shift"}
    assert report.findings[0].path.endswith("/final")


@pytest.mark.parametrize("with_profile", [True, False])
@pytest.mark.parametrize("norm_state", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("codec", ["bf16", "q8"])
def test_the_other_norm_state_is_named_norm_state(
    tmp_path: Path, target: Target, norm_state: NormState, codec: str, with_profile: bool
) -> None:
    other: NormState = "post_norm" if norm_state == "pre_norm" else "pre_norm"
    profile = profile_of(target) if with_profile else None
    records = healthy(target, norm_state=other)
    report = looked(store_of(tmp_path, target, records, codec=codec, norm_state=norm_state, profile=profile))
    assert kinds(report) == {"norm-state"}
    assert len(report.affected) == B


@pytest.mark.parametrize("field", ["aux", "final"])
def test_zeros_are_named_with_their_samples(tmp_path: Path, target: Target, field: str) -> None:
    records = healthy(target)
    sick = records[7]
    states = getattr(sick, field).clone()
    states[..., 3:9, :] = 0
    records[7] = replace(sick, **{field: states})
    report = looked(store_of(tmp_path, target, records, profile=profile_of(target)))
    assert kinds(report) == {"zeros"}
    assert report.affected == [sick.sample.id]


def test_a_store_of_zeros_is_named_zeros(tmp_path: Path, target: Target) -> None:
    records = [replace(r, aux=torch.zeros_like(r.aux), final=torch.zeros_like(r.final)) for r in healthy(target)]
    report = looked(store_of(tmp_path, target, records, profile=profile_of(target)))
    assert "zeros" in kinds(report)
    zeros = [f for f in report.findings if f.kind == "zeros"]
    assert {name for f in zeros for name in f.samples} == {r.sample.id for r in records}


@pytest.mark.parametrize("field", ["aux", "final"])
def test_repeated_rows_are_named_with_their_samples(tmp_path: Path, target: Target, field: str) -> None:
    records = healthy(target)
    sick = records[4]
    states = getattr(sick, field).clone()
    states[..., 12, :] = states[..., 5, :]
    states[..., 13, :] = states[..., 5, :]
    records[4] = replace(sick, **{field: states})
    report = looked(store_of(tmp_path, target, records, profile=profile_of(target)))
    assert kinds(report) == {"repeated-rows"}
    assert report.affected == [sick.sample.id]


def test_non_finite_rows_are_named(tmp_path: Path, target: Target) -> None:
    records = healthy(target)
    aux = records[2].aux.clone()
    aux[1, 4, 3] = float("nan")
    records[2] = replace(records[2], aux=aux)
    report = looked(store_of(tmp_path, target, records, codec="bf16", profile=profile_of(target)))
    assert kinds(report) == {"non-finite"}
    assert report.affected == [records[2].sample.id]


@pytest.mark.parametrize("fields", [("aux",), ("final",), ("aux", "final")])
def test_states_of_another_sample_are_named_other_sample(
    tmp_path: Path, target: Target, fields: tuple[str, ...]
) -> None:
    records = healthy(target, final="all")
    one, two = records[8], records[13]
    records[8] = replace(one, **{f: getattr(two, f) for f in fields})
    records[13] = replace(two, **{f: getattr(one, f) for f in fields})
    report = looked(store_of(tmp_path, target, records, final="all", profile=profile_of(target)))
    assert kinds(report) == {"other-sample"}
    assert set(report.affected) == {one.sample.id, two.sample.id}


@pytest.mark.parametrize("with_profile", [True, False])
def test_a_store_that_pairs_every_sample_with_the_next_one_is_named_other_sample(
    tmp_path: Path, target: Target, with_profile: bool
) -> None:
    records = healthy(target, final="all")
    turned = [replace(r, aux=s.aux, final=s.final) for r, s in zip(records, records[1:] + records[:1], strict=True)]
    profile = profile_of(target) if with_profile else None
    report = looked(store_of(tmp_path, target, turned, final="all", profile=profile))
    assert kinds(report) == {"other-sample"}
    assert len(report.affected) == B


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("id_follows", [True, False])
def test_a_mask_one_token_off_is_named_mask_shift(tmp_path: Path, target: Target, by: int, id_follows: bool) -> None:
    records = []
    for sample, layers, normed in zip(target.samples, target.layers, target.normed, strict=True):
        mask = np.roll(sample.loss_mask, by)
        mask[0 if by > 0 else -1] = 0
        name = sample_id(sample.input_ids, mask) if id_follows else sample.id
        records.append(record_of(replace(sample, id=name, loss_mask=mask), layers, normed))
    report = looked(store_of(tmp_path, target, records, profile=profile_of(target)))
    assert kinds(report) == {"mask-shift"}
    assert len(report.affected) == B


def test_a_narrowed_mask_is_healthy(tmp_path: Path, target: Target) -> None:
    records = []
    for sample, layers, normed in zip(target.samples, target.layers, target.normed, strict=True):
        mask = sample.loss_mask.copy()
        mask[:18] = 0
        name = sample_id(sample.input_ids, mask)
        records.append(record_of(replace(sample, id=name, loss_mask=mask), layers, normed))
    assert looked(store_of(tmp_path, target, records)).findings == []


def test_tokens_changed_after_capture_are_named_sample_id(tmp_path: Path, target: Target) -> None:
    records = healthy(target)
    ids = records[3].sample.input_ids.copy()
    ids[20] = (ids[20] + 1) % VOCAB
    records[3] = replace(records[3], sample=replace(records[3].sample, input_ids=ids))
    report = looked(store_of(tmp_path, target, records, profile=profile_of(target)))
    assert kinds(report) == {"sample-id"}
    assert report.affected == [records[3].sample.id]


def test_another_tokenizer_in_the_store_is_named_tokenizer(tmp_path: Path, target: Target) -> None:
    words = [f"w{i}" for i in range(VOCAB)]
    files, _ = tokenizer_files(words[::-1])
    report = looked(store_of(tmp_path, target, healthy(target), files=files, profile=profile_of(target)))
    assert kinds(report) == {"tokenizer"}


def test_rules_of_a_tokenizer_are_compared_where_files_come_as_copies(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, target, healthy(target), profile=profile_of(target))
    identity = store.capture.target.model_copy(update={"tokenizer_rules_sha256": "4" * 64})
    capture = store.capture.model_copy(update={"target": identity})
    store.manifest = store.manifest.model_copy(update={"capture": capture})
    original = store.fs.local_path("target")

    @contextmanager
    def copied(path: str, without: str = "") -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(shutil.copytree(original, Path(folder, path)))

    monkeypatch.setattr(store.fs, "local_copy", copied)
    report = Report("meaning")
    meaning.load_tokenizer(store, report)
    assert kinds(report) == {"tokenizer"}


def test_tokens_cut_by_another_tokenizer_are_named_tokenizer(tmp_path: Path, target: Target) -> None:
    """The capture is right in every way, but the ids the target was given mean other words."""
    permuted = np.random.default_rng(1).permutation(VOCAB)
    records = []
    for index, sample in enumerate(target.samples):
        foreign = conversation(permuted[sample.input_ids], index)
        records.append(record_of(foreign, *target.run(foreign.input_ids)))
    first = records[0].sample
    layers, normed = target.run(first.input_ids)
    report = looked(
        store_of(tmp_path, target, records, profile=make_profile(first.id, first.input_ids, layers, normed))
    )
    assert kinds(report) == {"tokenizer"}
    assert len(report.affected) == B
    # A handful of odd conversations looks the same.
    few = looked(store_of(tmp_path / "few", target, records[:6], profile=None))
    assert "tokenizer" not in kinds(few)
    assert "prediction-undecided" in {note.kind for note in few.notes}


def test_tokens_outside_the_vocabulary_are_named(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A writer that does not look.
    monkeypatch.setattr("hiddenstore.segments.encode.tokens_fault", lambda input_ids, vocab: None)
    records = healthy(target)
    ids = records[3].sample.input_ids.copy()
    ids[20] = VOCAB
    sample = replace(records[3].sample, input_ids=ids, id=sample_id(ids, records[3].sample.loss_mask))
    records[3] = replace(records[3], sample=sample)
    report = looked(store_of(tmp_path, target, records, codec="bf16"))
    assert "token-range" in kinds(report)
    assert [f.samples for f in report.findings if f.kind == "token-range"] == [(sample.id,)]


def test_rows_one_token_late_are_named_row_shift(tmp_path: Path, target: Target) -> None:
    records = [replace(r, final=torch.roll(r.final, 1, 0)) for r in healthy(target, final="all")]
    report = looked(store_of(tmp_path, target, records, final="all"))
    assert kinds(report) == {"row-shift"}


def test_a_head_of_another_target_is_named(tmp_path: Path, target: Target) -> None:
    other = replace(target.head, norm_weight=target.head.norm_weight.flip(0))
    files = {**target.files, "head.safetensors": other.save_bytes()}
    assert "head-mismatch" in kinds(looked(store_of(tmp_path, target, healthy(target), files=files)))


def test_a_share_of_the_samples_can_be_looked_at(tmp_path: Path, target: Target) -> None:
    store = store_of(tmp_path, target, healthy(target), profile=profile_of(target))
    report = verify(store.path, "meaning", sample_share=0.3)
    assert report.samples_checked in (6, 7)
    assert report.findings == []
    assert report.sample_share == report.samples_checked / B
    # Rounded up, these are all: nothing is left that another share would look at.
    report = verify(store.path, "meaning", sample_share=0.96)
    assert (report.samples_checked, report.sample_share) == (B, 1)


def test_unless_told_it_looks_at_what_a_fifth_of_the_capture_pays_for(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, target, healthy(target), profile=profile_of(target))
    assert (affordable_share(store), verify(store.path, "meaning").samples_checked) == (1.0, B)
    monkeypatch.setattr(meaning, "ALWAYS_AFFORDABLE", 0)
    width, layers = store.capture.target.hidden_size, store.capture.target.num_layers
    tokens = sum(record.tokens for record in store.commits()) / B
    capture, look = 24 * layers * width**2 * tokens, 8 * tokens * VOCAB * (2 * width + 100)
    assert affordable_share(store) == pytest.approx(0.2 * capture / look)
    report = verify(store.path, "meaning")
    assert 1 <= report.samples_checked < B
    # As many as the share says, rounded up, and the profile's own.
    assert 0 <= report.samples_checked - affordable_share(store) * B < 2
    assert report.sample_share == report.samples_checked / B


@pytest.mark.parametrize(("most", "fewest", "share"), [(0.25, 3, 0.25), (0.1, 3, 3 / B), (2.0, 3, 1.0)])
def test_unless_told_it_reads_no_more_bytes_of_a_large_store_than_a_person_waits_for(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, most: float, fewest: int, share: float
) -> None:
    store = store_of(tmp_path, target, healthy(target), profile=profile_of(target))
    stored = sum(file.size for record in store.commits() for file in record.files)
    monkeypatch.setattr(meaning, "MOST_READ_BYTES", most * stored)
    monkeypatch.setattr(meaning, "FEWEST_SAMPLES", fewest)
    assert affordable_share(store) == pytest.approx(share)
    assert verify(store.path, "meaning", sample_share=1.0).samples_checked == B


def test_what_too_few_samples_left_undecided_names_the_share_and_the_option_that_looks_at_all(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meaning, "ALWAYS_AFFORDABLE", 0)
    monkeypatch.setattr(meaning, "SHARE_OF_CAPTURE", 1e-9)
    store = store_of(tmp_path, target, healthy(target), profile=profile_of(target))
    report = verify(store.path, "meaning")
    # The profile's own sample, and one more.
    assert (report.samples_checked, report.findings) == (2, [])
    undecided = {note.kind: note.detail for note in report.notes}
    assert undecided.keys() >= {"pairing-undecided", "prediction-undecided"}
    for kind in ("pairing-undecided", "prediction-undecided"):
        assert f"2 of {B} samples were looked at; verify --meaning --share 1 looks at all" in undecided[kind]
    whole = verify(store.path, "meaning", sample_share=1)
    assert not {"pairing-undecided", "prediction-undecided"} & {note.kind for note in whole.notes}


def test_every_part_says_how_much_there_is_to_do_and_does_as_much(tmp_path: Path, target: Target) -> None:
    store = store_of(tmp_path, target, healthy(target), profile=profile_of(target))
    parts: dict[str, list[int]] = {}

    def begin(label: str, total: int, unit: str) -> Callable[[int], None]:
        parts[f"{label} in {unit}"] = [total]
        return parts[f"{label} in {unit}"].append

    verify(store.path, "meaning", also_bytes=True, also_stock=True, begin=begin)
    assert [*parts] == ["verify bytes in bytes", "verify by stock readers in samples", "verify meaning in samples"]
    for total, *done in parts.values():
        assert sum(done) == total > 0


def test_the_report_is_plain_json(tmp_path: Path, target: Target) -> None:
    store = store_of(tmp_path, target, healthy(target))
    told = json.loads(json.dumps(looked(store).to_json()))
    assert told["ok"] is True
    assert told["findings"] == []
    assert io.StringIO(json.dumps(told)).read()


def test_text_that_is_foreign_to_the_target_is_a_note_and_no_finding(tmp_path: Path, target: Target) -> None:
    """A target of one domain on text of another: right states, right tokenizer, worse than token counts."""
    random = np.random.default_rng(5)
    records = []
    for index, sample in enumerate(target.samples):
        ids = sample.input_ids.copy()
        foreign = random.random(len(ids)) < 0.15
        ids[foreign] = random.integers(0, VOCAB, int(foreign.sum()))
        mixed = conversation(ids, index)
        records.append(record_of(mixed, *target.run(mixed.input_ids)))
    first = records[0].sample
    layers, normed = target.run(first.input_ids)
    rows = final_row_positions(first.loss_mask, "supervised")
    profile = make_profile(first.id, first.input_ids, layers, normed, rows)
    report = looked(store_of(tmp_path, target, records, profile=profile))
    assert kinds(report) == set()
    assert "weak-target" in {note.kind for note in report.notes}
