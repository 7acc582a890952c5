"""Learn's first panels in a browser: stepping, choosing, and room on a phone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

PANELS = ("landscape", "layer", "collectives")


def open_panel(page: Page, site: str, name: str, **params: str) -> None:
    query = "&".join(f"{key}={value}" for key, value in {"panel": name, **params}.items())
    page.goto(f"{site}#learn?{query}")
    page.wait_for_selector(".says:not(:empty)")


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f"select[name={name}]").select_option(value)


def station(page: Page, name: str) -> str:
    return page.locator(f"[data-station='{name}']").text_content() or ""


@pytest.mark.parametrize("name", PANELS)
def test_arrow_keys_walk_through_every_frame(page: Page, site: str, name: str) -> None:
    open_panel(page, site, name)
    total = int(page.inner_text(".stepper .where").split()[-1])
    page.locator("[aria-label='Step forward']").focus()
    said, heard = [page.inner_text(".says")], {page.text_content(".picture")}
    for _ in range(total - 1):
        page.keyboard.press("ArrowRight")
        said.append(page.inner_text(".says"))
        heard.add(page.text_content(".picture"))
    assert len(set(said)) == total
    assert len(heard) > total / 2
    assert page.inner_text(".stepper .where") == f"{total} of {total}"
    assert f"frame={total - 1}" in page.url
    labels = page.locator(".picture svg").evaluate_all(
        "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert labels and all(labels)


def test_the_layer_shows_conjugates_and_bytes(page: Page, site: str) -> None:
    open_panel(page, site, "layer", frame="3")
    assert "all-gather 8.0 MiB" in station(page, "enter 1")
    choose(page, "sp", "off")
    page.wait_for_selector("[data-station='enter experts']")
    assert "all-reduce 16.0 MiB" in station(page, "leave 1")
    choose(page, "context", "ulysses")
    page.wait_for_selector("[data-station='tokens to heads']")
    assert "context=ulysses" in page.url


def test_an_impossible_choice_is_told(page: Page, site: str) -> None:
    open_panel(page, site, "landscape", dp="1")
    choose(page, "ep", "8")
    page.locator(".problem", has_text="must divide").wait_for()


def test_the_landscape_marks_the_column_in_focus(page: Page, site: str) -> None:
    open_panel(page, site, "landscape", frame="3")
    marked = page.locator("td").evaluate_all(
        "all => all.filter(one => one.style.background).length"
    )
    assert marked == page.locator("tbody tr").count() == 10
    assert "heads of attention 32 → 16" in page.locator(".says").inner_text()


@pytest.mark.parametrize("name", PANELS)
def test_nothing_is_wider_than_a_phone(page: Page, site: str, name: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    open_panel(page, site, name, frame="4", **({"ranks": "8"} if name == "collectives" else {}))
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    beyond = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth).length"
    assert page.locator(".picture svg text").evaluate_all(beyond) == 0
