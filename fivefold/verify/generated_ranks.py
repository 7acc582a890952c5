"""The proof of generation in a layout: its ranks generate, one process compares, and the ranks of
another layout compute the log-probabilities of the same texts as training does.

The training forward is that of a job: shards of ZeRO, its pipeline, its loss. Only the loss is
asked token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import Batch, Layout, Weight, problems
from fivefold.core.plan import Plan
from fivefold.generate import LayoutEngine, ScheduleLimits, Watch, forward_plan, mesh_of, stage_of
from fivefold.launch import Backend, Pool, Worker, forked_device
from fivefold.model import NOT_COUNTED, CrossEntropy, TokenBatch
from fivefold.parallel import Job, Mesh, compose, tensor
from fivefold.step import evaluate
from fivefold.verify.generated import (
    NUM_WAYS,
    GeneratedTrial,
    GeneratedVerdict,
    MakeEngine,
    Observed,
    larger,
    requests_of,
)
from fivefold.verify.runs import Device

TokenLogprob = tuple[int, int, float]
"""Number of a text, position of a token in it, and the log-probability of the next token."""


@dataclass(frozen=True)
class GeneratedSettings:
    """Settings of a proof of generation."""

    dtype: str = "float64"
    seed: int = 0
    device: Device = "cpu"
    backend: Backend = "gloo"
    batch_invariant: bool = False


@dataclass(frozen=True)
class DrawnText:
    """A prompt with its drawn tokens and their log-probabilities."""

    prompt: tuple[int, ...]
    drawn: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.drawn)

    def cut(self, outgrown_at: int | None) -> list[DrawnText]:
        """Split where the text has outgrown a length: training rotates all tokens of a text
        alike."""
        before = len(self.drawn) if outgrown_at is None else outgrown_at + 1 - len(self.prompt)
        if not 0 < before < len(self.drawn):
            return [self]
        prompt = (*self.prompt, *self.drawn[:before])
        return [
            DrawnText(self.prompt, self.drawn[:before], self.logprobs[:before]),
            DrawnText(prompt, self.drawn[before:], self.logprobs[before:]),
        ]


def num_generation_phases(plan: Plan, settings: GeneratedSettings) -> int:
    """Number of `on_phase` calls of a successful proof."""
    return plan.layout.world * (NUM_WAYS + 2 + 2 * settings.batch_invariant) + 1


def run_generated(
    pool: Pool,
    plan: Plan,
    settings: GeneratedSettings,
    on_phase: Callable[[], None] | None = None,
) -> GeneratedVerdict:
    """Generate in the layout of a plan, compare with one device, and with training elsewhere."""
    plan = forward_plan(plan)
    world = plan.layout.world
    ranks: list[Observed] = pool.run_each([(generate_rank, (plan, settings))] * world, on_phase)
    verdict: GeneratedVerdict
    (verdict,) = pool.run_each([(judge_rank, (plan, settings, ranks))], on_phase)
    texts = drawn_texts(plan, settings, ranks[0])
    training = training_plan(plan, texts)
    task = (train_rank, (training, settings, texts))
    if settings.backend == "nccl":
        pool.renew()
    trained = pool.run_each([task] * world, on_phase)
    error = trained_error(texts, [logprob for rank in trained for logprob in rank])
    return replace(verdict, trained_err=error, trained_layout=str(training.layout))


def drawn_texts(plan: Plan, settings: GeneratedSettings, seen: Observed) -> list[DrawnText]:
    """Texts of all requests, as drawn in batches."""
    completions = seen.completions["batched"]
    requests = requests_of(plan.shape, settings.seed, plan.layout.dp)
    texts = [
        DrawnText(request.prompt, completions[request.id].tokens, completions[request.id].logprobs)
        for request in requests
    ]
    return [piece for text in texts for piece in text.cut(plan.shape.outgrown_at)]


def generate_rank(worker: Worker, plan: Plan, settings: GeneratedSettings) -> Observed:
    """Run every mode on one rank of the layout."""
    layout = plan.layout
    rank = forked_device(settings.device, settings.backend, worker.rank, layout.world)
    with worker.joined(layout.world, rank):
        worker.phase("build")
        trial = _trial(plan, settings)
        with _engines(plan, rank.device, trial, settings.batch_invariant) as engine:
            observed = trial.observe(engine, worker.phase)
            if not settings.batch_invariant:
                return observed
            worker.phase("with it")
            seconds = trial.seconds(engine)
        worker.phase("without it")
        with _engines(plan, rank.device, trial, False) as engine:
            return replace(observed, cost=seconds / trial.seconds(engine))


@contextmanager
def _engines(
    plan: Plan, device: torch.device, trial: GeneratedTrial, same: bool
) -> Iterator[MakeEngine]:
    """What makes engines of this rank, on a mesh of their own."""
    mesh, dtype = mesh_of(plan, device, same), getattr(torch, trial.dtype)
    engines: list[LayoutEngine] = []

    def engine(blocks: int, limits: ScheduleLimits, watch: Watch) -> LayoutEngine:
        stage = stage_of(plan, mesh, dtype, same)
        stage.fill(lambda weight, dtype: _full(trial, weight))
        engines.append(LayoutEngine(plan, mesh, stage, blocks, limits, watch, batch_invariant=same))
        return engines[-1]

    yield engine
    for idle in engines:
        idle.close()
    if plan.layout.world > 1:
        torch.distributed.barrier()  # what was sent has been received
    mesh.close_groups()


def judge_rank(
    worker: Worker, plan: Plan, settings: GeneratedSettings, ranks: Sequence[Observed]
) -> GeneratedVerdict:
    """Compare with the plain forward, in one process."""
    worker.phase("compare")
    return _trial(plan, settings).verdict(ranks, settings.batch_invariant)


def _trial(plan: Plan, settings: GeneratedSettings) -> GeneratedTrial:
    return GeneratedTrial(plan.shape, settings.dtype, settings.seed, plan.layout.dp)


def _full(trial: GeneratedTrial, weight: Weight) -> Tensor:
    full = trial.full_weight(weight.name)
    assert full is not None, f"the plain model has no {weight.name}"
    return full


# The training forward in another layout.


def training_plan(plan: Plan, texts: Sequence[DrawnText]) -> Plan:
    """Plan to train the same model on these texts, on as many ranks in another layout."""
    seq = max(len(text.tokens) for text in texts) - 1
    layouts = [
        candidate for candidate in _layouts(plan) if not problems(candidate, plan.shape, seq=seq)
    ]
    if not layouts:
        raise FivefoldError(f"no other layout of {plan.layout.world} ranks fits this model")
    layout = min(
        layouts,
        key=lambda candidate: (_same(candidate, plan.layout), _drawn_by_hash(candidate, plan)),
    )
    count = max(2 * layout.pp, -(-len(texts) // layout.dp))
    batch = Batch.resolve(layout.dp, seq, microbatch_size=1, microbatches=count)
    options = replace(plan.options, schedule="1f1b", tp_overlap=1)
    return replace(plan, layout=layout, batch=batch, options=options, stage_layers=None)


def _layouts(plan: Plan) -> Iterator[Layout]:
    """Every layout of as many ranks."""
    world, experts = plan.layout.world, plan.shape.moe is not None
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            for cp in _divisors(world // tp // pp):
                dp = world // (tp * pp * cp)
                for ep in _divisors(dp * cp * tp) if experts else (1,):
                    yield Layout(shard=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=1 if pp > 1 else 3)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _same(layout: Layout, other: Layout) -> int:
    """How many of the degrees that cut the model are equal."""
    return sum(getattr(layout, axis) == getattr(other, axis) for axis in ("tp", "pp", "cp", "ep"))


def _drawn_by_hash(layout: Layout, plan: Plan) -> bytes:
    """One of equals, the same on every machine."""
    return hashlib.blake2b(f"{layout} for {plan.layout}".encode(), digest_size=8).digest()


def train_rank(
    worker: Worker, plan: Plan, settings: GeneratedSettings, texts: Sequence[DrawnText]
) -> list[TokenLogprob]:
    """Log-probabilities of drawn tokens, computed on this rank as in training."""
    layout = plan.layout
    rank = forked_device(settings.device, settings.backend, worker.rank, layout.world)
    with worker.joined(layout.world, rank):
        worker.phase("train")
        mesh = Mesh.of(plan, rank.device)
        dtype = getattr(torch, settings.dtype)
        job = compose(plan, mesh, seed=settings.seed, dtype=dtype)
        trial = GeneratedTrial(plan.shape, settings.dtype, settings.seed)
        give_weights(job, trial)
        coord, count = layout.coord(mesh.rank), plan.batch.microbatches
        numbers = range(coord.dp * count, (coord.dp + 1) * count)
        batches = [_row(plan, texts, number, rank.device) for number in numbers]
        heard = _listen(job)
        evaluate(job, batches)
        mesh.close_groups()
    if coord.tp:  # the others have heard the same
        return []
    logprobs: list[TokenLogprob] = []
    for number, batch, losses in zip(numbers, batches, heard, strict=False):
        local = job.local(batch)
        counted = local.positions[local.labels != NOT_COUNTED].tolist()
        logprobs += [(number, *pair) for pair in zip(counted, losses, strict=True)]
    return logprobs


@torch.no_grad()
def give_weights(job: Job, trial: GeneratedTrial) -> None:
    """Copy the weights of a trial to a job."""
    for shard in job.local_shards:
        name = shard.row.name
        full = trial.full_weight(job.table[name].name)
        if full is not None:
            local_weight = tensor.cut(full, job.shards[name]).flatten()
            shard.tensor.view(-1).copy_(
                local_weight[shard.start : shard.start + shard.tensor.numel()]
            )
    for chunk in job.chunks:
        for name, buffer in chunk.model.named_buffers():
            full = trial.full_weight(name)
            buffer.copy_(buffer if full is None else full)
        chunk.data.publish()
        chunk.data.wait()


def _row(plan: Plan, texts: Sequence[DrawnText], number: int, device: torch.device) -> TokenBatch:
    """One text as a row; a loss for what was drawn. There may be rows without a text."""
    seq = plan.batch.seq
    tokens, labels = torch.zeros(1, seq, dtype=torch.int64), torch.full((1, seq), NOT_COUNTED)
    outgrown_at, outgrown = plan.shape.outgrown_at, None
    if number < len(texts):
        text = texts[number]
        first, length = len(text.prompt) - 1, len(text.tokens) - 1
        tokens[0, :length] = torch.tensor(text.tokens[:-1])
        labels[0, first:length] = torch.tensor(text.drawn)
        if outgrown_at is not None:  # what follows the text makes it no longer
            outgrown = torch.full((1, seq), int(length > outgrown_at), device=device)
    positions = torch.arange(seq, device=device)[None]
    return TokenBatch(tokens.to(device), labels.to(device), positions, outgrown=outgrown)


def _listen(job: Job) -> list[list[float]]:
    """From now on, the log-probability of every counted token, by microbatch: each has a row."""
    heard: list[list[float]] = []
    for head in (chunk.model.head for chunk in job.chunks if chunk.model.head is not None):
        loss = head.cross_entropy

        def each_token(logits_NV: Tensor, labels_N: Tensor, loss: CrossEntropy = loss) -> Tensor:
            counted = (labels_N != NOT_COUNTED).nonzero().flatten().tolist()
            losses = [loss(logits_NV[n : n + 1], labels_N[n : n + 1]) for n in counted]
            heard.append([-token_loss.item() for token_loss in losses])
            return sum(losses, logits_NV.new_zeros(()))

        head.chunked, head.cross_entropy = None, each_token
    return heard


def trained_error(texts: Sequence[DrawnText], trained: Sequence[TokenLogprob]) -> float:
    """Largest difference of log-probabilities; infinite if a token is missing."""
    logprobs = {(number, position): logprob for number, position, logprob in trained}
    error = 0.0
    for number, text in enumerate(texts):
        for index, logprob in enumerate(text.logprobs):
            theirs = logprobs.get((number, len(text.prompt) - 1 + index), float("nan"))
            error = larger(error, abs(logprob - theirs))
    return error
