"""What docstrings and comments cite ships: pages of docs/, decisions of docs/design, and no document but those."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DESIGN = ROOT / "docs" / "design"
PAGES = sorted(DESIGN.glob("[0-9]*.md"))
SOURCES = [
    path
    for folder in ("schemas", "hiddenstore", "collectors", "trainer", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
HEADINGS = ("## Decision", "## Why", "## What was tried and not taken", "## What follows")

# A page of another project stands behind its name: OWNER/NAME docs/….
CITED = re.compile(r"(?P<theirs>[\w.-]+/[\w.-]+ )?(?P<path>docs/[\w./-]*\w)")
DOCUMENT = re.compile(r"(?P<theirs>[\w.-]+/[\w.-]+ )?(?P<path>[\w./-]*\w\.md)\b")
NUMBERED = re.compile(r"docs/design/(\d{3})")
UNPUBLISHED = re.compile(r"\bthe \w+ study\b")
IN_THE_REPOSITORY = re.compile(r"`((?:tests|benchmarks|docs)/[\w/.*-]+)`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def exists(cited: str) -> bool:
    """Whether the repository has a path; a decision may be cited by its number."""
    numbered = NUMBERED.fullmatch(cited)
    pattern = f"{cited}-*.md" if numbered else cited.rstrip("/")
    return any(ROOT.glob(pattern))


def prose(text: str) -> Iterator[str]:
    """Docstrings and comments of a source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def missing_pages(text: str) -> list[str]:
    """Pages of docs/ that a source cites anywhere, hints to users included, and the repository lacks."""
    return [found["path"] for found in CITED.finditer(text) if not found["theirs"] and not exists(found["path"])]


def missing_documents(text: str, folder: Path) -> list[str]:
    """Documents that docstrings and comments of a source in ``folder`` cite and the repository lacks."""
    found = []
    # Telling comments from code takes ten times as long as the rest.
    for part in prose(text) if ".md" in text or "study" in text else ():
        cited = [match["path"] for match in DOCUMENT.finditer(part) if not match["theirs"]]
        found += [name for name in cited if not exists(name) and not exists(name_of(folder / name))]
        found += UNPUBLISHED.findall(" ".join(part.split()))
    # A pattern of file names that a program writes is no document.
    return [name for name in found if "DATE" not in name]


def test_every_page_that_a_source_cites_exists() -> None:
    missing = {name_of(path): missing_pages(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: pages for name, pages in missing.items() if pages} == {}


def test_no_docstring_cites_a_document_that_does_not_ship() -> None:
    missing = {name_of(path): missing_documents(path.read_text(encoding="utf-8"), path.parent) for path in SOURCES}
    assert {name: documents for name, documents in missing.items() if documents} == {}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ('"""Sources: notes.md section 3."""', ["notes.md"]),
        ('"""Source: the codec study, section 6."""', ["the codec study"]),
        ("x = 1  # as docs/nowhere.md has it", ["docs/nowhere.md"]),
        ('"""See docs/design/009 and docs/format.md."""', []),
        ('"""As NVIDIA/TensorRT-LLM docs/source/features/page.md has it."""', []),
        ('name = "table.md"', []),
    ],
)
def test_a_document_that_does_not_ship_is_found(source: str, missing: list[str]) -> None:
    assert missing_documents(source, ROOT) == missing


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ('hint = "docs/nowhere.md"', ["docs/nowhere.md"]),
        ('"""Measured: docs/design/999."""', ["docs/design/999"]),
        ('"""Measured: docs/design/003."""', []),
        ('"""As OWNER/NAME docs/source/page.md has it."""', []),
    ],
)
def test_a_page_that_does_not_exist_is_found(source: str, missing: list[str]) -> None:
    assert missing_pages(source) == missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_has_its_headings_and_its_line_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    number = page.name[:3]
    assert text.startswith(f"# {number}: ")
    at = [re.search(f"^{heading}", text, re.MULTILINE) for heading in HEADINGS]
    assert all(at), f"expected {HEADINGS}"
    assert f"| [{number}]({page.name}) |" in (DESIGN / "README.md").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120


def test_decisions_are_numbered_without_gaps_and_the_index_names_no_other() -> None:
    assert [page.name[:3] for page in PAGES] == [f"{number:03}" for number in range(1, len(PAGES) + 1)]
    index = (DESIGN / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\d{3}[\w-]+\.md)\)", index) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [*PAGES, DESIGN / "README.md"], ids=lambda page: page.stem)
def test_what_a_decision_cites_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in IN_THE_REPOSITORY.findall(text) if not exists(name)]
    assert not missing
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for number in re.findall(r"\((\d{3}(?:, \d{3})*)\)", text):
        assert all(any(DESIGN.glob(f"{one}-*.md")) for one in number.split(", ")), number
