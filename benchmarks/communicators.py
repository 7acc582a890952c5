"""What a communicator of NCCL holds on a rank: when it is made, and after its first use.

    python benchmarks/communicators.py [--ranks 2 4 8] [--most 6] [--json FILE] [--dry]

For 2, 4 and 8 ranks, with NCCL's own number of channels, 4 and 1: the memory of a GPU before and
after communicators are split from that of all ranks, one to six of them, and after each has run an
all-reduce, an all-gather, a send and receive, or an all-to-all. Ranks that share one GPU need NCCL
2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1, and its memory is divided by them; NCCL opens more channels
there than between GPUs, so that bytes of a channel and of a peer are what can be taken from it
(`fivefold/cost/memory/communicators.py`). NCCL_MAX_CTAS must not be set. `--dry` runs the same
calls over gloo on CPUs, where nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

MIB = 2**20
CHANNELS = (None, 4, 1)  # None: as many as NCCL chooses
ELEMENTS = 2**20
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Sample(NamedTuple):
    """MiB of a rank: of the last of `count` communicators, when it was made and after its use."""

    ranks: int
    channels: int | None
    use: str
    count: int
    made: float
    used: float


class Measurer:
    """One rank that makes communicators and asks what the GPU still has."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.x = torch.ones(ELEMENTS, device=device)
        self.y = torch.ones(ELEMENTS * ranks, device=device)

    def held(self) -> float:
        """MiB of the GPU that are taken, for each rank on it."""
        dist.barrier()
        if self.device.type == "cpu":
            return 0.0
        torch.cuda.synchronize(self.device)
        dist.barrier()
        free, total = torch.cuda.mem_get_info(self.device)
        gpus = min(self.ranks, torch.cuda.device_count())
        return (total - free) / MIB / (self.ranks / gpus)

    def group(self, channels: int | None) -> Any:
        """Another communicator of all ranks."""
        if self.device.type == "cpu":
            return dist.new_group()
        options = dist.ProcessGroupNCCL.Options()
        if channels is not None:
            options.config.max_ctas = channels
        return dist.split_group(split_ranks=[list(range(self.ranks))], pg_options=options)

    def uses(self) -> dict[str, Callable[[Any], object]]:
        """What a communicator is used for."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

        def message(group: Any) -> None:
            ends = (dist.P2POp(dist.isend, self.x, after, group),)
            ends = (*ends, dist.P2POp(dist.irecv, self.y[:ELEMENTS], before, group))
            for work in dist.batch_isend_irecv(list(ends)):
                work.wait()

        def every_pair(group: Any) -> None:
            dist.all_to_all_single(self.y, self.y.clone(), group=group)

        return {
            "all-reduce": lambda group: dist.all_reduce(self.x, group=group),
            "all-gather": lambda group: _all_gather(self.y, self.x, group=group),
            "send-recv": message,
            "all-to-all": every_pair,
        }

    def samples(self, most: int) -> list[Sample]:
        """Of every number of channels and use."""
        samples: list[Sample] = []
        for channels in CHANNELS:
            for name, use in self.uses().items():
                groups: list[Any] = []
                for count in range(1, (most if name == "all-gather" else 1) + 1):
                    start = self.held()
                    groups.append(self.group(channels))
                    made = self.held()
                    use(groups[-1])
                    sizes = (made - start, self.held() - start)
                    samples.append(Sample(self.ranks, channels, name, count, *sizes))
                for group in groups:
                    dist.destroy_process_group(group)
        return samples


def run_rank(rank: int, ranks: int, folder: str, most: int, dry: bool) -> None:
    device = torch.device("cpu")
    if not dry:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store-{ranks}", ranks)
    backend, bound = ("gloo", None) if dry else ("nccl", device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=bound)
    measurer = Measurer(rank, ranks, device)
    first = measurer.held()  # with CUDA's context, and NCCL's communicator of all ranks
    samples = measurer.samples(most)
    if rank == 0:
        table = {"first": first, "samples": [sample._asdict() for sample in samples]}
        Path(folder, f"{ranks}.json").write_text(json.dumps(table))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--most", type=int, default=6, help="communicators at once")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one, or with --dry")
        return 2
    if "NCCL_MAX_CTAS" in os.environ:
        print("NCCL_MAX_CTAS is set, which limits every communicator: unset it")
        return 2
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    tables: dict[str, Any] = {}
    print("| ranks | channels | use | communicators | MiB, made | MiB, used |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            multiprocessing.spawn(run_rank, (ranks, folder, options.most, options.dry), ranks)
            tables[str(ranks)] = table = json.loads(Path(folder, f"{ranks}.json").read_text())
            for sample in (Sample(**row) for row in table["samples"]):
                shown = (sample.ranks, sample.channels or "NCCL's", sample.use, sample.count)
                cells = (*shown, f"{sample.made:,.0f}", f"{sample.used:,.0f}")
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
            print(f"{ranks} ranks begin with {table['first']:,.0f} MiB each", flush=True)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    sys.exit(main())
