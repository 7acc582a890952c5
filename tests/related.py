"""The cases that `make test` runs: those that a change touches first, then a sample of all.

`tests/data/coverage_map.json.xz` says which functions each case ran, in how many seconds, on one
commit. Cases are related to a change if they run a function or open a file that differs from this
commit, or if their own text does. They take turns: the function with the fewest seconds of cases
so far comes next, and the one with fewer cases first, since they are the more special. What differs
from the last commit but one comes before anything else, with `LAST` seconds of its own, and then
gets `RECENT` times as many as what changed before it. Their sum stays below `RELATED` seconds. The
others fill up to `SECONDS`, drawn by the salt.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path

from tests.changes import MODULES, Changes, Name, Repository, mentioning
from tests.coverage_map import MAP, CoverageMap, read
from tests.selection import salted_share, shuffled

PACKAGES = MODULES[:-1]
# Seconds of two cores, as the map has them: 10 minutes less setup, imports and uneven halves, on
# cores that take 1.5 times as long as those on which the map was recorded.
SECONDS = 430.0
RELATED = 280.0
# Of these, for the last change: whatever short tests and older changes take, its cases run.
LAST = 0.3
# Seconds: what takes n times as long is drawn n times as rarely. Tests without a mark run always.
LONG, LONG_UNMARKED, SHORT = 0.5, 4.0, 0.1
RECENT = 10.0
MOST_CHANGED = 0.4  # of the functions of the map: beyond it, everything has changed
UNKNOWN = 0.1  # seconds of a case in a folder that the map does not have


@dataclass(frozen=True)
class Case:
    """An item; `number` is that of its mark `sample`, and None without one."""

    name: str
    number: float | None = None

    @property
    def test(self) -> str:
        return self.name.partition("[")[0]


@dataclass(frozen=True)
class Choice:
    """Which cases run, and why."""

    cases: frozenset[str]
    num_changed: int
    num_related: int
    num_related_run: int
    seconds: float
    note: str = ""  # why the map says nothing of the change

    def __str__(self) -> str:
        if self.note:
            return f"{self.note}; a sample of {self.seconds:,.0f} s by the map"
        related = f"{self.num_related:,} cases related to {self.num_changed:,} changes"
        return f"{related}, {self.num_related_run:,} of them run; {self.seconds:,.0f} s by the map"


class Related:
    """The map, beside the cases that pytest has collected."""

    def __init__(self, coverage: CoverageMap, cases: Sequence[Case]) -> None:
        self.coverage = coverage
        self.cases = {case.name: case for case in cases}
        self._paid: set[str] = set()
        self.chosen: set[str] = set()
        self.spent = 0.0

    def fresh(self) -> Related:
        """The same map and cases, with nothing chosen."""
        _ = self.by_test, self._means, self._shared_by  # made once for all
        related = copy(self)
        related._paid, related.chosen, related.spent = set(), set(), 0.0
        return related

    @cached_property
    def by_test(self) -> dict[str, list[str]]:
        tests: dict[str, list[str]] = defaultdict(list)
        for case in self.cases.values():
            tests[case.test].append(case.name)
        return tests

    @cached_property
    def _draws(self) -> dict[str, float]:
        return {name: salted_share(name) for name in self.cases}

    @cached_property
    def _shared_by(self) -> dict[str, list[str]]:
        """The fixtures and caches that an item uses."""
        shared: dict[str, list[str]] = defaultdict(list)
        for name, runs in self.coverage.uses.items():
            for item in self.coverage.items(runs):
                shared[item].append(name)
        return shared

    @cached_property
    def _means(self) -> dict[str, float]:
        """Mean seconds of tests, files and folders, for cases that the map does not have."""
        long: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self.coverage.seconds.items():
            for group in _groups(name):
                long[group].append(seconds)
        return {name: sum(values) / len(values) for name, values in long.items()}

    def seconds(self, name: str) -> float:
        if name in self.coverage.seconds:
            return self.coverage.seconds[name]
        return next((self._means[g] for g in _groups(name) if g in self._means), UNKNOWN)

    def cost(self, name: str) -> float:
        """Its seconds, and those of fixtures that no case before it has paid for."""
        new = [shared for shared in self._shared_by.get(name, ()) if shared not in self._paid]
        return self.seconds(name) + sum(self.coverage.shared[shared] for shared in new)

    def running(self, function: str) -> list[str]:
        """The collected cases that run a function; of a test whose cases are new, all of them."""
        recorded = set(self.coverage.items(self.coverage.functions.get(function, [])))
        tests = {name.partition("[")[0] for name in recorded}
        return [
            name
            for test in tests
            for name in self.by_test.get(test, ())
            if name in recorded or name not in self.coverage.seconds
        ]

    def targets(self, changes: Changes, tests: Iterable[Name]) -> dict[str, list[str]]:
        """The cases of each change; `tests` are test functions whose own text has changed."""
        targets = {function: self.running(function) for function in changes.functions}
        targets |= {test: self.by_test.get(test, []) for test in map(item_of, tests)}
        return {target: cases for target, cases in targets.items() if cases}

    def run(self, name: str, limit: float = inf) -> None:
        """Choose a case, if its seconds are left."""
        if name not in self.chosen and self.spent + (cost := self.cost(name)) <= limit:
            self.chosen.add(name)
            self.spent += cost
            self._paid.update(self._shared_by.get(name, ()))

    def run_short(self) -> None:
        """Tests without a mark run always, where they are short."""
        for name, case in self.cases.items():
            if case.number is None and self.seconds(name) <= LONG_UNMARKED:
                self.run(name)

    def run_related(
        self, targets: Mapping[str, Collection[str]], recent: Collection[str], limit: float
    ) -> None:
        """Related cases, in turns of their targets."""
        turns = {target: self._in_turns(cases) for target, cases in targets.items()}
        queue = [(0.0, len(targets[target]), target) for target in sorted(turns)]
        heapq.heapify(queue)
        while queue and self.spent < limit:
            spent, number, target = heapq.heappop(queue)
            name = next(turns[target], None)
            if name is not None:
                self.run(name, limit)
                cost = self.seconds(name)
                spent += cost / RECENT if target in recent else cost
                heapq.heappush(queue, (spent, number, target))

    def _in_turns(self, names: Iterable[str]) -> Iterator[str]:
        """One case of each test before the second of any, in the order of the salt; what takes four
        times as long comes half as soon."""
        tests: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=self._draws.__getitem__):
            tests[name.partition("[")[0]].append(name)
        due = {
            name: (turn + self._draws[name]) * max(self.seconds(name), SHORT) ** 0.5
            for cases in tests.values()
            for turn, name in enumerate(cases)
        }
        return iter(sorted(due, key=lambda name: due[name]))

    def run_sample(self, limit: float) -> None:
        """Of the others as many as their mark says, long ones more rarely."""
        due: list[tuple[float, str]] = []
        for test, names in self.by_test.items():
            number = self.cases[names[0]].number
            for position, name in enumerate(shuffled(names)):
                if number is None:
                    share = self._draws[name] * self.seconds(name) / LONG_UNMARKED
                elif number:
                    rarely = max(self.seconds(name) / LONG, 1.0) / number
                    share = (position + salted_share(test)) * rarely
                else:
                    share = 1.0
                due.append((share, name))
        for _, name in sorted(pair for pair in due if pair[0] < 1):
            self.run(name, limit)


def _groups(name: str) -> tuple[str, str, str]:
    """The test of a case, its file and its folder."""
    test = name.partition("[")[0]
    file = test.partition("::")[0]
    return test, file, file.rpartition("/")[0]


def item_of(name: Name) -> str:
    path, function = name
    return f"{path}::{function.replace('.', '::')}"


def choose(
    cases: Sequence[Case],
    coverage: CoverageMap,
    changes: Changes,
    tests: Iterable[Name] = (),
    recent: Collection[str] = (),
    limits: tuple[float, float] = (RELATED, SECONDS),
) -> Choice:
    """The cases that run after these changes; `recent` are functions and names of tests."""
    of_related, of_all = limits
    related = Related(coverage, cases)
    targets = related.targets(changes, tests)
    names = {name for names in targets.values() for name in names}
    last = {target: targets[target] for target in targets.keys() & set(recent)}
    related.run_related(last, recent, LAST * of_related)
    of_related -= related.spent
    related.run_short()
    related.run_related(targets, recent, min(of_all, related.spent + of_related))
    num_run = len(names & related.chosen)
    related.run_sample(of_all)
    return Choice(frozenset(related.chosen), len(targets), len(names), num_run, related.spent)


def changes_since(repository: Repository) -> tuple[Changes, set[Name]]:
    """Changed functions, also through constants and classes, and changed tests."""
    changes = repository.changed(PACKAGES)
    # A method that a class gains hides another's, and who constructs the class calls it.
    methods = {(path, name.rpartition(".")[0]) for path, name in changes.added if "." in name}
    mentions = mentioning(
        changes.names | methods, repository.files(PACKAGES), through_functions=False
    )
    named = {f"{changes.old_paths.get(path, path)}:{name}" for path, name in mentions}
    changes.functions |= named | repository.changed_data()
    own = repository.changed(["tests"])
    functions = {(path, name) for path, name in map(_of_path, own.functions)}
    files = repository.files(["tests"])
    # Who mentions a new name of a helper has changed too.
    return changes, own.added | mentioning(own.names | functions, files, through_functions=True)


def _of_path(function: str) -> Name:
    path, _, name = function.partition(":")
    return path, name


def chosen(cases: Sequence[Case], root: Path, path: Path = MAP) -> Choice | str:
    """The choice for the working tree: a sample by seconds where the map does not know what has
    changed, and a sentence where there is no map."""
    if not path.exists():
        return "no map from functions to cases: `make test-map` records one"
    coverage = read(path)
    repository = Repository(root, coverage.base)
    if not repository.has_base():
        note = f"no commit {coverage.base[:12]}, which the map of cases is of"
        return replace(choose(cases, coverage, Changes()), note=note)
    changes, tests = changes_since(repository)
    num_changed = len(changes.functions & coverage.functions.keys())
    if num_changed > MOST_CHANGED * len(coverage.functions):
        past = f"{num_changed:,} of {len(coverage.functions):,} functions differ"
        note = f"{past} from {coverage.base[:12]}: `make test-map` records a new map"
        return replace(choose(cases, coverage, Changes()), note=note)
    recent: set[str] = set()
    before_last = Repository(root, "HEAD~1")
    if before_last.has_base():
        last_changes, last_tests = changes_since(before_last)
        recent = {*last_changes.functions, *map(item_of, last_tests)}
    return choose(cases, coverage, changes, tests, recent)
