"""Settings as `key=value`: sorted into those of the plan, of training and of the model.

The keys of a plan file, of its `[train]` table and of a model have the same names on the command
line; an unknown key is an error that suggests the nearest ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from fivefold.core import BadFile, UnknownName, tables
from fivefold.core.layout import parse_zero
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions
from fivefold.core.plan.recipe import Recipe

_TABLES = ("model", "set", "train")  # not keys of their own


class ParsedSettings(NamedTuple):
    """Settings by where their keys belong; those of the model stay texts."""

    plan: dict[str, Any]
    train: dict[str, Any]
    model: dict[str, str]


def plan_keys() -> list[str]:
    """The keys of a plan file outside its tables."""
    return [field.name for field in dataclasses.fields(PlanOptions) if field.name not in _TABLES]


def train_keys() -> list[str]:
    """The keys of `[train]`."""
    return [field.name for field in dataclasses.fields(Recipe)]


def require_key(key: str) -> None:
    """Refuse a key that neither plan, training nor model has, with the nearest that one has."""
    known = [*train_keys(), *plan_keys(), *models.keys()]
    if key not in known:
        raise UnknownName("key", key, known)


def parse_settings(pairs: Mapping[str, str]) -> ParsedSettings:
    """Every setting converted to the type of its key; all problems at once."""
    settings, problems = ParsedSettings({}, {}, {}), list[str]()
    plan, train = tables.types_of(PlanOptions), tables.types_of(Recipe)
    of_model = models.keys()
    for key, text in pairs.items():
        require_key(key)
        if key in of_model:
            settings.model[key] = text
            continue
        into, hint = (settings.train, train[key]) if key in train else (settings.plan, plan[key])
        try:
            into[key] = parse_zero(text) if key == "zero" else tables.from_text(hint, text, key)
        except ValueError as error:
            problems.append(f"{key} = {text!r}: {error}")
    if problems:
        raise BadFile("--set", problems)
    return settings
