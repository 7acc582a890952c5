"""Slow ranks, hosts and links: who makes a step longer, and by how much.

Every rank measures how long it waited in collectives, by role. The rest of its step is its own
time. A rank that computes longer than its peers, the ranks of the same stage, makes all others wait
for the difference, so that waits show who is slow by being short.

Of a group, the member that waits least came last: its wait is the time of the link. A message of a
pipeline takes from the moment when both sides were there until it came. A link is slow beside other
groups of its role; where there are none, beside its own best time of this start.

The least time of some steps counts, and only what is slow twice in a row is named: what is always
slow is slow then too, and a pause is not.

One rank compares all of them, from a short row of each: each list is sorted once, since many
thousands of ranks and links are compared with the median of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

LEAST_SHARE = 0.01  # of a step: what costs less is not named
SHOWN_SHARE = 0.03  # what costs more is in the step line
_SLOW_RANK = 1.1  # times its peers
_SLOW_LINK = 1.5  # times other links
_MOST = 4  # named at once, the dearest
_STEPS = 6  # whose waits are in a row
_LISTED = 4  # messages of a pair in a row

Pair = tuple[int, int]  # from one rank to another
Link = tuple[str, tuple[int, ...]]  # role and ranks


@dataclass(frozen=True)
class RankPace:
    """One rank over some steps: its least own time and the median of the step, in seconds; its
    waits in each step by role; of roles that computation waits for, the `least` wait and the number
    of collectives a step by role and kind; and when messages left and came (from when they were
    awaited), by the ranks of a pair, on the clock of the wall. `stage` is its pipeline rank."""

    host: str
    stage: int
    own: float
    step: float
    waited: Mapping[str, Sequence[float]]
    least: Mapping[tuple[str, str], tuple[float, int]] = field(
        default_factory=dict[tuple[str, str], "tuple[float, int]"]
    )
    sends: Mapping[Pair, Sequence[float]] = field(default_factory=dict[Pair, "Sequence[float]"])
    receives: Mapping[Pair, Sequence[tuple[float, float]]] = field(
        default_factory=dict[Pair, "Sequence[tuple[float, float]]"]
    )
    # A step, where not all of them are listed.
    messages: Mapping[Pair, int] = field(default_factory=dict[Pair, int])
    last: int = 0  # the last of these steps

    def to_row(self) -> list[Any]:
        """A row of some hundred characters: waits that tell of links, and the newest messages of
        each pair."""
        steps = max(map(len, self.waited.values()), default=1)
        unused = {"pp", "world", *(role for role, _ in self.least)}
        sends = [
            [*pair, [_short(time) for time in times[-_LISTED:]]]
            for pair, times in self.sends.items()
        ]
        received = [
            [
                *pair,
                -(-len(times) // steps),
                *([_short(time) for time in ends[-_LISTED:]] for ends in zip(*times, strict=True)),
            ]
            for pair, times in self.receives.items()
            if times
        ]
        return [
            self.host,
            self.stage,
            _rounded(self.own),
            _rounded(self.step),
            {
                role: [_rounded(seconds) for seconds in row[-_STEPS:]]
                for role, row in self.waited.items()
                if role not in unused
            },
            [[*what, _rounded(seconds), count] for what, (seconds, count) in self.least.items()],
            sends,
            received,
            self.last,
        ]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> RankPace:
        """The pace of a row."""
        host, stage, own, step, waited, least, sends, receives, last = row
        return cls(
            host,
            stage,
            own,
            step,
            waited,
            {(role, kind): (seconds, count) for role, kind, seconds, count in least},
            {(source, target): times for source, target, times in sends},
            {(row[0], row[1]): list(zip(*row[3:], strict=True)) for row in receives},
            {(row[0], row[1]): row[2] for row in receives},
            last,
        )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _short(wall: float) -> float:
    """A moment of the wall's clock within a day or so, to the microsecond."""
    return round(wall % 100_000, 6)


class Slow(NamedTuple):
    """A rank, host or link that costs a share of each step."""

    what: str  # rank, host or link
    ranks: tuple[int, ...]
    share: float
    text: str

    def to_json(self) -> dict[str, Any]:
        share = round(self.share, 4)
        return {"what": self.what, "ranks": [*self.ranks], "share": share, "words": self.text}


def slow_ones(
    paces: Sequence[RankPace],
    groups: Mapping[str, Sequence[tuple[int, ...]]],
    best: dict[object, float],
) -> list[Slow]:
    """The dearest first. `groups` are those of each role that communicates. `best` remembers the
    best times of this start."""
    step = median(pace.step for pace in paces)
    ranks = list(_ranks(paces, best, step))
    suspects = [*_hosts(paces, ranks), *_links(paces, groups, best, step)]
    named = [suspect for suspect in suspects if suspect.share >= LEAST_SHARE]
    return sorted(named, key=lambda suspect: -suspect.share)[:_MOST]


