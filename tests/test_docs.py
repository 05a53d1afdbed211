"""The docs keep their word: links lead somewhere, and every page of a topic names law, mechanism and test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TOPICS = sorted((ROOT / "docs").glob("[01][0-9]-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    for link in links:
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_one_page_a_topic() -> None:
    assert [p.name[:2] for p in TOPICS] == [f"{i:02}" for i in range(1, 11)]


@pytest.mark.parametrize("page", TOPICS, ids=lambda p: p.name)
def test_a_topic_page_names_law_mechanism_and_test(page: Path) -> None:
    text = page.read_text()
    for heading in ("## The law", "## The mechanism", "## The test", "## Sources"):
        assert heading in text, f"{page.name} lacks {heading!r}"
