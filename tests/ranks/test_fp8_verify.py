"""`verify` in fp8: no value is rounded differently, and planted faults are seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planted import Patch
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.layout.fp8 import Fp8Format
from fivefold.core.plan.plan import PlanOptions
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.fp8 import experts as fp8_experts
from fivefold.model.fp8 import rounding as fp8
from fivefold.model.fp8 import rows as fp8_rows
from fivefold.model.fp8.linear import FusedLinears, RoundedWeights
from fivefold.model.fp8.operand import Operand
from fivefold.model.fp8.rounding import OverRanks
from fivefold.model.fp8.rows import BothStacks, RowOperand
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import SplitMatmuls
from fivefold.parallel.units import fp8_maxima
from fivefold.parallel.units.flat_unit import CodedGather
from fivefold.parallel.units.fp8_maxima import WeightMaxima
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge
from tests.commands import in_fork

SMALL = {"layers": "2"}
JOB = ["verify", "tiny", "--precision", "fp8"]
MOE = {"model": "tiny-moe"}
ZERO_3 = {**MOE, "zero": 3}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "words",
    [
        ["--fp8", "tensorwise"],
        ["--fp8", "blockwise"],
        ["--fp8", "tensorwise", "--set", "fp8_wgrad=bf16", "--set", "fp8_gradients=e4m3"],
        ["--fp8", "blockwise", "--set", "fp8_skip=1+0", "--microbatch-size", "2"],
        ["--fp8", "blockwise", "--layout", "dp=2 pp=2"],
        ["--fp8", "tensorwise", "--layout", "dp=2 pp=2", "--schedule", "zb-h1"],
        ["--fp8", "tensorwise", "--recompute", "selective"],
        ["--fp8", "blockwise", "--recompute", "full"],
    ],
    ids=" ".join,
)
def test_nothing_is_rounded_differently(words: list[str], tmp_path: Path) -> None:
    done = in_fork([*JOB, "--set", "layers=2", "--json", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["flips"] == 0 and found["passed"]
    assert max(found[key] for key in ("loss_err", "grad_err", "weight_err")) < 1e-10


def test_it_says_what_was_widened(tmp_path: Path) -> None:
    words = [*JOB, "--fp8", "blockwise", "--set", "layers=2", "--steps", "1"]
    said = in_fork(words, tmp_path).stdout
    assert "widened for blocks of 128: width 192, layers 2; rows of 160 tokens" in said
    assert "(flips): 0" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "pp=2", "--schedule", "pipedream"], "several versions of them"),
        (["--fp8", "blockwise", "--layout", "tp=2", "--set", "tp_overlap=2"], "does not is 1"),
        (["--dtype", "float32"], "emulates fp8 in float64"),
        (["--fp8", "delayed"], "tensorwise or blockwise"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path) -> None:
    done = in_fork([*JOB, *words], tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def stale_weights() -> Patch:
    """Weights of the first step, rounded once for all."""
    return patch.object(RoundedWeights, "forget", lambda self: None)


def transposed_scales() -> Patch:
    """The blocks of a weight with the scales of the transposed one."""
    rounded = fp8._square_blocks

    def turned(weight_OI: Tensor) -> Operand:
        right, wrong = rounded(weight_OI), rounded(weight_OI.T)
        blocks = min(*right.scale.shape, *wrong.scale.shape)
        scale = right.scale.clone()
        scale[:blocks, :blocks] = wrong.scale[:blocks, :blocks].clone()
        return right._replace(scale=scale)

    return patch.object(fp8, "_square_blocks", turned)


def one_part_only() -> Patch:
    """The maximum of the first linear alone, for all of a fused matmul."""
    largest = fp8.largest_of
    return patch.object(fp8, "largest_of", lambda parts: largest(parts[:1]))


def blocks_over_rows() -> Patch:
    """Tokens of two rows share a scale."""
    rounded = fp8._token_blocks

    def flattened(x_BSW: Tensor, form: Fp8Format) -> Operand:
        flat = rounded(x_BSW.flatten(0, 1)[None], form)
        right = rounded(x_BSW, form)
        blocks = min(flat.scale.shape[1], right.scale.shape[1])
        scale = right.scale.clone()
        scale[:, :blocks] = flat.scale[:, :blocks]
        return right._replace(scale=scale)

    return patch.object(fp8, "_token_blocks", flattened)


def gradients_of_weights_format() -> Patch:
    """Gradients in e4m3 where e5m2 is asked for."""
    return patch.object(FusedLinears, "_form", lambda self, gradient: "e4m3")


def stale_scale() -> Patch:
    """New codes of weights with the maxima of the first step."""
    measure, known = WeightMaxima.measure, dict[int, dict[str, Tensor]]()

    def first(self: WeightMaxima) -> dict[str, Tensor]:
        return known.setdefault(id(self), measure(self))

    return patch.object(WeightMaxima, "measure", first)


def one_shard_only() -> Patch:
    """Every rank scales by the maximum of what it has."""
    over = fp8_maxima._over

    def wrong(mesh: Mesh, axis: str) -> OverRanks:
        largest = over(mesh, axis)
        return lambda maximum: (largest(maximum.clone()), maximum)[1]

    return patch.object(fp8_maxima, "_over", wrong)


def scale_of_another_rank() -> Patch:
    """All ranks scale by the maximum of the last one."""
    over = fp8_maxima._over

    def wrong(mesh: Mesh, axis: str) -> OverRanks:
        largest, last = over(mesh, axis), mesh.coord(axis) == mesh.size(axis) - 1
        return lambda maximum: largest(maximum if last else torch.zeros_like(maximum))

    return patch.object(fp8_maxima, "_over", wrong)


def gradients_of_own_heads() -> Patch:
    """Replicated KV heads: every rank rounds its share of the gradient."""

    def partial_sums(self: SplitMatmuls, gradients: Sequence[Tensor], _: object) -> object:
        return gradients

    return patch.object(SplitMatmuls, "sum_shared_grads", partial_sums)


def padding_counts() -> Patch:
    """Maxima go over padded tokens as well."""
    return patch.multiple(
        SplitMatmuls, zero_padding=lambda self, x: x, zero_padding_of_all=lambda self, x: x
    )


def scale_of_another_expert() -> Patch:
    """Codes of an expert's weight by its own scale, and values by that of the next one."""
    rounded = fp8_experts.round_stacks

    def wrong(parts: Sequence[Tensor], maximum_E: Tensor) -> BothStacks:
        right = rounded(parts, maximum_E)
        moved = (each._replace(scale=each.scale.roll(1, 0)) for each in right)
        return BothStacks(*moved)

    return patch.object(fp8_experts, "round_stacks", wrong)


