"""Find the rank that keeps the GPUs of the others waiting, from torch's record of NCCL's calls.

The hosts issue collectives ahead of their GPUs. When GPUs wait for one another, all hosts may have
issued the same. torch records what each rank has issued over NCCL, and how far its GPU has come. A
group runs its calls one after the other, so its head is the first one that is not finished. A GPU
waits at the head of a group

- for a rank that has not issued the call, and
- for a rank that has issued it, and whose GPU is still at an earlier head of another group.

The first head of a rank cannot be held by another one, because a call only waits for what was
issued before it. Later heads may be held, so for them only the first kind counts. With
`TORCH_NCCL_ENABLE_TIMING=1` torch also records which calls a GPU has begun; then only those count.

The waits lead to a rank that waits for no other, or to a circle, or all ranks of a call are in it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, NamedTuple

from fivefold.launch.watch.hang import first_circle, named_call
from fivefold.launch.watch.positions import (
    CommGroup,
    HangVerdict,
    LoggedCollective,
    Position,
    ranks,
    stands_at,
    who_waits,
)

_COMPLETED, _STARTED = "completed", "started"
_MESSAGES = ("send", "recv")
_UNREADABLE = "torch's record cannot be read: it is stopped, or a thread of it is blocked in CUDA"
_BYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
}

Queue = tuple[CommGroup, bool]
"""A group, and whether its messages are meant: torch numbers them and its collectives apart."""


class DeviceCall(NamedTuple):
    """A collective, send or receive that a rank has issued and its GPU has not finished."""

    call: LoggedCollective
    number: int  # by torch, since its group was made
    is_message: bool = False
    started: bool = False  # False also where torch does not record it

    @property
    def queue(self) -> Queue:
        """Queue of the call: its group, and whether it is a message."""
        return self.call.group, self.is_message

    def __str__(self) -> str:
        return named_call(self.call, self.number)


@dataclass(frozen=True)
class DeviceProgress:
    """Progress of a GPU through NCCL calls."""

    heads: Sequence[DeviceCall]  # of every queue the first unfinished call, in the order of issue
    issued: Mapping[Queue, int]  # the last number that its host has issued
    lost: bool = False  # torch has dropped its oldest records

    def has_issued(self, call: DeviceCall) -> bool:
        """Whether its host has issued a call of another rank, within the recorded history."""
        last = self.issued.get(call.queue)
        return self.lost if last is None else last >= call.number

    def is_before(self, call: DeviceCall) -> bool:
        """Whether its GPU has not reached a call that another GPU runs."""
        own_head = next((head for head in self.heads if head.queue == call.queue), None)
        if own_head is None or own_head.number > call.number or own_head.started:
            return False
        return own_head is not self.heads[0] or call.started

    @property
    def current(self) -> Sequence[DeviceCall]:
        """Calls that the GPU may be running."""
        return [head for head in self.heads if head.started] or self.heads


class DeviceWait(NamedTuple):
    """A call in which a GPU waits for another rank, and whether that rank has issued it."""

    call: DeviceCall
    issued: bool


Waits = dict[int, dict[int, DeviceWait]]
Devices = Mapping[int, DeviceProgress | None]
"""By rank; None where the record cannot be read."""


def on_device(positions: Mapping[int, Position], devices: Devices) -> HangVerdict | None:
    """Rank that blocks the GPUs of others, or None if no GPU waits."""
    waits = _waits(devices)
    awaited = {other for targets in waits.values() for other in targets}

    def innocence(rank: int) -> tuple[bool, bool, int]:
        """A record that shows a missing call says more than one that has not come."""
        return _has_issued_all(rank, waits), devices[rank] is None, rank

    ends = sorted(awaited - set(waits), key=innocence)
    if ends:
        heads, call = _heads(ends[0], devices), _waiting_for(ends[0], waits)[0][1]
        if heads and heads[0].queue != call.queue:
            return _together(ends[0], positions, devices)
        return _missing(ends[0], waits, positions, devices)
    if waits:
        return _circular(waits, positions, devices)
    busy = [rank for rank in sorted(devices) if _heads(rank, devices)]
    return _together(busy[0], positions, devices) if busy else None


def _waits(devices: Devices) -> Waits:
    waits: Waits = {}
    for rank, progress in devices.items():
        for at, call in enumerate(progress.current if progress else ()):
            for other in call.call.group.members:
                if other == rank or other not in devices:
                    continue
                theirs = devices[other]
                issued = theirs is not None and theirs.has_issued(call)
                surely_in_it = at == 0 or call.started
                if not issued or (surely_in_it and theirs is not None and theirs.is_before(call)):
                    waits.setdefault(rank, {}).setdefault(other, DeviceWait(call, issued))
    return waits


def _heads(rank: int, devices: Devices) -> Sequence[DeviceCall]:
    progress = devices.get(rank)
    return progress.heads if progress else ()


def _waiting_for(rank: int, waits: Waits) -> list[tuple[int, DeviceCall]]:
    """Who waits for a rank, and in what; ranks that wait for this rank alone come first."""
    direct = [(len(targets), waiter) for waiter, targets in waits.items() if rank in targets]
    return [(waiter, waits[waiter][rank].call) for _, waiter in sorted(direct)]


def _has_issued_all(rank: int, waits: Waits) -> bool:
    """Whether a rank has issued all calls in which others wait for it."""
    return all(targets[rank].issued for targets in waits.values() if rank in targets)


def _missing(
    rank: int, waits: Waits, positions: Mapping[int, Position], devices: Devices
) -> HangVerdict:
    """A rank that waits for no other, and keeps others waiting."""
    direct = _waiting_for(rank, waits)
    call = direct[0][1]
    waiting = {waiter for waiter, other in direct if _place(other) == _place(call)}
    where = f"{call}, where {who_waits(waiting)} on the GPU"
    if devices[rank] is not None and _has_issued_all(rank, waits):
        reasons = [
            f"has issued {where}, and its GPU has not begun it: an earlier kernel is running"
        ]
    elif devices[rank] is not None or not isfinite(_position(rank, positions).idle):
        reasons = [f"has not joined {where}"]
    else:
        reasons = [f"may not have joined {where}", _UNREADABLE]
    if further := set(waits) - waiting - {rank}:
        reasons.append(f"{who_waits(further)} in turn")
    return _verdict(rank, "; ".join(reasons), positions)


def _circular(waits: Waits, positions: Mapping[int, Position], devices: Devices) -> HangVerdict:
    """Ranks that wait for one another.

    To blame is the only one that has not issued its call, or the only such one whose program does
    not wait. If all have issued theirs, they have done so in orders that do not fit.
    """
    circle = first_circle(waits)
    steps = list(zip(circle, [*circle[1:], circle[0]], strict=True))
    behind = [other for rank, other in steps if not waits[rank][other].issued]
    awake = [rank for rank in behind if not positions[rank].waits]
    to_blame = next(
        (candidates[0] for candidates in (behind, awake) if len(candidates) == 1), circle[0]
    )
    sentences: list[str] = []
    for rank, other in steps:
        call, issued = waits[rank][other]
        heads = _heads(other, devices)[:1] if issued else ()
        reason = f"whose GPU is still at {heads[0]}" if heads else "which has not joined it"
        sentences.append(f"rank {rank} waits on its GPU in {call} for rank {other}, {reason}")
    rank_names = ranks(set(circle) - {to_blame})
    return _verdict(
        to_blame, f"and {rank_names} wait in a circle: {'; '.join(sentences)}", positions
    )


def _together(rank: int, positions: Mapping[int, Position], devices: Devices) -> HangVerdict:
    """A rank is in a call that all of its ranks have issued, and no GPU is before it."""
    call = _heads(rank, devices)[0]
    inside = {
        other
        for other in call.call.group.members
        if _place(call) in map(_place, _heads(other, devices))
    }
    if peers := inside - {rank}:
        cause = f"and {ranks(peers)} are in the same call"
    else:
        cause = "is in a call that its other ranks have finished"
    cause += f", {call}, and no rank is before it: the network between them or a GPU is stuck"
    return _verdict(rank, cause, positions)


def _place(call: DeviceCall) -> tuple[Queue, int]:
    """What is equal on all ranks of a call."""
    return call.queue, call.number


def _position(rank: int, positions: Mapping[int, Position]) -> Position:
    return positions.get(rank, Position({}, phase="an unknown place"))


def _verdict(rank: int, cause: str, positions: Mapping[int, Position]) -> HangVerdict:
    position = _position(rank, positions)
    if rank in positions and isfinite(position.idle):  # else it has ended
        cause += f"; it has not moved for {position.idle:.0f} s" + stands_at(position)
    return HangVerdict(rank, position.phase, cause)


# torch's record, as it dumps it.


def role_of(name: str, description: str) -> str:
    """Role of a process group, by its description."""
    if description == "default_pg":
        return "world"
    return f"group {name}" if description in ("", "undefined") else description


def progress_from(trace: bytes, groups: Mapping[str, CommGroup]) -> DeviceProgress:
    """Parse the NCCL record of a rank, with its groups by name."""
    entries: list[dict[str, Any]] = pickle.loads(trace).get("entries") or []
    issued: dict[Queue, int] = {}
    heads: dict[Queue, DeviceCall] = {}
    blocked = _blocked(entries)
    for group, members in _calls(entries, groups):
        first = members[0]
        kinds = dict.fromkeys(_kind(entry) for entry in members if "coalesced" not in _kind(entry))
        is_message = bool(first.get("is_p2p", _kind(first) in _MESSAGES))
        call = DeviceCall(
            LoggedCollective(group, " and ".join(kinds) or _kind(first), _bytes(first)),
            _numbers(first)[is_message],
            is_message,
            members[-1].get("state") == _STARTED,
        )
        issued[call.queue] = max(call.number, issued.get(call.queue, 0))
        end = members[-1]
        if end.get("state") != _COMPLETED or any(end is blocked_entry for blocked_entry in blocked):
            heads.setdefault(call.queue, call)
    lost = bool(entries) and entries[0].get("record_id", 0) > 0
    return DeviceProgress(list(heads.values()), issued, lost)


def _blocked(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls in which a host may be blocked.

    torch records a call before it issues it. While a host is blocked in it, it looks completed,
    because nothing was recorded on the GPU yet. But it is the last of its thread, and torch has not
    retired it, which it does with completed calls in a tenth of a second.
    """
    if not any(entry.get("retired") for entry in entries):
        return []
    last = {entry.get("thread_id"): entry for entry in entries}
    return [entry for entry in last.values() if not entry.get("retired", True)]


