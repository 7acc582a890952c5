"""Collectives on switches that reduce and on tori: the laws, and what they change in a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from one_layout import grid_of

from fivefold.core import hardware as machines
from fivefold.core import tables
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.hardware import Machine
from fivefold.core.model import presets as models
from fivefold.cost.grid import Array
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.hardware.links import Links
from fivefold.cost.hardware.stack_presets import load_stack
from fivefold.cost.step.time import step_time
from fivefold.planner.search import search_layouts
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.space import SearchSpace

H100, TPU = machines.load("h100"), machines.load("tpu-v4")
SIZE = np.array([1e9])


def of(number: float) -> Array:
    return np.array([float(number)])


def reducing(machine: Machine, *names: str) -> Machine:
    """The machine with switches that reduce in some of its tiers."""
    tiers = (replace(tier, reduces=tier.name in names) for tier in machine.tiers)
    return replace(machine, tiers=tuple(tiers))


def ideal(machine: Machine) -> Machine:
    """The machine without latencies, and with software that reaches every byte/s."""
    tiers = (replace(each, link=replace(each.link, latency=0.0)) for each in machine.tiers)
    return replace(
        machine, tiers=tuple(tiers), efficiency=replace(machine.efficiency, links=(1.0,))
    )


# --- Switches that reduce


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_switch_that_reduces_moves_a_sum_once(ranks: int) -> None:
    """A ring moves 2 (n - 1)/n of the bytes, a switch all of them once; a scatter is as before."""
    plain, summing = Links(ideal(H100)), Links(ideal(reducing(H100, "nvlink")))
    asked = (SIZE, of(ranks), of(1))
    second = 1e9 / 450e9
    share = (ranks - 1) / ranks
    assert plain.all_reduce(*asked).item() == pytest.approx(2 * share * second)
    assert summing.all_reduce(*asked).item() == pytest.approx(second)
    assert summing.ring(*asked).item() == pytest.approx(share * second)
    assert plain.ring(*asked).item() == pytest.approx(share * second)


def test_without_such_switches_a_large_sum_is_a_scatter_and_a_gather() -> None:
    links = Links(H100)
    for ranks, stride in ((4, 1), (16, 1), (64, 8), (1, 8)):
        asked = (SIZE, of(ranks), of(stride), 3.0)
        assert links.all_reduce(*asked).item() == pytest.approx(2 * links.ring(*asked).item())


# --- Rings and trees at scale


def test_small_sums_between_nodes_go_through_a_tree() -> None:
    """The hops of a ring grow with its ranks, those of a tree with the logarithm of its nodes."""
    network = H100.tiers[1]
    trees = Links(H100)
    rings = Links(
        replace(
            H100,
            tiers=(H100.tiers[0], replace(network, link=replace(network.link, trees=False))),
        )
    )
    small, large = np.array([1e6]), np.array([1e12])
    for nodes in (2, 16, 128):
        ranks = of(8 * nodes)
        hops = 2 * (7 * 3.4e-6 + np.log2(nodes) * 14e-6)
        assert trees.all_reduce(np.zeros(1), ranks, of(1)).item() == pytest.approx(hops)
        assert trees.all_reduce(small, ranks, of(1)) < rings.all_reduce(small, ranks, of(1))
        assert trees.all_reduce(large, ranks, of(1)) == rings.all_reduce(large, ranks, of(1))
        assert trees.ring(small, ranks, of(1)) == rings.ring(small, ranks, of(1))


@pytest.mark.parametrize("buckets", [1.0, 64.0])
def test_collectives_slow_down_with_every_node(buckets: float) -> None:
    """Also if the bytes of a rank stay the same."""
    links = Links(machines.load("h100-p5"))
    for collective in (links.ring, links.all_reduce):
        seconds = [
            collective(SIZE, of(8 * nodes), of(1), buckets).item() for nodes in (1, 2, 4, 8, 64)
        ]
        assert seconds == sorted(seconds) and seconds[-1] > 2 * seconds[1]


def test_all_reduces_on_p5_slow_down_as_logged() -> None:
    """nanotron's logs on 4 to 64 nodes of AWS p5, in GB/s as NCCL's tests count them; a message of
    128 MiB is assumed, which they do not say."""
    links, size = Links(machines.load("h100-p5")), np.array([2.0**27])
    for nodes, logged in ((4, 161), (8, 95), (16, 53), (32, 27), (64, 13)):
        ranks = 8 * nodes
        seconds = links.all_reduce(size, of(ranks), of(1)).item()
        found = 2 * (ranks - 1) / ranks * size.item() / seconds / 1e9
        assert found == pytest.approx(logged, rel=0.15), nodes


def test_buckets_pay_the_latency_of_a_ring_each() -> None:
    """Small runs on many nodes wait for their gradients: the smaller the buckets, the longer."""
    shape, p5 = models.load("llama-3.2-1b"), machines.load("h100-p5")

    def seconds(shard: int, bucket_bytes: float | None) -> float:
        grid = grid_of(shard=shard, microbatch_size=1)
        stack = replace(load_stack("nanotron"), bucket_bytes=bucket_bytes)
        return step_time(shape, p5, stack, grid, 4096, "bf16").parts["dp"].item()

    torch_default = 25 * 2**20
    assert seconds(64, torch_default) > 1.5 * seconds(64, None)
    assert seconds(512, torch_default) > 4 * seconds(64, torch_default)
    assert seconds(512, None) < 0.1 * seconds(512, torch_default)


def test_latency_falls_from_every_hop_to_up_and_down() -> None:
    nothing = np.zeros(1)
    plain, summing = Links(H100), Links(reducing(H100, "network"))
    asked = (nothing, of(64), of(8))  # one rank of each of 64 nodes
    assert plain.ring(*asked).item() == pytest.approx(63 * 14e-6)
    assert summing.ring(*asked).item() == pytest.approx(2 * 14e-6)
    assert summing.all_reduce(*asked).item() == pytest.approx(2 * 14e-6)


def test_the_slower_of_two_tiers_decides() -> None:
    """16 ranks on two nodes: NVLink's ring inside, and 8 network cards that reduce between."""
    links = Links(ideal(reducing(H100, "network")))
    found = links.all_reduce(SIZE, of(16), of(1)).item()
    assert found == pytest.approx(max(2 * 15 / 16 * 1e9 / 450e9, 1e9 / (8 * 50e9)))


