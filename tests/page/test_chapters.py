"""The path of Learn in a browser: chapters, the way on, words, commands, and contrast."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from fivefold_page.document import LESSONS
from fivefold_page.learn import chapters
from fivefold_page.learn.chapters import CHAPTERS, plain
from fivefold_page.learn.glossary import GLOSSARY
from tests.page.contrast import contrasts, faint
from tests.page.ink import ink

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIP = ".tip"
# Choices that draw what the defaults do not.
VARIANTS = (
    "panel=collectives&collective=all-to-all&ranks=8&frame=3",
    "panel=data&zero=1&microbatches=3&frame=9",
    "panel=tensor&part=attention&tp=4&frame=6",
    "panel=pipeline&schedules=all&frame=9",
    "panel=context&kind=ulysses&window=8&frame=2",
    "panel=expert&skew=heavy&capacity=capacity:1&nodes=2&frame=4",
    "panel=expert&skew=heavy&capacity=capacity:1&nodes=2&frame=5",
    "panel=landscape&model=deepseek-v3&frame=6",
    "panel=layer&sp=off&frame=12",
    "panel=compare&gpus=8&frame=6",
    "panel=device&model=deepseek-v3&frame=4",
)


def opened(page: Page, site: str, query: str) -> None:
    page.goto("about:blank")
    page.goto(f"{site}#learn?{query}")
    page.wait_for_selector(".says:not(:empty)")


def chapter(page: Page, name: str) -> None:
    page.wait_for_selector(f".chapter[data-chapter={name}] .says:not(:empty)")


def test_every_chapter_shows_what_python_says(page: Page, reader: Page, site: str) -> None:
    for name, one in CHAPTERS.items():
        opened(page, site, f"chapter={name}")
        view = chapters.view(name)
        assert page.inner_text(".chapter > h2") == one.question
        said = page.inner_text(".prose").replace("\n\n", "\n").split("\n")
        assert said == [plain(each) for each in view["paragraphs"]]
        assert plain(view["analogy"]) in page.inner_text(".kitchen")
        assert page.locator(".command code").all_inner_texts() == list(one.commands)
        assert page.locator(f"#panel-{one.panel}").count() == 1
        for choice, value in one.start.items():
            assert page.locator(f".choices select[name={choice}]").input_value() == value
        pictures = ink(page, reader)
        assert pictures or one.panel in ("compare", "trainers")
        assert not [each for each in pictures if each.is_blank], name


def test_a_panel_by_its_own_name_is_in_its_chapter(page: Page, site: str) -> None:
    for panel in LESSONS:
        page.goto(f"{site}#learn?panel={panel}&frame=1")
        chapter(page, chapters.chapter_of(panel) or "")
        assert "frame=1" in page.url
        chosen = {name: one.default for name, one in LESSONS[panel].CHOICES.items()}
        for choice, value in chosen.items():
            assert page.locator(f".choices select[name={choice}]").input_value() == value


def test_the_path_from_first_to_last_by_keyboard_and_back(page: Page, site: str) -> None:
    page.goto(f"{site}#learn")
    names = list(CHAPTERS)
    chapter(page, names[0])
    for before, name in pairwise(names):
        assert f"chapter={before}" in page.url
        page.locator(".ways .next").focus()
        page.keyboard.press("Enter")
        chapter(page, name)
        assert page.evaluate("document.activeElement.tagName") == "H2"
        assert page.evaluate("scrollY") == 0
        here = page.locator(".lessons [aria-current]")
        assert here.inner_text().endswith(CHAPTERS[name].question)
    assert f"Chapter {len(names)} of {len(names)}" in page.inner_text(".progress")
    page.go_back()
    chapter(page, names[-2])
    page.locator(".ways .prev").click()
    chapter(page, names[-3])
    page.locator(".lessons a").first.click()
    chapter(page, names[0])
    assert page.locator(".ways .prev").count() == 0


def test_a_choice_stays_in_the_address_of_its_chapter(page: Page, site: str) -> None:
    opened(page, site, "chapter=tensor")
    page.select_option("#panel-tensor select[name=tp]", "4")
    page.wait_for_function("() => location.hash.includes('tp=4')")
    assert "chapter=tensor" in page.url and "sp=off" in page.url
    page.reload()
    chapter(page, "tensor")
    assert page.locator("select[name=tp]").input_value() == "4"
    assert page.locator("select[name=sp]").input_value() == "off"


def test_words_explain_themselves_on_hover_focus_and_tap(page: Page, site: str) -> None:
    opened(page, site, "chapter=zero")
    word = page.locator(".term[data-term='flat unit']")
    assert word.count() == 1 and page.locator(TIP).count() == 0
    word.hover()
    assert GLOSSARY["flat unit"] in page.inner_text(TIP)
    page.mouse.move(5, 500)
    page.locator(TIP).wait_for(state="detached")
    word.focus()
    assert GLOSSARY["flat unit"] in page.inner_text(TIP)
    described = word.get_attribute("aria-describedby")
    assert described and page.locator(f"#{described}").get_attribute("role") == "tooltip"
    page.keyboard.press("Escape")
    assert page.locator(TIP).count() == 0
    page.keyboard.press("Enter")
    assert page.locator(TIP).count() == 1
    page.keyboard.press("Tab")
    page.wait_for_timeout(50)
    assert "flat unit" not in "".join(page.locator(TIP).all_inner_texts())
    page.locator(".words summary").click()
    assert page.locator(".words dt").count() == len(GLOSSARY)


def test_words_can_be_tapped_on_a_phone(browser: Browser, site: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    page = context.new_page()
    opened(page, site, "chapter=context")
    for word in page.locator(".prose .term").all()[:6]:
        word.tap()
        box = page.locator(TIP).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
        page.locator(".progress").tap()
        page.locator(TIP).wait_for(state="detached")
    assert page.locator(".lessons ol").is_hidden()
    page.locator(".lessons summary").tap()
    page.locator(".lessons a", has_text="experts").tap()
    chapter(page, "expert")
    assert page.locator(".lessons ol").is_hidden()
    context.close()


def test_a_command_is_copied(browser: Browser, site: str) -> None:
    for allowed, says in ((["clipboard-read", "clipboard-write"], "copied"), ([], "press Ctrl-C")):
        context = browser.new_context(permissions=allowed)
        page = context.new_page()
        if not allowed:
            page.add_init_script("delete Navigator.prototype.clipboard")
        opened(page, site, "chapter=pipeline")
        page.locator(".command button").nth(1).click()
        page.locator(".command button", has_text=says).wait_for()
        command = CHAPTERS["pipeline"].commands[1]
        if allowed:
            assert page.evaluate("navigator.clipboard.readText()") == command
        else:
            assert page.evaluate("String(getSelection())") == command
        context.close()


def test_unknown_chapters_and_panels_begin_at_the_beginning(page: Page, site: str) -> None:
    for query in ("chapter=nothing", "panel=nothing", "chapter=constructor", "panel=__proto__"):
        opened(page, site, query)
        chapter(page, next(iter(CHAPTERS)))


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_text_of_a_chapter_has_contrast(
    page: Page, reader: Page, site: str, name: str
) -> None:
    for width, frame, theme in ((1280, 3, "light"), (1280, 3, "dark"), (390, 99, "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=theme)
        opened(page, site, f"chapter={name}&frame={frame}")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, theme)
        assert not faint(page, reader), (width, theme)


@pytest.mark.parametrize("query", VARIANTS)
def test_every_text_of_other_choices_has_contrast(
    page: Page, reader: Page, site: str, query: str
) -> None:
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        opened(page, site, query)
        page.locator(".prose .term").first.focus()  # its definition is a text too
        page.locator(".words summary").click()
        page.wait_for_timeout(200)
        assert not faint(page, reader), theme


def test_faint_texts_are_found(page: Page, reader: Page, site: str) -> None:
    """The measure itself: known contrasts, on paper and on a picture."""
    opened(page, site, "chapter=context&frame=2")
    page.emulate_media(color_scheme="light")
    page.evaluate(
        """() => {
          const add = (style, text) => {
            const node = document.querySelector(".prose").appendChild(document.createElement("p"));
            node.setAttribute("style", style);
            node.textContent = text;
          };
          add("color:#777;background:#fff", "grey on white");
          add("color:#fff;background:#009e73", "white on green");
          add("color:#000;opacity:0.3;background:#fff", "thin on white");
          add("color:#000;background:#fff", "black on white");
        }"""
    )
    found = {one.text: one.ratio for one in contrasts(page, reader)}
    assert found["grey on white"] == pytest.approx(4.48, abs=0.02)
    assert found["white on green"] == pytest.approx(3.42, abs=0.02)
    assert found["thin on white"] < 2.5
    assert found["black on white"] == 21
    page.add_style_tag(content="#panel-context .ring text { fill: #fff !important }")
    assert any(one.where == "ring" for one in faint(page, reader))
