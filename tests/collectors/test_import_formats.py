"""Every peer's format, written from its documented keys, comes back as the states it was written from."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectors.capture.import_job import ImportOptions, ImportReport, import_dump
from collectors.engines.dump import AMBIGUOUS, FORMATS
from collectors.engines.dump.engine import Claims, choose_columns
from collectors.engines.dump.matching import rows_of, supervised_spans, text_end
from collectors.engines.dump.peer import PeerSample, PeerSource, Unusable, files_below
from hiddenstore.dumps.common import ABOUT_FILE, SAMPLES_FILE
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError
from hiddenstore.records import Sample, sample_id
from hiddenstore.store import Store
from tests.collectors import peer_dumps
from tests.collectors.peer_dumps import Spoken
from tests.collectors.tiny import save_target

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("target"), dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def spoken() -> list[Spoken]:
    return peer_dumps.speak(7)


Importer = Callable[..., ImportReport]


@pytest.fixture
def bring(tmp_path: Path, target: str) -> Importer:
    def run(peer: str, **more: Any) -> ImportReport:
        given = {
            "store": tmp_path / "store",
            "target": target,
            "recipe": "raw",
            "check": "none",
            "validation": 0.0,
        } | more
        return import_dump(ImportOptions(tmp_path / "dump", peer, **given), note=lambda _text: None)

    return run


@dataclass(frozen=True)
class Case:
    """How one format is written and asked for, and what of it must come back."""

    write: Callable[[Path, list[Spoken]], None]
    asked: dict[str, Any]
    norm: str | None
    layers: tuple[int, ...] = LAYERS
    first: int = 0


NAMED = {"layers": "0,1,2"}
CASES: dict[str, Case] = {
    "specforge-eagle3": Case(lambda f, s: peer_dumps.specforge(f, s, LAYERS), NAMED, "post_norm"),
    "specforge-dflash": Case(lambda f, s: peer_dumps.specforge(f, s, LAYERS, ".ckpt.gz", "dflash"), NAMED, None),
    "specforge-dspark": Case(
        lambda f, s: peer_dumps.specforge(f, s, LAYERS, strategy="dspark"), {"peer_layers": "0,1,2"}, "post_norm"
    ),
    "speculators": Case(lambda f, s: peer_dumps.speculators(f, s, LAYERS), {"peer_layers": "1,2,3"}, "pre_norm"),
    "vllm-extract": Case(
        lambda f, s: peer_dumps.vllm_extract(f, s, LAYERS), {"peer_layers": "1 2 3 4", "loss_on": "all"}, "pre_norm"
    ),
    "modelopt-hf": Case(lambda f, s: peer_dumps.modelopt(f, s, LAYERS), NAMED, "post_norm"),
    "modelopt-trtllm": Case(lambda f, s: peer_dumps.modelopt(f, s, LAYERS), NAMED, "post_norm"),
    "modelopt-vllm": Case(
        lambda f, s: peer_dumps.modelopt(f, s, LAYERS, post=False), {"peer_layers": "1,2,3"}, "pre_norm"
    ),
    "trtllm-raw": Case(lambda f, s: peer_dumps.trtllm_raw(f, s, LAYERS), NAMED | {"loss_on": "all"}, "post_norm"),
    "automodel-eagle3": Case(lambda f, s: peer_dumps.automodel(f, s, LAYERS, "eagle3"), {}, None, first=1),
    "automodel-dspark": Case(lambda f, s: peer_dumps.automodel(f, s, LAYERS, "dspark"), {}, "post_norm"),
    "deepspec": Case(lambda f, s: peer_dumps.deepspec(f, s, (-1, 0, 3)), {}, "post_norm", layers=(-1, 0, 3)),
    "eagle1": Case(lambda f, s: peer_dumps.eagle1(f, s), {}, "post_norm", layers=()),
}


def expected_of(one: Spoken, case: Case) -> Sample:
    ids = one.ids[case.first :].numpy().astype(np.int32)
    mask = one.mask[case.first :].numpy().astype(np.uint8)
    if case.asked.get("loss_on") == "all":
        mask = np.ones_like(mask)
    return Sample(sample_id(ids, mask), ids, mask, supervised_spans(mask))


def test_every_format_of_the_table_is_tested() -> None:
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize("name", CASES)
def test_the_states_tokens_and_masks_come_back_bit_for_bit(
    name: str, bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    case = CASES[name]
    case.write(tmp_path / "dump", spoken)
    report = bring(name, **case.asked)
    store = Store.open(tmp_path / "store")
    assert (report.samples, report.rejects.total(), len(store)) == (7, 0, 7)
    assert store.capture.aux_layers == case.layers
    assert store.capture.final == ("none" if case.norm is None else "all")
    assert case.norm is None or store.capture.final_norm == case.norm
    assert {record.engine.name for record in store.commits()} == {f"import:{name}"}
    for one in spoken:
        sample = expected_of(one, case)
        record = store[sample.id]
        assert np.array_equal(record.sample.input_ids, sample.input_ids)
        assert np.array_equal(record.sample.loss_mask, sample.loss_mask)
        assert np.array_equal(record.sample.spans, sample.spans)
        for slot, layer in enumerate(case.layers):
            assert torch.equal(record.aux[slot], one.states[layer + 1, case.first :]), layer
        final = one.normed if case.norm == "post_norm" else one.states[-1]
        if case.norm is None:
            assert not len(record.final)
        elif name == "eagle1":
            # fp16 has fewer small numbers than bf16.
            assert torch.allclose(record.final.float(), final.float(), atol=1e-7, rtol=2**-8)
            assert report.rounded == 7
        else:
            assert torch.equal(record.final, final)


def test_fp8_states_are_what_speculators_own_reader_makes_of_them(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    from safetensors.torch import load_file, save_file

    peer_dumps.speculators(tmp_path / "dump", spoken, LAYERS)
    restored = {}
    for path in (tmp_path / "dump" / "hidden_states").iterdir():
        held = load_file(path)
        scale = (held["hidden_states"].float().abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
        small = (held["hidden_states"].float() / scale).to(torch.float8_e4m3fn)
        save_file(held | {"hidden_states": small, "hidden_states_scales": scale}, path)
        restored[tuple(held["token_ids"].tolist())] = small.bfloat16() * scale.bfloat16()
    bring("speculators", layers="0,1,2")
    store = Store.open(tmp_path / "store")
    for name in store.sample_ids:
        record = store[name]
        expected = restored[tuple(record.sample.input_ids.tolist())]
        assert torch.equal(record.aux, expected[:, :-1].transpose(0, 1))
        assert torch.equal(record.final, expected[:, -1])


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_name_that_fits_several_formats_is_asked_about(name: str, bring: Importer) -> None:
    with pytest.raises(ConfigError) as caught:
        bring(name)
    assert caught.value.kind == "dump-unclear"
    assert caught.value.hint is not None
    assert caught.value.hint.removeprefix("--from ") in FORMATS


def refusal(bring: Importer, peer: str, **asked: Any) -> HiddenstoreError:
    with pytest.raises(HiddenstoreError) as caught:
        bring(peer, **asked)
    return caught.value


def test_layers_that_nothing_names_are_asked_for_with_what_each_choice_means(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.specforge(tmp_path / "dump", spoken, LAYERS, strategy="dflash")
    error = refusal(bring, "specforge-dflash")
    assert error.kind == "dump-unclear"
    assert "--layers 1,15,28 names them by the block whose output they are" in error.message
    assert "--peer-layers" in error.message
    assert refusal(bring, "specforge-dflash", layers="0,1").kind == "layers-invalid"
    assert not (tmp_path / "store").exists()


def test_layers_given_against_those_of_the_dump_are_refused(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.deepspec(tmp_path / "dump", spoken, LAYERS)
    assert refusal(bring, "deepspec", layers="1,2,3").kind == "layers-differ"


@pytest.mark.parametrize(
    ("peer", "key"),
    [("deepspec", "version"), ("automodel-eagle3", "format_version"), ("automodel-dspark", "format_version")],
)
def test_a_dump_of_another_version_of_its_format_is_refused(
    peer: str, key: str, bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    CASES[peer].write(tmp_path / "dump", spoken)
    path = tmp_path / "dump" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {key: 99}))
    error = refusal(bring, peer, **CASES[peer].asked)
    assert error.kind == "dump-version"
    assert f"manifest.json is of {key} 99, expected {manifest[key]}" in error.message


def test_columns_of_one_layer_are_stored_once_when_they_are_equal_and_refused_when_not(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    """SpecForge's defaults on a target of four layers are 1, 1 and 0."""
    peer_dumps.specforge(tmp_path / "dump", spoken, (1, 1, 0))
    report = bring("specforge-eagle3")
    assert "1 repeated column stored once" in report.explained
    assert Store.open(tmp_path / "store").capture.aux_layers == (0, 1)
    peer_dumps.specforge(tmp_path / "dump", spoken, (1, 2, 0))
    assert refusal(bring, "specforge-eagle3", store=tmp_path / "other").kind == "layers-invalid"


