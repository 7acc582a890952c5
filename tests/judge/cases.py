"""The trainings that are judged: together they have every key that changes a number."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from fivefold import step as step_module
from tests.judge.runs import Case, Table

MOE: Table = {"moe.experts": 4}
BIASED: Table = {**MOE, "moe.bias": True}
KILLED_AFTER = 4  # steps


def killed() -> AbstractContextManager[Any]:
    """One rank is killed in the middle of its fifth step."""
    inner, calls = step_module.step, [0]

    def dies(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] > KILLED_AFTER and given[0].mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*given)

    return patch("fivefold.train.loop.step", dies)


CASES = (
    Case("usual", train={"lr": None, "data": None, "steps": None}, model={"vocab": 300}),
    Case("two epochs", plan={"packed": True}, train={"data": "{short}", "seed": 5}),
    Case(
        "clipped",
        "dp=2",
        {"zero": 1, "packed": True},
        train={"clip": 0.05, "weight_decay": 0.5, "lr_curve": "linear", "warmup": 3},
    ),
    Case("muon", "tp=2", train={"optimizer": "muon", "lr_curve": "wsd", "warmup": 3, "steps": 10}),
    Case("sgd", "pp=2", train={"optimizer": "sgd", "lr_curve": "constant", "warmup": 0}),
    Case("tied", "pp=2", {"schedule": "zb-h1", "recompute": "full"}, {"tied": True}),
    Case("context", "cp=2", {"packed": True}, train={"events": True, "log": "memory"}),
    Case("mixture", train={"data": "{short}:1 {other}:2.5 synthetic:0.5"}),
    Case("experts", "dp=2 ep=2", {"balance": "aux+z", "packed": True}, MOE),
    Case("biased", "dp=2 ep=2", {"balance": "aux-seq:0.1+bias:0.01", "zero": 0}, BIASED),
    Case("capacity", "tp=2", {"balance": "capacity-position:1.25"}, MOE),
    Case("capacity by score", "dp=1", {"balance": "capacity:1"}, MOE),
    Case("muon of experts", "dp=2 ep=2", {"balance": "aux"}, MOE, {"optimizer": "muon"}),
    Case("narrow states", "tp=2", train={"states": "bf16", "seed": 2}),
    Case("narrow states of experts", "dp=2 ep=2", {}, MOE, {"states": "bf16"}),
    Case("narrow momentum", train={"states": "bf16", "optimizer": "sgd"}),
    Case("offloaded", "dp=2", train={"offload": "cpu", "states": "bf16"}),
    Case("on disk", train={"offload": "nvme:states"}),
    Case("dropped", "tp=2", {"packed": True}, {"dropout": 0.2, "attention_dropout": 0.1}),
    Case("dropped experts", "dp=2 ep=2", {}, {**MOE, "dropout": 0.3}, {"seed": 2**33 + 1}),
    Case(
        "dropped and resumed",
        "dp=2",
        model={"dropout": 0.2},
        starts=("--until 3", "--resume --layout pp=2"),
    ),
    Case("offloaded gradients", "dp=2x2", {"zero": 2}, train={"offload_grads": "cpu"}),
    Case("gradients on disk", "dp=2", {"zero": 3}, train={"offload_grads": "nvme:gradients"}),
    Case("flat units", "dp=2", {"zero": 3, "unit_size": 0.05, "prefetch": 2}),
    Case("float32", dtype="float32"),
    Case("bfloat16", dtype="bfloat16"),
    Case("float16", "dp=2", dtype="float16"),
    Case("overflow", "dp=1", {"balance": "aux:1000"}, MOE, {"steps": 8}, dtype="float16"),
    Case(
        *("overflow, offloaded", "dp=1", {"balance": "aux:1000"}, MOE),
        {"steps": 8, "offload_grads": "cpu"},
        dtype="float16",
    ),
    Case("not finite", train={"lr": 1e200, "skip_limit": 2}, ends=1),
    Case(
        "resumed",
        "dp=2",
        {"packed": True},
        train={"data": "{short}", "lr_curve": "linear", "steps": 10},
        starts=("--until 4", "--resume --layout tp=2"),
    ),
    Case(
        "resumed with experts",
        "dp=2 ep=2",
        {"balance": "aux-global:1+bias"},
        BIASED,
        {"optimizer": "muon"},
        starts=("--until 3", "--resume --layout dp=1"),
    ),
    Case(
        "resumed after an overflow",
        "dp=1",
        {"balance": "aux:1000"},
        MOE,
        {"steps": 10},
        dtype="float16",
        starts=("--until 8", "--resume"),
    ),
    Case(
        "killed",
        "dp=2",
        train={"save_every": 2, "keep": 1},
        starts=("", "--resume --layout pp=2"),
        first=killed,
    ),
)
# A small learning rate: in float16 two trainings of so many larger steps diverge by rounding.
LONG = Case(
    "a scale that grows",
    plan={"seq": 4, "batch": 2, "microbatch_size": 1},
    model={"layers": 1},
    train={"steps": 510, "eval_every": 0, "lr": 1e-5},
    dtype="float16",
    starts=("--until 300", "--resume"),
)
BY_NAME = {case.name: case for case in (*CASES, LONG)}
