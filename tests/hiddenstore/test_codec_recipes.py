"""Recipes: names, per-field words, and what is said of a word nobody knows."""

import pytest
from pydantic import ValidationError

from hiddenstore.codecs import CODECS, FITTED, LAYOUTS
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, RECIPES, get_recipe, recipe_name
from hiddenstore.errors import ConfigError
from hiddenstore.testing.builders import capture_spec
from schemas.capture import Codecs, topk_of


def test_every_recipe_names_codecs_that_exist_and_reads_back_its_own_name() -> None:
    assert DEFAULT_RECIPE in RECIPES
    for name in RECIPES:
        recipe = get_recipe(name)
        assert recipe.aux in (*CODECS, *FITTED)
        assert recipe.final in LAYOUTS
        assert recipe_name(recipe) == name


@pytest.mark.parametrize(
    ("text", "aux", "final", "name"),
    [
        ("aux=q4,final=q8", "q4", "q8", "compact"),
        ("final=topk , aux=q4", "q4", "topk", "tiny"),
        ("aux=q4", "q4", "q8", "compact"),
        ("final=bf16", "q8", "bf16", "aux=q8,final=bf16"),
    ],
)
def test_fields_are_chosen_one_by_one_and_the_rest_is_the_default(text: str, aux: str, final: str, name: str) -> None:
    recipe = get_recipe(text)
    assert (recipe.aux, recipe.final, recipe_name(recipe)) == (aux, final, name)
    assert get_recipe(recipe_name(recipe)) == recipe


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("save", "name-unknown", "did you mean safe"),
        ("compcat", "name-unknown", "did you mean compact"),
        ("aus=q4", "name-unknown", "unknown field 'aus'.*did you mean aux"),
        ("aux=q5", "name-unknown", "aux: unknown codec 'q5'.*did you mean q"),
        ("aux=topk", "name-unknown", "expected one of: bf16, lossless, q8, q4"),
        ("final=top-k", "name-unknown", "did you mean topk"),
        ("aux=q4,aux=q8", "name-unknown", "names aux twice"),
        ("aux=q4,", "name-unknown", "unknown field ''"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_known_one(text: str, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        get_recipe(text)
    assert error.value.kind == kind


@pytest.mark.parametrize(
    ("text", "fields"),
    [("safe,final=topk", "aux=q8,final=topk"), ("final=bf16, rebuilt", "aux=q4,final=bf16")],
)
def test_a_recipe_beside_fields_is_refused_with_its_own_fields_in_its_place(text: str, fields: str) -> None:
    with pytest.raises(ConfigError, match="is a recipe, which stands alone") as error:
        get_recipe(text)
    assert (error.value.kind, error.value.hint) == ("name-unknown", f"--recipe {fields}")
    get_recipe(fields)


def test_aux_layers_cannot_be_stored_as_top_tokens() -> None:
    with pytest.raises(ValidationError, match="aux layers cannot be stored so"):
        Codecs(aux="topk", final="q8")


def test_a_capture_says_what_stands_at_its_final_rows() -> None:
    tiny, safe = capture_spec(codec="tiny"), capture_spec(codec="safe")
    assert (tiny.holds_final_hidden, tiny.holds_topk, tiny.state_fields) == (False, True, ["layer_1", "layer_3"])
    assert (safe.holds_final_hidden, safe.holds_topk, safe.state_fields) == (True, False, safe.fields)
    without = capture_spec(codec="tiny", final="none")
    assert (without.holds_final_hidden, without.holds_topk) == (False, False)
    with pytest.raises(ValidationError, match="needs at least one aux layer or the final hidden"):
        capture_spec(layers=(), codec="tiny")


@pytest.mark.parametrize(("width", "k"), [(4, 1), (8, 1), (32, 4), (256, 32), (512, 64), (4096, 64), (8192, 64)])
def test_top_tokens_follow_from_the_width(width: int, k: int) -> None:
    assert topk_of(width) == k
