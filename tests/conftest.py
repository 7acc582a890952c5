"""What all tests share: which of them run, warnings as errors, the size of each package."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.house import FILES
from tests.related import Case, Choice, chosen
from tests.selection import ALL_CASES, SALT, all_cases, num_drawn, salt, seed, shuffled

# Before torch is loaded: on ARM, matmuls keep the number of threads that the first of them had,
# whatever torch is told later. A rank that is forked after it would wait for those threads forever.
os.environ["OMP_NUM_THREADS"] = "1"
# Trainings measure the CPU once: into a cache of the tests, not into the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / "build" / "cache")

LONGEST = "test_readme.py"
OF_RANKS = 0.15  # of the cases that tests with ranks ask for: `make test` stays below 10 minutes
ROOT = Path(__file__).parent.parent
RELATED = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """All test workers take the cases of one salt, even where a commit comes in between.

    Hypothesis draws by it too, so that two runs of one commit see the same examples.
    """
    os.environ[SALT] = salt()
    # Clocks would judge what else runs on the machine.
    slow = [HealthCheck.too_slow]
    settings.register_profile("fivefold", deadline=None, suppress_health_check=slow)
    settings.load_profile("fivefold")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seed())


def pytest_report_header(config: pytest.Config) -> str:
    return which_cases()


def which_cases() -> str:
    cases = "all cases" if all_cases() else f"some cases ({ALL_CASES}=1 runs all)"
    return f"{cases}, drawn by {SALT}={salt()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Our own code may not warn. Each torch on each Python has warnings of its own.

    The longest file comes first, so that no test worker waits for it in the end. Its name before
    the others on the command line no longer does that: pytest 9 drops what a folder has too.
    """
    items.sort(key=lambda item: item.path.name != LONGEST)
    for item in items:
        if "pure" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("error"))
    left_out = set(not_now(items, choice(config, items)))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def choice(config: pytest.Config, items: list[pytest.Item]) -> Choice | None:
    """What the change asks for; nothing where all cases run, or a test is named."""
    if all_cases() or any("::" in word for word in config.args):
        return None
    marks = ((item, item.get_closest_marker("sample")) for item in items)
    cases = [
        Case(item.nodeid, mark.args[0] if mark else None)
        for item, mark in marks
        if not item.get_closest_marker("nightly")
    ]
    found = chosen(cases, ROOT)
    config.stash[RELATED] = str(found)
    return found if isinstance(found, Choice) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The test workers know which cases are related; their parent prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["related"] = session.config.stash.get(RELATED, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    output = getattr(node, "workeroutput", {})
    if output.get("related"):
        node.config.stash[RELATED] = output["related"]


def not_now(items: list[pytest.Item], choice: Choice | None) -> Iterator[pytest.Item]:
    """What this run leaves out: nightly tests, and all but a sample of the cases of a test.

    `sample(number)` takes all cases in `make nightly`; with `table=True` a sample there too, since
    a table of `make verify-all` has them all. A number below 1 is a share of commits: those take
    one case, the others none. Without a choice by the change, tests that start ranks take
    `OF_RANKS` of their number.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sample = item.get_closest_marker("sample")
        if item.get_closest_marker("nightly") and not all_cases():
            yield item
        elif choice is not None:
            if item.nodeid not in choice.cases:
                yield item
        elif sample is not None and (sample.kwargs.get("table") or not all_cases()):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        sample = cases[0].get_closest_marker("sample")
        assert sample is not None
        by_name = {item.nodeid: item for item in cases}
        test = cases[0].nodeid.partition("[")[0]
        starts_ranks = cases[0].path.parent.name in ("ranks", "judge")
        taken = num_drawn(test, sample.args[0] * (OF_RANKS if starts_ranks else 1))
        yield from (by_name[name] for name in shuffled(by_name)[taken:])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end: nobody looks for garbage among them."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print files, lines and the largest file of each package, so that growth is seen.

    And the salt again, which the head of a quiet report leaves out.
    """
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for path in FILES:
        name = path.relative_to(ROOT)
        package = "/".join(name.parts[: min(2, len(name.parts) - 1)])
        sizes[package][str(name)] = len(path.read_text("utf-8").splitlines())
    everything = {
        name: lines for of_package in sizes.values() for name, lines in of_package.items()
    }
    terminalreporter.write_line(f"{'package':<12} {'files':>5} {'lines':>7}  largest file")
    for package, lines in [*sizes.items(), ("all", everything)]:
        largest = max(lines, key=lambda name: lines[name])
        terminalreporter.write_line(
            f"{package:<12} {len(lines):>5} {sum(lines.values()):>7,}  {largest} ({lines[largest]})"
        )
    terminalreporter.write_line(which_cases())
    if related := terminalreporter.config.stash.get(RELATED, ""):
        reports = chain.from_iterable(terminalreporter.stats.values())
        seconds = sum(getattr(report, "duration", 0.0) for report in reports)
        terminalreporter.write_line(f"{related}; all cases took {seconds:,.0f} s")
