"""Run a command whose ranks share one GPU over NCCL, under MPS.

    python -m tests.gpu.on_shared_gpu [--without-mps] [--all-channels] COMMAND ...
    python -m tests.gpu.on_shared_gpu python benchmarks/decode_ranks.py tp=2 tp=4 --sums nccl

The command gets an NCCL that lets ranks share a GPU (`make device-env` packs one) and the packages
that the journeys of `tests/gpu/accept.py` get. It ends with the command's exit code; 2 where there
is no GPU. Without MPS ranks take turns of milliseconds: for tests of faults, not for times.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from tests.gpu.accept import Refused, machine_of, shared_gpu


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without-mps", action="store_true")
    parser.add_argument("--all-channels", action="store_true", help="as many as NCCL takes, not 1")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("give a command")
    with tempfile.TemporaryDirectory(prefix="fivefold-shared-") as name:
        try:
            machine = machine_of("cuda", Path(name))
        except Refused as error:
            print(f"on_shared_gpu: {error}", file=sys.stderr)
            return 2
        alone = nullcontext(machine.environment)
        with alone if options.without_mps else shared_gpu(machine, Path(name)) as environment:
            if options.all_channels:
                del environment["NCCL_MAX_CTAS"]
            return subprocess.run(options.command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
