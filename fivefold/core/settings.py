"""Settings as `key=value`: each goes to whoever knows its key, the plan, the training or the model.

The keys of a plan file and of its `[train]` table, and those of a model, are spelled alike on the
command line; a key that nobody knows is an error with the nearest ones.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from fivefold.core import models, tables
from fivefold.core.errors import BadFile, UnknownName
from fivefold.core.layout import parse_zero
from fivefold.core.plan import Wishes
from fivefold.core.recipe import Recipe

_TABLES = ("model", "set", "train")  # said otherwise


class ParsedSettings(NamedTuple):
    """Settings by who knows their keys; those of the model stay texts."""

    plan: dict[str, Any]
    train: dict[str, Any]
    model: dict[str, str]


def plan_keys() -> list[str]:
    """The keys of a plan file outside of its tables."""
    return [each.name for each in dataclasses.fields(Wishes) if each.name not in _TABLES]


def train_keys() -> list[str]:
    """The keys of `[train]`."""
    return [each.name for each in dataclasses.fields(Recipe)]


def sort_out(pairs: Mapping[str, str]) -> ParsedSettings:
    """Every setting in the type of its key; all problems at once."""
    said, problems = ParsedSettings({}, {}, {}), list[str]()
    plan, train = typing.get_type_hints(Wishes), typing.get_type_hints(Recipe)
    of_model = models.keys()
    for key, text in pairs.items():
        if key in train:
            into, hint = said.train, train[key]
        elif key in plan_keys():
            into, hint = said.plan, plan[key]
        elif key in of_model:
            said.model[key] = text
            continue
        else:
            known = [*train, *plan_keys(), *of_model]
            raise UnknownName("key", key, known)
        try:
            into[key] = parse_zero(text) if key == "zero" else tables.from_text(hint, text)
        except ValueError as error:
            problems.append(f"{key} = {text!r}: {error}")
    if problems:
        raise BadFile("--set", problems)
    return said