def rows_of_one_etp_shard() -> Patch:
    """A row's scale from the columns of this rank alone."""
    over = fp8_maxima._over

    def wrong(mesh: Mesh, axis: str) -> OverRanks:
        largest = over(mesh, axis)
        return largest if axis != "etp" else lambda mine: (largest(mine.clone()), mine)[1]

    return patch.object(fp8_maxima, "_over", wrong)


def stale_expert_maxima() -> Patch:
    """New codes of experts with the maxima of the first step."""
    measured, known = WeightMaxima._of_experts, dict[tuple[int, str], Tensor]()

    def first(self: WeightMaxima, names: Sequence[str], number: int) -> Tensor:
        found = measured(self, names, number)
        return known.setdefault((id(self), names[0]), found.clone())

    return patch.object(WeightMaxima, "_of_experts", first)


def experts_of_one_shard() -> Patch:
    """Every rank scales an expert by the maximum of its own shard."""
    over = fp8_maxima._over

    def wrong(mesh: Mesh, axis: str) -> OverRanks:
        largest = over(mesh, axis)
        return largest if axis != "edp" else lambda mine: (largest(mine.clone()), mine)[1]

    return patch.object(fp8_maxima, "_over", wrong)


def gathered_by_the_next_scale() -> Patch:
    """Codes of experts that arrive become values by the scale of the next one."""
    filled = CodedGather.fill

    def wrong(self: CodedGather, full: Tensor, come: Sequence[Tensor]) -> None:
        right = self.maximum
        with patch.object(self, "maximum", lambda name: right(name).roll(1)):
            filled(self, full, come)

    return patch.object(CodedGather, "fill", wrong)


