"""End a launcher whose host is cut off from the others.

torchrun asks its store without any timeout. If the network is cut, its ranks end by their
watchdogs, and torchrun itself waits for as long as TCP does: a quarter of an hour. A rank that ends
for this reason starts this process. It waits for the launcher to end by itself and looks for the
store. If neither is seen, it ends the launcher, so that whoever started that can start another.

    python -m fivefold.launch.watch.cut_off LAUNCHER HOST PORT
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys

_WAIT_SECONDS = 30.0  # in which the launcher may end by itself, or the network come back
_TERM_SECONDS = 10.0  # that it has after SIGTERM
_CONNECT_SECONDS = 5.0


def watch_launcher(launcher: int, host: str, port: int) -> None:
    """Start a process that ends a launcher without a network; it outlives the calling rank."""
    if hasattr(os, "pidfd_open"):
        command = [
            sys.executable,
            "-m",
            "fivefold.launch.watch.cut_off",
            str(launcher),
            host,
            str(port),
        ]
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


def main(launcher: int, host: str, port: int) -> None:
    """Watch the network, and end the launcher if it is lost."""
    try:
        handle = os.pidfd_open(launcher)
    except OSError:  # it has ended
        return
    if _ends(handle, _WAIT_SECONDS) or _reachable(host, port):
        return
    print(
        f"fivefold: the store at {host}:{port} cannot be reached from this host, and its launcher "
        f"(process {launcher}) does not notice: it is ended",
        file=sys.stderr,
        flush=True,
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, number)
        if _ends(handle, _TERM_SECONDS):
            return


def _ends(handle: int, seconds: float) -> bool:
    return bool(select.select([handle], [], [], seconds)[0])


def _reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
