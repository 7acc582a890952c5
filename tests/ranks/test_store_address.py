"""The meeting point of launched ranks listens where MASTER_ADDR says, and nowhere else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fivefold.core.errors import FivefoldError
from fivefold.launch.launcher import LauncherEnvironment
from fivefold.launch.worker import LaunchedMeeting

LISTENING = "0A"  # a state in /proc/net/tcp


def addresses(port: int) -> set[str]:
    """Where somebody listens on this port, as hexadecimal addresses."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            address, _, state = line.split()[1:4]
            if state == LISTENING and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_of_a_loopback_address_listens_there_alone(host: str) -> None:
    port = free_port()
    meeting = LaunchedMeeting(LauncherEnvironment(0, 1, 0, host, port))
    store = meeting._connect(hosts=True)
    other = meeting._connect(hosts=False)
    store.set("greeting", "hello")
    assert other.get("greeting") == b"hello"
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert addresses(port) and addresses(port) <= loopback


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meeting = LaunchedMeeting(LauncherEnvironment(0, 1, 0, "127.0.0.1", port))
        with pytest.raises(FivefoldError, match=r"cannot reach the meeting point.*in use"):
            meeting._connect(hosts=True)
