"""What a target cannot express, and the nearest plan that it can: one loss after another.

Each loss has candidates, which must be legal plans. With a price the fastest that fits is taken,
without one the first: they are listed nearest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from fivefold.bridges.job_values import Values, settled, usual_values
from fivefold.bridges.key_table import Key, KeyChoice, allowed, ours_of
from fivefold.bridges.target import Target
from fivefold.core import PRECISIONS, FivefoldError
from fivefold.core.model import REMADE, SELECTIVE, Shape, StageRecompute
from fivefold.core.schedule import family


class Priced(NamedTuple):
    """The estimate of a plan: seconds of a step, and GiB of the fullest rank and of its GPU."""

    step: float
    gib: float
    limit: float
    verdict: str

    @property
    def too_large(self) -> bool:
        return self.verdict == "does not fit"

    def __str__(self) -> str:
        return f"{self.gib:.1f} of {self.limit:.1f} GiB: {self.verdict}"


Price = Callable[[Values], Priced | None]
_MOST_CHUNKS_TRIED = 8
_MOST_RULES = 3  # of what is impossible together, one after another
_MOST_PRICED = 12  # candidates, the nearest
# Said by every program itself: which data, what it saves and what it logs.
_OF_PROGRAMS = (
    *("eval_every", "data", "loss", "save_every", "keep", "sample_every", "skip_limit"),
    *("log", "events", "compare_every", "replay", "spike_bound", "hang_after"),
)
_TOGETHER = {"lora": ("lora_alpha", "lora_targets"), "eval_every": ("eval_data", "keep_best")}
_RECOMPUTED = ("none", "norm", "act", "selective", "mlp", "experts", "attention", "full")


@dataclass(frozen=True)
class Loss:
    """One thing that a target cannot express: what the plan has, what it gets instead, the share by
    which a step gets slower and its memory after the change; None if these were not estimated."""

    key: str
    was: str
    replacement: str
    slower: float | None = None
    left: bool = False  # to the user's program: nothing is lost, and nothing priced
    after: Priced | None = None
    together: bool = False  # the target has it, but not beside other values of the plan

    @property
    def name(self) -> str:
        """What the plan has, in the field's words."""
        return self.was if self.key == "schedule" else _assigned(self.key, self.was)

    def text(self, title: str) -> str:
        if self.left:
            key = _assigned(self.key, self.was)
            return f"{key} is said in your own program, not in a file of {title}"
        beside = " beside other values of this plan" if self.together else ""
        text = f"{title} has no {self.name}{beside}: {self.replacement}"
        if self.slower is None or self.after is None:
            return text
        direction = "slower" if self.slower > 0 else "faster"
        speed = "as fast" if abs(self.slower) < 0.0005 else f"{abs(self.slower):.1%} {direction}"
        return f"{text}, {speed}, {self.after}"


class Expressed(NamedTuple):
    """The nearest plan that a target can express, and how it differs."""

    values: Values
    losses: tuple[Loss, ...]


