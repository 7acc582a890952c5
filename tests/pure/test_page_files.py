"""The page's own files: small, without markup made of texts, and without a word to another host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fivefold.page import document
from fivefold.page.questions import LESSONS, key

SCRIPTS = sorted(document.STATIC.glob("*.js"))
FORBIDDEN = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(")
OURS = {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_small_and_makes_no_markup_of_text(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 400
    assert text.startswith("// @ts-check")
    assert not [word for word in FORBIDDEN if word in text]
    assert not set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"'`)]*", text)) - OURS


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_is_there(path: Path) -> None:
    names = re.findall(r"(?:from|import\()\s*[\"'`]([^\"'`]+)[\"'`]", path.read_text("utf-8"))
    for name in names:
        if "${" not in name:
            assert (document.STATIC / name.removeprefix("fivefold/")).is_file(), (
                f"{path.name}: {name}"
            )


def test_every_lesson_has_a_drawing() -> None:
    drawn = {path.stem.removeprefix("learn_") for path in SCRIPTS}
    assert set(LESSONS) <= drawn


def test_a_whole_page_carries_everything_and_cannot_be_broken_out_of() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    text = document.whole(
        document.PageStart("learn", {}, ""), {key("explore", {"model": hostile}): {}}, hostile
    )
    assert "alert(1)</script>" not in text
    assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(?!data:)', text)
    site = re.search(r'id="site">(.*?)</script>', text, re.S)
    assert site is not None and json.loads(site[1])["command"] == hostile
    assert re.findall(r"default-src 'none'", text)


def test_keys_are_those_of_the_browser() -> None:
    """JSON.stringify writes neither spaces nor escapes of letters beyond ASCII."""
    assert key("explore", {"tp": "8", "model": "é"}) == 'explore[["model","é"],["tp","8"]]'
