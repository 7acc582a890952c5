"""`fivefold generate`: complete prompts with a run or a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from fivefold.commands.job import OnProgress, TaskProgress, above, checkpoint_step, warn_caller
from fivefold.commands.options import (
    CacheOption,
    DeviceOption,
    DraftsKey,
    InvariantOption,
    KvKey,
    ModelLayoutOption,
    ServedPrecisionOption,
    SourceArgument,
    StepOption,
    TokenizerOption,
    exit_on_lost_rank,
    model_options,
    model_path,
    named_adapters,
    open_weights,
    shown_progress,
    warn,
    with_set_keys,
)
from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Layout
from fivefold.generate import (
    DTYPES,
    ModelOptions,
    Prompt,
    Request,
    Sampling,
    TextModel,
    find_model,
    finished_ids,
    read_prompts,
    set_up,
    with_adapters,
)

if TYPE_CHECKING:
    from fivefold.generate import Message, Tell, TextPiece, WrittenText


@with_set_keys
def run(
    source: SourceArgument,
    prompt: Annotated[str | None, typer.Option(help="The text to complete.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": …} or {"messages": […]}, "id".')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a completion.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, 1 unchanged.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the top probability P.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text or special token that ends it; repeat it.")
    ] = None,
    layout: ModelLayoutOption = "dp=1",
    adapter: Annotated[
        Path | None, typer.Option(help="Adapter of this model: a run, or a folder of PEFT.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the folder's chat template.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)} (default: float32, bfloat16 on GPUs).")
    ] = None,
    device: DeviceOption = "auto",
    tokenizer: TokenizerOption = None,
    cache_gb: CacheOption = 1.0,
    batch_invariant: InvariantOption = False,
    precision: ServedPrecisionOption = None,
    step: StepOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", help="JSONL to write, or to continue.")
    ] = None,
    record_routing: Annotated[
        bool, typer.Option("--record-routing", help="Record the experts of all tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    drafts: DraftsKey = None,
    kv: KvKey = None,
) -> None:
    """Complete a prompt, or those of a file."""
    if (prompt is None) == (file is None):
        raise FivefoldError("give one of --prompt TEXT and --file PROMPTS.jsonl")
    if record_routing and not as_json and output is None:
        raise FivefoldError("--record-routing writes into JSON lines: give --json, or -o OUT.jsonl")
    prompts = read_prompts(file) if file is not None else [Prompt("0", prompt or "")]
    streams = len(prompts) == 1 and not as_json and output is None
    echoed = "" if chat else prompts[0].text
    printer = _Printer(streams, as_json, quiet=output is not None, prompt=echoed)
    with exit_on_lost_rank(), shown_progress("generate", shown=len(prompts) > 1) as on_progress:
        texts = generate(
            source,
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop or (),
            layout=layout,
            adapter=adapter,
            chat=chat,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            cache_gb=cache_gb,
            batch_invariant=batch_invariant,
            precision=precision,
            step=step,
            output=output,
            record_routing=record_routing,
            drafts=drafts,
            kv=kv,
            on_piece=printer.on_piece,
            on_progress=on_progress,
            on_warning=warn,
        )
    if not texts:
        typer.echo(f"all {len(prompts):,} completions are in {output} already", err=True)
    elif drafts is not None:
        typer.echo(texts.drafts_line, err=True)


class _Printer:
    """Prints one prompt's text as it comes, else whole completions; `quiet`: only JSON."""

    def __init__(self, streams: bool, as_json: bool, quiet: bool, prompt: str) -> None:
        self.streams, self.as_json, self.quiet = streams, as_json, quiet
        self.prompt = prompt  # printed before what completes it

    def on_piece(self, piece: TextPiece) -> None:
        if self.streams:
            sys.stdout.write(self.prompt + piece.text)
            sys.stdout.flush()
            self.prompt = ""
        if (written := piece.written) is None:
            return
        if self.streams:
            typer.echo()
        elif self.as_json:
            typer.echo(json.dumps(written.table(), ensure_ascii=False))
        elif not self.quiet:
            typer.echo(f"[{written.id}] {written.prompt}{written.text}")