def test_a_final_hidden_that_the_columns_repeat_is_stored_once(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    both = [Spoken(one.ids, one.mask, torch.cat([one.states, one.normed[None]]), one.normed) for one in spoken]
    peer_dumps.trtllm_raw(tmp_path / "dump", both, (0, 1, 4))
    bring("trtllm-raw", layers="0,1", loss_on="all")
    assert Store.open(tmp_path / "store").capture.aux_layers == (0, 1)
    peer_dumps.automodel(tmp_path / "dump", both, (0, 4), "dspark")
    manifest = tmp_path / "dump" / "manifest.json"
    # Automodel calls it layer 3, the last one, but takes it after the norm.
    manifest.write_text(manifest.read_text().replace("[0, 4]", "[0, 3]"))
    bring("automodel-dspark", store=tmp_path / "other")
    assert Store.open(tmp_path / "other").capture.aux_layers == (0,)


@pytest.mark.parametrize(("peer", "post"), [("modelopt-hf", False), ("modelopt-vllm", True)])
def test_a_final_hidden_on_the_other_side_of_the_norm_is_refused_with_what_was_measured(
    peer: str, post: bool, bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.modelopt(tmp_path / "dump", spoken, LAYERS, post=post)
    error = refusal(bring, peer, layers="0,1,2")
    assert (error.kind, isinstance(error, FormatError)) == ("dump-norm", True)
    assert f"{'100' if post else '0'}% of its rows" in error.message
    bring(peer, layers="0,1,2", norm="post_norm" if post else "pre_norm")
    assert Store.open(tmp_path / "store").capture.final_norm == ("post_norm" if post else "pre_norm")


def test_a_norm_flag_inside_the_files_is_believed_before_the_format(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.modelopt(tmp_path / "dump", spoken, LAYERS, post=False, hidden_states_prenorm=True)
    bring("modelopt-hf", layers="0,1,2")
    assert Store.open(tmp_path / "store").capture.final_norm == "pre_norm"


def test_a_wrong_layer_is_found_by_hugging_face_and_the_right_ones_are_named(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    peer_dumps.modelopt(tmp_path / "dump", spoken, LAYERS, post=False)
    error = refusal(bring, "modelopt-vllm", layers="1,2,3", check="hf")
    assert (error.kind, error.hint) == ("layers-differ", "--layers 0,1,2")
    bring("modelopt-vllm", layers="0,1,2", check="hf")
    assert (tmp_path / "store" / "calibration" / "profile.json").is_file()


@pytest.mark.parametrize(("word", "ids"), [("dflash", (1, 9, 17, 25, 33)), ("eagle3", (1, 17, 32))])
def test_usual_layers_are_those_that_the_peer_s_own_script_hands_to_its_engine(
    word: str, ids: tuple[int, ...], tmp_path: Path
) -> None:
    """What ModelOpt's ``--aux-layers dflash`` and ``eagle`` make of 36 layers: its other scripts read outputs of
    blocks, vLLM under the same ids what enters them. speculators' ids are of the same outputs as SpecForge's."""
    (tmp_path / "dump").mkdir()
    inputs, outputs = tuple(k - 1 for k in ids), ids
    for peer, layers in (("modelopt-vllm", inputs), ("modelopt-hf", outputs), ("vllm-extract", outputs)):
        source = FORMATS[peer](peer, tmp_path / "dump", 4096)
        assert choose_columns(source, Claims(layers=word), None, len(ids), 36).layers == layers


@pytest.mark.parametrize(
    ("peer", "layers", "ids"),
    [
        ("modelopt-vllm", "0, 8, 16, 24, 32", "--peer-layers 1,9,17,25,33"),
        ("vllm-extract", "1, 9, 17, 25, 33", "--peer-layers 2,10,18,26,34"),
        ("specforge-dflash", "1, 9, 17, 25, 33", "--layers 1,9,17,25,33"),
    ],
)
def test_what_is_offered_for_five_columns_names_the_same_layers_in_words_and_ids(
    peer: str, layers: str, ids: str, tmp_path: Path
) -> None:
    (tmp_path / "dump").mkdir()
    with pytest.raises(ConfigError, match=f"--layers dflash means {layers}") as caught:
        choose_columns(FORMATS[peer](peer, tmp_path / "dump", 4096), Claims(), None, 5, 36)
    assert caught.value.hint == ids


def test_a_dump_of_the_peer_s_usual_layers_is_what_hugging_face_recomputes(
    bring: Importer, tmp_path: Path, spoken: list[Spoken]
) -> None:
    """ModelOpt's ``--aux-layers eagle`` makes ids 0 and 1 of four layers."""
    peer_dumps.modelopt(tmp_path / "dump", spoken, (-1, 0), post=False)
    bring("modelopt-vllm", layers="eagle3", check="hf")
    assert Store.open(tmp_path / "store").capture.aux_layers == (-1, 0)


def test_a_dump_of_another_target_is_refused(bring: Importer, tmp_path: Path, spoken: list[Spoken]) -> None:
    narrow = [Spoken(one.ids, one.mask, one.states[..., :40], one.normed[..., :40]) for one in spoken]
    peer_dumps.modelopt(tmp_path / "dump", narrow, LAYERS)
    assert refusal(bring, "modelopt-hf").kind == "target-mismatch"
    foreign = [Spoken(one.ids + 200, one.mask, one.states, one.normed) for one in spoken]
    peer_dumps.modelopt(tmp_path / "dump", foreign, LAYERS)
    assert refusal(bring, "modelopt-hf", layers="0,1,2").kind == "target-mismatch"
    other = [Spoken(one.ids, one.mask, one.states, one.normed * torch.rand(64) * 2) for one in spoken]
    peer_dumps.modelopt(tmp_path / "dump", other, LAYERS)
    assert refusal(bring, "modelopt-hf", layers="0,1,2").kind == "dump-norm"
    assert not (tmp_path / "store").exists()


def test_a_dump_without_masks_says_how_to_get_them(bring: Importer, tmp_path: Path, spoken: list[Spoken]) -> None:
    peer_dumps.vllm_extract(tmp_path / "dump", spoken, LAYERS)
    error = refusal(bring, "vllm-extract", layers="0,1,2")
    assert error.kind == "nothing-usable"
    assert "--tokens-from DATA" in (error.hint or "")
    assert "--loss-on all" in (error.hint or "")


def peer_row(ids: list[int], mask: list[int], **more: Any) -> PeerSample:
    return PeerSample(np.array(ids, np.int32), np.array(mask, np.uint8), len(ids), 0, **more)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12), st.integers(0, 6))
def test_stripping_padding_gives_back_the_text_up_to_unsupervised_zeros_at_its_own_end(
    text: list[tuple[int, bool]], padding: int
) -> None:
    ids = np.array([token for token, _ in text] + [0] * padding, np.int32)
    mask = np.array([int(held) for _, held in text] + [0] * padding, np.uint8)
    end = text_end(ids, mask)
    assert end <= len(text)
    assert not ids[end : len(text)].any()
    assert not mask[end : len(text)].any()
    assert end == 0 or ids[end - 1] != 0 or mask[end - 1] == 1


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 11))
def test_rows_of_a_shifted_cache_stand_under_their_own_tokens(text: list[int], cut: int) -> None:
    """The cache lost the first id: what it names begins at row 1."""
    peer = peer_row(text[1:], [1] * (len(text) - 1), first_row=1)
    kept = np.array(text[1:][: max(1, min(cut, len(text) - 1))], np.int32)
    rows = rows_of(peer, kept)
    assert text[rows] == kept.tolist()