def test_sums_of_gradients_and_of_tensor_ranks_gain() -> None:
    shape, stack = models.load("llama-3.1-8b"), replace(stacks.FIVEFOLD, tp_overlap=0)

    def traffic(machine: Machine, name: str, *, sp: bool = True, **degrees: int) -> float:
        grid = grid_of(sp=sp, microbatch_size=1, **degrees)
        return step_time(shape, machine, stack, grid, 8192, "bf16").parts[name].item()

    inside, between = reducing(H100, "nvlink"), reducing(H100, "network")
    assert traffic(inside, "tp", tp=8, sp=False) < 0.6 * traffic(H100, "tp", tp=8, sp=False)
    assert 0.9 < traffic(inside, "tp", tp=8) / traffic(H100, "tp", tp=8) < 1
    whole = [traffic(each, "dp", tp=8, shard=64) for each in (between, H100)]
    assert whole[0] < 0.7 * whole[1]
    # ZeRO-1 gains hops and no bytes.
    sliced = [traffic(each, "dp", tp=8, shard=64, zero=1) for each in (between, H100)]
    assert sliced[0] < sliced[1]
    bare = [traffic(ideal(each), "dp", tp=8, shard=64, zero=1) for each in (between, H100)]
    assert bare[0] == pytest.approx(bare[1])


def test_a_machine_file_turns_it_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100"\n\n[tiers.network]\nreduces = true\n')
    found = machines.load(path)
    assert found.tiers == reducing(H100, "network").tiers
    path.write_text(tables.to_toml(machines.to_table(found)))
    assert machines.load(path) == found
    path.write_text('base = "h100"\n\n[tiers.network]\nreduces = "yes"\n')
    with pytest.raises(BadFile, match=r"tiers\.network\.reduces"):
        machines.load(path)


