"""Who keeps the GPUs of the others waiting, on planted cases; and how torch's record is read."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fivefold.launch.watch.device_calls import (
    DeviceCall,
    DeviceProgress,
    Queue,
    from_table,
    on_device,
    progress_from,
    role_of,
    to_table,
)
from fivefold.launch.watch.hang import verdict
from fivefold.launch.watch.positions import CommGroup, HangVerdict, LoggedCollective, Position

WORLD = CommGroup("world", (0, 1, 2, 3))
TP = {rank: CommGroup("tp", members) for members in ((0, 1), (2, 3)) for rank in members}
DP = {rank: CommGroup("dp", members) for members in ((0, 2), (1, 3)) for rank in members}
DOWN, UP = CommGroup("pp 0->1", (0, 2)), CommGroup("pp 1->0", (2, 0))
BOUND = 20.0


def group(rank: int, letter: str) -> CommGroup:
    return {"w": WORLD, "t": TP[rank], "d": DP[rank], "v": DOWN, "^": UP}[letter]


def gpu(rank: int, heads: str = "", issued: str = "", lost: bool = False) -> DeviceProgress:
    """A GPU of dp=2 tp=2 at calls such as `t6 w3`, begun if `!`, whose host has issued `t6 w3`."""
    calls: list[DeviceCall] = []
    last: dict[Queue, int] = {}
    for text in heads.split():
        call = LoggedCollective(
            group(rank, text[0]), "recv" if text[0] in "v^" else "all_reduce", 64
        )
        number = int(text[1:].rstrip("!"))
        calls.append(DeviceCall(call, number, text[0] in "v^", text.endswith("!")))
        last[calls[-1].queue] = number
    for text in issued.split():
        last[group(rank, text[0]), text[0] in "v^"] = int(text[1:])
    return DeviceProgress(calls, last, lost)


def four(idle: float = 30.0) -> dict[int, Position]:
    """Four hosts that have issued the same."""
    groups = {rank: {WORLD: 3, TP[rank]: 6, DP[rank]: 2} for rank in range(4)}
    return {
        rank: Position(
            groups[rank],
            [LoggedCollective(WORLD, "all_reduce", 24)],
            phase=f"step 3 of rank {rank}",
            idle=idle,
            stack=[f"  loop.py:{rank} step: loss.item()"],
        )
        for rank in range(4)
    }


def judged(found: HangVerdict | None, rank: int, pattern: str) -> None:
    assert found is not None
    assert found.rank == rank, str(found)
    assert re.search(pattern, found.cause, re.S), str(found)
    assert found.doing == f"step 3 of rank {rank}"


def judge(*gpus: DeviceProgress | None) -> HangVerdict | None:
    return on_device(four(), dict(enumerate(gpus)))


def test_a_rank_that_never_issues_a_call_is_to_blame() -> None:
    found = judge(
        gpu(0, "w3", "t6"), gpu(1, "w3", "t6"), gpu(2, "", "t5 w2"), gpu(3, "t6", "t6 w2")
    )
    judged(
        found,
        2,
        r"^has not joined call 6 on tp \(ranks 2 and 3\), all_reduce of 64 bytes, where rank 3 "
        r"waits on the GPU; ranks 0 and 1 wait in turn; it has not moved for 30 s, in:\n  loop",
    )


def test_a_rank_that_skips_a_call_and_goes_on_is_to_blame_in_its_circle() -> None:
    """Rank 2 waits in the next call for rank 3, which waits in the skipped one for rank 2."""
    ahead = "t6 w3"
    found = judge(gpu(0, "w3", ahead), gpu(1, "w3", ahead), gpu(2, "w3", "t5"), gpu(3, "t6 w3"))
    judged(
        found,
        2,
        r"^and rank 3 wait in a circle: .*rank 3 waits on its GPU in call 6 on tp \(ranks 2 and "
        r"3\), all_reduce of 64 bytes for rank 2, which has not joined it",
    )
    judged(found, 2, r"rank 2 waits .* call 3 on world .* rank 3, whose GPU is still at call 6 on")


def test_the_chain_is_followed_over_a_gpu_that_another_group_holds() -> None:
    """Rank 0 waits for rank 1, which has issued the call, and whose GPU waits for rank 3."""
    found = judge(gpu(0, "t4"), gpu(1, "d2 t4", ""), gpu(2, "", "t4 d2"), gpu(3, "", "t4 d1"))
    judged(
        found, 3, r"call 2 on dp \(ranks 1 and 3\).* where rank 1 waits .*; rank 0 waits in turn"
    )


def test_a_receive_that_was_posted_ahead_hides_nobody() -> None:
    """Rank 2 waits for a message and in tp; the message waits for rank 2, and rank 3 is behind."""
    found = judge(gpu(0, "^4", "t6 v4"), gpu(1, "", "t6"), gpu(2, "v5 t6", "^3"), gpu(3, "", "t5"))
    judged(found, 3, r"has not joined call 6 on tp .* where rank 2 waits .*; rank 0 waits in turn")


def test_calls_in_another_order_make_a_circle_in_which_nobody_is_missing() -> None:
    a, b = CommGroup("tp", (0, 1)), CommGroup("dp", (0, 1))
    first, second = (LoggedCollective(each, "all_reduce", 64) for each in (a, b))
    queues: dict[Queue, int] = {(a, False): 4, (b, False): 2}
    found = on_device(
        four(),
        {
            0: DeviceProgress([DeviceCall(first, 4), DeviceCall(second, 2)], queues),
            1: DeviceProgress([DeviceCall(second, 2), DeviceCall(first, 4)], queues),
        },
    )
    judged(found, 0, r"in call 4 on tp .* for rank 1, whose GPU is still at call 2 on dp .*;")
    judged(
        found, 0, r"rank 1 waits on its GPU in call 2 on dp .* for rank 0, whose GPU is still at"
    )


def test_in_a_circle_of_missing_calls_the_rank_whose_program_does_not_wait_is_to_blame() -> None:
    gpus = {0: gpu(0, "^4", "v4"), 2: gpu(2, "v5", "^3")}
    positions = four()
    judged(on_device(positions, gpus), 0, "^and rank 2 wait in a circle")
    positions[2] = replace(positions[2], waits=False)
    judged(on_device(positions, gpus), 2, "^and rank 0 wait in a circle")


def test_all_ranks_are_in_the_same_call() -> None:
    found = judge(*(gpu(rank, "w3", "t6") for rank in range(4)))
    judged(found, 0, r"^and ranks 1, 2 and 3 are in the same call, call 3 on world .*network")
    # Others wait for ranks that are in it.
    found = judge(gpu(0, "t7", "w2"), gpu(1, "d2", "t6"), gpu(2, "", "t6"), gpu(3, "d2", "t6"))
    judged(found, 1, r"^and rank 3 are in the same call, call 2 on dp \(ranks 1 and 3\)")
    found = judge(gpu(0, "t6"), gpu(1, "", "t6"), gpu(2), gpu(3))
    judged(found, 0, "^is in a call that its other ranks have finished, call 6 on tp")


def test_no_gpu_waits() -> None:
    assert judge(*(gpu(rank, "", "t6 w3") for rank in range(4))) is None
    assert judge(None, None, None, None) is None


def test_a_gpu_that_has_not_begun_what_others_are_in() -> None:
    """Known only with start events: an earlier kernel holds the stream of rank 1."""
    found = judge(gpu(0, "t6!"), gpu(1, "t6"), gpu(2), gpu(3))
    judged(found, 1, r"^has issued call 6 on tp .*, where rank 0 waits .* has not begun it")
    # Rank 2 has begun dp and not tp, so tp does not count.
    found = judge(gpu(0, "", "d1"), gpu(1), gpu(2, "t6 d2!"), gpu(3, "", "t5"))
    judged(found, 0, r"^has not joined call 2 on dp \(ranks 0 and 2\)")


def test_a_rank_whose_record_cannot_be_read() -> None:
    found = judge(gpu(0, "t6"), None, gpu(2), gpu(3))
    judged(found, 1, r"^may not have joined call 6 on tp .*; torch's record cannot be read")
    positions = four()
    positions[1] = replace(positions[1], idle=float("inf"))
    judged(on_device(positions, {0: gpu(0, "t6"), 1: None}), 1, "^has not joined call 6 .*GPU$")
    unknown = on_device({0: positions[0]}, {0: gpu(0, "t6"), 1: None})
    assert unknown is not None and (unknown.rank, unknown.doing) == (1, "an unknown place")


def test_a_record_that_has_not_come_is_no_proof_beside_one_that_has() -> None:
    """Rank 0 waits for rank 1, of which nothing is known, and rank 3 for rank 2, which is known to
    have left out the call."""
    found = judge(gpu(0, "t6"), None, gpu(2, "", "t5"), gpu(3, "t6"))
    judged(found, 2, r"^has not joined call 6 on tp \(ranks 2 and 3\)")


def test_records_that_were_dropped_blame_nobody() -> None:
    judged(judge(gpu(0, "t6"), gpu(1), gpu(2), gpu(3)), 1, "has not joined call 6 on tp")
    judged(judge(gpu(0, "t6"), gpu(1, lost=True), gpu(2), gpu(3)), 0, "other ranks have finished")


# How the verdict of the hosts and that of the GPUs go together.


def missing() -> Mapping[int, DeviceProgress]:
    return {0: gpu(0), 1: gpu(1), 2: gpu(2, "", "t5"), 3: gpu(3, "t6")}


def test_gpus_are_asked_where_the_hosts_name_nobody() -> None:
    positions = four()
    found = verdict(positions, bound=BOUND, on_device=lambda: on_device(positions, missing()))
    judged(found, 2, "has not joined call 6 on tp")
    judged(verdict(positions, bound=BOUND), 0, "wait for one another, and none has left out a call")
    early = four(idle=12.0)
    assert verdict(early, bound=BOUND, on_device=lambda: pytest.fail("asked too early")) is None


def test_a_host_that_its_gpu_holds_is_not_to_blame() -> None:
    """Rank 1 has issued less than rank 0, because its GPU waits for rank 3."""
    positions = four()
    positions[1] = replace(positions[1], counts={WORLD: 3, TP[1]: 5, DP[1]: 2})
    judged(verdict(positions, bound=BOUND), 1, "has not joined the others, where rank 0 waits")
    gpus = {0: gpu(0, "t6"), 1: gpu(1, "d2", "t5"), 2: gpu(2), 3: gpu(3, "", "d1")}
    found = verdict(positions, bound=BOUND, on_device=lambda: on_device(positions, gpus))
    judged(found, 3, r"has not joined call 2 on dp \(ranks 1 and 3\)")
    slow = positions | {3: replace(positions[3], allowed=100.0)}
    assert verdict(slow, bound=BOUND, on_device=lambda: on_device(slow, gpus)) is None


def test_hosts_that_issued_different_calls_are_not_asked_for_their_gpus() -> None:
    positions = four()
    for rank in (2, 3):
        calls = [LoggedCollective(TP[rank], "all_reduce" if rank == 3 else "all_gather", 64)]
        positions[rank] = replace(positions[rank], counts={TP[rank]: 1}, trail=calls)
    found = verdict(positions, bound=BOUND, on_device=lambda: pytest.fail("asked"))
    judged(found, 2, "have not called the same")


# torch's record.

GROUPS = {"0": WORLD, "1": TP[0], "2": CommGroup("cp", (0, 1))}


def entry(number: int, name: str, kind: str, state: str, **more: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it."""
    return {
        "record_id": number,
        "pg_id": int(name),
        "process_group": (name, "tp"),
        "thread_id": "140",
        "collective_seq_id": 0,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{kind}",
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        **more,
    }