def test_a_file_that_changed_since_its_tokens_were_read_is_refused() -> None:
    with pytest.raises(Unusable) as caught:
        rows_of(peer_row([1, 2, 4], [1, 1, 1]), np.array([1, 2, 3], np.int32))
    assert caught.value.reason == "changed"


class NumpyFiles(PeerSource):
    """A format of a file that the table of formats names: a layer and the final hidden before its norm."""

    final = "pre_norm"
    last_is_final = False
    layers_note = ". They are in its log"

    def locations(self) -> Sequence[str]:
        return files_below(self.folder, ".npz")

    def read(self, location: str, states: bool) -> PeerSample:
        arrays = {name: torch.from_numpy(array) for name, array in np.load(self.file_of(location)).items()}
        ids, mask = arrays["ids"].numpy(), arrays["mask"].numpy()
        return PeerSample(ids, mask, len(ids), 64, columns=arrays["layer"][:, None], final=arrays["final"])


def change_manifest(**members: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | members))

    return change


def state_layers(text: str) -> Callable[[Path], Any]:
    about = f'{{"layout": "vllm-extract", "aux_hidden_state_layer_ids": {text}}}'
    return lambda folder: (folder / ABOUT_FILE).write_text(about)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "layers that the target lacks": ("deepspec", change_manifest(target_layer_ids=[1, 2, 99]), "layers 99 are outside"),
    "layers below all": ("deepspec", change_manifest(target_layer_ids=[-7, 0, 3]), "layers -7 are outside"),
    "no width": ("deepspec", change_manifest(hidden_size=float("inf")), "lacks or garbles"),
    "an export's layers": ("vllm-extract", state_layers("[2, 3, 400]"), "layers 399 are outside"),
    "an export's words": ("vllm-extract", state_layers('["a"]'), "layers that are no numbers"),
    "an export's samples": (
        "vllm-extract",
        lambda folder: (folder / SAMPLES_FILE).write_bytes(b"PAR1 torn"),
        f"{SAMPLES_FILE} cannot be read",
    ),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_what_a_dump_says_of_itself_wrongly_is_an_error_of_its_own(
    bring: Importer, tmp_path: Path, spoken: list[Spoken], fault: str
) -> None:
    peer, damage, said = DAMAGE[fault]
    CASES[peer].write(tmp_path / "dump", spoken)
    damage(tmp_path / "dump")
    with pytest.raises(ConfigError, match=said):
        bring(peer, loss_on="all")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_token_ids_of_any_whole_numbers_are_read(
    bring: Importer, tmp_path: Path, spoken: list[Spoken], dtype: torch.dtype
) -> None:
    ids = [replace(one, ids=one.ids.to(dtype)) for one in spoken]
    peer_dumps.vllm_extract(tmp_path / "dump", ids, LAYERS)
    assert bring("vllm-extract", **CASES["vllm-extract"].asked).samples == len(spoken)


