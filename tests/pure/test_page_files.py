"""The page's own files: small, without markup made of texts, and without a word to another host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fivefold_page import document
from fivefold_page.document import answer_key
from fivefold_page.explore import explore
from fivefold_page.explore.state import State
from fivefold_page.run import view as run_view
from fivefold_page.view import View

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


def exported(script: str) -> set[str]:
    """The functions that a module of the page exports."""
    text = (document.STATIC / f"{script}.js").read_text("utf-8")
    return set(re.findall(r"export (?:async )?function (\w+)", text))


def test_every_panel_has_a_drawing() -> None:
    for name in document.LESSONS:
        assert "create" in exported(f"learn_{name}")
    for name, panel in explore.PANELS.items():
        assert not panel.title or "create" in exported(panel.drawing or name)
    for name, panel in run_view.PANELS.items():
        assert name in exported(panel.drawing)


def test_one_line_registers_a_panel_of_explore(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table alone makes a panel part of the answer, of the text and of the page."""

    def view(state: State) -> View:
        return {"gpus": state.gpus}

    def text(found: View) -> list[str]:
        return [f"{found['gpus']} GPUs"]

    panel = explore.ExplorePanel("Dummy", "A hint.", text, view)
    monkeypatch.setitem(explore.PANELS, "dummy", panel)
    found = document.answers("explore", {}, "dummy", None, lambda share: None)
    assert found["explore"]["dummy"] == {"gpus": 16_384}
    assert list(document.lines(found, "dummy")) == ["16384 GPUs", ""]
    page, _ = document.live_page(document.PageStart("explore", {}, ""))
    site = re.search(r'id="site">(.*?)</script>', page, re.S)
    assert site is not None
    assert json.loads(site[1])["panels"]["explore"][-1]["name"] == "dummy"


def test_a_whole_page_carries_everything_and_cannot_be_broken_out_of() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    text = document.offline_page(
        document.PageStart("learn", {}, ""),
        {answer_key("explore", {"model": hostile}): {}},
        hostile,
    )
    assert "alert(1)</script>" not in text
    assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="(?!data:)', text)
    site = re.search(r'id="site">(.*?)</script>', text, re.S)
    assert site is not None and json.loads(site[1])["command"] == hostile
    assert re.findall(r"default-src 'none'", text)


def test_keys_are_those_of_the_browser() -> None:
    """JSON.stringify writes neither spaces nor escapes of letters beyond ASCII."""
    assert answer_key("explore", {"tp": "8", "model": "é"}) == 'explore[["model","é"],["tp","8"]]'
