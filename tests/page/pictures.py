"""Take the pictures of the page that README and docs show: `make page-pictures`."""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.page.conftest import BROWSERS, missing, serve

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SEARCH_MS = 60_000  # the planner's
# Address, size, and what must be there first.
SHOTS = {
    "explore.png": ("explore", (1280, 1310), ".panel-ranking table"),
    "learn.png": ("learn?panel=pipeline&frame=4", (1100, 860), ".picture svg"),
}


def main() -> None:
    """Every picture anew."""
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    path = next(filter(None, map(shutil.which, BROWSERS)))
    server, address = serve()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for name, (place, (width, height), ready) in SHOTS.items():
                page = browser.new_page(viewport={"width": width, "height": height})
                page.goto(f"{address}#{place}")
                page.locator(ready).first.wait_for(timeout=SEARCH_MS)
                page.screenshot(path=FOLDER / name)
                print(FOLDER / name)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
