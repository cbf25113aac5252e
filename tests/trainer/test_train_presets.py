"""Presets by name, what names the drafter, and every drafter on a store captured for all of them."""

import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from collectors.targets.layers import choose_layers
from hiddenstore.errors import ConfigError
from hiddenstore.store import Store
from hiddenstore.testing.builders import NUM_LAYERS, make_store
from schemas.layers import default_aux_layers
from trainer.cli.train import train as train_command
from trainer.drafters import DRAFTERS, drafter_kind
from trainer.presets import preset_names, settings_file
from trainer.settings import load_config
from trainer.train.loop import train

SMALL = ["data.batch_tokens=80", "data.pack_tokens=80", "train.max_steps=2", "train.validate_every=2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What `--layers all-drafters` would have captured."""
    choice = choose_layers("all-drafters", None, NUM_LAYERS)
    folder = tmp_path_factory.mktemp("all")
    return make_store(folder, samples=12, layers=choice.aux_layers, final=choice.final)


def extra(drafter: str) -> list[str]:
    """The random store holds no tokenizer that a mask token could follow from."""
    return (
        ["drafter.mask_token_id=0"] if drafter in ("dflash", "dspark", "dflash2", "domino", "xpress", "peagle") else []
    )


def drafter_of(preset: str) -> str:
    return str(yaml.safe_load(settings_file(preset).read_text())["drafter"]["name"])


def test_every_drafter_has_a_preset_and_help_lists_them_all() -> None:
    assert {drafter_of(name) for name in preset_names()} == set(DRAFTERS)
    said = " ".join(CliRunner().invoke(train_command, ["--help"]).output.split())
    assert ", ".join(preset_names()) in said


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_names_its_drafter_and_every_value_gives_its_source(preset: str, store: Store) -> None:
    file = settings_file(preset)
    config = load_config(store, file=file, words=extra(drafter_of(preset)))
    assert config.drafter.name == drafter_of(preset)
    values = [line for line in file.read_text().splitlines() if line.startswith("  ") and "name:" not in line]
    assert values
    assert all("#" in line for line in values)


def test_the_preset_of_eagle_3_1_sets_its_two_flags_and_the_published_rate(store: Store) -> None:
    config = load_config(store, file=settings_file("eagle3.1"))
    assert (config.drafter.fc_norm, config.drafter.norm_output) == (True, True)  # type: ignore[attr-defined]
    assert (config.optim.lr, config.optim.clip, config.train.epochs) == (1e-4, 0.5, 10)


def test_an_unknown_preset_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown preset .*one of: dflash, .*eagle1, .*eagle3, eagle3\.1, .*medusa, .*peagle",
    ) as caught:
        settings_file("eagle31")
    assert (caught.value.kind, caught.value.hint) == ("name-unknown", "-c eagle3.1")
    assert settings_file("mine.yaml") == Path("mine.yaml")


def test_a_file_or_a_word_that_names_the_drafter_makes_the_flag_needless(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("drafter: {name: medusa}\n")
    assert load_config(store, file=file).drafter.name == "medusa"
    assert load_config(store, words=["drafter.name=eagle1"]).drafter.name == "eagle1"
    assert load_config(store, "medusa", file=file).drafter.name == "medusa"
    assert load_config(store).drafter.name == "eagle3"


def test_two_names_for_the_drafter_are_refused_naming_both(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("drafter: {name: medusa}\n")
    with pytest.raises(
        ConfigError, match=r"--drafter says eagle3, drafter\.name \(.*mine\.yaml\) says medusa"
    ) as caught:
        load_config(store, "eagle3", file)
    assert caught.value.kind == "drafter-contradiction"
    with pytest.raises(ConfigError, match=r"mine\.yaml\) says medusa, drafter\.name \(command line\) says eagle1"):
        load_config(store, None, file, ["drafter.name=eagle1"])
    with pytest.raises(ConfigError, match="unknown drafter 'eagel3'") as caught:
        load_config(store, words=["drafter.name=eagel3"])
    assert caught.value.hint == "--drafter eagle3"


def test_all_drafters_captures_the_union_of_what_they_read(store: Store) -> None:
    wanted = {*default_aux_layers("eagle3", NUM_LAYERS), *default_aux_layers("dflash", NUM_LAYERS)}
    assert store.capture.aux_layers == tuple(sorted(wanted))
    assert store.capture.final == "all"


FROM_RANDOM = [name for name in DRAFTERS if not drafter_kind(name).begins_as_the_target_s]
"""Drafters that need no checkpoint to start from; `tests.trainer.test_mtp` has the other."""


@pytest.mark.parametrize("drafter", FROM_RANDOM)
def test_every_drafter_trains_on_a_store_for_all_without_further_flags(
    drafter: str, store: Store, tmp_path: Path
) -> None:
    report = train(store.path, tmp_path / "run", drafter=drafter, words=[*SMALL, *extra(drafter)])
    assert report.steps == 2
    assert report.validation["accepted_length"] >= 1.0


@pytest.mark.parametrize("drafter", FROM_RANDOM)
def test_a_refusal_prints_the_command_that_captures_what_is_missing(drafter: str, tmp_path: Path) -> None:
    poor = make_store(tmp_path, samples=3, layers=(0,), final="none")
    layers = default_aux_layers(drafter_kind(drafter).layers, NUM_LAYERS)
    asked = [f"drafter.aux_layers={','.join(map(str, layers))}"] if layers else []
    with pytest.raises(ConfigError, match=f"{drafter} cannot be trained on {poor.path}") as caught:
        train(poor.path, tmp_path / "run", drafter=drafter, words=[*asked, *extra(drafter)])
    words = shlex.split(str(caught.value.hint))
    assert words[:6] == ["hiddenstore", "collect", "DATA", "-o", "NEW_STORE", "--target"]
    final = words[words.index("--final") + 1] if "--final" in words else None
    choice = choose_layers(words[words.index("--layers") + 1], final, NUM_LAYERS)  # type: ignore[arg-type]
    (tmp_path / "again").mkdir()
    enough = make_store(tmp_path / "again", samples=6, layers=choice.aux_layers, final=choice.final)
    assert train(enough.path, tmp_path / "run", drafter=drafter, words=[*SMALL, *asked, *extra(drafter)]).steps == 2
