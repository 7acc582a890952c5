"""No serious issue of accessibility: axe-core looks at every tab, in light and dark.

axe-core is no part of the repository: `make test-page` fetches it into build/, where npm is
installed; without it these tests are skipped.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.conftest import LONG_MS
from tests.page.contrast import faint

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE = Path(__file__).parents[2] / "build" / "axe.min.js"
SERIOUS = ("serious", "critical")
SMALL = "explore?model=llama-7b&gpus=16&tp=2&pp=2&batch=64&schedule=1f1b&zero=1"
PLACES = {
    SMALL: "#panel-curves figure:nth-of-type(2) .scatterlayer",
    "explore?model=llama-3.1-405b&gpus=8": ".notice .ways",
}
LOOK = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.map(({ id, impact, nodes }) =>
    ({ id, impact, where: nodes.slice(0, 5).map(({ target }) => target.join(" ")) }));
}"""
pytestmark = pytest.mark.skipif(
    not AXE.exists(), reason="no build/axe.min.js: make test-page fetches it with npm"
)


@pytest.mark.parametrize(
    ("place", "width", "theme"), [*product(PLACES, (1440, 390), ("light", "dark"))]
)
def test_explore_has_no_serious_issue(
    page: Page, reader: Page, site: str, place: str, width: int, theme: Any
) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=theme)
    page.add_init_script(path=AXE)
    page.goto(f"{site}#{place}")
    page.locator(PLACES[place]).first.wait_for(timeout=LONG_MS)
    found = [one for one in page.evaluate(LOOK) if one["impact"] in SERIOUS]
    assert not found
    assert not faint(page, reader)


def test_an_issue_is_found(page: Page, site: str) -> None:
    """The look itself: a button without a name, and pale letters."""
    page.add_init_script(path=AXE)
    page.goto(f"{site}#{SMALL}")
    page.wait_for_selector("html[data-painted]")
    page.evaluate(
        """() => document.querySelector("main").insertAdjacentHTML("beforeend",
          "<button></button><p style='color: #999; background: #fff'>pale</p>")"""
    )
    assert {"button-name", "color-contrast"} <= {one["id"] for one in page.evaluate(LOOK)}
