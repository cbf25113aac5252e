"""Settings: derived defaults, precedence, errors."""

import json
import re
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from trainer.config import RopeScaling, Section, TrainConfig
from trainer.drafters import DRAFTERS
from trainer.settings import check_settings, config_class, default_lr, derived, derived_lr, load_config


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path, samples=3, layers=(1, 3, 4))


def test_defaults_come_from_the_target(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "max_position_embeddings": 512,
    }  # fmt: skip
    monkeypatch.setattr(Store, "target_file", lambda self, name: json.dumps(shape).encode())
    config = load_config(store)
    d = config.drafter
    assert (d.hidden_size, d.intermediate_size, d.num_heads, d.num_kv_heads, d.head_dim) == (32, 96, 4, 2, 8)
    assert (d.rms_norm_eps, d.rope_theta, d.max_position, d.vocab_size) == (1e-6, 5e5, 512, 64)
    assert d.aux_layers == (1, 3, 4)
    assert config.optim.lr == derived_lr(store, config)


def test_nested_text_config_and_layer_types_are_understood(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = {
        "num_attention_heads": 2,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
    }
    monkeypatch.setattr(Store, "target_file", lambda self, name: json.dumps({"text_config": inner}).encode())
    found = derived(store)["drafter"]
    assert (found["num_heads"], found["num_kv_heads"], found["rope_theta"]) == (2, 2, 1e6)


def test_words_win_over_the_file_and_the_file_over_the_target(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n  lr: 1e-3\nloss:\n  steps: 4\n")
    config = load_config(store, file=file, words=["loss.steps=2", "loss.step_weights=1,0.5"])
    assert (config.optim.lr, config.loss.steps, config.loss.step_weights) == (1e-3, 2, (1.0, 0.5))


def test_aux_layers_are_ascending_however_they_are_named(store: Store) -> None:
    stored = store.capture.aux_layers
    named = ",".join(map(str, reversed(stored)))
    assert load_config(store, words=[f"drafter.aux_layers=[{named}]"]).drafter.aux_layers == tuple(stored)


def test_a_smaller_batch_is_one_pack_and_a_larger_one_several(store: Store) -> None:
    derived_pack = load_config(store).data.pack_tokens
    assert load_config(store, words=["data.batch_tokens=100"]).data.pack_tokens == 100
    assert load_config(store, words=["data.batch_tokens=90000"]).data.pack_tokens == derived_pack
    assert load_config(store, words=["data.batch_tokens=100", "data.pack_tokens=50"]).data.pack_tokens == 50


def test_every_wrong_setting_is_named_at_once(store: Store) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(store, words=["traner.lr=1", "loss.steps=0", "drafter.num_kv_heads=2", "drafter.num_heads=3"])
    message = str(caught.value)
    assert caught.value.kind == "config-unknown-key"
    assert "traner" in message
    assert "loss.steps" in message
    assert "num_kv_heads" in message


@pytest.mark.parametrize(("width", "rate"), [(4096, 1e-4), (192, 5e-3), (2048, 2.4e-4)])
def test_rate_falls_with_width(width: int, rate: float) -> None:
    assert default_lr(width) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("words", "factor"),
    [
        (["train.max_steps=500"], 1),
        (["train.max_steps=125"], 2),
        (["train.max_steps=8"], 4),
        (["train.max_steps=100000"], 1),
        (["train.max_steps=8", "optim.kind=adamw"], 1),
        (["data.batch_tokens=12", "data.max_tokens=12", "train.epochs=1"], 4),
        (["data.batch_tokens=12", "data.max_tokens=12", "train.epochs=5000"], 1),
    ],
)
def test_a_short_run_takes_a_higher_rate_under_muon(store: Store, words: list[str], factor: float) -> None:
    assert load_config(store, words=words).optim.lr == pytest.approx(factor * default_lr(32))
    assert load_config(store, words=[*words, "optim.lr=3e-4"]).optim.lr == 3e-4


@pytest.mark.parametrize(
    "words",
    [
        ["data.batch_tokens=100"],
        ["optim.lr=auto", "drafter.num_heads=3"],
        ["train.init_from=runs/first", "loss.no_such=1"],
        ["loss.steps=3", "loss.step_weights=1,0.8,0.6"],
    ],
)
def test_settings_that_a_store_can_make_right_pass_before_there_is_one(words):
    check_settings(None, None, words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train.patience=2", "train.validate_every=0"], "patience waits for validations"),
        (["loss.step_weights=1,0.8"], "2 entries for 7 steps"),
        (["drafter.rope_scaling={rope_type: yarn}"], "rope_type yarn needs"),
        (["optim.lrr=1"], "did you mean optim.lr?"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_there_is_a_store(words, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        check_settings(None, None, words)


@pytest.mark.parametrize(
    ("drafter", "words", "part"),
    [
        ("eagle3", ["loss.steps=2", "loss.step_weights=0,0"], "at least 0 and not all 0, found 0,0"),
        ("peagle", ["loss.steps=2", "loss.step_weights=1,-1"], "at least 0 and not all 0, found 1,-1"),
        ("dspark", ["loss.cross_entropy=0", "loss.overlap=0", "loss.confidence=0"], "are all 0"),
    ],
)
def test_weights_of_a_loss_that_teach_nothing_or_the_contrary_are_refused(drafter, words, part):
    with pytest.raises(ConfigError, match=part):
        check_settings(drafter, None, words)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_setting_is_described_at_its_field(drafter: str) -> None:
    sections: list[type[Section]] = [config_class(drafter), RopeScaling]
    for section in sections:
        for name, field in section.model_fields.items():
            description = (TrainConfig.model_fields[name] if section is sections[0] else field).description
            assert description, f"{section.__name__}.{name}"
            assert description.endswith("."), f"{section.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                sections.append(field.annotation)
    assert len(sections) == 7
