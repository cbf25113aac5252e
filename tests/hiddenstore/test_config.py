"""Settings from defaults, file and command line."""

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hiddenstore import settings as config
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.settings import key_paths


class Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 0.5


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = "run"
    drafter: Literal["eagle3", "dflash"] = "eagle3"
    layers: tuple[int, ...] | None = None
    frozen: bool = True
    steps: int = Field(10, gt=0)
    train: Optimizer = Optimizer()
    engine: dict[str, Any] = {}


class Strict(Settings):
    width: int

    @model_validator(mode="after")
    def _fits(self) -> "Strict":
        if self.steps > self.width:
            raise ValueError("too many steps")
        return self


def test_a_check_names_what_no_default_could_make_right_and_nothing_else() -> None:
    config.check(Strict, None, ["steps=20", "train.clip=1", "layers=auto"])
    with pytest.raises(ConfigError) as caught:
        config.check(Strict, None, ["steps=no", "train.lrr=1", "drafter=medusa"])
    assert caught.value.kind == "config-unknown-key"
    assert all(part in str(caught.value) for part in ("steps", "train.lrr", "drafter", "3 settings are wrong"))
    assert "width" not in str(caught.value)


def test_command_line_words_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 20\nname: file\ntrain: {lr: 3e-4}\n")
    settings = config.load(Settings, file, ["train.clip=1", "name=word"], {"steps": 5, "frozen": False})
    assert (settings.steps, settings.name, settings.frozen) == (20, "word", False)
    assert settings.train == Optimizer(lr=3e-4, clip=1.0)


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ("train.lr=1e-4", "train", Optimizer(lr=1e-4)),
        ("name=no", "name", "no"),
        ("name=1e-4", "name", "1e-4"),
        ("name=2026-01-01", "name", "2026-01-01"),
        ("frozen=no", "frozen", False),
        ("frozen=true", "frozen", True),
        ("layers=1,15,28", "layers", (1, 15, 28)),
        ("layers=[1, 15]", "layers", (1, 15)),
        ("layers=none", "layers", None),
        ("layers=null", "layers", None),
        ("train.clip=none", "train", Optimizer(clip=None)),
        ("train.betas=0.8,0.9", "train", Optimizer(betas=(0.8, 0.9))),
        ("engine.tp=4", "engine", {"tp": 4}),
        ("engine.name=vllm", "engine", {"name": "vllm"}),
        ('engine.stop="[a-z"', "engine", {"stop": "[a-z"}),
        ("engine.since=2026-13-01", "engine", {"since": "2026-13-01"}),
        ("name=a=b", "name", "a=b"),
    ],
)
def test_the_annotation_decides_what_a_word_means(word: str, key: str, expected: object) -> None:
    assert getattr(config.load(Settings, dotlist=[word]), key) == expected


def test_a_word_nested_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no YAML value"):
        config.load(Settings, dotlist=[f"layers={'[' * 5000}"])


def test_an_unknown_setting_is_an_error_that_names_the_close_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean train\.lr\?") as caught:
        config.load(Settings, dotlist=["traner.lr=1e-4"])
    assert caught.value.kind == "config-unknown-key"
    assert caught.value.hint == "train.lr=…"


@pytest.mark.parametrize(
    ("wrong", "meant"), [("lr=1", "train.lr"), ("stesp=3", "steps"), ("train.cliip=1", "train.clip")]
)
def test_did_you_mean_finds_settings_at_any_depth(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        config.load(Settings, dotlist=[wrong])


class Loop(BaseModel):
    seed: int = 0
    steps: int = 10


class Sections(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    data: Loop = Loop()
    optim: Optimizer = Optimizer()
    train: Loop = Loop()


@pytest.mark.parametrize(
    ("wrong", "meant"), [("traner.seed", "train.seed"), ("dat.seed", "data.seed"), ("traner.lr", "optim.lr")]
)
def test_a_setting_in_a_wrong_section_is_found_by_its_last_name_first(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
        config.load(Sections, dotlist=[f"{wrong}=1"])


class Run(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    max_steps: int = 10
    validate_every: int = 100


class Unroll(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    steps: int = 3


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    train: Run = Run()
    loss: Unroll = Unroll()


def test_a_setting_of_the_section_that_is_written_is_meant_before_one_of_another() -> None:
    with pytest.raises(ConfigError, match=r"did you mean train\.max_steps\?"):
        config.load(Whole, dotlist=["train.steps=3"])


def test_no_setting_is_offered_that_is_only_half_alike() -> None:
    with pytest.raises(ConfigError, match=r"there are train\.max_steps, train\.validate_every") as caught:
        config.load(Whole, dotlist=["train.log_every=1"])
    assert "did you mean" not in str(caught.value)


def test_all_problems_are_reported_at_once_with_where_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: -3\nbogus: 1\n")
    with pytest.raises(ConfigError) as caught:
        config.load(Settings, file, ["train.lr=fast", "drafter=medusa", "oops"])
    message = caught.value.message
    assert message.startswith("5 settings are wrong")
    for part in ("bogus", "steps", "train.lr", "'fast'", "drafter", "'oops'", str(file), "command line"):
        assert part in message


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "steps: [1\n",
        "steps: 1\nsteps: 2\n",
        "name: &a x\ntrain: *a\n",
        'name: "\\UFFFFFFFF"\n',
        "just words\n",
        "? [a]\n: b\n",
        "\x00",
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
        config.load(Settings, file)
    assert caught.value.kind == "config-unreadable"


def test_an_empty_file_changes_nothing_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n")
    assert config.load(Settings, file) == Settings()
    with pytest.raises(NotFoundError, match=r"absent\.yaml"):
        config.load(Settings, tmp_path / "absent.yaml")


def test_key_paths_lists_every_leaf_in_order() -> None:
    assert key_paths(Settings)[-4:] == ["train.lr", "train.betas", "train.clip", "engine"]


@given(
    st.builds(
        Settings,
        name=st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029\ufeff\r"), max_size=12),
        layers=st.none() | st.lists(st.integers(-1, 99), max_size=4).map(tuple),
        frozen=st.booleans(),
        steps=st.integers(1, 10**9),
        train=st.builds(
            Optimizer,
            lr=st.floats(1e-12, 1e6, allow_nan=False),
            clip=st.none() | st.floats(0, 1e3),
        ),
    )
)
def test_dumped_settings_read_back_equal(settings: Settings) -> None:
    text = config.dump(settings)
    assert yaml.safe_load(text)["steps"] == settings.steps
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_text(text, encoding="utf-8")
        assert config.load(Settings, file) == settings


def test_auto_keeps_the_derived_default_and_undoes_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("train:\n  lr: 3.0\n")
    assert config.load(Settings, file, ["train.lr=auto"], {"train": {"lr": 0.5}}).train.lr == 0.5
    with pytest.raises(ConfigError):
        config.load(Settings, file, ["train.lr=auto"])


class Named(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: dict[str, Optimizer]


def test_sections_under_free_names_are_typed_and_their_unkey_paths_found(tmp_path: Path) -> None:
    file = tmp_path / "named.yaml"
    file.write_text("parts:\n  eagle3.1: {lr: 1e-4}\n  second: {}\n")
    assert config.load(Named, file).parts["eagle3.1"].lr == 1e-4
    with pytest.raises(ConfigError, match=r"parts.second.lrr.*did you mean parts.NAME.lr") as caught:
        config.load(Named, file, ["parts.second.lrr=2"])
    assert caught.value.kind == "config-unknown-key"
