"""Generated tables are up to date, README commands run as written, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from benchmarks.reports.documentation import ROOT, markdown_table, pages, refreshed


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert refreshed(text) == text, "run `make docs`"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_and_pictures_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_markdown_table_escapes_bars() -> None:
    assert markdown_table(("a", "b"), [("x|y", "z")]) == "| a | b |\n| --- | --- |\n| x\\|y | z |"


def test_pages_know_nothing_of_where_they_were_written() -> None:
    words = re.compile(r"/root/|/home/\w+/|/tmp/\w")
    assert [str(page) for page in pages() if words.search(page.read_text(encoding="utf-8"))] == []
    assert (ROOT / "README.md").is_file()