Messages = Sequence[Mapping[str, str]]
OnPiece = Callable[["TextPiece"], None]


@dataclass(frozen=True)
class TextOptions:
    """How completions are made and where they go."""

    max_tokens: int
    sampling: Sampling
    stops: list[str]
    chat: bool
    step: int | Literal["best"] | None
    record_routing: bool
    output: Path | None


class TextListeners(NamedTuple):
    """Who is told of text, of progress and of what is wrong."""

    on_piece: OnPiece | None
    on_progress: OnProgress | None
    on_warning: Tell

    def tell(self, piece: TextPiece, done: int, total: int) -> None:
        if self.on_piece is not None:
            self.on_piece(piece)
        if self.on_progress is not None and piece.written is not None:
            self.on_progress(TaskProgress(done, total, "generate"))


@dataclass(frozen=True)
class GeneratedTexts:
    """Completions, in the order of their prompts: a sequence of `WrittenText`.

    `str()` is the text that `fivefold generate` prints, `to_json()` a table for each.
    """

    completions: tuple[WrittenText, ...]

    @property
    def text(self) -> str:
        """The text, if there is one prompt."""
        if len(self.completions) != 1:
            raise FivefoldError(
                f"{len(self.completions)} completions: take one, as in texts[0].text"
            )
        return self.completions[0].text

    @property
    def drafts_line(self) -> str:
        """How many of the tokens that were proposed were drawn."""
        drafted, accepted = (
            sum(getattr(completion, name) or 0 for completion in self.completions)
            for name in ("drafted", "accepted")
        )
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        return f"drafts: {accepted:,} of {drafted:,} proposed tokens accepted{share}"

    def __len__(self) -> int:
        return len(self.completions)

    def __iter__(self) -> Iterator[WrittenText]:
        return iter(self.completions)

    def __getitem__(self, index: int) -> WrittenText:
        return self.completions[index]

    def to_json(self) -> list[dict[str, Any]]:
        """The lines that `fivefold generate --json` prints."""
        return [completion.table() for completion in self.completions]

    def __str__(self) -> str:
        if len(self.completions) == 1:
            return self.completions[0].text
        return "\n".join(
            f"[{completion.id}] {completion.prompt}{completion.text}"
            for completion in self.completions
        )

    def _repr_html_(self) -> str:
        from fivefold.render import texts_html

        return texts_html(
            [
                (completion.prompt, completion.text, completion.reason)
                for completion in self.completions
            ]
        )


