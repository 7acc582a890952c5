"""`verify` over the data and tensor axes: every mode of both equals one device, to rounding."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.model.batch import NOT_COUNTED
from fivefold.verify.runs import VerifySettings, num_phases, run_rank
from fivefold.verify.trial import run_trial

PUBLISHED = 1e-10  # what float64 must reach, whatever tolerance is derived


def plan_of(layout: str, **options: Any) -> Plan:
    changes = {"layers": "3"} | options.pop("set", {})
    return resolve(PlanOptions("tiny", layout=layout, set=changes, **options), small=True)


def verify(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["verify", *words.split()])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command_prints_what_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verify("--layout dp=2 --microbatches 1 --json", capsys)
    table = json.loads(out)
    assert code == 0 and table["passed"] and table["traffic"]["match"]
    assert (table["model"], table["layout"], table["world"]) == ("tiny", "dp=2", 2)
    for name in ("loss_err", "grad_err", "norm_err", "clip_err", "weight_err"):
        assert 0 <= table[name] <= table["tolerance"][name] <= PUBLISHED
    assert table["traffic"]["predicted"] == table["traffic"]["observed"]
    calls = {(each["kind"], each["bytes"], each["count"]) for each in table["traffic"]["observed"]}
    assert ("all_reduce", 8, 1) in calls and ("all_reduce", 40, 1) in calls
    assert table["diverges_at"] is None and table["seconds"] > 0
    assert any("eps" in note for note in table["notes"])


def test_a_large_model_is_scaled_down_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verify("qwen2.5-0.5b --layout tp=2 --microbatches 1 --steps 1", capsys)
    assert code == 0 and "PASS" in out
    assert "scaled down: 4 of 24 layers" in out
    assert "differs" not in out and "too large" not in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--layout dp=2 --dtype float16", "unknown --dtype 'float16': did you mean bfloat16"),
        ("--layout dp=2 --set optimizer=adam", "did you mean adamw"),
        ("--layout dp=2 --steps 0", "--steps 0: give a number above 0"),
        ("--layout dp=2 --set unit_size=nan", "unit_size nan: the MB of weights"),
        ("--layout dp=2 --set grad_dtype=fp16", "fp16 would overflow: choose fp32 or bf16"),
        ("--layout dp=2 --set grad_dtype=float16", "fp16 would overflow: choose fp32 or bf16"),
        ("--layout dp=2 --set grad_dtype=float64", "summed in fp32 (wider where the weights are)"),
        ("--layout dp=2 --set prefetch=-1", "prefetch -1: the number of blocks is 0 or more"),
        ("--layout cp=16 --context ulysses", "use cp=8 or context=hybrid"),
        ("--layout cp=8 --seq 10", "takes at least 16 tokens: use seq=16 or more, or cp=5"),
        ("--layout dp=128", "at most 64 ranks"),
        ("--layout tp=3", "tp=3 does not divide heads 8"),
        ("tiny-moe --layout dp=2 --dtype bfloat16", "layouts choose different experts"),
        ("bloom-176b --layout dp=2", "a norm after the embedding"),
        ("--layout dp=2 --precision fp8 --set grad_dtype=bf16", "grad_dtype bf16 with fp8"),
    ],
)
def test_bad_input_exits_with_2(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = verify(words, capsys)
    assert code == 2 and not out and reason in err


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["dp=2 tp=2", "dp=2x2"])
def test_every_zero_stage(pool: Pool, layout: str, zero: int) -> None:
    check(pool, plan_of(layout, zero=zero))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "tp=4", "set": {"kv_heads": "2"}},
        {"layout": "dp=2 tp=2", "set": {"vocab": "251"}},
        {"layout": "dp=2 tp=2", "set": {"tied": "true"}},
        {"layout": "dp=2 tp=2", "set": {"tied": "true"}, "zero": 1, "recompute": "full"},
        {"layout": "dp=2 tp=2", "recompute": "selective"},
        {"layout": "dp=2 tp=2", "recompute": "full"},
        {"layout": "dp=2 tp=2", "recompute": "full:2"},
        {"layout": "tp=2 pp=2", "schedule": "zb-v", "recompute": "full-but-attention"},
        {"layout": "dp=2 tp=2", "sp": False},
        {"layout": "dp=2 tp=2", "packed": True},
        {"layout": "dp=3", "microbatches": 3, "microbatch_size": 2},
        {"layout": "dp=1"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_every_model_and_mode(pool: Pool, options: dict[str, Any]) -> None:
    check(pool, plan_of(**options))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd"},
        {"offload": True},
        {"empty_rank": 1},
        {"seed": 7, "steps": 3},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_every_setting(pool: Pool, changes: dict[str, Any]) -> None:
    check(pool, plan_of("dp=2 tp=2"), replace(VerifySettings(), **changes))


KEYS: dict[str, dict[str, Any]] = {
    "split units": {"unit_size": 0.05},
    "joined units, none ahead": {"unit_size": 0.5, "prefetch": 0},
    "three ahead": {"unit_size": 0.1, "prefetch": 3, "recompute": "full:2"},
    "bf16 gradients": {"grad_dtype": "bf16"},
    "bf16 gradients of small units": {"grad_dtype": "bf16", "unit_size": 0.05, "prefetch": 2},
}
OVER = ("dp=4", "dp=2x2", "dp=2 tp=2", "dp=2 pp=2", "dp=2 ep=2")


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", OVER)
@pytest.mark.parametrize("keys", KEYS)
def test_keys_of_flat_units(pool: Pool, keys: str, layout: str, zero: int) -> None:
    model = {"moe.experts": "4", "moe.top_k": "2", "moe.ffn": "64"} if "ep" in layout else {}
    check(pool, plan_of(layout, zero=zero, gather="microbatch", set=model, **KEYS[keys]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_without_any_counted_token(pool: Pool, zero: int) -> None:
    check(pool, plan_of("dp=4", zero=zero), VerifySettings(empty_rank=3))


def check(pool: Pool, plan: Plan, settings: VerifySettings | None = None) -> None:
    settings = settings or VerifySettings()
    phases: list[None] = []
    verdict = run_trial(pool, plan, settings, lambda: phases.append(None))
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert len(phases) == num_phases(plan, settings)
    if settings.dtype == "float64" and plan.units.grad_dtype == "fp32":
        assert max(verdict.errors.values()) <= PUBLISHED


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full:2"])
@pytest.mark.parametrize("layout", ["dp=2x2 tp=2", "tp=2"])
def test_the_mesh_notes_what_the_dispatcher_sees(pool: Pool, layout: str, recompute: str) -> None:
    plan = plan_of(layout, recompute=recompute, set={"layers": "2"})
    ranks = pool.run_each([(run_rank, (plan, VerifySettings()))] * plan.layout.world)
    for rank in ranks:
        for heard in rank.heard:
            assert heard.noted and heard.seen == heard.noted


def test_samples_are_a_function_of_seed_and_step() -> None:
    batch = plan_of("dp=4", microbatch_size=2).batch
    drawn, again = (samples(batch, 256, 3, 1, empty_rank=2) for _ in range(2))
    assert drawn.tokens.equal(again.tokens) and drawn.labels.equal(again.labels)
    assert not drawn.tokens.equal(samples(batch, 256, 3, 2).tokens)
    assert not drawn.tokens.equal(samples(batch, 256, 4, 1).tokens)
    counted = [sum(int((one.labels != NOT_COUNTED).sum()) for one in drawn.of(r)) for r in range(4)]
    assert counted[2] == 0 and 0 < counted[0] != counted[1] > 0  # ragged
    whole = drawn.as_batch()
    assert int((whole.labels != NOT_COUNTED).sum()) == sum(counted)
    kept = whole.labels[:, :-1] != NOT_COUNTED
    assert whole.labels[:, :-1][kept].equal(whole.tokens[:, 1:][kept])


def test_the_reference_shares_nothing_with_the_ranks() -> None:
    code = (
        "import sys, fivefold.verify.reference\n"
        "shared = [name for name in sys.modules if name.startswith(('fivefold.parallel', "
        "'fivefold.step', 'fivefold.core.layout.units', 'fivefold.cost.traffic.collectives'))]\n"
        "assert not shared, shared"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def read_to_the_end(terminal: int) -> str:
    """All that a program writes to its terminal; the program would stop where nobody reads."""
    written = b""
    with suppress(OSError):  # how Linux says that the other side is closed
        while chunk := os.read(terminal, 65536):
            written += chunk
    return written.decode()


def test_a_progress_bar_is_drawn_where_somebody_looks() -> None:
    words = [sys.executable, "-m", "fivefold", "verify", "--steps", "1", "--json"]
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=end, env=environment) as done:
        os.close(end)
        drawn = read_to_the_end(terminal)
        output, _ = done.communicate()
    os.close(terminal)
    assert done.returncode == 0 and json.loads(output)["passed"]
    assert "verify" in drawn and "━" in drawn
