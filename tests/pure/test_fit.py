"""Times to constants: known ones come back, and the file that holds them can be read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.commands.calibrate import file_text, table_json, table_text
from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import Machine, load, presets
from fivefold.cost.hardware.calibration import (
    MeasuredTimes,
    Sample,
    calibrate,
    fit_line,
    guess_base,
    residuals,
)
from fivefold.cost.hardware.links import Links

SIZES = [10**power for power in (8, 9, 9.5, 10, 11, 12, 12.5)]


def times(
    rate: float,
    start: float,
    work: list[float] = SIZES,
    noise: float = 0.0,
    starts: float = 1.0,
    seed: int = 0,
) -> list[Sample]:
    """What a machine with these constants would have shown."""
    chance = random.Random(seed)
    return [
        Sample(
            f"{each:g}",
            each,
            (each / rate + starts * start) * (1 + noise * chance.uniform(-1, 1)),
            starts,
        )
        for each in work
    ]


@given(st.floats(1e9, 2e15), st.floats(1e-6, 1e-3), st.integers(1, 63))
def test_known_constants_come_back(rate: float, start: float, starts: int) -> None:
    # From all start to all work, whatever the constants: else one of them leaves no trace.
    work = [rate * start * starts * share for share in (0.01, 0.1, 1, 10, 100)]
    found = fit_line(times(rate, start, work, starts=starts))
    assert found.rate == pytest.approx(rate, rel=1e-6)
    assert found.start == pytest.approx(start, rel=1e-6)
    assert found.residuals.worst < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_them_by_no_more_than_itself(seed: int) -> None:
    samples = times(700e12, 12e-6, noise=0.05, seed=seed)
    found = fit_line(samples)
    assert found.rate == pytest.approx(700e12, rel=0.05)
    assert found.start == pytest.approx(12e-6, rel=0.05)
    assert 0 < found.residuals.median < found.residuals.worst < 0.1
    assert found.residuals.num_samples == len(samples)


def test_no_other_line_has_less_squared_relative_error() -> None:
    samples = times(700e12, 12e-6, noise=0.2, seed=3)
    found = fit_line(samples)

    def loss(rate: float, start: float) -> float:
        return sum(((one.work / rate + start) / one.seconds - 1) ** 2 for one in samples)

    least = loss(found.rate, found.start)
    for off in (0.99, 1.01):
        assert least < loss(found.rate * off, found.start)
        assert least < loss(found.rate, found.start * off)


def test_constants_are_never_negative() -> None:
    faster_when_small = [Sample("a", 1.0, 0.5), Sample("b", 10.0, 10.0), Sample("c", 100.0, 110.0)]
    found = fit_line(faster_when_small)
    assert found.start == 0 and found.rate > 0
    flat = [Sample("a", 1.0, 2.0), Sample("b", 10.0, 1.0)]
    assert fit_line(flat).start == 0 and fit_line(flat).rate > 0


def test_a_given_start_is_kept_unless_it_explains_all() -> None:
    found = fit_line(times(300e12, 12e-6), start=12e-6)
    assert (found.rate, found.start) == (pytest.approx(300e12), 12e-6)
    quick = fit_line([Sample("a", 1e9, 1e-6), Sample("b", 2e9, 2e-6)], start=1.0)
    assert (quick.rate, quick.start) == (pytest.approx(1e15), 0.0)


def test_one_size_is_not_enough_for_two_constants() -> None:
    with pytest.raises(FivefoldError, match="give more --seconds"):
        fit_line([Sample("a", 1.0, 2.0), Sample("a again", 1.0, 2.1)])


def test_residuals_are_shares_of_what_was_measured() -> None:
    samples = [Sample("a", 1.0, 2.0), Sample("b", 4.0, 4.0), Sample("c", 8.0, 4.0)]
    assert residuals(samples, 1.0, 0.0) == (0.5, 1.0, 3)


def on_h200(**more: list[Sample]) -> MeasuredTimes:
    samples = {"matmul": times(700e12, 10e-6), "memory": times(4e12, 0.0)} | more
    return MeasuredTimes("NVIDIA H200", "bf16", samples, launch=4e-6, ranks=8)


def written(found_in: Path, base: str, measured: MeasuredTimes) -> Machine:
    found = calibrate(load(base), measured, "Measured by a test")
    path = found_in / "mine.toml"
    path.write_text(file_text(found, measured, "Measured by a test"), "utf-8")
    return load(path)


def test_the_file_holds_what_was_measured_and_the_base_all_else(tmp_path: Path) -> None:
    base = load("h200")
    rings = times(300e9, 5e-6, starts=7.0, work=[1e5, 1e6, 1e7, 1e8])
    narrow, flash2 = times(1300e12, 10e-6), times(330e12, 10e-6)
    machine = written(
        tmp_path, "h200", on_h200(links=rings, matmul_fp8=narrow, attention_old=flash2)
    )
    reach = machine.efficiency
    assert reach.matmul == pytest.approx(700 / 989.4, rel=2e-3)
    assert reach.matmul_fp8 == pytest.approx(1300 / 1978.9, rel=2e-3)
    assert reach.attention_old == pytest.approx(330 / 989.4, rel=2e-3)
    assert reach.memory == pytest.approx(4 / 4.8, rel=2e-3)
    assert reach.start == pytest.approx(10e-6, rel=2e-3)
    assert reach.attention == base.efficiency.attention
    assert reach.links == (pytest.approx(300 / 450, rel=2e-3), base.efficiency.links[1])
    assert machine.tiers[0].link.latency == pytest.approx(5e-6)
    assert (machine.tiers[0].size, machine.tiers[1]) == (8, base.tiers[1])
    assert machine.peaks == base.peaks and machine.memory == base.memory
    assert machine.sources["efficiency"] == "Measured by a test"
    assert machine.sources["peaks"] == base.sources["peaks"]


def test_the_planner_says_of_a_ring_what_was_measured(tmp_path: Path) -> None:
    size, ranks = np.array([64e6]), 8
    seconds = size[0] * (1 - 1 / ranks) / 300e9 + (ranks - 1) * 5e-6
    rings = times(300e9, 5e-6, starts=ranks - 1.0, work=[1e5, 1e6, 1e7, 1e8])
    found = Links(written(tmp_path, "h200", on_h200(links=rings)))
    said = found.ring(size, np.array([float(ranks)]), np.ones(1))
    assert said.item() == pytest.approx(seconds, rel=5e-3)


def test_hardware_is_raised_to_what_was_measured(tmp_path: Path) -> None:
    samples = {
        "matmul": times(150e9, 1e-6),
        "attention": times(60e9, 1e-6),
        "memory": times(20e9, 0.0),
        "links": times(3e9, 50e-6),
    }
    measured = MeasuredTimes("one core", "fp32", samples, launch=1e-6, ranks=2)
    machine = written(tmp_path, "laptop", measured)
    assert machine.peak("fp32") == pytest.approx(150e9)
    assert machine.peak("fp64") == load("laptop").peak("fp64")
    assert machine.memory_bandwidth == pytest.approx(20e9)
    assert machine.tiers[0].bandwidth == pytest.approx(3e9)
    reach = machine.efficiency
    assert (reach.matmul, reach.memory, reach.links) == (1.0, 1.0, (1.0,))
    assert reach.attention == pytest.approx(60 / 150)
    notes = calibrate(load("laptop"), measured, "Measured by a test").notes
    assert [note.split(": ")[1].split(" is")[0] for note in notes] == [
        "peaks.fp32",
        "memory_bandwidth",
        "tiers.loopback.link",
    ]


def test_planned_beside_measured() -> None:
    measured = on_h200()
    found = calibrate(load("h200"), measured, "Measured by a test")
    assert [row.key for row in found.rows] == ["matmul", "start", "memory"]
    products = found.rows[0]
    assert products.planned == load("h200").efficiency.matmul
    planned = residuals(
        measured.samples["matmul"], products.planned * 989.4e12, load("h200").efficiency.start
    )
    assert products.planned_residuals == planned
    assert products.residuals.worst < 1e-6 < planned.median
    table = table_json(found, measured)
    assert table["constants"]["start"]["measured"] == pytest.approx(10e-6)
    assert table["constants"]["matmul"]["error"]["num_samples"] == len(SIZES)
    assert table["machine"]["efficiency"] == found.table["efficiency"]
    text = "\n".join(table_text(found, measured))
    assert "700 TFLOP/s" in text and "4,000 GB/s" in text and "10 us" in text


def test_the_file_says_what_the_fits_leave(tmp_path: Path) -> None:
    measured = on_h200(matmul=times(700e12, 10e-6, noise=0.1))
    found = calibrate(load("h200"), measured, "Measured by a test")
    left = found.rows[0].residuals
    text = file_text(found, measured, "Measured by a test")
    assert f"#   matmul: median {left.median:.1%}, worst {left.worst:.1%} of 7 sizes" in text
    assert text.startswith("# Measured by a test.\n")


@pytest.mark.parametrize(
    ("device", "gigabytes", "base"),
    [
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA GB200", 186, "gb200"),
        ("Tesla V100-SXM3-32GB", 32, "v100"),
    ],
)
def test_the_base_is_guessed_from_the_name(device: str, gigabytes: int, base: str) -> None:
    assert guess_base(device, gigabytes * 1e9) == base


@pytest.mark.parametrize("device", ["NVIDIA GH200 480GB", "NVIDIA L40S", "NVIDIA H20"])
def test_an_unknown_gpu_asks_for_a_base(device: str) -> None:
    with pytest.raises(FivefoldError) as refused:
        guess_base(device, 48e9)
    assert all(name in str(refused.value) for name in presets())