def read(*entries: dict[str, Any], groups: Mapping[str, CommGroup] = GROUPS) -> DeviceProgress:
    found = progress_from(pickle.dumps({"version": "2.10", "entries": list(entries)}, 2), groups)
    assert from_table(json.loads(json.dumps(to_table(found)))) == found
    return found


def test_the_head_of_every_queue_is_read() -> None:
    found = read(
        entry(0, "1", "all_reduce", "completed", collective_seq_id=7),
        entry(1, "1", "_all_gather_base", "started", collective_seq_id=8),
        entry(2, "0", "all_reduce_barrier", "scheduled", collective_seq_id=2, input_sizes=[]),
        entry(3, "1", "_reduce_scatter_base", "scheduled", collective_seq_id=9),
        entry(4, "9", "all_reduce", "scheduled", collective_seq_id=3),
    )
    assert [str(head) for head in found.heads] == [
        "call 8 on tp (ranks 0 and 1), all_gather of 16 bytes",
        "call 2 on world (ranks 0, 1, 2 and 3), all_reduce_barrier",
    ]
    assert [head.started for head in found.heads] == [True, False]
    assert found.issued == {(TP[0], False): 9, (WORLD, False): 2} and not found.lost


def test_other_spellings_and_missing_fields() -> None:
    found = read(
        {"pg_id": 1, "seq_id": 4, "state": "completed", "profiling_name": "nccl:all_reduce"},
        {"process_group": "1", "pg_id": 1, "seq_id": 5, "state": "scheduled", "input_sizes": None},
        {"process_group": ["2", "cp"], "p2p_seq_id": 3, "profiling_name": "nccl:send 0->1"},
    )
    assert [str(head) for head in found.heads] == [
        "call 5 on tp (ranks 0 and 1), call",
        "call 3 on cp (ranks 0 and 1), send",
    ]
    assert found.heads[1].is_message
    nothings: list[dict[str, Any]] = [{}, {"entries": None}, {"entries": []}]
    for nothing in nothings:
        assert progress_from(pickle.dumps(nothing), GROUPS) == DeviceProgress([], {})


