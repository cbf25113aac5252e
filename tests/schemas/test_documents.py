import pytest
from pydantic import ValidationError

from schemas import CaptureSpec, Codecs, CommitRecord, Engine, SampleEntry, TargetIdentity
from schemas.generate import DOCUMENTS, FOLDER, schema_text


def identity(**changes: object) -> TargetIdentity:
    values = {
        "name": "tiny",
        "model_type": "llama",
        "hidden_size": 32,
        "num_layers": 4,
        "vocab_size": 64,
        "dtype": "bfloat16",
        "config_sha256": "0",
        "tokenizer_sha256": "0",
        "chat_template_sha256": "0",
        "weights_sha256": "0",
    }
    return TargetIdentity.model_validate(values | changes)


def capture(**changes: object) -> CaptureSpec:
    values = {
        "target": identity(),
        "aux_layers": (1, 3),
        "final": "supervised",
        "final_norm": "pre_norm",
        "codecs": Codecs(aux="q8", final="q8"),
    }
    return CaptureSpec.model_validate(values | changes)


def test_fields_are_named_by_layer_with_the_final_hidden_last() -> None:
    assert capture(aux_layers=(-1, 1, 3)).fields == ["embeddings", "layer_1", "layer_3", "final"]


@pytest.mark.parametrize("layers", [(3, 1), (1, 1), (1, 4), (-2, 1)])
def test_layers_out_of_order_or_out_of_range_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        capture(aux_layers=layers)


def test_a_store_that_would_hold_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least one aux layer or the final hidden"):
        capture(aux_layers=(), final="none")


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        identity(colour="blue")


def test_a_commit_whose_samples_overlap_is_refused() -> None:
    first = SampleEntry(id="a", split="train", start=0, tokens=4, supervised=1, final_start=0, final_rows=3)
    second = SampleEntry(id="b", split="train", start=3, tokens=4, supervised=1, final_start=3, final_rows=3)
    with pytest.raises(ValidationError, match="does not start where the one before it ends"):
        CommitRecord(
            unit="u", input="i", segment="s", engine=Engine(name="hf", version="5"), files=(), samples=(first, second)
        )


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_the_checked_in_json_schema_is_current(name: str) -> None:
    assert (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8") == schema_text(name)
