"""The page of a store: what it says is the store's, whatever stands in it stays text, and nothing is loaded."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models

from hiddenstore.cli import main
from hiddenstore.codecs import get_layout
from hiddenstore.codecs.recipes import RECIPES, get_recipe
from hiddenstore.report import page
from hiddenstore.report.page import Bar, Html, Page, Scale, Section, Series, Verdict, tag
from hiddenstore.report.store import nominal_bytes, spread_ids, store_page
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    make_samples,
    make_store,
    random_records,
    target_files,
)
from hiddenstore.writer import create_store, write_unit

VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Elements by name, their attributes and text; fails where a tag is closed that was not opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        for name in set(self.open):
            self.text[name] = self.text.get(name, "") + data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="hiddenstore")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("report"), samples=24)


@pytest.fixture(scope="module")
def made(store: Store) -> Page:
    return store_page(store, samples=6, measured=8)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose tokens, target and split-off parts are markup."""
    words = {f'</script><script>alert({i})</script><img src=x onerror="alert({i})">\x1b': i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    capture = capture_spec()
    name = "<b onclick='x'>&amp;\u202etarget</b>"
    capture = capture.model_copy(update={"target": capture.target.model_copy(update={"name": name})})
    files = {**target_files(), "tokenizer.json": tokenizer.to_str().encode()}
    opened = create_store(tmp_path_factory.mktemp("hostile") / "store", capture, HEAD, "safe", files)
    write_unit(opened, "u-000000", "0" * 64, random_records(make_samples(4), capture), (), ENGINE)
    return Store.open(opened.path)


@pytest.fixture(scope="module")
def hostile_page(hostile: Store) -> str:
    return store_page(hostile, samples=4, measured=1).html()


def test_every_part_that_was_promised_is_there_and_says_what_is_healthy(made: Page) -> None:
    titles = ["What it holds", "Sources and spans", "Lengths", "Norms per layer", "Agreement", "Sizes", "Samples"]
    assert [section.title for section in made.sections] == [*titles, "Lineage"]
    assert all(section.healthy.endswith(".") for section in made.sections)


def test_the_figures_are_the_stores_own(store: Store, made: Page) -> None:
    tiles = dict(made.tiles)
    assert tiles["samples"] == str(len(store))
    share = store.totals["supervised"] / store.totals["tokens"]
    assert tiles["trained"] == f"{100 * share:.1f} %"
    text = Reader(made.html()).text["body"]
    assert all(f"layer_{layer}" in text for layer in store.capture.aux_layers)


def test_a_page_is_whole_html_of_which_nothing_is_loaded(made: Page) -> None:
    text = made.html()
    reader = Reader(text)
    assert not reader.named("img")
    assert not reader.named("link")
    assert not reader.named("iframe")
    assert not [a for _, a in reader.elements if {"src", "action", "srcset", "xlink:href"} & a.keys()]
    assert all((link["href"] or "").startswith("#") for link in reader.named("a"))
    assert not re.search(r"url\(|@import|https?:", text)
    policy = [meta["content"] for meta in reader.named("meta") if meta.get("http-equiv")]
    assert policy[0].startswith("default-src 'none'")


def test_every_link_of_a_page_has_a_place_and_every_drawing_a_name_and_its_numbers(made: Page) -> None:
    reader = Reader(made.html())
    places = {a["id"] for _, a in reader.elements if "id" in a}
    assert {(link["href"] or "").removeprefix("#") for link in reader.named("a")} <= places
    drawings = [svg for svg in reader.named("svg") if svg.get("role") == "img"]
    assert len(drawings) >= 7
    assert all(svg["aria-label"] for svg in drawings)
    assert len(reader.named("figure")) == len(drawings)
    assert len(reader.named("details")) >= len(drawings)


def test_markup_in_tokens_and_names_stays_text(hostile_page: str) -> None:
    reader = Reader(hostile_page)
    assert len(reader.named("script")) == 1
    assert not reader.named("img")
    assert not [a for _, a in reader.elements if any(name.startswith("on") for name in a)]
    assert "<script>alert(" in reader.text["article"]
    assert "\x1b" not in reader.text["body"]
    assert "\u202e" not in reader.text["body"]
    assert "<b onclick='x'>" in reader.text["dl"]


def test_trained_text_is_marked_and_nothing_else(hostile: Store, hostile_page: str) -> None:
    reader = Reader(hostile_page)
    marked = sum(int(hostile.sample(sample_id).loss_mask.sum()) for sample_id in hostile.sample_ids)
    assert reader.text["mark"].count("alert(") == 2 * marked


def test_without_samples_a_page_holds_no_text_and_does_not_warn_of_it(hostile: Store) -> None:
    shown = store_page(hostile, samples=0, measured=1)
    assert "alert(" not in shown.html()
    assert not shown.note
    assert "Token ids are that text" in store_page(hostile, samples=1, measured=1).note


def test_text_is_left_out_and_counted_where_it_would_make_a_page_too_large(
    hostile: Store, hostile_page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiddenstore.report.page.TEXT_BYTES", 8_000)
    less = store_page(hostile, samples=4, measured=1).html()
    assert len(less) < len(hostile_page)
    assert "would make the page too large" in less


def test_an_empty_store_has_a_page_that_says_so(tmp_path: Path) -> None:
    shown = store_page(create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files()))
    assert ("bad", "the store holds no sample yet") in [(v.level, v.text) for _, v in shown.verdicts]
    Reader(shown.html())


def test_states_of_another_sample_are_a_problem_on_the_page(tmp_path: Path) -> None:
    opened = create_store(tmp_path / "store", capture_spec(), HEAD, "safe", target_files())
    records = random_records(make_samples(8), capture_spec())
    for record in records:
        record.aux.zero_()
    write_unit(opened, "u-000000", "0" * 64, records, (), ENGINE)
    shown = store_page(Store.open(opened.path), measured=8)
    assert ("Norms per layer", "bad") in [(section.title, verdict.level) for section, verdict in shown.verdicts]
    agreement = [verdict for section, verdict in shown.verdicts if section.title == "Agreement"]
    assert agreement[0].level == "bad"
    assert any("of kind zeros: " in verdict.text for verdict in agreement)
    # Of a few rows nothing is said that chance may say.
    assert not any("would say the next token" in verdict.text for verdict in agreement)


def test_a_damaged_sample_is_a_problem_on_the_page_which_is_made_all_the_same(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    (layer,) = {file.path for record in store.commits() for file in record.files if file.path.startswith("layer_1/c")}
    path = Path(store.path, store.commits()[0].segment, layer)
    data = bytearray(path.read_bytes())
    data[0] ^= 0xFF
    path.write_bytes(data)
    out = tmp_path / "page.html"
    result = run("report", store.path, "-o", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    worst = json.loads(result.stdout)["verdicts"][0]
    assert (worst["section"], worst["level"]) == ("What it holds", "bad")
    assert "of 6 samples read are damaged: " in worst["text"]
    assert layer in worst["text"]
    Reader(out.read_text(encoding="utf-8"))


def test_a_page_of_a_snapshot_says_nothing_of_what_was_written_later(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6)
    store.save_snapshot("old")
    before = {record.unit for record in store.commits()}
    later = next(record for record in make_store(tmp_path, samples=9).commits() if record.unit not in before)
    Path(store.path, later.segment, "layer_1/c/0/0").unlink()
    frozen, whole = (
        " ".join(verdict.text for _, verdict in store_page(Store.open(store.path, name)).verdicts)
        for name in ("old", None)
    )
    assert "does not exist" in whole
    assert "does not exist" not in frozen


def test_the_most_urgent_verdict_comes_first() -> None:
    order = [Verdict("good", "a"), Verdict("bad", "b"), Verdict("unknown", "c"), Verdict("look", "d")]
    page = Page("t", "", [], [Section("s", Html(), verdicts=tuple(order))])
    assert [verdict.text for _, verdict in page.verdicts] == ["b", "d", "c", "a"]


def test_a_limit_that_cut_samples_is_seen_in_their_lengths() -> None:
    from hiddenstore.report.store import _wall

    rng = np.random.default_rng(0)
    free = rng.gamma(4.0, 60.0, 2_000).astype(np.int32) + 1
    assert _wall(np.minimum(free, 200))[0] == 200
    assert _wall(np.minimum(free, 200))[1] > 0.02 * len(free)
    assert _wall(free)[1] <= 0.02 * len(free)
    assert _wall(np.zeros(0, dtype=np.int32)) == (0, 0)


def test_samples_to_show_are_spread_from_the_first_to_the_last(store: Store) -> None:
    ids = list(store.sample_ids)
    assert spread_ids(store, 3) == [ids[0], ids[11], ids[23]]
    assert spread_ids(store, 1_000) == ids


def test_the_arithmetic_of_recipes_orders_them_by_size(store: Store) -> None:
    sizes = nominal_bytes(store)
    assert sizes["raw"] > sizes["lossless"] > sizes["safe"] > sizes["compact"]
    width, layers = store.capture.target.hidden_size, len(store.capture.aux_layers)
    rows = store.catalog.table.final_rows.sum() / store.totals["tokens"]
    assert sizes["raw"] == pytest.approx(2 * width * (layers + rows))
    rebuilt, (aux, _) = store.capture.with_codecs(get_recipe("rebuilt")), RECIPES["rebuilt"]
    assert len(rebuilt.stored_layers) == layers - 1
    assert sizes["rebuilt"] == pytest.approx((layers - 1) * get_layout(aux).row_bits(width) / 8)
    tokens, taught = store.totals["tokens"], store.catalog.table.supervised.sum() + 20 * len(store)
    saved = (layers - 1) * 4 * -(-width // 32) * (1 - min(1, taught / tokens))
    assert sizes["rebuilt-q3"] == pytest.approx(sizes["rebuilt"] - saved)


def test_a_recipe_that_cannot_hold_the_layers_has_no_arithmetic(tmp_path: Path) -> None:
    assert "rebuilt" not in nominal_bytes(make_store(tmp_path / "s", layers=()))


def test_the_command_writes_the_page_and_says_its_verdicts(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "here" / "page.html"
    result = run("report", store.path, "-o", str(out), "--samples", "2", "--measure", "4", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "hiddenstore.report/1"
    assert document["bytes"] == out.stat().st_size
    assert document["figures"]["samples"] == "24"
    assert {"section", "level", "text"} == set(document["verdicts"][0])
    assert run("report", store.path, "-o", str(out), "--samples", "0", "-q").stdout.strip() == str(out)


def test_a_store_below_a_folder_with_an_at_sign_and_its_snapshot_have_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(Path("jo@corp")).save_snapshot("v1")
    for named, name in (("jo@corp/store", "store"), ("jo@corp/store@v1", "store@v1")):
        result = run("report", named, "--samples", "0", "--measure", "1", "-q")
        assert (result.exit_code, result.stdout) == (0, f"{name}-report.html\n"), result.stderr


def test_a_file_that_is_no_report_is_never_replaced(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "notes.html"
    out.write_text("<p>mine</p>")
    result = run("report", store.path, "-o", str(out), "--samples", "0", "--measure", "2")
    assert result.exit_code == 6
    assert "[output-exists]" in result.stderr
    assert out.read_text() == "<p>mine</p>"


def test_a_folder_that_is_neither_store_nor_run_is_named(store: Store, tmp_path: Path) -> None:
    result = run("report", str(Path(store.path).parent / "data"))
    assert "it holds prepared data" in result.stderr
    assert run("report", str(tmp_path / "nothing")).exit_code == 2


def test_what_is_not_markup_is_escaped_once() -> None:
    assert tag("p", "a < b & c", Html("<b>d</b>"), title='"x"') == (
        '<p title="&quot;x&quot;">a &lt; b &amp; c<b>d</b></p>'
    )


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.13, 0.131), (3.0, 48_000.0), (-2.0, 2.0)])
def test_ticks_are_round_numbers_inside_the_range(low: float, high: float) -> None:
    marks = page.ticks(low, high)
    assert 2 <= len(marks) <= 7
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)
    steps = np.diff(marks)
    assert np.allclose(steps, steps[0])


def test_a_scale_puts_its_ends_where_they_belong() -> None:
    assert [Scale(0, 10, 50, 150)(value) for value in (0, 5, 10)] == [50, 100, 150]
    assert [Scale(1, 100, 0, 20, log=True)(value) for value in (1, 10, 100)] == pytest.approx([0, 10, 20])


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    drawn = page.lines("t", [Series("a", [0, 1, 2, 3], [1.0, float("nan"), 2.0, 3.0])], "x", "y")
    path = re.search(r'<path d="([^"]*)" class="line s0">', drawn)
    assert path is not None
    assert path[1].count("M") == 2
    assert path[1].count("L") == 1


def test_nothing_to_draw_is_said() -> None:
    for drawing in (
        page.lines("t", [Series("a", [1], [float("nan")])], "x", "y"),
        page.histogram("t", [], [], "x", "y"),
        page.bars("t", [Bar("a", float("nan"), "–")]),
    ):
        assert 'class="none"' in drawing


def test_a_long_line_keeps_its_mean_in_few_points() -> None:
    thin = Series("a", list(range(10_000)), [float(i % 7) for i in range(10_000)]).thinned()
    assert len(thin.xs) <= page.MOST_POINTS
    assert np.mean(thin.ys) == pytest.approx(3.0, abs=0.01)


def test_bars_are_as_long_as_their_values_say() -> None:
    drawn = page.bars("t", [Bar("a", 4.0, "4"), Bar("b", 2.0, "2")])
    full, half = (float(width) for width in re.findall(r'width="([\d.]+)" height="8" rx="4" class="fill', drawn))
    assert half / full == pytest.approx(0.5, abs=0.01)


def test_an_axis_of_steps_names_no_half_step() -> None:
    drawn = str(page.lines("Loss", [Series("training", [1, 2, 3], [7.0, 5.0, 4.5])], "step", "loss"))
    assert re.findall(r'class="middle">([^<]+)<', drawn) == ["1", "2", "3"]
