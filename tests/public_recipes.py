"""Public recipes of other frameworks, planned: `python -m tests.public_recipes` writes the table of
docs/public-recipes.md.

`data/public_recipes.toml` has the keys of each recipe that a plan depends on. They are written as a
file of its framework, and read as `fivefold plan FILE` reads one.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.bridges.bridging import TARGETS, ForeignPlan, read_foreign
from fivefold.bridges.formats import nested_of, yaml_text
from fivefold.bridges.megatron import words_of
from fivefold.commands.compare_frameworks import stack_names
from fivefold.commands.search import estimate_given, estimate_options
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import PlanOptions
from fivefold.core.tables import to_toml
from fivefold.render import duration

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "public-recipes.md"
_DATA = ROOT / "tests" / "data" / "public_recipes.toml"
_GIB = 2**30
_MOST_WORDS = 160
_TOO_LARGE = "does not fit"
_REFUSED = "no converter"
# Keys that save memory, or states, and are not planned.
_SAVERS = ("optimizer", "tiled_mlp", "activation_offloading", "fp8-param-gather")


@dataclass(frozen=True)
class PublicRecipe:
    """A recipe: where it is from, for how many GPUs of which machine (`said_by`), and its keys."""

    target: str
    repository: str
    path: str
    commit: str
    date: str
    machine: str
    said_by: str
    keys: Mapping[str, Any]
    gpus: int | None = None
    model: str | None = None
    seq: int | None = None

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix

    def text(self) -> str:
        """The keys as a file of the framework."""
        keys = dict(self.keys)
        if self.suffix == ".toml":
            return to_toml(nested_of(keys))
        if self.suffix == ".json":
            return json.dumps(nested_of(keys))
        if self.suffix == ".yaml":
            return yaml_text(nested_of(keys))
        return " ".join(["pretrain_gpt.py", *words_of(keys)])

    def read(self) -> ForeignPlan:
        """As `fivefold plan FILE` reads it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"recipe{self.suffix}"
            path.write_text(self.text(), "utf-8")
            try:
                return read_foreign(path, self.gpus, self.model)
            except FivefoldError as error:  # without the folder, which is another one each time
                raise FivefoldError(str(error).replace(f"cannot use {path}:\n  - ", "")) from error


def recipes() -> tuple[PublicRecipe, ...]:
    """All of them."""
    found: list[dict[str, Any]] = tomllib.loads(_DATA.read_text("utf-8"))["recipes"]
    return tuple(PublicRecipe(**one) for one in found)


class Planned(NamedTuple):
    """A recipe on its machine: the cells of its row."""

    layout: str
    legal: str
    fits: str
    step: str
    remark: str
    gpus: int | None = None

    @property
    def runs(self) -> bool:
        """Whether nothing speaks against it; a step is there if it fits."""
        return self.step != "–" and "cannot start" not in self.remark


def planned(recipe: PublicRecipe) -> Planned:
    """Read, resolved and estimated, priced as its framework's stack where one is known."""
    try:
        found = recipe.read()
    except FivefoldError as error:
        return Planned("–", "no", "–", "–", _short(str(error)))
    options: PlanOptions = replace(found.options, machine=recipe.machine)
    if recipe.seq is not None:
        options = replace(options, seq=recipe.seq)
    how = estimate_options(0.05, "compiled", None, stack_names().get(recipe.target))
    layout = f"{options.layout}, {options.precision}"
    try:
        plan, estimate = estimate_given(options, how, None)
    except FivefoldError as error:
        return Planned(layout, "no", "–", "–", _short(str(error)))
    layout = f"{plan.layout}, ZeRO-{plan.layout.zero}, {plan.precision}, recompute {plan.recompute}"
    memory = f"{estimate.total / _GIB:,.0f} of {estimate.setting.machine.memory / _GIB:,.0f} GiB"
    fits = f"{estimate.verdict}: {memory}"
    step = duration(estimate.step) if estimate.verdict != _TOO_LARGE else "–"
    remarks = [f"cannot start: {note}" for note in found.notes if _REFUSED in note]
    if estimate.verdict == _TOO_LARGE:
        name, most = max(estimate.memory.items(), key=lambda pair: pair[1])
        remarks.append(f"most of it {name}, {most / _GIB:,.0f} GiB")
    unknown = [each.removesuffix(" = ") for each in found.unknown if each.startswith(_SAVERS)]
    unknown += [note.split(":")[0] for note in found.notes if note.endswith("not known here")]
    if unknown:
        remarks.append(f"not planned: {', '.join(unknown)}")
    return Planned(layout, "yes", fits, step, _short("; ".join(remarks)), plan.layout.world)


def _short(text: str) -> str:
    """One line of a table."""
    line = " ".join(text.replace("|", "/").split())
    line = line.split(" nearest legal layouts:")[0]
    return line if len(line) <= _MOST_WORDS else line[: _MOST_WORDS - 1].rsplit(" ", 1)[0] + " …"


def row(recipe: PublicRecipe) -> str:
    """A line of the table."""
    one = planned(recipe)
    gpus = one.gpus or recipe.gpus
    count = "" if gpus is None else f"{gpus:,} "
    title = TARGETS[recipe.target].title
    cells = [f"`{recipe.path}`", title, f"{count}{recipe.machine} ({recipe.said_by})", *one[:-1]]
    return f"| {' | '.join(cells)} |"


def stopped() -> str:
    """Those that cannot run as they are, in words."""
    found = [(each, planned(each)) for each in recipes()]
    lines = [
        f"- `{Path(each.path).name}` ({TARGETS[each.target].title}): "
        + "; ".join(word for word in (one.fits, one.remark) if not word.startswith(("fits", "–")))
        for each, one in found
        if not one.runs
    ]
    head = f"{len(found) - len(lines)} of {len(found)} are legal and fit. The others, as written:"
    return "\n".join([head, "", *lines])


def table() -> str:
    """One line for each recipe."""
    head = ["recipe", "framework", "GPUs", "plan", "legal", "memory", "step", "remark"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(row(each) for each in recipes())])


def sources() -> str:
    """Where they were read."""
    found = dict.fromkeys((one.repository, one.commit, one.date) for one in recipes())
    return "\n".join(f"- `{name}` at {commit} ({date})" for name, commit, date in found)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    start, end = "<!-- made by tests/public_recipes.py -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    made = f"{sources()}\n\n{table()}\n\n{stopped()}\n"
    PAGE.write_text(before + start + made + end + after, "utf-8")
