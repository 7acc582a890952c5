"""Machines: published figures, tiers, custom files, and what bad files say."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.core import hardware as machine
from fivefold.core import tables
from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.hardware import Link, Machine, Tier, load

GPUS = "v100 a100 a100-40g a800 h100 h800 h200 b200 b300 gb200 gb300"
REQUIRED_MACHINES = [*GPUS.split(), "tpu-v4", "tpu-v5p", "laptop"]
LINKS = "pcie5 nvlink3 nvlink4 nvlink5 ib-hdr ib-ndr ib-xdr roce-400 ethernet"
GIB = 2**30


def test_the_required_presets_exist() -> None:
    assert set(REQUIRED_MACHINES) <= set(machine.presets())
    assert set(LINKS.split()) <= set(machine.links())


# TFLOP/s in bf16 and fp8, datasheet GB, TB/s, innermost link's GB/s and domain, network's GB/s
PUBLISHED = {
    "v100": (None, None, 32, 0.9, 150, 16, 6.25),
    "a100": (312, None, 80, 2.0, 300, 8, 25),
    "a100-40g": (312, None, 40, 1.555, 300, 8, 25),
    "a800": (312, None, 80, 2.0, 200, 8, 25),
    "h100": (989, 1979, 80, 3.35, 450, 8, 50),
    "h800": (989, 1979, 80, 3.35, 200, 8, 50),
    "h200": (989, 1979, 141, 4.8, 450, 8, 50),
    "b200": (2250, 4500, 180, 8.0, 900, 8, 50),
    "b300": (2250, 4500, 270, 8.0, 900, 8, 100),
    "gb200": (2450, 4900, 186, 8.0, 900, 72, 50),
    "gb300": (2450, 4900, 279, 8.0, 900, 72, 100),
    "tpu-v4": (275, None, 32, 1.2, 300, 4096, 6.25),
    "tpu-v5p": (459, None, 95, 2.765, 600, 8960, 6.25),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    bf16, fp8, gigabytes, terabytes_s, inner, domain, network = PUBLISHED[name]
    found = load(name)
    for dtype, teraflops in (("bf16", bf16), ("fp8", fp8)):
        if teraflops is None:
            assert dtype not in found.peaks.known()
        else:
            assert found.peak(dtype) == pytest.approx(teraflops * 1e12, rel=1e-3)
    # A program sees at most the datasheet's figure in GiB, and at least 98% of it.
    assert 0.98 * gigabytes <= found.memory / GIB <= gigabytes
    assert found.memory_bandwidth == pytest.approx(terabytes_s * 1e12, rel=0.02)
    assert [tier.size for tier in found.tiers] == [domain, None]
    assert found.tiers[0].bandwidth == pytest.approx(inner * 1e9)
    assert found.tiers[-1].bandwidth == pytest.approx(network * 1e9)


def test_nodes_and_domains_are_two_things() -> None:
    assert load("h100").gpus_per_node == load("h100").tiers[0].size == 8
    assert load("gb200").gpus_per_node == 4
    assert load("v100").gpus_per_node == 16
    assert load("v100").tiers[-1].links_per_gpu == 0.5  # 8 cards for 16 GPUs


def test_torus_links_say_how_many_rings_share_their_bandwidth() -> None:
    for name, one_link in (("ici-v4", 50e9), ("ici-v5p", 100e9)):
        link = machine.links()[name]
        assert (link.topology, link.rings) == ("torus", 3)
        assert link.bandwidth / link.rings / 2 == pytest.approx(one_link)


def test_link_rates_follow_from_their_standards() -> None:
    found = machine.links()
    for name, gigabits in {"ib-edr": 100, "ib-hdr": 200, "ib-ndr": 400, "ib-xdr": 800}.items():
        assert found[name].bandwidth == gigabits * 1e9 / 8
    assert found["roce-400"].bandwidth == found["ib-ndr"].bandwidth
    for name, transfers in {"pcie3": 8e9, "pcie4": 16e9, "pcie5": 32e9}.items():
        assert found[name].bandwidth == pytest.approx(transfers * 16 / 8 * 128 / 130, rel=1e-3)
    assert found["nvlink5"].latency < found["ib-ndr"].latency < found["ethernet"].latency


@pytest.mark.parametrize("name", REQUIRED_MACHINES)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    found = load(name)
    defaults = {"matmul_measured": machine.Rates(), "price_per_gpu_hour": None}
    defaults["gpu_mtbf_hours"] = None
    for field in dataclasses.fields(found):
        if field.name in ("name", "chip", "sources", "fitted"):
            continue
        if getattr(found, field.name) != defaults.get(field.name, ...):
            source = found.sources[field.name]
            assert len(source) > 15 and not source.startswith("set in"), field.name


def test_every_link_has_a_source_that_speaks_of_its_latency() -> None:
    for name, link in machine.links().items():
        assert "latency" in link.source or name == "loopback", name


def test_the_laptop_says_that_it_is_assumed() -> None:
    assert all(source.startswith("Assumption") for source in load("laptop").sources.values())


@pytest.mark.parametrize("name", REQUIRED_MACHINES)
def test_measured_products_stay_below_the_peak(name: str) -> None:
    found = load(name)
    for dtype, rate in found.matmul_measured.known().items():
        assert 0.6 * found.peak(dtype) < rate < found.peak(dtype)


def test_a_missing_dtype_lists_what_the_machine_has() -> None:
    with pytest.raises(FivefoldError, match=r"v100 has no peak for 'bf16': choose from fp16, fp32"):
        load("v100").peak("bf16")


@pytest.mark.parametrize(
    ("name", "ranks", "tier"),
    [
        ("h100", [0, 7], "nvlink"),
        ("h100", [7, 8], "network"),  # neighbours, but on two nodes
        ("h100", [15, 8, 11], "nvlink"),  # any order
        ("h100", [0, 8, 16], "network"),
        ("h100", [5], "nvlink"),
        ("gb200", [0, 8, 71], "nvlink"),  # 18 nodes, one domain
        ("gb200", [71, 72], "network"),
        ("tpu-v4", [0, 4095], "ici"),
        ("laptop", [0, 31], "loopback"),
    ],
)
def test_tier_of(name: str, ranks: list[int], tier: str) -> None:
    assert load(name).tier_of(ranks).name == tier


def three_tiers(inner: int, middle: int) -> Machine:
    base = load("h100")
    link = base.tiers[0].link
    sizes = {"nvlink": inner, "site": inner * middle, "world": None}
    tiers = tuple(Tier(name, link, size) for name, size in sizes.items())
    return dataclasses.replace(base, tiers=tiers)


@given(st.integers(1, 9), st.integers(2, 9), st.lists(st.integers(0, 500), min_size=1, max_size=6))
def test_the_tier_is_the_innermost_that_holds_all_pairs(
    inner: int, middle: int, ranks: list[int]
) -> None:
    found = three_tiers(inner, middle)
    place = found.tiers.index
    pairs = [place(found.tier_of((a, b))) for a in ranks for b in ranks]
    assert place(found.tier_of(ranks)) == max(pairs)


def test_beyond_the_outermost_domain_is_an_error_with_a_way_out() -> None:
    base = load("h100")
    one_node = dataclasses.replace(base, name="box", tiers=base.tiers[:1])
    with pytest.raises(
        FivefoldError, match=r"ranks 0 to 8 do not fit .* add a tier without a size"
    ):
        one_node.tier_of([0, 8])


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", REQUIRED_MACHINES)
def test_a_machine_written_out_loads_as_an_equal_one(name: str, tmp_path: Path) -> None:
    found = load(name)
    again = load(write(tmp_path, tables.to_toml(machine.to_table(found))))
    assert again == found
    assert hash(again) == hash(found)


@given(st.integers(1, 9), st.integers(2, 9), st.floats(1e-9, 1e20), st.booleans())
def test_any_machine_written_out_loads_as_an_equal_one(
    tmp_path_factory: pytest.TempPathFactory, inner: int, middle: int, memory: float, bare: bool
) -> None:
    found = dataclasses.replace(three_tiers(inner, middle), memory=memory)
    if bare:
        found = dataclasses.replace(found, sources={}, matmul_measured=machine.Rates())
    text = tables.to_toml(machine.to_table(found))
    assert load(write(tmp_path_factory.mktemp("machine"), text)) == found


def test_a_base_gives_what_the_file_leaves_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        base = "h100"
        memory = 94e9
        [peaks]
        bf16 = 800e12
        [tiers.network]
        size = 4096
        link = "roce-400"
        links_per_gpu = 0.5
        [tiers.wide]
        link = { name = "fibre", bandwidth = 1e9, latency = 0.01, source = "our lease" }
        [sources]
        memory = "the vendor's mail"
        """,
    )
    found, base = load(str(path)), load("h100")
    assert (found.name, found.memory, found.peak("bf16")) == ("mine", 94e9, 800e12)
    assert found.peak("fp8") == base.peak("fp8")
    assert [(tier.name, tier.size) for tier in found.tiers] == [
        ("nvlink", 8), ("network", 4096), ("wide", None),
    ]  # fmt: skip
    assert found.tiers[1].bandwidth == 25e9
    assert found.tiers[2].link == Link("fibre", 1e9, 0.01, "our lease")
    assert found.tier_of([0, 4096]).name == "wide"
    assert found.sources["memory"] == "the vendor's mail"
    assert found.sources["peaks"] == found.sources["tiers"] == "set in mine.toml"
    assert found.sources["host"] == base.sources["host"]


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        base = "h100"
        memroy = 1e9
        [tiers.network]
        link = "ib-ndd"
        sise = 4
        [host]
        link = "pcie7"
        """,
    )
    with pytest.raises(BadFile) as caught:
        load(path)
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "'memroy': did you mean memory" in told
    assert "tiers.network.link = 'ib-ndd': did you mean ib-ndr" in told
    assert "unknown key 'tiers.network.sise': did you mean size" in told
    assert "host.link = 'pcie7': did you mean pcie" in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory = -1.0", "memory = -1.0: give a finite number above 0"),
        ("memory = nan", "memory = nan: give a finite number above 0"),
        ("[host]\nnvme_bandwidth = inf", "host.nvme_bandwidth = inf"),
        ("[tiers.nvlink]\nsize = 0", "tiers.nvlink.size = 0: give a finite number above 0"),
        ("[tiers.network]\nsize = 12", "tiers.network.size = 12: give a larger multiple of the 8"),
        ("[tiers.wide]\nlink = 'ethernet'", "network has no size, yet wide is outside it"),
        ("[tiers]\nwide = 8", "tiers.wide = 8: expected a table with a link"),
        ("[tiers.'two words']\nsize = 4\nlink = 'pcie5'", "use letters, digits"),
        ("[sources]\nmemry = 'x'", "'sources.memry': did you mean memory"),
        ("sources = 3", "sources = 3"),
    ],
)
def test_numbers_that_no_machine_can_have(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadFile) as caught:
        load(write(tmp_path, f'base = "h100"\n{text}\n'))
    assert says in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_a_file_without_a_base_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(BadFile) as caught:
        load(write(tmp_path, 'chip = "mine"\n'))
    missing = {"gpus_per_node", "peaks", "memory", "memory_bandwidth", "tiers", "host"}
    assert len(caught.value.problems) == len(missing)
    assert all(any(f"'{key}'" in one for one in caught.value.problems) for key in missing)


@pytest.mark.parametrize(
    "tiers", ['[[tiers]]\nlink = "nvlink4"\n', "tiers = [1, 2]\n", "[[tiers]]\n", "tiers = 3\n"]
)
def test_tiers_that_are_no_tables_are_refused_by_their_rule(tmp_path: Path, tiers: str) -> None:
    with pytest.raises(BadFile, match=r"tiers: write a table for each, as \[tiers.nvlink\]"):
        load(write(tmp_path, f'base = "h100"\n{tiers}'))


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown machine 'h10': did you mean .*h100"):
        load("h10")
    for name in ("cray", "rtx4090", "rtx-4090", "mi300x", "MI300X", "l40s", "4090"):
        with pytest.raises(UnknownName, match=r": known machines: a100, .* v100") as caught:
            load(name)  # a chip of other letters is no typo, and its numbers are a file's
        assert "did you mean" not in str(caught.value)
        assert all(
            word in str(caught.value) for word in ("my.toml", "base =", "fivefold calibrate")
        )
    with pytest.raises(BadFile, match="base = 'h1000': did you mean h100"):
        load(write(tmp_path, 'base = "h1000"\n'))
    with pytest.raises(BadFile, match="check the path"):
        load("no/such/machine.toml")


def test_preset_files_hold_no_name_of_their_own() -> None:
    """The file name is the name: two would drift apart."""
    for path in (machine.PRESETS / "machines").glob("*.toml"):
        assert "name" not in tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory = " + "9" * 5000, "not valid TOML"),
        ("memory = 1" + "0" * 400, "memory: whole numbers have at most 64 bits"),
        ("memory = 0x" + "f" * 5000, "memory: whole numbers have at most 64 bits"),
        ("sources = [[0x1" + "0" * 20 + "]]", "sources: whole numbers"),
        ("memory = " + "[" * 5000, "nested too deep"),
        ("memory = 1e400", "give a finite number"),
    ],
)
def test_monstrous_numbers_and_nesting_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "h100"\n{text}\n')
    with pytest.raises(BadFile, match=says):
        machine.load(path)


def test_names_may_be_written_in_capitals() -> None:
    assert machine.load("H100") == machine.load("h100")
