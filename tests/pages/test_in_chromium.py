"""Reports in a real browser: both themes, wide and narrow, by keyboard, without a complaint and without a request."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from hiddenstore.report.page import write_page
from hiddenstore.report.store import store_page
from hiddenstore.testing.builders import make_store
from tests.pages.browser import WIDTHS, Browser, find_browser
from tests.tiny_world import World, run

PROBE = """
<script>
const facts = document.documentElement.dataset, root = document.documentElement;
facts.overflow = root.scrollWidth - root.clientWidth;
const browser = document.querySelector("[data-browser]"), search = browser.querySelector("input");
const shown = () => [...browser.querySelectorAll(".sample")].findIndex((sample) => !sample.hidden);
const press = (key) => browser.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const places = [shown()];
press("ArrowRight"); places.push(shown());
press("ArrowLeft"); press("ArrowLeft"); places.push(shown());
browser.querySelectorAll("button")[1].click(); places.push(shown());
search.value = "no conversation says this"; search.dispatchEvent(new Event("input")); places.push(shown());
facts.said = browser.querySelector("output").textContent;
search.value = ""; search.dispatchEvent(new Event("input")); places.push(shown());
facts.places = places.join(" ");
const letters = [...document.querySelectorAll("figure svg[role] text")];
facts.fonts = Math.min(...letters.map((text) => text.getBoundingClientRect().height));
facts.requests = performance.getEntriesByType("resource").length;
</script>
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return find_browser(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def pages(world: World, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports of the tiny world."""
    place = tmp_path_factory.mktemp("pages")
    commands = {
        "store": ("report", world / "store"),
        "run": ("report", world / "run"),
        "runs": ("compare", world / "run", world / "run"),
    }
    for name, words in commands.items():
        assert run(*words, "-o", str(place / f"{name}.html"), "-q") == 0
    return {name: place / f"{name}.html" for name in commands}


def probed(page: Path, browser: Browser, width: int) -> dict[str, str]:
    copy = page.with_name(f"probed-{page.name}")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    opening = browser.dom(copy, width).split("<head>", 1)[0]
    return dict(part.split('="', 1) for part in opening.split(" data-")[1:])


def test_a_report_opens_without_a_complaint(tmp_path: Path) -> None:
    browser = find_browser(tmp_path / "profile")
    page = tmp_path / "page.html"
    write_page(page, store_page(make_store(tmp_path, samples=4), samples=3, measured=2))
    document = browser.dom(page)
    assert document.count('class="sample" hidden=""') == 2
    assert 'class="tools" hidden' not in document


@pytest.mark.pages
@pytest.mark.parametrize("wrong", ["<script>nothing.there()</script>", '<img src="file:///tmp/picture.png">'])
def test_a_script_that_fails_and_a_picture_that_is_loaded_would_be_seen(
    pages: dict[str, Path], browser: Browser, wrong: str
) -> None:
    page = pages["store"].with_name("wrong.html")
    page.write_text(pages["store"].read_text(encoding="utf-8").replace("</body>", f"{wrong}</body>"), encoding="utf-8")
    with pytest.raises(AssertionError, match="CONSOLE"):
        browser.dom(page)


@pytest.mark.pages
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["store", "run"])
def test_samples_are_browsed_by_keyboard_button_and_search_and_nothing_overflows(
    pages: dict[str, Path], browser: Browser, name: str, width: int
) -> None:
    facts = {key: value.rstrip('">') for key, value in probed(pages[name], browser, width).items()}
    last = pages[name].read_text(encoding="utf-8").count('class="sample"') - 1
    assert facts["places"] == f"0 1 {last} 0 -1 0"
    assert facts["said"] == "no sample has that text"
    assert int(facts["overflow"]) <= 0
    assert float(facts["fonts"]) >= 10
    assert facts["requests"] == "0"


@pytest.mark.pages
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["store", "run", "runs"])
def test_every_page_has_a_light_and_a_dark_face_that_shows_something(
    pages: dict[str, Path], browser: Browser, name: str, width: int, tmp_path: Path
) -> None:
    means = {}
    for theme in ("light", "dark"):
        picture = matplotlib.image.imread(browser.picture(pages[name], theme, width, tmp_path / f"{theme}.png"))
        assert picture.shape[:2] == (1600, width)
        grey = picture[..., :3].mean(axis=2)
        means[theme] = float(grey.mean())
        # Ink on the paper, and colour in the drawings.
        assert np.unique((grey * 32).astype(int)).size > 12
        assert float((picture[..., :3].max(axis=2) - picture[..., :3].min(axis=2) > 0.25).mean()) > 0.001
    assert means["light"] > 0.8
    assert means["dark"] < 0.3
