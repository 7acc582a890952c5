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
from fivefold.render import wrapped
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
    entries: dict[str, Any] = tables.read_toml(_FILE)["trainers"]
    return {key: tables.build(Trainer, entry, f"trainer {key}") for key, entry in entries.items()}


@cache
def rows() -> tuple[Mapping[str, str], ...]:
    """Each with its name, what it asks, and a cell for fivefold and for every trainer."""
    entries: list[dict[str, str]] = tables.read_toml(_FILE)["rows"]
    columns = {"name", "asks", OWN, *trainers()}
    assert all(row.keys() == columns for row in entries), f"a row of {_FILE.name} lacks a cell"
    return tuple(entries)


CHOICES: Mapping[str, Choice] = {
    "beside": Choice("Beside", (ALL, *(trainer.name for trainer in trainers().values())), ALL),
}


def view(params: Params) -> View:
    """The table of one trainer or of all, and where each was read."""
    choices = chosen(CHOICES, params)
    shown = {
        k: trainer for k, trainer in trainers().items() if choices["beside"] in (ALL, trainer.name)
    }
    return {
        "choices": choices,
        "trainers": [
            {"name": trainer.name, "source": trainer.source.replace("`", ""), "date": trainer.date}
            for trainer in shown.values()
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
    cells = ((OWN, row[OWN]), *((trainer.name, row[key]) for key, trainer in shown.items()))
    answers = "; ".join(
        f"{name}: {'not mentioned' if text == '–' else text}" for name, text in cells
    )
    return f"{row['asks']}. {answers.replace('; not with', ', not with')}."


def text(view: View) -> list[str]:
    """The same for a terminal: a row of trainers for each row of the table."""
    names, lines = [OWN, *(entry["name"] for entry in view["trainers"])], list[str]()
    width = max(map(len, names)) + 2
    for row in view["rows"]:
        lines += [f"{row['name']}: {row['asks'][0].lower()}{row['asks'][1:]}"]
        for name, cell in zip(names, row["cells"], strict=True):
            lines += wrapped(cell, f"  {name:<{width}}")
    lines += ["", "Read at:"]
    for trainer in view["trainers"]:
        lines += wrapped(f"{trainer['source']}, {trainer['date']}", f"  {trainer['name']:<{width}}")
    return [*lines, "", *sentence_lines(view)]
