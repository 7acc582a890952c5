"""A plugin of pytest that records which functions each test item runs.

    FIVEFOLD_COVERAGE=FOLDER python -m pytest -p tests.coverage_recorder ...

writes a file for each process into the folder: test workers, and what they spawn; forks write into
the file of their parent. `python -m tests.coverage_map merge FOLDER` makes a map of them.
FIVEFOLD_COVERAGE_RECORDED=MAP leaves out the items that this map has, and
FIVEFOLD_COVERAGE_CASES=4 takes four cases of each test: the others count as running the same.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.coverage_map import read
from tests.coverage_trace import FOLDER, ROOT, begin, clear_caches, watch_caches
from tests.selection import shuffled

RECORDED, MOST_CASES = "FIVEFOLD_COVERAGE_RECORDED", "FIVEFOLD_COVERAGE_CASES"
# Python runs `sitecustomize` first, also in processes that a test spawns and in test workers.
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tests.coverage_trace", {path!r})
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.begin()
"""


def _spawned_too(folder: Path) -> None:
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    source = SITE.format(path=str(ROOT / "tests" / "coverage_trace.py"))
    (site / f"{os.getpid()}.tmp").write_text(source, "utf-8")
    (site / f"{os.getpid()}.tmp").replace(site / "sitecustomize.py")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(site) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), *paths]))


class Recorder:
    """Contexts of the items, fixtures and modules of one test worker."""

    def __init__(self) -> None:
        self.trace = begin()
        self.failed = False
        if self.trace is not None:
            watch_caches(self.trace)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, object, object]:
        """What a file of tests runs when it is imported counts for all its items."""
        if self.trace is None or not isinstance(collector, pytest.Module):
            return (yield)
        with self.trace.within(_module(collector.path)):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self.trace is None:
            return (yield)
        clear_caches()
        self.failed = False
        self.trace.enter(f"item {item.nodeid}")
        self.trace.link(_module(item.path))
        for name in _shared_fixtures(item):
            self.trace.link(name)
        result = yield  # an item that is interrupted counts as not recorded
        self.trace.leave()
        if self.failed:
            self.trace.write("failed", self.trace.define(f"item {item.nodeid}"))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """A fixture of a module or session runs in its first item, and counts for all of them."""
        if self.trace is None or fixturedef.scope == "function":
            return (yield)
        with self.trace.within(_fixture(fixturedef)):
            return (yield)


def _module(path: Path) -> str:
    return f"module {os.path.relpath(path, ROOT)}"


def _fixture(fixture: pytest.FixtureDef[object]) -> str:
    return f"fixture {fixture.baseid}:{fixture.argname}"


def _shared_fixtures(item: pytest.Item) -> list[str]:
    info = getattr(item, "_fixtureinfo", None)  # tests of other kinds have none
    defined = info.name2fixturedefs.values() if info is not None else ()
    return [_fixture(last) for *_, last in defined if last.scope != "function"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a map has already, and more cases of a test than so many."""
    recorded = read(Path(path)).seconds.keys() if (path := os.environ.get(RECORDED)) else set()
    most = int(os.environ.get(MOST_CASES, len(items)))
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    by_name = {item.nodeid: item for item in items}
    drawn = [
        name for cases in tests.values() for name in shuffled(case.nodeid for case in cases)[:most]
    ]
    chosen = {by_name[name] for name in drawn if name not in recorded}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(FOLDER):
        _spawned_too(Path(folder))
        config.pluginmanager.register(Recorder(), "fivefold-coverage")
