"""Text from a run or a Hugging Face model: the answer of `ff.generate`, and of `fivefold generate`.

With a layout, every rank is a forked process with an engine and a writer of its own. All add the
same requests and decide alike; rank 0 reports what was written. One rank runs in this process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fivefold.api.checks import above, checkpoint_step, one_of, positive
from fivefold.api.jobs import OnProgress, TaskProgress
from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.model import Shape
from fivefold.generate import (
    DTYPES,
    ModelOptions,
    Prompt,
    Request,
    Sampling,
    TextModel,
    find_model,
    finished_ids,
    set_up,
)

if TYPE_CHECKING:
    from fivefold.generate import Message, ReadWeight, Tell, TextPiece, WrittenText

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

    def __len__(self) -> int:
        return len(self.completions)

    def __iter__(self) -> Iterator[WrittenText]:
        return iter(self.completions)

    def __getitem__(self, place: int) -> WrittenText:
        return self.completions[place]

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
    chat: bool = False,
    dtype: str | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    cache_gb: float = 1.0,
    batch_invariant: bool = False,
    step: str | int | None = None,
    output: str | Path | None = None,
    record_routing: bool = False,
    on_piece: OnPiece | None = None,
    on_progress: OnProgress | None = None,
    on_warning: Tell | None = None,
) -> GeneratedTexts:
    """Go on with a prompt, or with several at a time, in any layout.

    `source` is a run, its folder, or the folder of a Hugging Face model. A prompt is a text, or
    with `chat` the messages of a conversation. `on_piece` gets text as it is written. With `output`
    completions are appended to a JSONL file, and prompts that it has already are left out.
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
    named = None if tokenizer is None else str(tokenizer)
    settings = {"layout": str(layout), "tokenizer": named, "batch_invariant": batch_invariant}
    runs = model_options(dtype, device, cache_gb, **settings)
    model = find_model(_folder(source), options.step)
    prompts = [Prompt("0", prompt)] if isinstance(prompt, str) else _prompts(prompt)
    on_message = on_warning or _warn
    listeners = TextListeners(on_piece, on_progress, on_message)
    return GeneratedTexts(_generate(model, prompts, options, runs, listeners))


def _warn(why: str) -> None:
    warnings.warn(why, stacklevel=3)


def _folder(source: Any) -> Path:
    """The folder of a run that was trained, or a path."""
    return Path(getattr(source, "folder", source))


def _prompts(given: Sequence[str | Messages | Prompt]) -> list[Prompt]:
    """Prompts by their places in the list."""
    prompts: list[Prompt] = []
    for number, prompt in enumerate(given):
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


def model_options(dtype: str | None, device: str, cache_gb: float, **more: Any) -> ModelOptions:
    """How a model is to be run."""
    dtype = dtype and one_of("--dtype", dtype, DTYPES)
    device = one_of("--device", device, ("auto", "cpu", "cuda"))
    cache_gb = positive("--cache-gb", cache_gb)
    return ModelOptions(dtype=dtype, device=device, cache_gb=cache_gb, **more)


def open_weights(model: TextModel, step: int | Literal["best"] | None, tell: Tell) -> ReadWeight:
    """What reads a weight of the folder; tells why a newer checkpoint is not read."""
    from fivefold.huggingface import HfFolder
    from fivefold.train.checkpoint import open_run

    if not model.is_run:
        return HfFolder(model.folder, model.shape).weight
    reader = open_run(model.source, model.shape, step, tell)
    return lambda weight, dtype: reader.read(f"model/{weight.name}").to(dtype)


def _check_recording(shape: Shape, options: TextOptions) -> None:
    """Refuse to record choices that there are not."""
    if options.record_routing and shape.moe is None:
        raise FivefoldError(f"--record-routing: {shape.name} has no experts; leave it out")


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

    _check_recording(model.shape, options)
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