def _calls(
    entries: Sequence[dict[str, Any]], groups: Mapping[str, CommGroup]
) -> Iterator[tuple[CommGroup, list[dict[str, Any]]]]:
    """The entries of each call of these groups, in the order of issue.

    A batch of sends and receives is one call. torch records its members, whose state never
    changes, and then the batch. All have the same two numbers, which no other call of the group
    has.
    """
    newest: dict[str, int] = {}  # a new group may have the name of one that was destroyed
    calls: dict[tuple[str, int, int, int], list[dict[str, Any]]] = {}
    for entry in entries:
        # The name of the group: torch has written (name, description), or the name alone.
        group_name: Any = entry.get("process_group", entry.get("pg_id", ""))
        name, maker = (
            group_name
            if isinstance(group_name, str)
            else str(group_name if isinstance(group_name, int) else group_name[0]),
            entry.get("pg_id", 0),
        )
        newest[name] = max(maker, newest.get(name, 0))
        calls.setdefault((name, maker, *_numbers(entry)), []).append(entry)
    for (name, maker, *_), members in calls.items():
        if name in groups and maker == newest[name]:
            yield groups[name], members


def _numbers(entry: dict[str, Any]) -> tuple[int, int]:
    """How many collectives, and how many messages, its group has issued with this call."""
    return entry.get("collective_seq_id", entry.get("seq_id", 0)), entry.get("p2p_seq_id", 0)