class _NearestPlan:
    """The plan as it is turned into what the target can express."""

    def __init__(
        self, target: Target, values: Values, model: tuple[str, dict[str, str], Shape], price: Price
    ) -> None:
        self.target, self.values, self.price = target, values, price
        self.name, self.changes, self.shape = model
        self.losses: list[Loss] = []
        self.priced = price(values)

    def legal(self, changes: Values, any_batch: bool = False) -> Values | None:
        """The plan with changes, the same sequences a step, and what follows from them; or a batch
        of one microbatch a data rank."""
        values = {**self.values, **changes}
        if values["microbatches"] is not None:
            before = self.values["replicate"] * self.values["shard"] * self.values["microbatches"]
            dp = values["replicate"] * values["shard"]
            if before % dp and not any_batch:
                return None
            values["microbatches"] = max(1, before // dp)
        return settled(values, self.name, self.changes)

    def _possible(self, values: Values) -> bool:
        return next(self.target.impossible(values, self.shape), None) is None

    def _legal_at_all(self, listed: list[Values], most: int) -> list[tuple[Values, Values]]:
        """Candidates of which something else must change as well."""
        all_legal = ((changes, self.legal(changes)) for changes in listed)
        return list(
            islice(((changes, values) for changes, values in all_legal if values is not None), most)
        )

    def take(
        self,
        key: str,
        was: Any,
        candidates: Iterable[Values],
        *,
        left: bool = False,
        together: bool = False,
    ) -> None:
        """Replace the plan by the best candidate."""
        listed = list(candidates)
        most = 1 if left or self.priced is None else _MOST_PRICED
        all_legal = (
            (changes, values) for changes in listed if (values := self.legal(changes)) is not None
        )
        possible = ((changes, values) for changes, values in all_legal if self._possible(values))
        legal = list(islice(possible, most)) or self._legal_at_all(listed, most)
        for candidate in [] if legal else listed:
            if (values := self.legal(candidate, any_batch=True)) is not None:
                legal.append(({**candidate, "microbatches": values["microbatches"]}, values))
        if not legal:
            raise FivefoldError(
                f"{self.target.title} has no {_assigned(key, was)}, and nothing near it is a legal "
                "plan: choose another layout or target"
            )
        if left or len(legal) == 1:
            changes, values = legal[0]
            after = None if left else self.price(values)
        else:
            priced = [(self.price(values), changes, values) for changes, values in legal]
            after, changes, values = min(priced, key=lambda entry: _by_price(entry[0]))
        loss = Loss(key, str(was), _shown(changes), left=left, together=together)
        if after is not None and self.priced is not None:
            loss = replace(loss, slower=after.step / self.priced.step - 1, after=after)
        self.losses.append(loss)
        self.values = values
        self.priced = after or self.priced


def _by_price(priced: Priced | None) -> tuple[int, float]:
    """What fits first, the fastest of it first; of what does not, the smallest."""
    if priced is None:
        return 3, 0.0
    if priced.too_large:
        return 2, priced.gib
    return int(priced.verdict != "fits"), priced.step


def express(
    target: Target, values: Values, model: tuple[str, dict[str, str], Shape], price: Price
) -> Expressed:
    """The nearest plan to these values (of `values_of`) that the target can express."""
    search = _NearestPlan(target, values, model, price)
    # Degrees that the target has not: their ranks go to other axes.
    for axis in ("pp", "cp", "etp", "ep", "replicate", "tp"):
        degree = search.values[axis]
        if degree == 1 or axis in search.target.axes:
            continue
        search.take(axis, degree, _moved(search, axis, degree))
    _schedule(search)
    for item in target.table:
        _item(search, item)
    for _ in range(_MOST_RULES):
        for key, was, candidates in target.impossible(search.values, search.shape):
            search.take(key, was, candidates, together=True)
            break
    _others(search)
    return Expressed(search.values, tuple(search.losses))


def _shown(changes: Values) -> str:
    """Changes in words."""
    if changes.get("chunks"):
        interleaved = changes["chunks"] > 1
        chunks = f" with {changes['chunks']} virtual stages a rank" if interleaved else ""
        return f"{changes['schedule']}{chunks}"
    texts = [_assigned(name, value) for name, value in changes.items() if value is not None]
    return " ".join(texts) or "it decides itself"


def _assigned(key: str, value: Any) -> str:
    """A key with its value. Elsewhere selective recomputation is that of core attention, which has
    no key here: kernels of attention save no scores."""
    word = str(value)
    if key == "recompute":
        word = word.replace(SELECTIVE, "+".join(REMADE))
    return f"{key}={word}"


def _moved(search: _NearestPlan, axis: str, degree: int) -> Iterator[Values]:
    values, axes = search.values, search.target.axes
    if axis == "etp":
        yield {"etp": 1, "ep": values["ep"] * degree}
        yield {"etp": 1}
        yield {"etp": 1, "sp": True}
        yield {"etp": 1, "ep": 1}
        return
    if axis == "ep":
        yield {"ep": 1}
        return
    gone: Values = {axis: 1}
    if axis == "pp":
        gone |= {"schedule": "1f1b", "chunks": None, "stage_layers": None}
    targets = ("shard",) if axis == "replicate" else ("shard", "cp", "tp", "pp")
    for other in targets:
        if other == axis or (other != "shard" and other not in axes):
            continue
        for stage in dict.fromkeys((values["zero"], 3)):
            sharding = {"zero": stage} if stage != values["zero"] or axis != "pp" else {}
            changed = {**gone, **sharding, other: values[other] * degree}
            yield {**changed, "gather": None} if sharding else changed


def _schedule(search: _NearestPlan) -> None:
    """Another schedule with any number of chunks, its stages cut anew."""
    values, known = search.values, search.target.schedules
    if values["pp"] == 1 or values["schedule"] in known:
        return

    def candidates() -> Iterator[Values]:
        for name in known:
            domain = family(name)
            most = domain.max_chunks or _MOST_CHUNKS_TRIED
            for chunks in range(domain.min_chunks, 1 + min(most, _MOST_CHUNKS_TRIED)):
                yield {"schedule": name, "chunks": chunks, "stage_layers": None}

    def distance(candidate: Values) -> tuple[bool, int]:
        return candidate["chunks"] != values["chunks"], candidate["chunks"]

    search.take("schedule", values["schedule"], sorted(candidates(), key=distance))


def _item(search: _NearestPlan, item: Key | KeyChoice) -> None:
    """A value that the table does not list."""
    listed = allowed(item, search.shape.moe is not None)
    if listed is None:
        return
    ours: tuple[str, ...] = item.ours if isinstance(item, KeyChoice) else (item.ours,)
    first = ours[0]
    values = search.target.outgoing(search.values, search.shape)
    was = item.value(values) if isinstance(item, KeyChoice) else values[item.ours]
    if was is None or was in listed or any(name not in search.values for name in ours):
        return
    near = sorted(listed, key=lambda value: _distance(first, was, value))
    pairs = [
        item.as_values(value) if isinstance(item, KeyChoice) else {first: value} for value in near
    ]
    if ours == ("number",):
        gone = dict.fromkeys(("fp8_wgrad", "fp8_skip", "fp8_matmul"))
        pairs = [pair if "fp8" in pair["number"] else {**pair, **gone} for pair in pairs]
    shown = was
    if len(ours) > 1:
        pairs_left = zip(ours[1:], was[1:], strict=True)
        shown = " ".join([str(was[0]), *(f"{name}={value}" for name, value in pairs_left if value)])
    search.take(next(iter(ours)), shown, pairs)


def _distance(key: str, was: Any, value: Any) -> float:
    """How far a value is from the wanted one."""
    if key == "zero":
        return abs(was[0] - value[0]) + 4 * (was[0] > value[0])  # more memory is farther away
    if key == "recompute":
        return abs(_amount(was) - _amount(value)) + 0.01 * len(str(value))
    if key == "number":
        same = str(was).split()[0] == str(value).split()[0]
        return 0 if same else 1 + abs(_bytes(was) - _bytes(value))
    return 0


def _amount(rule: str) -> float:
    """How much is recomputed, by the modules of the rule that has most."""
    rules = StageRecompute.parse(rule).rules
    most = max(rules, key=lambda rule: (rule.full, len(rule.modules)))
    if most.full:
        return len(_RECOMPUTED) + most.blocks / 100
    return sum(1.0 + 0.1 * _RECOMPUTED.index(module) for module in most.modules)


def _bytes(number: str) -> float:
    return PRECISIONS[number.split()[0]].itemsize


def _others(search: _NearestPlan) -> None:
    """Keys without a place in the table, or that the user's program says."""
    target = search.target
    has = {*ours_of(target.table), *target.axes, *target.covers, "schedule"}
    usual = usual_values() | dict(target.always)
    left = (*target.left, *_OF_PROGRAMS)
    for key in [key for key in search.values if key not in has and key not in left]:
        if search.values[key] != usual[key]:
            _drop(search, key, search.values[key], usual)
    for key in left:
        if (was := search.values[key]) != usual[key]:
            search.take(key, was, [_together(key, usual)], left=True)


def _together(key: str, usual: Values) -> Values:
    """A key and those that mean nothing without it, with their usual values."""
    return {name: usual[name] for name in (key, *_TOGETHER.get(key, ()))}


def _drop(search: _NearestPlan, key: str, was: Any, usual: Values) -> None:
    changes = _together(key, usual)
    again = search.legal(changes)
    if again is not None and again[key] == was:
        search.values = again  # it is what the plan gets anyway
        return
    candidates = [changes]
    if key == "sp":  # experts across tp need it
        tp = {"tp": 1, "etp": 1, "shard": search.values["shard"] * search.values["tp"]}
        candidates += [{**changes, "ep": 1, "etp": 1}, {**changes, **tp}]
    if key == "context":  # heads may be too few for it
        values, alone = search.values, {**changes, "cp": 1}
        candidates += [{**alone, axis: values[axis] * values["cp"]} for axis in ("shard", "tp")]
    search.take(key, was, candidates)