# --- Tori


def test_a_gather_has_the_links_of_all_dimensions_it_spans() -> None:
    """300 GB/s by six links: two along each ring, one at the end of a line."""
    links = Links(ideal(TPU))

    def rate(ranks: int, stride: int) -> float:
        return (1 - 1 / ranks) * 1e9 / links.ring(SIZE, of(ranks), of(stride)).item() / 1e9

    assert rate(4096, 1) == pytest.approx(300)  # the whole torus
    assert rate(16, 1) == pytest.approx(100)  # a ring
    assert rate(256, 1) == pytest.approx(200)  # a plane
    assert rate(256, 16) == pytest.approx(200)  # the planes across the rings
    assert rate(8, 1) == pytest.approx(50)  # half of a ring: a line
    assert rate(32, 1) == pytest.approx(150)  # a ring and two neighbours
    assert rate(4, 4) == pytest.approx(25)  # a ring whose links four groups share
    assert rate(1024, 4) == pytest.approx(225)  # the same, and a plane of its own


def test_hops_are_half_of_a_ring() -> None:
    nothing = np.zeros(1)
    links = Links(TPU)
    assert links.ring(nothing, of(16), of(1)).item() == pytest.approx(8e-6)
    assert links.ring(nothing, of(4096), of(1)).item() == pytest.approx(24e-6)
    assert links.ring(nothing, of(8), of(1)).item() == pytest.approx(8e-6)
    assert links.all_reduce(nothing, of(16), of(1)).item() == pytest.approx(16e-6)


def test_an_exchange_is_bound_by_the_bisection() -> None:
    """A pod's bisection is 16 · 16 · 2 links of 50 GB/s, 25.6 TB/s: half of it all crosses it."""
    links = Links(ideal(TPU))
    whole = links.all_to_all(SIZE, of(4096), of(1)).item()
    assert whole == pytest.approx(2048 * 1e9 / 2 / 25.6e12)
    ring, line = (links.all_to_all(SIZE, of(n), of(1)).item() for n in (16, 8))
    assert ring == pytest.approx(8 * 1e9 / 2 / 100e9)
    assert line == pytest.approx(4 * 1e9 / 2 / 50e9)


def test_a_message_takes_the_links_of_one_way() -> None:
    links = Links(ideal(TPU))
    for stride, rate in ((1, 50e9), (16, 50e9), (256, 50e9), (4, 12.5e9), (15, 50e9), (32, 25e9)):
        assert links.send(SIZE, of(stride)).item() == pytest.approx(1e9 / rate), stride
    assert links.send(SIZE, of(4096)).item() == pytest.approx(1e9 / 6.25e9)  # to another pod


def test_a_torus_must_be_whole() -> None:
    ici, network = TPU.tiers
    for wrong, words in (
        (replace(ici, torus=(16, 16)), "one degree for each ring"),
        (replace(ici, torus=(16, 16, 8)), "its 2048 ranks must be the tier's size, 4096"),
        (replace(ici, torus=(16, 16, 16), reduces=True), "no switch joins a torus"),
        (replace(ici, link=H100.tiers[0].link), "nvlink4 is a switch"),
        (replace(ici, torus=(16, 256, 0)), "above 0"),
    ):
        with pytest.raises(FivefoldError, match=words):
            replace(TPU, tiers=(wrong, network))


def test_palm_has_no_pipeline_on_a_torus() -> None:
    """2,048 rows of 2,048 tokens on two pods, as PaLM 540B was trained."""
    shape = models.load("palm-540b")
    question = SearchSpace(shape, 6144, 2048, 2048, (4096,), {"cp": 1, "recompute": "none"})
    found = search_layouts(question, EstimateSetting(TPU, stacks.FIVEFOLD, "bf16"), 8).best
    assert found and found[0].grid.pp.item() == 1 and found[0].grid.zero.item() == 3
    assert found[0].grid.tp.item() > 1