def scale_of_another_row() -> Patch:
    """Codes that arrive with the scales of their neighbours."""

    def wrong(packed: Tensor, width: int) -> RowOperand:
        right = fp8_rows.unpacked(packed, width)
        return right._replace(scale=right.scale.roll(1))

    return patch.object(fp8_experts, "unpacked", wrong)


def _run_planted(worker: Worker, fault: object, *job: object) -> VerifiedRank:
    assert callable(fault)
    with fault():
        return run_rank(worker, *job)  # pyright: ignore[reportArgumentType]


def verdict(pool: Pool, scaling: str, fault: object, layout: str, said: Any) -> VerifyVerdict:
    changes = SMALL | said.get("set", {})
    options = {"precision": "fp8", "fp8": scaling, **said, "set": changes}
    model = options.pop("model", "tiny")
    plan, settings = runnable(PlanOptions(model, layout=layout, **options)), VerifySettings()
    ranks = [(_run_planted, (fault, plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
    return judge(plan, settings, runs, truths)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("scaling", "fault", "layout", "said"),
    [
        ("tensorwise", stale_weights, "dp=1", {}),
        ("blockwise", stale_weights, "dp=1", {}),
        ("tensorwise", stale_scale, "dp=1", {}),
        ("tensorwise", stale_scale, "dp=2", {"zero": 3}),
        ("tensorwise", one_shard_only, "dp=2", {"zero": 3}),
        ("blockwise", transposed_scales, "dp=1", {}),
        ("tensorwise", one_part_only, "dp=1", {}),
        ("blockwise", blocks_over_rows, "dp=1", {"microbatch_size": 2}),
        ("tensorwise", gradients_of_weights_format, "dp=1", {}),
        ("tensorwise", one_shard_only, "tp=2", {}),
        ("tensorwise", one_shard_only, "cp=2", {}),
        ("tensorwise", scale_of_another_rank, "tp=2", {}),
        ("tensorwise", scale_of_another_rank, "cp=2", {}),
        ("tensorwise", gradients_of_own_heads, "tp=2", {"set": {"kv_heads": "1"}}),
        ("blockwise", gradients_of_own_heads, "tp=2", {"set": {"kv_heads": "1"}}),
        ("tensorwise", padding_counts, "cp=4", {"seq": 9}),
        ("tensorwise", scale_of_another_expert, "dp=1", MOE),
        ("tensorwise", stale_expert_maxima, "dp=1", MOE),
        ("tensorwise", experts_of_one_shard, "dp=2 tp=2 ep=2", ZERO_3),
        ("tensorwise", gathered_by_the_next_scale, "dp=2", ZERO_3),
        ("tensorwise", scale_of_another_row, "dp=2 ep=2", MOE),
        ("tensorwise", rows_of_one_etp_shard, "tp=2 etp=2", MOE),
    ],
)
def test_planted_faults_are_seen(
    pool: Pool, scaling: str, fault: object, layout: str, said: Any
) -> None:
    sick = verdict(pool, scaling, fault, layout, said)
    assert not sick.passed
    assert sick.flips, "the values that round differently are counted"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "said"), [("cp=4", {"seq": 9}), ("dp=2 tp=2 ep=2", ZERO_3), ("dp=2", ZERO_3)]
)
def test_without_a_fault_it_passes(pool: Pool, layout: str, said: Any) -> None:
    healthy = verdict(pool, "tensorwise", nullcontext, layout, said)
    assert healthy.passed and healthy.flips == 0
