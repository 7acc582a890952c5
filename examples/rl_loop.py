"""Reinforcement learning: train in one layout, generate in another, on the same ranks.

python examples/rl_loop.py

Every step moves the weights to the generator in memory, draws a group of completions for each
prompt, and makes those more likely that are better than their group (GRPO without clipping: one
update for each draw). The reward is the share of drawn tokens that are low. The trainer computes
the log-probabilities of what was drawn, and they are those of the generator: 1e-9 in float64.
"""

import math
import sys
from dataclasses import dataclass

import torch

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.layout import LayoutEngine, plan_of
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.composition import compose, compose_forward
from fivefold.parallel.mesh import Mesh
from fivefold.step import logprobs, step

TRAINS, GENERATES = "dp=2 pp=2", "tp=2 dp=2"
MODEL = {"layers": "2", "width": "32", "heads": "4", "kv_heads": "2", "ffn": "64", "vocab": "32"}
LOW = 8  # of 32 tokens: a reward of 0.25 for a model that has learned nothing
PROMPTS, GROUP, TOKENS = 4, 8, 8
DTYPES = {"float64": 1e-9, "float32": 1e-3}  # how much summed log-probabilities may differ


@dataclass(frozen=True)
class RoundResult:
    """The mean reward of a step, and the largest difference of log-probabilities."""

    reward: float
    difference: float


def requests_of(number: int) -> list[Request]:
    """A group for each prompt; another seed in each step."""
    sampling = Sampling(temperature=1.0, seed=number)
    return [
        Request(f"{prompt}.{member}", (prompt, 31 - prompt, 16), TOKENS, sampling)
        for prompt in range(PROMPTS)
        for member in range(GROUP)
    ]


def reward_of(completion: Completion) -> float:
    return sum(token < LOW for token in completion.tokens) / len(completion.tokens)


def advantages(rewards: list[float]) -> list[float]:
    """How much better each is than its group, in standard deviations."""
    found: list[float] = []
    for start in range(0, len(rewards), GROUP):
        group = rewards[start : start + GROUP]
        mean = sum(group) / GROUP
        deviation = math.sqrt(sum((each - mean) ** 2 for each in group) / GROUP)
        found += [(each - mean) / (deviation + 1e-6) for each in group]
    return found


def row_of(request: Request, completion: Completion) -> TokenBatch:
    """Prompt and completion as a row, with a loss for what was drawn."""
    text = torch.tensor([[*request.prompt, *completion.tokens]])
    labels = text[:, 1:].clone()
    labels[:, : len(request.prompt) - 1] = NOT_COUNTED
    return TokenBatch(text[:, :-1], labels, torch.arange(text.shape[1] - 1)[None])


def plans(trains: str, generates: str) -> tuple[Plan, Plan]:
    """The same model in two layouts of as many ranks; a microbatch is one completion."""
    options = PlanOptions(
        "tiny",
        layout=trains,
        set=MODEL,
        seq=3 + TOKENS - 1,
        batch=PROMPTS * GROUP,
        microbatch_size=1,
    )
    training = resolve(options)
    return training, plan_of(training.shape, PlanOptions("tiny", layout=generates, set=MODEL))


def train(worker: Worker, trains: str, generates: str, steps: int, dtype: str) -> list[RoundResult]:
    """One rank of both."""
    training, generating = plans(trains, generates)
    results: list[RoundResult] = []
    with worker.joined(training.layout.world):
        device, kind = torch.device("cpu"), getattr(torch, dtype)
        mesh, other = Mesh.of(training, device), Mesh.of(generating, device)
        job = compose(training, mesh, seed=0, dtype=kind)
        engine = LayoutEngine(generating, other, compose_forward(generating, other, kind), 64)
        owned = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
        optimizer = make_optimizer("adamw", owned, lr=1e-2, weight_decay=0.0)
        coord, count = training.layout.coord(mesh.rank).dp, training.batch.microbatches
        for number in range(steps):
            worker.phase(f"step {number}")
            engine.load(job)
            requests = requests_of(number)
            drawn = list(engine.run(requests).values())  # on every rank the same
            rewards = [reward_of(each) for each in drawn]
            mine = slice(coord * count, (coord + 1) * count)
            pairs = zip(requests[mine], drawn[mine], strict=True)
            rows = [row_of(request, completion) for request, completion in pairs]
            theirs = logprobs(job, rows).flatten().tolist()
            ours = [sum(each.logprobs) for each in drawn]
            difference = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
            results.append(RoundResult(sum(rewards) / len(rewards), difference))
            if worker.rank == 0:
                worker.report((number, results[-1]))
            step(job, optimizer, rows, max_norm=1.0, weights=advantages(rewards)[mine])
        engine.close()
        for each in (mesh, other):
            each.close_groups()
    return results


def show(report: tuple[int, RoundResult]) -> None:
    number, result = report
    print(
        f"step {number:>2} | reward {result.reward:.3f} | log-probabilities of generator and "
        f"trainer differ by {result.difference:.0e}",
        flush=True,
    )


def main(steps: int = 30, dtype: str = "float64") -> int:
    """Run all ranks here; fails if the reward does not rise or the two sides disagree."""
    world = plans(TRAINS, GENERATES)[0].layout.world
    print(f"train in {TRAINS}, generate in {GENERATES}: {world} ranks, {dtype}")
    with Pool(world, patience=120) as pool:
        task = (train, (TRAINS, GENERATES, steps, dtype))
        results = pool.run_each([task] * world, on_report=show)[0]
    agree = max(each.difference for each in results) <= DTYPES[dtype]
    return 0 if agree and results[-1].reward > results[0].reward + 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
