"""Values of options, checked one by one: the same sentences for a command line and for Python."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from fivefold.core import FivefoldError, UnknownName

if TYPE_CHECKING:
    from fivefold.launch import Backend

Number = TypeVar("Number", int, float)

BACKENDS = ("nccl", "gloo")
# Names of one type of numbers: each is understood where another one is known.
_SAME_TYPE = (
    *({"bf16", "bfloat16"}, {"fp16", "float16"}, {"fp32", "float32"}, {"fp64", "float64"}),
)


def one_of(option: str, given: str, known: Collection[str]) -> str:
    """Check that an option has one of the known values, or another name of one; returns it."""
    if given not in known:
        same = next((names for names in _SAME_TYPE if given in names), set[str]())
        if option == "--dtype" and (matches := [match for match in known if match in same]):
            return matches[0]
        raise UnknownName(option, given, known)
    return given


def asked_backend(given: str | None) -> Backend | None:
    """The value of --backend; None if it was left out."""
    return None if given is None else cast("Backend", one_of("--backend", given, BACKENDS))


def above(option: str, given: Number, low: Number) -> Number:
    """Check that an option is a number above `low`."""
    if not low < given < 1e9:
        raise FivefoldError(f"{option} {given}: give a number above {low} and below 1e9")
    return given


def positive(option: str, given: float) -> float:
    """Check that an option is above 0 and finite."""
    if not 0 < given < 1e30:
        raise FivefoldError(f"{option} {given}: give a number above 0")
    return given


def checkpoint_step(given: str | int | None) -> int | Literal["best"] | None:
    """The checkpoint that an option names."""
    if given is None or given == "best":
        return given
    text = str(given)
    if not text.isdecimal() or len(text) > 9:
        raise FivefoldError(f"--step {given}: give the number of a step, or best")
    return int(text)
