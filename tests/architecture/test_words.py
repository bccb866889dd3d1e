"""Plain words: no text has a banned word (but bodies of some tests), and test names are plain and short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = ("told", "anew", "shall", "so many", "so long", "whoever", "belongs into", "dearer", "for want of", "by lot")
PATTERN = re.compile(
    "(?<![a-z])(" + "|".join(word.replace(" ", r"[\s_#-]+") for word in BANNED) + ")(?![a-z])", re.IGNORECASE
)
"""Whole words, also inside of names with underscores and across the lines of a comment."""
TEXTS = sorted(
    path
    for pattern in (
        *("*.md", "dev", "src/**/*", "docs/**/*.md", "examples/*", "tools/*.py", ".github/**/*"),
        *("chaos/*", "benchmarks/**/*.py", "benchmarks/*.md", "tests/*.py", "tests/chaos/*.py", "tests/worker/*.py"),
        *("tests/*/conftest.py", "tests/*/[!t]*.py"),
    )
    for path in ROOT.glob(pattern)
    if path.suffix in ("", ".lua", ".md", ".mjs", ".py", ".sh", ".sql", ".yml") and path.is_file()
)
TESTS = sorted(path for folder in ("tests", "chaos") for path in (ROOT / folder).rglob("test_*.py"))
TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
LONGEST_TEST_NAME = 80


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def banned_words(text: str) -> list[str]:
    """Line and word of each banned word."""
    found = ((text[: match.start()].count("\n") + 1, match[1]) for match in PATTERN.finditer(text))
    return [f"line {line}: {word}" for line, word in found]


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_file_has_no_banned_word(path: Path) -> None:
    assert banned_words(path.read_text()) == []


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_test_names_are_plain_and_short(path: Path) -> None:
    names = TEST_NAME.findall(path.read_text())
    assert [name for name in names if banned_words(name) or len(name) > LONGEST_TEST_NAME] == []


def test_banned_words_are_found_as_whole_words_only() -> None:
    assert banned_words("Whoever\nasks so\n# many are_told") == [
        "line 1: Whoever",
        "line 2: so\n# many",
        "line 3: told",
    ]
    assert banned_words("untold, shallow, also many, by lots, a new one") == []
