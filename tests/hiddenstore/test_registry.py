"""Tables: rows of other packages are found, checked when they are loaded, and never stand in for one of ours."""

import sys
from pathlib import Path

import pytest

from hiddenstore.codecs import CODECS
from hiddenstore.codecs.base import Codec
from hiddenstore.errors import ConfigError
from hiddenstore.registry import Registry, nearest

CODEC = Path(__file__).parent.parent / "plugin" / "other_house" / "codec.py"
FACTS = ("name", "exact", "code_dtype", "compressed", "formula", "small", "nominal_bits", "reach", "same_layer")
METHODS = ("chunk_tokens", "code_columns", "row_parts", "row_bits", "encode", "encode_layers", "decode", "decode_rows")


def install(folder: Path, package: str, source: str, **rows: str) -> None:
    """A distribution ``package`` 2.1 in ``folder``: one module, and entry points of the group of codecs."""
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.1\n")
    points = "".join(f"{name} = {target}\n" for name, target in rows.items())
    (info / "entry_points.txt").write_text(f"[hiddenstore.codecs]\n{points}")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are found in; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def codecs() -> Registry[Codec]:
    """The table of codecs as a new process sees it."""
    return Registry(CODECS.thing, CODECS.group, CODECS.rows, CODECS.contract)


def test_every_row_of_ours_states_everything() -> None:
    assert [CODECS[name].name for name in CODECS] == list(CODECS)
    assert {name for name in (*FACTS, *METHODS) if not hasattr(CODECS["q8"], name)} == set()


@pytest.mark.parametrize("base", ["", "Codec"])
@pytest.mark.parametrize("fact", [*FACTS, *METHODS])
def test_a_codec_without_one_of_its_facts_is_an_error_that_names_it(base: str, fact: str, place: Path) -> None:
    stated = "\n".join(f"    {name} = CODECS['q8'].{name}" for name in (*FACTS, *METHODS) if name != fact)
    source = f"from hiddenstore.codecs import CODECS\nfrom hiddenstore.codecs.base import Codec\n\nclass C({base}):\n"
    install(place, "lame", f"{source}{stated}\n\nC1 = C()\n", mine="lame:C1")
    with pytest.raises(ConfigError, match=f"codec mine of lame 2.1 states no {fact}$") as error:
        codecs()["mine"]
    assert (error.value.kind, error.value.hint) == ("plugin-broken", "pip install --upgrade lame")


@pytest.mark.parametrize(
    ("stated", "wanted", "found"),
    [
        ("reach: float = LARGEST * (1 + 2**-5)", 'reach: str = "far"', "states reach = 'far', not float | None"),
        ("nominal_bits: float = 8.0", "nominal_bits: None = None", "states nominal_bits = None, not float"),
        ("def chunk_tokens(self, width: int)", "chunk_tokens: int = 64\n    def no(self)", "states chunk_tokens = 64"),
        ("import torch\n", "import torhc\n", "cannot be imported: ModuleNotFoundError: No module named 'torhc'"),
        ("FP8 = Fp8Codec()", "FP8 = Fp8Codec", "is the class Fp8Codec, not an object of it"),
        ("FP8 = ", "FP9 = ", "cannot be imported: AttributeError: module 'lame' has no attribute 'FP8'"),
    ],
)
def test_a_row_that_is_not_what_it_should_be_says_so(stated: str, wanted: str, found: str, place: Path) -> None:
    source = CODEC.read_text()
    assert stated in source
    install(place, "lame", source.replace(stated, wanted), mine="lame:FP8")
    with pytest.raises(ConfigError, match=r"codec mine of lame 2\.1") as error:
        codecs()["mine"]
    assert found in str(error.value)


def test_names_are_known_without_importing_a_row_and_none_of_ours_is_replaced(place: Path) -> None:
    install(place, "other", CODEC.read_text(), fp8="other:FP8", q8="other:FP8")
    table = codecs()
    assert list(table) == [*CODECS.rows, "fp8"]
    assert len(table) == len(CODECS.rows) + 1
    assert "other" not in sys.modules
    assert table["q8"] is CODECS["q8"]
    assert table["fp8"] is table["fp8"] is sys.modules["other"].FP8


def test_a_name_that_two_packages_bring_is_of_neither(place: Path) -> None:
    install(place, "one", CODEC.read_text(), fp8="one:FP8")
    install(place, "two", CODEC.read_text(), fp8="two:FP8")
    with pytest.raises(ConfigError, match=r"codec fp8 of (one|two) 2.1 and (one|two) 2.1 is in more than one package"):
        codecs()["fp8"]


def test_a_row_of_another_class_or_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"path a of hiddenstore .* is a int, not a Path"):
        Registry("path", "none", {"a": 3}, "pathlib:Path")["a"]
    with pytest.raises(ConfigError, match=r"launcher a of hiddenstore .* is a int, not a Callable"):
        Registry("launcher", "none", {"a": 3})["a"]


def test_an_unknown_name_lists_what_there_is_and_offers_the_nearest() -> None:
    table = Registry("engine", "none", {"hf": "a:b", "vllm": "c:d"}, option="--engine", default="hf")
    with pytest.raises(
        ConfigError, match=r"unknown engine 'vlm', expected one of: hf, vllm; did you mean vllm\?$"
    ) as e:
        table["vlm"]
    assert (e.value.kind, e.value.hint) == ("name-unknown", "--engine vllm")
    with pytest.raises(ConfigError) as e:
        table["something"]
    assert e.value.hint == "--engine hf"


def test_of_names_as_alike_the_one_that_begins_the_same_is_meant() -> None:
    assert nearest("eagle4", ["dflash", "peagle", "eagle3", "medusa"]) == "eagle3"
    assert nearest("eagle4", []) == ""
