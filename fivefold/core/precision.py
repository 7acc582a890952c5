"""Number formats: the one table of dtypes, and of the precisions that plans and estimates name.

A precision (`bf16`) is what a plan says and the key of a machine's FLOP/s; a dtype (`bfloat16`) is
torch's name for the format of weights and activations. Optimizer states and master weights are
kept in float32 or wider; gradients are summed so too, unless a plan says `grad_dtype = bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "nvfp4"]
GradDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class NumberFormat:
    """A dtype: bytes of a number, and bits of its fraction."""

    itemsize: int
    fraction_bits: int
    verified: bool = True  # float16 needs loss scaling, which `verify` does not run

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.fraction_bits


FORMATS: dict[Dtype, NumberFormat] = {
    "float32": NumberFormat(4, 23),
    "float64": NumberFormat(8, 52),
    "bfloat16": NumberFormat(2, 7),
    "float16": NumberFormat(2, 10, verified=False),
}


@dataclass(frozen=True)
class ComputePrecision:
    """A precision: the dtype of weights and activations, and in which precision a run computes.

    Matmuls may have fewer bits, with everything else in bf16. Some of these formats only estimates
    have: a run computes in another. `narrow`: bytes of an element that a matmul reads, with its
    share of the scales: one for each 32 elements in mxfp8, for each 16 in nvfp4. `peak`: the key of
    the machine's FLOP/s, if not the precision's own name.
    """

    dtype: Dtype
    runs_in: Precision
    narrow: float | None = None
    peak: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of a weight or an activation."""
        return FORMATS[self.dtype].itemsize

    @property
    def wide(self) -> Precision:
        """The precision of all but narrow matmuls."""
        return self.runs_in if self.narrow is None else "bf16"


PRECISIONS: dict[str, ComputePrecision] = {
    "bf16": ComputePrecision("bfloat16", "bf16"),
    "fp8": ComputePrecision("bfloat16", "fp8", 1.0),
    "mxfp8": ComputePrecision("bfloat16", "fp8", 1 + 1 / 32, "fp8"),
    "nvfp4": ComputePrecision("bfloat16", "bf16", 1 / 2 + 1 / 16),
    "fp32": ComputePrecision("float32", "fp32"),
    "fp16": ComputePrecision("float16", "fp16"),
}
# What a run can compute in, the smallest first.
RUNTIME_PRECISIONS: tuple[Precision, ...] = tuple(
    sorted(
        dict.fromkeys(precision.runs_in for precision in PRECISIONS.values()),
        key=lambda name: PRECISIONS[name].itemsize,
    )
)


def plan_keys(precision: str) -> dict[str, str]:
    """The keys of a plan that runs what is estimated in this precision."""
    keys: dict[str, str] = {"precision": PRECISIONS[precision].runs_in}
    return {**keys, "fp8": "mxfp8"} if precision == "mxfp8" else keys


def run_keys(precision: str) -> dict[str, str]:
    """The keys of a run in this precision. One that is only planned stays, so that it is refused
    and nothing runs in another one."""
    return {"precision": precision} if precision in get_args(Precision) else plan_keys(precision)


def itemsize_of(precision: str) -> int:
    """Bytes of a weight or an activation; 2 for a format that only a machine file names."""
    return PRECISIONS[precision].itemsize if precision in PRECISIONS else 2


def matmul_bytes(precision: str) -> float:
    """Bytes of an element that matmuls read."""
    known = PRECISIONS.get(precision)
    narrow = None if known is None else known.narrow
    return float(itemsize_of(precision)) if narrow is None else narrow


def gradient_format(grad_dtype: GradDtype, itemsize: int) -> Dtype:
    """The dtype in which gradients of weights of so many bytes are accumulated and reduced; fp32
    means float32, or wider where the weights are wider."""
    if grad_dtype == "bf16":
        return "bfloat16"
    return "float64" if itemsize > FORMATS["float32"].itemsize else "float32"