def generate(
    source: Any,
    prompt: str | Sequence[str | Messages | Prompt],
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    layout: str | Layout = "dp=1",
    adapter: Any = None,
    chat: bool = False,
    dtype: str | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    cache_gb: float = 1.0,
    batch_invariant: bool = False,
    precision: str | None = None,
    step: str | int | None = None,
    output: str | Path | None = None,
    record_routing: bool = False,
    drafts: str | None = None,
    kv: str | None = None,
    on_piece: OnPiece | None = None,
    on_progress: OnProgress | None = None,
    on_warning: Tell | None = None,
) -> GeneratedTexts:
    """Go on with a prompt, or with several at a time, in any layout.

    `source` is a run, its folder, or the folder of a Hugging Face model. A prompt is a text, or
    with `chat` the messages of a conversation. `adapter` is a run with `lora` that was trained on
    this model, or a folder of PEFT. `on_piece` gets text as it is written. With `output`
    completions are appended to a JSONL file, and prompts that it has already are left out.
    `drafts`, such as "ngram:4" or "mtp:1", proposes tokens that a step verifies together.
    `kv` "fp8" keeps keys and values in a byte a number.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    if problems := list(sampling.problems()):
        raise BadFile("the options", problems)
    options = TextOptions(
        above("--max-tokens", max_tokens, 0),
        sampling,
        [stop] if isinstance(stop, str) else list(stop),
        chat,
        checkpoint_step(step),
        record_routing,
        None if output is None else Path(output),
    )
    runs = model_options(
        dtype,
        device,
        cache_gb,
        layout=layout,
        tokenizer=tokenizer,
        batch_invariant=batch_invariant,
        precision=precision,
        drafts=drafts,
        kv=kv,
    )
    model = find_model(model_path(source), options.step)
    if adapter is not None:
        model = with_adapters(model, named_adapters({"adapter": adapter}, model.shape), "")
    prompts = [Prompt("0", prompt)] if isinstance(prompt, str) else _prompts(prompt)
    listeners = TextListeners(on_piece, on_progress, on_warning or warn_caller)
    return GeneratedTexts(_generate(model, prompts, options, runs, listeners))


def _prompts(listed: Sequence[str | Messages | Prompt]) -> list[Prompt]:
    """Prompts by their numbers in the list."""
    prompts: list[Prompt] = []
    for number, prompt in enumerate(listed):
        if isinstance(prompt, Prompt):
            prompts.append(prompt)
        elif isinstance(prompt, str):
            prompts.append(Prompt(str(number), prompt))
        else:
            messages = tuple({**message} for message in prompt)
            prompts.append(Prompt(str(number), messages=messages))
    if not prompts:
        raise FivefoldError("no prompt: give a text, or a list of texts")
    return prompts


def _generate(
    model: TextModel,
    prompts: list[Prompt],
    options: TextOptions,
    runs: ModelOptions,
    listeners: TextListeners,
) -> tuple[WrittenText, ...]:
    # Imported here, so that a bad option is refused before torch is loaded.
    from fivefold.generate import (
        ChatTemplate,
        LibraryCodec,
        QuotingCodec,
        TextRequest,
        run_ranks,
        stops_of,
    )

    if options.record_routing and model.shape.moe is None:
        raise FivefoldError(f"--record-routing: {model.shape.name} has no experts; leave it out")
    setup = set_up(model, runs, partial(open_weights, model, options.step))
    codec = setup.codec
    stops, ends = stops_of(codec, options.stops)
    template = ChatTemplate(model.folder) if options.chat else None
    # As in a server: special tokens in messages are text, and so nobody's text forges a turn.
    quoting = QuotingCodec(codec) if template and isinstance(codec, LibraryCodec) else None

    def render(messages: Sequence[Message]) -> str:
        assert template is not None
        return template.render(quoting.quoted_messages(messages) if quoting else messages)

    rendered = {prompt.id: prompt.rendered(render if template else None) for prompt in prompts}
    texts = {id: quoting.shown(text) if quoting else text for id, text in rendered.items()}
    done = set[str]() if options.output is None else finished_ids(options.output, texts)
    requests = [
        Request(
            id,
            (quoting or codec).encode(text, special=not options.chat),
            options.max_tokens,
            options.sampling,
            ends | setup.ends,
            adapter=len(model.adapters),
        )
        for id, text in rendered.items()
        if id not in done
    ]
    for request in requests:
        request.check(model.shape.vocab, model.shape.max_seq)
    if not requests:
        return ()
    text_requests = [
        TextRequest(prompt_request, texts[prompt_request.id], stops) for prompt_request in requests
    ]
    written: dict[str, WrittenText] = {}
    with _lines(options.output) as write_line:

        def on_each(piece: TextPiece) -> None:
            if piece.written is not None:
                written[piece.id] = piece.written
                write_line(json.dumps(piece.written.table(), ensure_ascii=False))
            listeners.tell(piece, len(written), len(text_requests))

        run_ranks(setup.task(text_requests, options.record_routing), on_each, listeners.on_warning)
    return tuple(written[prompt_request.id] for prompt_request in requests)


@contextmanager
def _lines(output: Path | None) -> Generator[Callable[[str], None]]:
    """What appends a line to a file, if there is one."""
    if output is None:
        yield lambda line: None
        return
    try:
        stream = output.open("a", encoding="utf-8")
    except OSError as error:
        raise BadFile(str(output), [f"{error.strerror}; give another file with -o"]) from error

    def write_line(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    with stream:
        yield write_line
