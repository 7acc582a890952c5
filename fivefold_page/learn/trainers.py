"""Learn: what other trainers can run, dimension by dimension, with the sources and their dates.

    view(params) -> {"choices", "trainers", "rows", "frames", "sentences"}

The tables are data, `presets/frameworks.toml`; docs/compared.md has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fivefold.core import PRESETS, tables
from fivefold.report import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines

TITLE = "fivefold beside other trainers"
OWN, ALL = "fivefold", "all five"
_FILE = PRESETS / "frameworks.toml"


@dataclass(frozen=True)
class Trainer:
    """A trainer, and what was read of it."""

    name: str
    repository: str
    commit: str
    files: str
    date: str

    @property
    def source(self) -> str:
        """As a line of a table."""
        return f"`{self.repository}` {self.commit}, {self.files}"


@cache
def trainers() -> dict[str, Trainer]:
    """By the key of their columns."""
    found: dict[str, Any] = tables.read_toml(_FILE)["trainers"]
    return {key: tables.build(Trainer, one, f"trainer {key}") for key, one in found.items()}


@cache
def rows() -> tuple[Mapping[str, str], ...]:
    """Each with its name, what it asks, and a cell for fivefold and for every trainer."""
    found: list[dict[str, str]] = tables.read_toml(_FILE)["rows"]
    wanted = {"name", "asks", OWN, *trainers()}
    assert all(row.keys() == wanted for row in found), f"a row of {_FILE.name} lacks a cell"
    return tuple(found)


CHOICES: Mapping[str, Choice] = {
    "beside": Choice("Beside", (ALL, *(one.name for one in trainers().values())), ALL),
}


def view(params: Params) -> View:
    """The table of one trainer or of all, and where each was read."""
    choices = chosen(CHOICES, params)
    shown = {k: one for k, one in trainers().items() if choices["beside"] in (ALL, one.name)}
    return {
        "choices": choices,
        "trainers": [
            {"name": one.name, "source": one.source.replace("`", ""), "date": one.date}
            for one in shown.values()
        ],
        "rows": [
            {"name": row["name"], "asks": row["asks"], "cells": [row[k] for k in (OWN, *shown)]}
            for row in rows()
        ],
        "frames": [{"says": _words(row, shown)} for row in rows()],
        "sentences": [
            "A dash: the files that were read do not mention it. All of them change, so look again "
            "before you decide.",
            "fivefold has run on one H200 and on ranks that share it: its times on many GPUs are "
            "estimates. Megatron-LM, DeepSpeed and TorchTitan have run on hundreds to thousands.",
        ],
    }


def _words(row: Mapping[str, str], shown: Mapping[str, Trainer]) -> str:
    cells = ((OWN, row[OWN]), *((one.name, row[key]) for key, one in shown.items()))
    said = "; ".join(f"{name}: {'not mentioned' if text == '–' else text}" for name, text in cells)
    return f"{row['asks']}. {said.replace('; not with', ', not with')}."


def text(view: View) -> list[str]:
    """The same for a terminal: a row of trainers for each row of the table."""
    names, lines = [OWN, *(one["name"] for one in view["trainers"])], list[str]()
    width = max(map(len, names)) + 2
    for row in view["rows"]:
        lines += [f"{row['name']}: {row['asks'][0].lower()}{row['asks'][1:]}"]
        for name, cell in zip(names, row["cells"], strict=True):
            lines += wrapped(cell, f"  {name:<{width}}")
    lines += ["", "Read at:"]
    for one in view["trainers"]:
        lines += wrapped(f"{one['source']}, {one['date']}", f"  {one['name']:<{width}}")
    return [*lines, "", *sentence_lines(view)]
