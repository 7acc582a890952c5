"""Other jobs in a real browser: the planner's best, no dead end or stale answer, sharing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from tests.page.conftest import LONG_MS
from tests.page.test_explore import SMALL, after, painted, param, show

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

NOTICE = ".notice:not([hidden])"
FIRST_ROW = "#panel-ranking tbody tr:nth-child(1)"
PHONE = {"width": 390, "height": 844}
# Everything that is touched: what is smaller than 24 pixels, unless a label around it is not.
SMALL_TARGETS = """() => {
  const touched = "button, a[href], summary, select, textarea, input, [role=tab], [role=button]";
  const tall = (node) => node.getBoundingClientRect();
  return [...document.querySelectorAll(touched)].filter((node) => {
    if (!node.checkVisibility() || node.matches(".skip")) return false;
    const { width, height } = tall(node);
    return width < 24 || height < 24;
  }).map((node) => [node.outerHTML.slice(0, 90), tall(node).width, tall(node).height]);
}"""


def fill(page: Page, key: str, value: str) -> None:
    page.locator(f"input[name={key}]").fill(value)
    page.locator(f"input[name={key}]").press("Enter")


def loaded(page: Page, words: str) -> str:
    """Wait until the notice has these words, and all of it."""
    notice = page.locator(NOTICE, has_text=words)
    notice.wait_for(timeout=LONG_MS)
    return notice.inner_text()


def verdict(page: Page) -> str | None:
    return page.locator(".tile[data-verdict]").get_attribute("data-verdict")


def test_another_job_loads_the_planners_best_and_says_so(page: Page, site: str) -> None:
    show(page, site, {})
    changes = [("model", "gpt2"), ("gpus", "96"), ("batch", "960")]
    for key, value in changes:
        fill(page, key, value)
        page.locator(NOTICE, has_text="The planner searches").wait_for()
        said = loaded(page, "is loaded")
        assert "The planner's best for gpt2" in said
        assert param(page, key) == value
        assert verdict(page) == "fits"
        assert page.locator(".refusal").is_hidden()
    assert "96 GPUs of h100" in said and param(page, "seq") == "1024"
    page.locator("select[name=machine]").select_option("a100")
    assert "96 GPUs of a100" in loaded(page, "of a100 is loaded")
    # The ranking is that of this job, without another search, and marks what is shown.
    page.locator(f"{FIRST_ROW}[data-here]").wait_for(timeout=LONG_MS)
    number = painted(page)
    page.locator("select[name=zero]").select_option(index=2)  # a layout of one's own
    after(page, number)
    assert page.locator(NOTICE).count() == 0


def test_what_fits_nowhere_leads_to_where_it_fits(page: Page, site: str) -> None:
    show(page, site, {})
    fill(page, "gpus", "1")
    said = loaded(page, "Nothing fits")
    assert "it takes 128 GPUs" in said and "The leanest layout is shown" in said
    assert verdict(page) == "does not fit"
    page.get_by_role("button", name="128 GPUs", exact=True).click()
    assert "on 128 GPUs" in loaded(page, "is loaded")
    assert verdict(page) == "fits"
    assert param(page, "gpus") == "128"


def test_the_next_model_brings_its_own_job(page: Page, site: str) -> None:
    show(page, site, {"model": "gpt2", "gpus": "2048"})
    loaded(page, "gpt2 on 2,048 GPUs")
    fill(page, "model", "deepseek-v3")
    loaded(page, "deepseek-v3 on 2,048 GPUs")
    assert (param(page, "seq"), param(page, "batch")) == ("8192", "512")
    fill(page, "seq", "4096")
    fill(page, "model", "llama-3.1-70b")
    loaded(page, "llama-3.1-70b on 2,048 GPUs")
    assert param(page, "seq") == "4096"


def test_an_unknown_model_shows_no_answer_of_another(page: Page, site: str) -> None:
    show(page, site, SMALL)
    fill(page, "model", "nothing-7b")
    page.locator(".refusal", has_text="unknown model").wait_for()
    assert page.locator(".tile[data-verdict]").is_hidden()
    page.get_by_role("button", name="back to llama-7b").click()
    page.locator(".tile[data-verdict]").wait_for()
    assert page.locator(".refusal").is_hidden()


def test_no_layout_at_all_leads_on(page: Page, site: str) -> None:
    show(page, site, {"model": "tiny", "gpus": "101", "batch": "1", "seq": "64"})
    assert "no legal layout" in loaded(page, "Nothing fits")
    page.get_by_role("button", name="64 GPUs", exact=True).click()
    assert "on 64 GPUs" in loaded(page, "is loaded")
    assert page.locator(".refusal").is_hidden() and verdict(page) == "fits"


def test_an_address_that_names_only_a_job_loads_its_best(page: Page, site: str) -> None:
    show(page, site, {"model": "llama-7b", "gpus": "16"})
    assert "llama-7b on 16 GPUs" in loaded(page, "is loaded")
    assert verdict(page) == "fits"


def test_the_ranking_never_shows_another_job(page: Page, site: str) -> None:
    """An answer that comes late, for a job that was left, is dropped."""
    from playwright.sync_api import Error

    held: list[Route] = []

    def hold(route: Route) -> None:
        if not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/ask/ranking", hold)
    show(page, site, SMALL)  # its ranking is held
    page.locator("#panel-ranking").scroll_into_view_if_needed()
    page.wait_for_function("() => !document.querySelector('#panel-ranking .waits').hidden")
    page.wait_for_timeout(600)
    assert held
    fill(page, "gpus", "8")
    assert page.locator("#panel-ranking tbody tr").count() == 0
    loaded(page, "on 8 GPUs of h100 is loaded")
    page.locator(f"{FIRST_ROW}[data-here]").wait_for(timeout=LONG_MS)
    rows = page.locator("#panel-ranking tbody").inner_text()
    late: dict[str, Any] = {"layouts": [], "refused": "another job", "notes": [], "job": {}}
    with suppress(Error):  # a request that the page has dropped may be gone
        held[0].fulfill(json=late)
    page.wait_for_timeout(300)
    assert page.locator("#panel-ranking tbody").inner_text() == rows


def test_the_command_is_shared(page: Page, site: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(page, site, SMALL)
    page.get_by_role("button", name="Copy command line").click()
    page.get_by_text("The command is copied").wait_for()
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[:3] == ["fivefold", "plan", "llama-7b"]
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *words[1:]], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert page.locator("#panel-numbers .tile b").nth(1).inner_text() in done.stdout
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("The address is copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    assert urlencode(SMALL).split("&")[0] in page.url


@pytest.mark.parametrize("width", [1440, 390])
def test_what_is_touched_is_large_enough(page: Page, site: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    show(page, site, SMALL)
    page.wait_for_selector(FIRST_ROW, timeout=LONG_MS)
    assert page.evaluate(SMALL_TARGETS) == []


def test_answers_are_above_the_fold_of_a_phone(page: Page, site: str) -> None:
    page.set_viewport_size(PHONE)
    show(page, site, {})
    for name in (
        ".tile[data-verdict]",
        ".tile:nth-child(5)",
        "input[name=model]",
        "input[name=gpus]",
    ):
        box = page.locator(name).bounding_box()
        assert box is not None and box["y"] + box["height"] <= PHONE["height"], name