def test_a_batch_of_messages_is_one_call_with_the_state_of_the_batch() -> None:
    """The members of a batch have no state of their own."""

    def batch(start: int, number: int, state: str) -> list[dict[str, Any]]:
        same = {"collective_seq_id": 1, "p2p_seq_id": number}
        return [
            entry(start, "2", "send 0->1", "scheduled", is_p2p=True, **same),
            entry(start + 1, "2", "recv 0<-1", "scheduled", is_p2p=True, **same),
            entry(start + 2, "2", "coalesced", state, input_sizes=[], **same),
        ]

    first = entry(0, "2", "all_reduce", "completed", collective_seq_id=1)
    found = read(first, *batch(1, 1, "completed"), *batch(4, 2, "scheduled"))
    assert [str(head) for head in found.heads] == [
        "call 2 on cp (ranks 0 and 1), send and recv of 16 bytes"
    ]
    assert found.issued == {(GROUPS["2"], False): 1, (GROUPS["2"], True): 2}
    assert read(first, *batch(1, 1, "completed")).heads == []


def test_a_call_in_which_the_host_is_blocked_is_not_finished() -> None:
    """torch takes it for completed, because nothing was recorded on the GPU yet."""
    done = entry(0, "1", "all_reduce", "completed", collective_seq_id=1)
    last = entry(1, "1", "all_reduce", "completed", collective_seq_id=2, retired=False)
    later = entry(2, "0", "all_reduce", "completed", collective_seq_id=1)
    assert [head.number for head in read(done, last).heads] == [2]
    assert read(done, last, later).heads == [], "its thread went on"
    assert read(last).heads == [], "nothing is ever retired with TORCH_NCCL_BLOCKING_WAIT=1"


def test_a_group_that_was_destroyed_and_made_again_counts_anew() -> None:
    old = entry(90, "1", "all_reduce", "scheduled", collective_seq_id=900)
    new = entry(91, "1", "all_reduce", "completed", collective_seq_id=1, pg_id=17)
    found = read(old, new)
    assert found.heads == [] and found.issued == {(TP[0], False): 1} and found.lost


def test_groups_are_named_for_their_role() -> None:
    assert role_of("0", "default_pg") == "world"
    assert role_of("5", "dp-cp") == "dp-cp"
    assert role_of("5", "undefined") == role_of("5", "") == "group 5"