@pytest.mark.parametrize("peer", ["deepspec", "modelopt-hf"])
def test_a_dump_whose_layers_are_none_gives_the_final_hidden_alone(
    bring: Importer, tmp_path: Path, spoken: list[Spoken], peer: str
) -> None:
    (one, *_) = spoken
    if peer == "deepspec":
        peer_dumps.deepspec(tmp_path / "dump", [one], LAYERS)
        change_manifest(target_layer_ids=[])(tmp_path / "dump")
    else:
        none = torch.zeros(len(one.ids), 0, dtype=torch.bfloat16)
        peer_dumps.modelopt(tmp_path / "dump", [one], LAYERS, aux_hidden_states=none)
    assert bring(peer).samples == 1
    (record,) = Store.open(tmp_path / "store")
    assert torch.equal(record.final, one.normed)


def test_a_format_is_a_file_and_a_line(
    bring: Importer, tmp_path: Path, spoken: list[Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS.rows, "numpy", f"{__name__}:NumpyFiles")
    (tmp_path / "dump").mkdir()
    for index, one in enumerate(spoken):
        arrays = {"ids": one.ids.int(), "mask": one.mask.byte()}
        arrays |= {"layer": one.states[2].float(), "final": one.states[-1].float()}
        np.savez(tmp_path / "dump" / f"{index}.npz", **{name: array.numpy() for name, array in arrays.items()})
    assert refusal(bring, "numpy").message.endswith("counts by their output, from 0. They are in its log")
    report = bring("numpy", layers="1", check="hf")
    assert (report.samples, report.rounded, report.final_norm) == (7, 7, "pre_norm")
    assert {record.engine.name for record in Store.open(tmp_path / "store").commits()} == {"import:numpy"}
