"""The machine and the precision of a measured run, from the words of its row."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from fivefold.core import PRECISIONS, Machine, UnknownName
from fivefold.core import hardware as machines
from fivefold_score.spelling import RowReader, family_of, is_usual_network, network_rate, spellings


def read_machine(reader: RowReader, without: str) -> Machine:
    """The machine of a row, with the network that it names; none of its numbers is fitted to the
    source `without`."""
    tables, label = spellings(), reader.text("gpu").lower()
    name = tables.gpus.get(label, label)
    wires = reader.text("interconnect")
    family = tables.families.get(family_of(reader.row))
    if not wires and family and family.interconnect:
        wires = family.interconnect
        reader.assume(f"interconnect is not said: {wires}, as other rows of its family")
    variants = tables.variants.get(name, {})
    variant = next((kind for text, kind in variants.items() if text in wires), "")
    name = variant or name
    for chips, part in tables.slices.get(name, {}).items():
        if reader.integer("gpus") % int(chips) == 0:
            name = part
    machine = _loaded(name, without)
    _compare_nodes(reader, machine)
    rate = reader.row.get("network_gb_s")
    if rate is not None:
        return _with_network(machine, float(rate) * 1e9)
    stated = network_rate(wires, machine.gpus_per_node)
    if stated is not None and not variant:
        return _with_network(machine, stated)
    crosses = reader.integer("gpus") > (machine.tiers[0].size or machine.gpus_per_node)
    if crosses and not variant and not is_usual_network(wires):
        label = f"{wires!r} tells no bandwidth" if wires else "interconnect is not said"
        reader.assume(f"{label}: the network of {machine.name}")
    return machine


def _compare_nodes(reader: RowReader, machine: Machine) -> None:
    count = reader.row.get("gpus_per_node")
    if count is not None and count != machine.gpus_per_node:
        of = f"the {machine.gpus_per_node} of {machine.name}"
        reader.assume(f"gpus_per_node = {count}: priced with {of}")


@lru_cache
def _loaded(name: str, without: str) -> Machine:
    return machines.load_without(name, without)


@lru_cache
def _with_network(machine: Machine, bandwidth: float) -> Machine:
    *inner, network = machine.tiers
    if network.link.bandwidth * network.links_per_gpu == bandwidth:
        return machine
    link = replace(network.link, bandwidth=bandwidth)
    return replace(machine, tiers=(*inner, replace(network, link=link, links_per_gpu=1.0)))


def read_precision(reader: RowReader) -> str:
    """The precision: one word of the row, which may be followed by a recipe in brackets."""
    text = reader.text("precision").lower()
    if not text:
        reader.assume("precision is not said: bf16")
        return "bf16"
    known = {**spellings().precisions, **{precision: precision for precision in PRECISIONS}}
    names = [word for word in re.findall(r"[a-z0-9]+", text.split("(")[0]) if word in known]
    if not names:
        raise UnknownName("precision", text, known)
    precisions = {known[name] for name in names}
    if len(precisions) > 1:
        reader.assume(f"precision = {text!r}: matmuls in {known[names[-1]]}")
    elif text.split("(")[0].strip() not in known:
        reader.assume(f"precision = {text!r}: {known[names[-1]]}")
    return known[names[-1]]