def _ranks(paces: Sequence[RankPace], best: dict[object, float], step: float) -> Iterator[Slow]:
    stages: dict[int, list[int]] = {}
    for rank, pace in enumerate(paces):
        stages.setdefault(pace.stage, []).append(rank)
    for members in stages.values():
        medians = _medians_of_others([paces[rank].own for rank in members])
        for rank, peers in zip(members, medians, strict=True):
            pace = paces[rank]
            usual = _usual(peers, pace.own, ("rank", rank), best)
            if pace.own > _SLOW_RANK * usual:
                beside = "its peers" if peers is not None else "at its best"
                text = f"rank {rank} on {pace.host} computes {pace.own / usual:.2f} times as long "
                yield Slow("rank", (rank,), (pace.own - usual) / step, f"{text}as {beside}")


def _hosts(paces: Sequence[RankPace], slow: Sequence[Slow]) -> Iterator[Slow]:
    """A host all of whose ranks are slow, in the stead of these ranks."""
    hosts: dict[str, set[int]] = {}
    for rank, pace in enumerate(paces):
        hosts.setdefault(pace.host, set()).add(rank)
    shares, done = {suspect.ranks[0]: suspect.share for suspect in slow}, set[int]()
    for host, members in hosts.items():
        if len(hosts) > 1 and len(members) > 1 and members <= shares.keys():
            text = f"all {len(members)} ranks of {host} compute longer than their peers"
            most = max(shares[rank] for rank in members)
            yield Slow("host", tuple(sorted(members)), most, text)
            done |= members
    yield from (suspect for suspect in slow if suspect.ranks[0] not in done)


def _links(
    paces: Sequence[RankPace],
    groups: Mapping[str, Sequence[tuple[int, ...]]],
    best: dict[object, float],
    step: float,
) -> Iterator[Slow]:
    times: dict[Link, float] = {}
    for role, of_role in groups.items():
        for group in of_role:
            times[role, group] = _group_seconds([paces[rank] for rank in group], role)
    weight = dict.fromkeys(times, 1)
    stages: dict[Link, int | None] = {link: paces[link[1][0]].stage for link in times}
    for pair, seconds, number in _messages(paces):
        times["pp", pair], weight["pp", pair] = seconds, number
        stages["pp", pair] = None  # messages of all stages have one size
    kinds: dict[tuple[str, int | None], list[Link]] = {}
    for link in times:
        kinds.setdefault((link[0], stages[link]), []).append(link)
    for links in kinds.values():
        medians = _medians_of_others([times[link] for link in links])
        for (role, group), peers in zip(links, medians, strict=True):
            seconds = times[role, group]
            usual = _usual(peers, seconds, (role, group), best)
            if usual > 0 and seconds > _SLOW_LINK * usual:
                share = (seconds - usual) * weight[role, group] / step
                route = " to ".join(map(str, group)) if role == "pp" else _named(group)
                beside = "others of its kind" if peers is not None else "at its best"
                yield Slow(
                    *("link", group, share),
                    f"the {role} link of ranks {route} takes {seconds / usual:.2f} times as long "
                    f"as {beside}",
                )


def _group_seconds(members: Sequence[RankPace], role: str) -> float:
    """Seconds of a group's link in a step. If computation waits for every collective, the shortest
    wait of all is the link's. If it overlaps them, the sum over a step counts, which is of those
    that nothing hides."""
    kinds = {what for member in members for what in member.least if what[0] == role}
    if kinds:
        records = [[member.least.get(what, (0.0, 0)) for member in members] for what in kinds]
        return sum(min(record)[0] * max(number for _, number in record) for record in records)
    waits = [member.waited.get(role, ()) for member in members]
    return min((min(row) for row in zip(*waits, strict=False)), default=0.0)


def _messages(paces: Sequence[RankPace]) -> Iterator[tuple[Pair, float, int]]:
    """For each direction of a pair: seconds of its fastest message, and how many a step has.

    A message that nobody waited for was there for some time, so the fastest one counts.
    """
    for pace in paces:
        for pair, came in pace.receives.items():
            sender = paces[pair[0]]
            sent = sender.sends.get(pair, ()) if sender.last == pace.last else ()
            pairs = list(zip(sent, came, strict=False))
            if pairs:
                took = [end - max(begun, posted) for begun, (posted, end) in pairs]
                steps = max(map(len, pace.waited.values()), default=1)
                count = pace.messages.get(pair, -(-len(pairs) // steps))
                yield pair, max(0.0, min(took)), count


def _usual(peers: float | None, seconds: float, key: object, best: dict[object, float]) -> float:
    """What is usual: the median of others, or the best of its own."""
    if peers is not None:
        return peers
    best[key] = min(seconds, best.get(key, seconds))
    return best[key]


def _medians_of_others(values: Sequence[float]) -> list[float | None]:
    """For each value the median of all others; None without others.

    >>> _medians_of_others([1.0, 5.0, 2.0, 9.0])
    [5.0, 2.0, 5.0, 2.0]
    """
    order, count = sorted(range(len(values)), key=values.__getitem__), len(values) - 1
    if count < 1:
        return [None] * len(values)
    medians: list[float | None] = [None] * len(values)
    middle = (count // 2, count // 2 - 1 + count % 2)
    for at, index in enumerate(order):
        # The others in order are those before this one and those after it.
        low, high = (values[order[number + (number >= at)]] for number in middle)
        medians[index] = (low + high) / 2
    return medians


def _named(group: Sequence[int]) -> str:
    if len(group) > 4:
        return f"{group[0]} to {group[-1]} ({len(group)})"
    return ", ".join(map(str, group))
