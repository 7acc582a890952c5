"""The errors, and small functions for their texts.

Every message names the violated rule and ends with what to do. Users' mistakes raise a
`FivefoldError`; the command line prints it without a traceback and exits with code 2. An impossible
result raises an `InternalError`, with exit code 70. `assert` is for programming errors.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

_HIDDEN = ("Cc", "Cf")  # kinds of characters that a terminal obeys and does not show
JSON_SCHEMA = 1  # of what --json prints: a key that goes or changes its meaning raises it


class FivefoldError(ValueError):
    """A user's input cannot be used; the message names the rule and the way out. `ways`: options
    with which the same command works, where they are known."""

    ways: tuple[str, ...] = ()


class InternalError(RuntimeError):
    """The program has computed what cannot be; the message names the part, and is no answer."""


class RankLost(RuntimeError):
    """A rank died, raised or hangs: which rank, what it was doing, and how it ended.

    `who` is another name of it, where it is no rank of the layout. A `final` loss is an error that
    every further start would find too.
    """

    def __init__(
        self, rank: int, doing: str, cause: str, who: str | None = None, final: bool = False
    ) -> None:
        self.rank, self.doing, self.cause, self.final = rank, doing, cause, final
        self.who = f"rank {rank}" if who is None else who
        super().__init__(f"{self.who}, at {doing}: {cause}")

    @property
    def reason(self) -> str:
        """What is said of it."""
        return f"lost {self.who} at {self.doing}: it {self.cause}"

    def named(self, who: str) -> RankLost:
        """The same loss of a process that is no rank."""
        return RankLost(self.rank, self.doing, self.cause, who, self.final)

    def ended(self, final: bool) -> RankLost:
        """The same loss, after which there is another start or, if it is `final`, none."""
        return RankLost(self.rank, self.doing, self.cause, self.who, final)


class UnknownName(FivefoldError):
    """A preset, key, schedule or option that does not exist; says `hint`, or the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f"unknown {kind} {name!r}: {hint or did_you_mean(name, self.known)}")


class BadFile(FivefoldError):
    """A file or text that cannot be read; carries every problem found in it."""

    def __init__(self, where: str, problems: Iterable[str]) -> None:
        self.where, self.problems = where, list(problems)
        super().__init__(bullets(f"cannot use {where}:", self.problems))


class IllegalLayout(FivefoldError):
    """A layout that breaks rules of the model, the machine or the batch, with every reason."""

    def __init__(self, layout: str, reasons: Iterable[str], nearest: Iterable[str]) -> None:
        self.layout, self.reasons, self.nearest = layout, list(reasons), list(nearest)
        lines = bullets(f'impossible layout "{layout}":', self.reasons)
        if self.nearest:
            lines += "\n" + bullets("nearest legal layouts:", self.nearest)
        super().__init__(lines)


class IllegalSchedule(FivefoldError):
    """A schedule with illegal numbers, or one that deadlocks."""


# What other software calls our keys.
_CALLED_ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "global_batch_size": "batch",
    "micro_batch_size": "microbatch_size",
    "gradient_accumulation_steps": "microbatches",
    "seq_len": "seq",
    "seq_length": "seq",
    **dict.fromkeys(("max_steps", "num_steps", "iters", "max_iters", "iterations"), "steps"),
    # An epoch is so many steps of the data.
    **dict.fromkeys(("epoch", "epochs", "num_epochs", "num_train_epochs", "max_epochs"), "steps"),
    **dict.fromkeys(("sequence_length", "max_length", "context_length", "block_size"), "seq"),
    **dict.fromkeys(("num_gpus", "devices", "nproc_per_node", "world_size"), "gpus"),
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "tensor_parallel_size"), "layout"),
    "per_device_train_batch_size": "microbatch_size",
    "output_dir": "out",
    "dataset": "data",
    "train_iters": "steps",
    "save_steps": "save_every",
    "save_interval": "save_every",
    "warmup_steps": "warmup",
    "grad_clip": "clip",
    "max_norm": "clip",
    "num_layers": "layers",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "sliding_window": "window",
    "num_experts": "moe.experts",
    "activation_checkpointing": "recompute",
    "checkpoint_interval": "save_every",
    "eval_interval": "eval_every",
}


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """Suggest the known name of what other software calls so, or the nearest ones; if none is near,
    list them all.

    >>> did_you_mean("lama-3", ["llama-3", "gpt-2"])
    'did you mean llama-3?'
    >>> did_you_mean("learning_rate", ["lr", "layers"])
    'did you mean lr?'
    """
    options = sorted(known)
    if near := nearest(name, options, most):
        return "did you mean " + " or ".join(near) + "?"
    return "choose from " + ", ".join(options)


def nearest(name: str, known: Iterable[str], most: int = 3, alike: float = 0.6) -> list[str]:
    """The known name of what other software calls so, or those that are spelt alike."""
    options = sorted({*known})
    plain = name.lower().replace("-", "_")
    if (same := _CALLED_ELSEWHERE.get(plain)) in options:
        return [same]
    return difflib.get_close_matches(name.lower(), options, n=most, cutoff=alike)


def bullets(head: str, lines: Iterable[str]) -> str:
    """A heading with one line per reason.

    >>> bullets("no:", ["too few"])
    'no:\\n  - too few'
    """
    return "\n".join([head, *(f"  - {line}" for line in lines)])


def printable(text: str) -> str:
    """A text of others for a terminal: what would move its cursor or change its colours is spelt.

    >>> printable("a\\x1b[2Jb\\nc")
    'a\\\\x1b[2Jb\\nc'
    """
    hidden = {char for char in set(text) - {"\n", "\t"} if unicodedata.category(char) in _HIDDEN}
    return text.translate({ord(char): ascii(char)[1:-1] for char in hidden})


def counted(number: float, noun: str) -> str:
    """A number and its noun, singular or plural.

    >>> counted(1, "rank"), counted(16, "rank"), counted(2.5, "microbatch")
    ('1 rank', '16 ranks', '2.5 microbatches')
    """
    plural = noun + ("es" if noun.endswith(("ch", "s")) else "s")
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun if number == 1 else plural}"


def span(numbers: range) -> str:
    """A range by its first and last number.

    >>> span(range(4, 8)), span(range(4, 5))
    ('4–7', '4')
    """
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def kind_text(kind: str) -> str:
    """The kind of a collective as texts spell it.

    >>> kind_text("all_gather")
    'all-gather'
    """
    return kind.replace("_", "-")
