"""What the model says, every `sample_every` steps: a completion of a text that is held out.

The ranks of the job are those of the generator, in the same layout but without context ranks, which
become replicas. Its weights are a copy that is there only while it draws: each rank needs the
memory of its tensor and pipeline shard for that, and no ZeRO stage makes it smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.core.model import BYTES, TOKENIZER, blocks_of, model_folder
from fivefold.core.plan import Plan, PlanOptions
from fivefold.data import Source, read_rows
from fivefold.generate import (
    ByteCodec,
    Codec,
    LayoutEngine,
    Request,
    Sampling,
    plan_of,
    read_tokenizer,
)
from fivefold.parallel import Mesh, compose_forward
from fivefold.records import EVAL
from fivefold.train import RankRun
from fivefold.train.callbacks.callback import Callback

PROMPT, TOKENS = 32, 64  # tokens


@dataclass(frozen=True)
class SampleText:
    """Text that the model wrote after a step, and its prompt."""

    step: int
    prompt: str
    text: str

    def __str__(self) -> str:
        return f"sample after step {self.step} | {self.prompt!r} → {self.text!r}"


@dataclass
class SampleCallback(Callback):
    """Samples on all ranks; rank 0 reports the text, and writes it to the run folder."""

    run: RankRun
    drawn: list[SampleText] = field(default_factory=list[SampleText])
    mesh: Mesh | None = None

    def measure(self, number: int) -> dict[str, Any]:
        every = self.run.settings.recipe.sample_every
        if every and self.run.settings.recipe.is_due(every, number):
            self.run.phases.unknown(f"sample after step {number}")
            with self.run.spent.on(EVAL):
                self.drawn.append(self._draw(number))
        return {}

    def after_step(self, number: int) -> None:
        for sample in self.drawn if self.run.worker.rank == 0 else ():
            if self.run.folder is not None:
                self.run.folder.append_sample(sample.step, sample.prompt, sample.text)
            self.run.worker.report(sample)
        self.drawn.clear()

    def close(self) -> None:
        if self.mesh is not None:
            self.mesh.close_groups()
            self.mesh = None

    def _draw(self, number: int) -> SampleText:
        job, source = self.run.rank.job, self.run.rank.reader.source
        plan = generating(job.plan)
        prompt = held_out_prompt(source, min(PROMPT, plan.shape.max_seq // 2))
        request = Request(
            f"step {number}", prompt, TOKENS, Sampling(1.0, seed=self.run.settings.recipe.seed)
        )
        self.mesh = self.mesh or Mesh.of(plan, job.mesh.device)
        dtype = next(job.chunks[0].model.parameters()).dtype
        stage = compose_forward(plan, self.mesh, dtype)
        engine = LayoutEngine(plan, self.mesh, stage, blocks_of(PROMPT + TOKENS))
        engine.load(job)
        done = engine.run([request])[request.id]
        engine.close()
        codec = codec_of(job.plan, source)
        return SampleText(number, _text(codec, prompt), _text(codec, done.tokens))


def generating(plan: Plan) -> Plan:
    """Plan of a generator on the ranks of a job."""
    layout = replace(plan.layout, cp=1, shard=plan.layout.shard * plan.layout.cp, chunks=1)
    options = PlanOptions(plan.options.model, set=plan.options.set, train=plan.options.train)
    return plan_of(plan.shape, replace(options, layout=str(layout)))


def held_out_prompt(source: Source, length: int) -> tuple[int, ...]:
    """Beginning of a held-out row, or of the first sample if there is none."""
    places = source.held_out(1)
    rows = read_rows(places, source.seq) if places else source.samples([0])
    return tuple(rows.tokens[0, :length].tolist())


def codec_of(plan: Plan, source: Source) -> Codec | None:
    """Codec of the tokens; None if it is unknown."""
    if source.tokenizer is not None and source.tokenizer.fingerprint == BYTES:
        return ByteCodec()
    folders = (model_folder(plan.options.model), *source.folders)
    paths = [folder / TOKENIZER for folder in folders if folder is not None]
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else read_tokenizer(path)


def _text(codec: Codec | None, tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens)) if codec is None else codec.decode(tokens)
