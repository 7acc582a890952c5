"""`verify` in fp8: no value is rounded differently, and planted faults are seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from planted import Patch
from torch import Tensor

from fivefold.core.fp8 import Fp8Format
from fivefold.core.plan import PlanOptions
from fivefold.launch.processes import Pool, Worker
from fivefold.model import fp8
from fivefold.model.fp8_linear import RoundedWeights
from fivefold.model.fp8_operand import Both, Operand
from fivefold.verbs.verify import runnable
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import VerifyVerdict, judge
from tests.commands import in_fork

SMALL = {"layers": "2"}
JOB = ["verify", "tiny", "--precision", "fp8"]


@pytest.mark.parametrize(
    "words",
    [
        ["--fp8", "tensorwise"],
        ["--fp8", "blockwise"],
        ["--fp8", "tensorwise", "--fp8-wgrad", "bf16", "--fp8-gradients", "e4m3"],
        ["--fp8", "blockwise", "--fp8-skip", "1+0", "--microbatch-size", "2"],
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
        (["--layout", "tp=2"], "maxima are not exchanged"),
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
    largest = fp8._largest
    return patch.object(fp8, "_largest", lambda parts: largest(parts[:1]))


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
    tokens = fp8.Tensorwise.tokens

    def narrow(self: fp8.Tensorwise, parts: Sequence[Tensor], form: Fp8Format, both: bool) -> Both:
        return tokens(self, parts, "e4m3", both)

    return patch.object(fp8.Tensorwise, "tokens", narrow)


def _run_planted(worker: Worker, fault: object, *job: object) -> VerifiedRank:
    assert callable(fault)
    with fault():
        return run_rank(worker, *job)  # pyright: ignore[reportArgumentType]


def verdict(scaling: str, fault: object, **more: int) -> VerifyVerdict:
    said = {"precision": "fp8", "fp8": scaling, **more}
    plan = runnable(PlanOptions("tiny", set=SMALL, **said))  # pyright: ignore[reportArgumentType]
    plan, settings = replace(plan, notes=()), VerifySettings()
    with Pool(2, 60.0) as pool:
        run, truths = pool.run_each(
            [(_run_planted, (fault, plan, settings)), (run_reference, (plan, settings))], None
        )
    return judge(plan, settings, [run], truths)


@pytest.mark.parametrize(
    ("scaling", "fault", "more"),
    [
        ("tensorwise", stale_weights, {}),
        ("blockwise", stale_weights, {}),
        ("blockwise", transposed_scales, {}),
        ("tensorwise", one_part_only, {}),
        ("blockwise", blocks_over_rows, {"microbatch_size": 2}),
        ("tensorwise", gradients_of_weights_format, {}),
    ],
)
def test_planted_faults_are_seen(scaling: str, fault: object, more: dict[str, int]) -> None:
    assert not verdict(scaling, fault, **more).passed