def _kind(entry: dict[str, Any]) -> str:
    """`all_gather` of `nccl:_all_gather_base`, `send` of `nccl:send 0->1`."""
    kind = str(entry.get("profiling_name", "call")).rpartition(":")[2].split(" ")[0]
    return kind.strip("_").removesuffix("_base")


def _bytes(entry: dict[str, Any]) -> int:
    """Bytes of the inputs, or 0 if they are not known."""
    sizes: list[list[int]] = entry.get("input_sizes") or []
    dtypes: list[str] = entry.get("input_dtypes") or []
    return sum(
        prod(size) * _BYTES.get(dtype, 0) for size, dtype in zip(sizes, dtypes, strict=False)
    )


def to_table(progress: DeviceProgress | None) -> dict[str, Any] | None:
    """Convert progress to JSON."""
    if progress is None:
        return None
    groups = list(dict.fromkeys(group for group, _ in progress.issued))
    index = {group: at for at, group in enumerate(groups)}
    return {
        "groups": [[group.axis, list(group.members)] for group in groups],
        "heads": [
            [index[call.group], call.kind, call.size, *fields] for call, *fields in progress.heads
        ],
        "issued": [
            [index[group], *fields, last] for (group, *fields), last in progress.issued.items()
        ],
        "lost": progress.lost,
    }


def from_table(table: dict[str, Any] | None) -> DeviceProgress | None:
    """Parse progress from JSON."""
    if table is None:
        return None
    groups: list[CommGroup] = [CommGroup(axis, tuple(members)) for axis, members in table["groups"]]
    heads = [
        DeviceCall(LoggedCollective(groups[at], kind, size), *fields)
        for at, kind, size, *fields in table["heads"]
    ]
    issued: dict[Queue, int] = {(groups[at], kind): last for at, kind, last in table["issued"]}
    return DeviceProgress(heads, issued, table["lost"])
