"""A model as evaluations ask it: how likely a text is after another, and what the model writes.

The three questions are those of the `lm-eval` package, in plain values: this file does not import
it. All requests of a call go to the engine together, which batches them; texts that begin alike
share what is computed of them. Texts are split into tokens as that package does for Hugging Face
models: spaces at the end of a context belong to what follows, and a context that is too long for
the model loses its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.core import BadFile, FivefoldError
from fivefold.generate.requests import NOT_FINITE, Request, Sampling
from fivefold.generate.text import ByteCodec, Codec, read_table, token_text
from fivefold.generate.writer import TextRequest, WrittenText

MOST_WRITTEN = 256  # tokens, if a task does not say
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # the same, under several names
_KNOWN = (*_LENGTHS, "until", "do_sample", "temperature", "top_k", "top_p", "num_beams")

Write = Callable[[list[TextRequest]], Mapping[str, WrittenText]]
"""Runs requests in some layout; returns what came of them by their ids."""


class ScoredText(NamedTuple):
    """Log-probability of a continuation, and whether greedy decoding gives it."""

    logprob: float
    is_greedy: bool


@dataclass
class TaskModel:
    """A model with its tokenizer, for evaluation harnesses. `prefix`: the token before a text
    without context, if any; `ends`: tokens that end a completion."""

    codec: Codec
    vocab: int
    max_seq: int
    prefix: int | None
    ends: frozenset[int]
    write: Write
    num_truncated: int = 0  # contexts that were too long
    num_calls: int = 0

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[ScoredText]:
        """Log-likelihood of every (context, continuation)."""
        windows: list[tuple[tuple[int, ...], int]] = []
        for context, continuation in pairs:
            before, after = self._split(context, continuation)
            if len(after) > self.max_seq:
                raise FivefoldError(
                    f"a continuation has {len(after):,} tokens and the model takes "
                    f"{self.max_seq:,}: leave this task out, or evaluate a model with a longer "
                    "context"
                )
            self.num_truncated += len(before) + len(after) > self.max_seq + 1
            windows.append(((*before, *after), len(after)))
        return self._score(windows)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of every text, in windows of the model's length that count each token
        once."""
        counts: list[int] = []
        windows: list[tuple[tuple[int, ...], int]] = []
        for text in texts:
            text_windows = list(self._rolling(self._encode(text)))
            counts.append(len(text_windows))
            windows += text_windows
        scored = iter(self._score(windows))
        return [sum(next(scored).logprob for _ in range(count)) for count in counts]

    def generate_until(self, tasks: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generate after every context, up to its stop texts."""
        requests = [
            self._writing(f"{i}", context, options) for i, (context, options) in enumerate(tasks)
        ]
        written = self._written(requests)
        return [written[request.request.id].text for request in requests]

    def _encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """With the tokens that the tokenizer puts around a text, unless it has the first one."""
        names = {number: name for name, number in self.codec.named().items()}
        begins = names.get(-1 if self.prefix is None else self.prefix)
        has_prefix = begins is not None and text.startswith(begins)
        return self.codec.encode(text, special=special and not has_prefix)

    def _split(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of both. The continuation is what the whole text has more than the context."""
        if not context:
            after = self._encode(continuation, special=False)
            if self.prefix is not None and after[:1] == (self.prefix,):
                return after[:1], after[1:]
            return (self._needed_prefix(),), after
        before = self._encode(context.rstrip())
        after = self._encode(context + continuation)[len(before) :]
        return before or (self._needed_prefix(),), after

    def _needed_prefix(self) -> int:
        if self.prefix is None:
            raise FivefoldError(
                "a text without context needs a token before it, and this tokenizer has neither a "
                "beginning nor an end token: add bos_token_id to the model's config.json"
            )
        return self.prefix

    def _rolling(self, tokens: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Windows of a text, each with the number of tokens that are counted at its end."""
        full_tokens, done = (self._needed_prefix(), *tokens), 0
        while done < len(tokens):
            count = min(self.max_seq, len(tokens) - done)
            stop = done + count + 1
            yield full_tokens[max(0, stop - self.max_seq - 1) : stop], count
            done += count

    def _score(self, windows: Sequence[tuple[tuple[int, ...], int]]) -> list[ScoredText]:
        """Of each window, the log-probability of so many tokens at its end."""
        requests: list[TextRequest] = []
        for i, (tokens, count) in enumerate(windows):
            if count:
                window = tokens[-(self.max_seq + 1) :]
                request = Request(f"{i}", window[:-1], 0, targets=window[len(window) - count :])
                requests.append(TextRequest(request, ""))
        written = self._written(requests)
        scored = [ScoredText(0.0, True)] * len(windows)  # nothing is certain to follow
        for text_request in requests:
            answer = written[text_request.request.id]
            is_greedy = answer.tokens == text_request.request.targets
            scored[int(text_request.request.id)] = ScoredText(sum(answer.logprobs), is_greedy)
        return scored

    def _writing(self, id: str, context: str, options: Mapping[str, Any]) -> TextRequest:
        most, sampling, until = _generation(options)
        if most >= self.max_seq:
            raise FivefoldError(
                f"a task writes up to {most:,} tokens and the model takes {self.max_seq:,}, with "
                "the context: lower max_gen_toks in the task's generation_kwargs"
            )
        tokens = self._encode(context) or (self._needed_prefix(),)
        self.num_truncated += len(tokens) + most > self.max_seq
        known = self.codec.named()
        ends = self.ends | {known[text] for text in until if text in known}
        stops = tuple(text for text in until if text not in known)
        prompt = tokens[-(self.max_seq - most) :]
        return TextRequest(Request(id, prompt, most, sampling, ends), context, stops)

    def _written(self, requests: list[TextRequest]) -> Mapping[str, WrittenText]:
        self.num_calls += 1
        for text_request in requests:
            text_request.request.check(self.vocab, self.max_seq)
        texts = self.write(requests) if requests else dict[str, WrittenText]()
        if any(text.reason == "error" for text in texts.values()):
            raise FivefoldError(NOT_FINITE)
        return texts


def _generation(options: Mapping[str, Any]) -> tuple[int, Sampling, list[str]]:
    """What a task's `generation_kwargs` say: the most tokens, how they are drawn, and stops."""
    unknown = [key for key in options if key not in _KNOWN]
    if options.get("num_beams", 1) != 1:
        unknown.append("num_beams")
    if unknown:
        rule = f"{', '.join(unknown)} in generation_kwargs of a task: fivefold has"
        raise FivefoldError(f"{rule} {', '.join(_KNOWN[:-1])}; leave the others out")
    stop_texts: str | list[str] = options.get("until") or []
    until = [stop_texts] if isinstance(stop_texts, str) else stop_texts
    lengths = [int(options[key]) for key in _LENGTHS if options.get(key) is not None]
    temperature = options.get("temperature")
    samples = bool(options.get("do_sample", (temperature or 0.0) > 0))
    odds = 1.0 if temperature is None else float(temperature)
    sampling = Sampling(
        odds if samples else 0.0,
        int(options.get("top_k") or 0) or None,
        float(options.get("top_p") or 1.0),
    )
    if problems := list(sampling.problems()):
        raise BadFile("generation_kwargs of a task", problems)
    return (*lengths, MOST_WRITTEN)[0], sampling, [text for text in until if text]


def prefix_token(folder: Path, codec: Codec, ends: frozenset[int], vocab: int) -> int | None:
    """Token before a text without context: the beginning of texts, or else an end."""
    candidates: list[int] = []
    if not isinstance(codec, ByteCodec):
        names, known = read_table(folder / "tokenizer_config.json"), codec.named()
        for key in ("bos_token", "eos_token"):
            text = token_text(names.get(key))
            candidates += [known[text]] if isinstance(text, str) and text in known else []
        number = read_table(folder / "config.json").get("bos_token_id")
        candidates += [number] if isinstance(number, int) and not isinstance(number, bool) else []
    return next(
        (candidate for candidate in (*candidates, *sorted(ends)) if 0 <= candidate < vocab), None
    )
