"""Megatron's text of a pipeline, `Et*3|(tt|)*29,m|L`, to layers per stage and back.

Letters: E embedding, t decoder layer, m multi-token-prediction layer, L loss. A bar ends a stage, a
star repeats the letter or the brackets before it, commas have no meaning. The stages are in the
order of the model: with v virtual stages a rank, rank i has stages i, i + p, … .
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fivefold.core import MOST_LAYERS, BadFile

_WORD = re.compile(r"([EtmL|()])|\*(\d{1,9})")


class PipelineText(NamedTuple):
    """What a text says: decoder layers of each stage, and MTP layers of the model."""

    layers: tuple[int, ...]
    mtp: int


def layout_text(layers: Sequence[int], mtp: int = 0) -> str:
    """The text of these stages.

    >>> layout_text((3, 2, 2, 2, 1), mtp=1)
    'Et*3|(t*2|)*3t*1mL'
    """
    last = len(layers) - 1
    tokens = [f"t*{count}" for count in layers]
    tokens[0] = f"E{tokens[0]}"
    tokens[last] += "m" * mtp + "L"
    runs = [(word, len([*same])) for word, same in groupby(tokens[:-1])]
    ended = [f"{word}|" if times == 1 else f"({word}|)*{times}" for word, times in runs]
    return "".join([*ended, tokens[last]])


def parse_layout(text: str) -> PipelineText:
    """Read such a text; every mistake is refused with its rule.

    >>> parse_layout("Et*3|(tt|)*2,m|L").layers
    (3, 2, 2, 0, 0)
    """
    stages = _expanded(_words(text), text).split("|")
    letters = "".join(stages)
    problems = [
        f"{letter} must be there once, at the {position}: put it there"
        for letter, position, in_position in (
            ("E", "beginning", letters.startswith("E")),
            ("L", "end", letters.endswith("L")),
        )
        if letters.count(letter) != 1 or not in_position
    ]
    if "m" in letters and "t" in letters[letters.index("m") :]:
        problems.append("a decoder layer (t) after an MTP layer (m): put MTP layers last")
    if problems:
        raise BadFile(f"pipeline layout {text[:60]!r}", problems)
    return PipelineText(tuple(stage.count("t") for stage in stages), letters.count("m"))


def filled_stages(layers: Sequence[int]) -> tuple[int, ...]:
    """The nearest stages that all have a layer: empty ones get one of an earlier stage.

    >>> filled_stages((3, 2, 2, 0, 0))
    (3, 1, 1, 1, 1)
    """
    counts = list(layers)
    for i, count in enumerate(counts):
        if count:
            continue
        near = sorted(range(len(counts)), key=lambda other: (abs(other - i), other))
        rich = next((other for other in near if counts[other] > 1), None)
        if rich is None:
            rule = f"{sum(layers)} layers for {len(layers)} stages: every stage needs one"
            raise BadFile("the pipeline layout", [rule])
        counts[rich] -= 1
        counts[i] = 1
    return tuple(counts)


def _words(text: str) -> list[str]:
    plain = re.sub(r"[,\s]", "", text)
    tokens: list[str] = []
    at = 0
    while at < len(plain):
        match = _WORD.match(plain, at)
        if match is None or len(tokens) > 4 * MOST_LAYERS:
            rule = f"{plain[at]!r} at {at} is no part of a layout: use E, t, m, L, |, * and ( )"
            raise BadFile(f"pipeline layout {text[:60]!r}", [rule])
        tokens.append(match[1] or match[2])
        at = match.end()
    return tokens


def _expanded(tokens: list[str], text: str) -> str:
    """The letters with all repeats written out, within a limit."""
    open_groups = [""]
    last = ""  # what a star repeats
    problem = ""
    for word in tokens:
        if word == "(":
            open_groups.append("")
            last = ""
        elif word == ")":
            if len(open_groups) == 1:
                problem = "a bracket closes that none opened: take it out"
                break
            last = open_groups.pop()
            open_groups[-1] += last
        elif word.isdecimal():
            if not last or not 1 <= int(word) <= MOST_LAYERS:
                problem = f"*{word}: write it after a letter or brackets, from 1 to {MOST_LAYERS:,}"
                break
            if len(last) * int(word) + len(open_groups[-1]) > 4 * MOST_LAYERS:
                problem = f"more than {MOST_LAYERS:,} layers: write fewer"
                break
            open_groups[-1] += last * (int(word) - 1)
            last = ""
        else:
            open_groups[-1] += word
            last = word
    if not problem and len(open_groups) > 1:
        problem = "a bracket is open at the end: close it"
    if problem:
        raise BadFile(f"pipeline layout {text[:60]!r}", [problem])
    return open_groups[0]
