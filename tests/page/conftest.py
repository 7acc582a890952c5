"""A real browser at a real server; without either every test here is skipped, and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HERE = Path(__file__).parent
# Waits grow with the load of the machine: other work on two cores would fail healthy tests.
BUSY = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
WAIT_MS, LONG_MS = 30_000 * BUSY, 120_000 * BUSY  # an answer; a search of the planner
LOCAL = ("http://127.0.0.1:", "data:", "blob:", "file:")


def missing() -> str | None:
    """What is not installed."""
    if find_spec("playwright") is None:
        return "no playwright: run make test-page, which installs it"
    if find_spec("starlette") is None or find_spec("plotly") is None:
        return "the extra `page` is not installed: run make test-page"
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser: install one of {', '.join(BROWSERS)}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a browser where there is none."""
    if (reason := missing()) is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


def serve(*words: str) -> tuple[subprocess.Popen[str], str]:
    """A server of its own, and its address."""
    command = [sys.executable, "-m", "fivefold", "observe", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "http://" in line:
            return process, "http://" + line.split("http://")[1].split()[0]
    raise AssertionError(f"no server: it ended with {process.wait()}")


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """A live server without a run."""
    process, address = serve()
    yield address
    process.terminate()
    assert process.wait(10) == 0


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=5_000 * BUSY)
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def reader(browser: Browser) -> Iterator[Page]:
    """An empty page that reads screenshots."""
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails its test on a console error, or on a request to anywhere else."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    found, wrong = context.new_page(), list[str]()
    found.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda request: _require_local(request, wrong))
    yield found
    context.close()
    # A refused question is an answer here, which the browser reports as a failed resource.
    assert not [one for one in wrong if "422" not in one]


def _require_local(request: Any, wrong: list[str]) -> None:
    if not request.url.startswith(LOCAL):
        wrong.append(f"a request left this machine: {request.url}")
