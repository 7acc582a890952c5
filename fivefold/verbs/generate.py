"""`fivefold generate`: text from a run or from a Hugging Face model, on this machine.

With a layout, every rank is a forked process with an engine and a writer of its own. All add the
same requests and decide alike; rank 0 reports what was written. One rank runs in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.core import models, plan
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.plan import Plan, PlanOptions
from fivefold.core.precision import FORMATS
from fivefold.core.shape import Shape
from fivefold.core.weights import tuned
from fivefold.generate.prompts import Prompt, finished_ids, read_prompts
from fivefold.generate.requests import Request, Sampling
from fivefold.verbs import above, checkpoint_step, one_of, positive, progress_bar

if TYPE_CHECKING:
    from fivefold.generate.layout import ReadWeight
    from fivefold.generate.text import Codec
    from fivefold.generate.text_ranks import TextTask
    from fivefold.generate.writer import WrittenText

_TOKENIZER, _BYTES_END = "tokenizer.json", 256
_MOST_RANKS = 64  # processes on one machine
_PATIENCE = 600.0  # seconds of a step, or of reading weights
_DTYPES = [name for name, each in FORMATS.items() if each.verified]
InvariantOption = Annotated[
    bool, typer.Option("--batch-invariant", help="No bit depends on what else is in a batch.")
]


@dataclass(frozen=True)
class TextModel:
    """A model as it is found in a folder."""

    shape: Shape
    options: PlanOptions  # its name and changes
    source: Path
    folder: Path  # that may have a tokenizer and its configs
    is_run: bool


@dataclass(frozen=True)
class TextOptions:
    """How completions are made and where they go."""

    max_tokens: int
    sampling: Sampling
    stops: list[str]
    chat: bool
    dtype: str | None
    tokenizer: str | None
    cache_gb: float
    step: int | Literal["best"] | None
    layout: str
    device: str
    record_routing: bool
    batch_invariant: bool


def run(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a Hugging Face folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to go on with.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": …} or {"messages": […]}, "id".')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 the model's own odds.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest with this share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text or special token that ends it; repeat it.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help='Degrees of ranks, as in "tp=2 pp=2"; dp are replicas.')
    ] = "dp=1",
    chat: Annotated[bool, typer.Option("--chat", help="Use the folder's chat template.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(_DTYPES)} (default: float32, bfloat16 on GPUs).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json, or bytes (default: the folder's).")
    ] = None,
    cache_gb: Annotated[float, typer.Option(help="Most GB of keys and values on a rank.")] = 1.0,
    batch_invariant: InvariantOption = False,
    step: Annotated[str | None, typer.Option(help="Step of the run's checkpoint, or best.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL to write; it is gone on with.")
    ] = None,
    record_routing: Annotated[
        bool, typer.Option("--record-routing", help="Put the experts of all tokens into the lines.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line a prompt.")] = False,
) -> None:
    """Go on with a prompt, or with those of a file."""
    if (prompt is None) == (file is None):
        raise FivefoldError("give one of --prompt TEXT and --file PROMPTS.jsonl")
    sampling = Sampling(temperature, top_k, top_p, seed)
    if problems := list(sampling.problems()):
        raise BadFile("the options", problems)
    options = TextOptions(
        above("max-tokens", max_tokens, 0),
        sampling,
        stop or [],
        chat,
        dtype and one_of("dtype", dtype, _DTYPES),
        tokenizer,
        positive("cache-gb", cache_gb),
        checkpoint_step(step),
        layout,
        one_of("device", device, ("auto", "cpu", "cuda")),
        record_routing,
        batch_invariant,
    )
    prompts = read_prompts(file) if file is not None else [Prompt("0", prompt or "")]
    _generate(_found(source), prompts, options, output, as_json)


def _check_recording(shape: Shape, options: TextOptions, to_lines: bool) -> None:
    """Refuse to record choices that there are not, or that would go nowhere."""
    if options.record_routing and shape.moe is None:
        raise FivefoldError(f"--record-routing: {shape.name} has no experts; leave it out")
    if options.record_routing and not to_lines:
        raise FivefoldError("--record-routing writes into JSON lines: give --json, or -o OUT.jsonl")


def _found(source: Path) -> TextModel:
    """The model of a folder."""
    if (source / "plan.toml").exists():
        options = plan.read(source / "plan.toml")
        shape = models.with_overrides(models.load(options.model), options.set)
        shape = tuned(shape, options.train.tuning)
        path = Path(options.model)
        beside = path if path.is_dir() else path.parent
        folder = beside if (beside / _TOKENIZER).exists() else source
        named = PlanOptions(options.model, set=options.set, train=options.train.only_tuning())
        return TextModel(shape, named, source, folder, True)
    if (source / "config.json").exists():
        config = str(source / "config.json")
        return TextModel(models.load(config), PlanOptions(config), source, source, False)
    rule = "is neither a run (plan.toml) nor a Hugging Face model (config.json)"
    raise BadFile(str(source), [f"{rule}: give one of these folders"])


def _generate(
    model: TextModel,
    prompts: list[Prompt],
    options: TextOptions,
    output: Path | None,
    as_json: bool,
) -> None:
    # Imported here, so that a bad command line is refused before torch is loaded.
    from fivefold.generate.chat import ChatTemplate
    from fivefold.generate.text import ByteCodec, end_tokens, stops_of
    from fivefold.generate.text_ranks import TextTask
    from fivefold.launch.backend import NcclLibrary, available_device, choose_backend, num_gpus

    _check_recording(model.shape, options, as_json or output is not None)
    gpus = num_gpus()
    device = available_device(options.device, gpus)
    plan = _plan(model, options)
    codec = _codec(model, options.tokenizer)
    stops, ends = stops_of(codec, options.stops)
    is_bytes = isinstance(codec, ByteCodec)
    ends |= frozenset({_BYTES_END}) if is_bytes else end_tokens(model.folder)
    render = ChatTemplate(model.folder).render if options.chat else None
    texts = {each.id: each.rendered(render) for each in prompts}
    done = set[str]() if output is None else finished_ids(output, texts)
    requests = [
        Request(
            id,
            codec.encode(text, special=not options.chat),
            options.max_tokens,
            options.sampling,
            ends,
        )
        for id, text in texts.items()
        if id not in done
    ]
    for request in requests:
        request.check(model.shape.vocab, model.shape.max_seq)
    if not requests:
        typer.echo(f"all {len(done):,} completions are in {output} already", err=True)
        return
    task = TextTask(
        plan,
        options.dtype or ("float32" if device == "cpu" else "bfloat16"),
        options.cache_gb,
        partial(open_weights, model, options.step),
        codec,
        [(each, texts[each.id]) for each in requests],
        stops,
        device,
        choose_backend(None, device, plan.layout.world, gpus, NcclLibrary.here()),
        options.record_routing,
        options.batch_invariant,
    )
    with _sink(output, as_json, len(prompts) == 1) as (on_text, on_written):
        _write_all(task, on_text, on_written)


def _plan(model: TextModel, options: TextOptions) -> Plan:
    """The plan of the layout; refused if it cannot run here."""
    from fivefold.generate.layout import invariant_plan, plan_of

    plan = plan_of(model.shape, replace(model.options, layout=options.layout))
    plan = invariant_plan(plan) if options.batch_invariant else plan
    if plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"--layout {options.layout}: generate forks a process for every rank, and "
            f"{plan.layout.world} are too many for one machine: use at most {_MOST_RANKS}"
        )
    return plan


def _codec(model: TextModel, tokenizer: str | None) -> Codec:
    from fivefold.generate.text import NUM_BYTES, ByteCodec, read_tokenizer

    path = model.folder / _TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer != "bytes" and (tokenizer is not None or path.exists()):
        return read_tokenizer(path)
    if tokenizer is None and (not model.is_run or model.shape.vocab > 2 * NUM_BYTES):
        rule = f"has no {_TOKENIZER}, and a vocabulary of {model.shape.vocab:,}"
        raise BadFile(str(model.folder), [f"{rule}: give --tokenizer FILE, or --tokenizer bytes"])
    return ByteCodec()


def open_weights(model: TextModel, step: int | None, tells: bool) -> ReadWeight:
    """What reads a weight of the folder; `tells` why a newer checkpoint is not read."""
    from fivefold.huggingface.files import HfFolder
    from fivefold.train.checkpoint.of_run import open_run

    if not model.is_run:
        return HfFolder(model.folder, model.shape).weight
    reader = open_run(
        model.source,
        model.shape,
        step,
        lambda why: typer.echo(f"fivefold: {why}", err=True) if tells else None,
    )
    return lambda weight, dtype: reader.read(f"model/{weight.name}").to(dtype)


def _write_all(
    task: TextTask,
    on_text: Callable[[str], None],
    on_written: Callable[[WrittenText], None],
) -> None:
    """Run the ranks, and pass on what they write."""
    from fivefold.generate.text_ranks import RefusedTask, write_rank
    from fivefold.generate.writer import TextPiece
    from fivefold.launch.processes import Pool, RankLost
    from fivefold.launch.worker import Worker

    world, refused = task.plan.layout.world, list[str]()
    with progress_bar("generate", len(task.requests), shown=len(task.requests) > 1) as bar:

        def on_report(value: TextPiece | RefusedTask) -> None:
            if isinstance(value, RefusedTask):
                refused.append(value.reason)
                return
            on_text(value.text)
            if value.written is not None:
                on_written(value.written)
                bar.advance(1)

        if world == 1:
            alone = Worker.alone(lambda kind, value: on_report(value) if kind == "report" else None)
            write_rank(alone, task)
            return
        try:
            with Pool(world, _PATIENCE) as pool:
                pool.run_each([(write_rank, (task,))] * world, on_report=on_report)
        except RankLost as lost:
            if refused:
                raise FivefoldError(refused[0]) from lost
            typer.echo(
                f"fivefold: lost rank {lost.rank} at {lost.doing}: it {lost.cause}", err=True
            )
            raise typer.Exit(1) from lost


@contextmanager
def _sink(
    output: Path | None, as_json: bool, single: bool
) -> Iterator[tuple[Callable[[str], None], Callable[[WrittenText], None]]]:
    """Where text and completions go: one prompt's text as it comes, else whole completions."""
    streams = single and not as_json and output is None

    def on_text(text: str) -> None:
        if streams:
            sys.stdout.write(text)
            sys.stdout.flush()

    def on_written(written: WrittenText) -> None:
        line = json.dumps(written.table(), ensure_ascii=False)
        if stream is not None:
            stream.write(line + "\n")
            stream.flush()
        if streams:
            typer.echo()
        elif as_json:
            typer.echo(line)
        elif output is None:
            typer.echo(f"[{written.id}] {written.prompt}{written.text}")

    stream = None if output is None else _opened(output)
    try:
        yield on_text, on_written
    finally:
        if stream is not None:
            stream.close()


def _opened(output: Path) -> Any:
    try:
        return output.open("a", encoding="utf-8")
    except OSError as error:
        raise BadFile(str(output), [f"{error.strerror}; give another file with -o"]) from error
