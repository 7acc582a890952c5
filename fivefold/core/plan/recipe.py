"""Recipe: how a plan is trained, as the `[train]` table of a plan file says it.

The plan says what runs where; the recipe says how weights are updated, which data is read, and what
is saved and logged.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, cast

from fivefold.core import FORMATS, BadFile, FivefoldError, did_you_mean, is_code, load_code
from fivefold.core.model import ALL, Tuning

Curve = Literal["cosine", "wsd", "linear", "constant"]
Compile = Literal["auto", True, False]
States = Literal["fp32", "bf16"]
LossOn = Literal["assistant", "all"]
DISK = "nvme:"
BLOCK_OF_STATES = 256_000_000  # bytes of states in memory that an update by blocks has at once
ROUNDED_AT_ONCE = 1 << 22  # elements of bf16 states: enough for a GPU, and few temporaries
_WARM_UP = 10  # default warmup: one tenth of the steps
_LOWEST = 0.1  # of the learning rate: where a cosine ends
_DECAY = 5  # wsd decays over the last fifth of the steps
# What a plan cannot know of a real run: what its default is, and what to write in its place.
_STILL_YOURS = {
    "data": (
        "stdlib, the source of Python's standard library",
        'data = "FOLDER"  # of `fivefold tokens TEXT --tokenizer DIR -o FOLDER`',
    ),
    "steps": ("20", "steps = N  # or plan with --tokens"),
    "save_every": ("none before the last step", 'save_every = "auto"  # or a number of steps'),
    "lr": ("0.001", "lr = 3e-4  # the highest learning rate"),
}


_LONGEST_HANG = 1e9  # seconds


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer: what planning must know about it, and where its code is.

    `factory` is `module:function`, because core never loads torch. The function gets parameter
    groups, learning rate and epsilon, and makes a torch optimizer; a class of a user, given as
    `FILE.py:NAME`, gets no epsilon (`own_optimizer`). `states` are the names of its
    state tensors, each as large as the weight, and torch's names for them. `counts_steps`: it
    stores a float32 step count for each weight. `scales`: its kernel multiplies gradients by a
    factor as it reads them.

    `full_matrices`: an update needs full matrices, so that shards are gathered before it. The
    factory of such an optimizer makes an updater, as `optim/muon.py` does. Its states stay on the
    device in float32, and their memory is not estimated.
    """

    factory: str
    states: Mapping[str, str] = field(default_factory=dict[str, str])
    counts_steps: bool = False
    scales: bool = False
    full_matrices: bool = False

    def make(self, groups: list[dict[str, Any]], lr: float, eps: float) -> Any:
        """The torch optimizer of these parameter groups."""
        if is_code(self.factory):
            return load_code(self.factory)(groups, lr=lr)
        return pkgutil.resolve_name(self.factory)(groups, lr, eps)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        "fivefold.optim.optimizer:adamw",
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
        counts_steps=True,
        scales=True,
    ),
    "muon": OptimizerKind("fivefold.optim.muon:Muon", full_matrices=True),
    "sgd": OptimizerKind("fivefold.optim.optimizer:sgd", {"momentum": "momentum_buffer"}),
}


def optimizer_kind(name: str) -> OptimizerKind:
    """What is known about an optimizer, ours or a user's, which is loaded."""
    return _own_optimizer(name) if is_code(name) else OPTIMIZERS[name]


@lru_cache
def _own_optimizer(text: str) -> OptimizerKind:
    """A user's torch optimizer. Its class says in `states` which tensors, each as large as the
    weight, it has for a weight, because memory is planned and shards are saved by them."""
    optimizer: Any = load_code(text)
    if not (isinstance(optimizer, type) and hasattr(optimizer, "add_param_group")):
        raise BadFile(text, ["it is no optimizer: give a subclass of torch.optim.Optimizer"])
    names: Any = getattr(optimizer, "states", None)
    if not isinstance(names, tuple):
        reason = "states is missing: name the state tensors of a weight in the class, each as large"
        raise BadFile(text, [f'{reason} as the weight, as in states = ("exp_avg",); () for none'])
    counts_steps = bool(getattr(optimizer, "counts_steps", False))
    states = {str(name): str(name) for name in cast("tuple[object, ...]", names)}
    return OptimizerKind(text, states, counts_steps)


@dataclass(frozen=True)
class Recipe:
    """The keys of `[train]`.

    `warmup` and `save_every` count steps; None means a tenth of the steps, and one checkpoint at
    the end. `save_every` may be auto: by cost and failures, of which one is assumed in `mtbf_hours`
    hours of the job (`train/recovery/save_interval.py`). `copy_every` counts steps between copies
    in the memory of another failure domain, which has `copy_domain` ranks, 0 for those of a host
    (`core/layout/partners.py`). `data` is stdlib, rhymes, synthetic, or folders of shards with
    weights; `loss` is on what the assistant says in conversations, or on all of their tokens.
    `eval_data` is folders with names, or nothing: rows that `data` holds out. `keep_best` is the
    name of one of these sets. `offload`, of states, and `offload_grads` are none, cpu or
    nvme:FOLDER. `log` joins tensorboard, wandb and memory with `+`. `compile` is true, false, or
    auto: on GPUs. `callbacks` are classes as FILE.py:NAME, joined with `+`; `optimizer` is one of
    OPTIMIZERS, or such a class too. `lora` is the rank of adapters, 0 without any; `lora_alpha` is
    twice the rank if None; `lora_targets` and `train_only` are parts of names
    (`core/model/tuning.py`). `dpo_beta` is that of DPO on preference pairs, 0 without. Copies of
    weights and states are compared every `compare_every` steps, and every `replay`-th step is run
    twice; 0 means never. A step also runs again if loss or norm is `spike_bound` times as far above
    its median as is usual. A run ends when a rank has stood still for `hang_after` seconds; 0 means
    never.
    """

    steps: int = 20
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_curve: Curve = "cosine"
    warmup: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    data: str = "stdlib"
    loss: LossOn = "assistant"
    states: States = "fp32"
    offload: str = "none"
    offload_grads: str = "none"
    save_every: int | Literal["auto"] | None = None
    mtbf_hours: float | None = None
    copy_every: int = 0
    copy_domain: int = 0
    keep: int = 2
    keep_best: str = ""
    eval_every: int = 0
    eval_data: str = ""
    sample_every: int = 0
    skip_limit: int = 10
    log: str = ""
    callbacks: str = ""
    events: bool = False
    compile: Compile = "auto"
    lora: int = 0
    lora_alpha: float | None = None
    lora_targets: str = ALL
    train_only: str = ""
    dpo_beta: float = 0.0
    compare_every: int = 20
    replay: int = 0
    spike_bound: float = 10.0
    hang_after: float = 600.0

    def __post_init__(self) -> None:
        """Refuse every impossible value in one error."""
        low = {"steps": 1, "keep": 1, "seed": 0, "eval_every": 0, "skip_limit": 0}
        low |= {"sample_every": 0, "lora": 0, "copy_every": 0, "copy_domain": 0}
        low |= {"compare_every": 0, "replay": 0}
        problems = [
            f"{key} = {getattr(self, key)}: at least {least}"
            for key, least in low.items()
            if getattr(self, key) < least
        ]
        if not self.spike_bound >= 1:
            problems.append(f"spike_bound = {self.spike_bound}: at least 1, the usual bound itself")
        if not 0 <= self.hang_after <= _LONGEST_HANG:
            rule = f"seconds, or 0 for never; at most {_LONGEST_HANG:.0e}"
            problems.append(f"hang_after = {self.hang_after}: {rule}")
        if self.warmup is not None and self.warmup < 0:
            problems.append(f"warmup = {self.warmup}: at least 0")
        if self.optimizer not in OPTIMIZERS and not is_code(self.optimizer):
            near = did_you_mean(self.optimizer, OPTIMIZERS)
            problems.append(
                f"optimizer = {self.optimizer!r}: {near} (or your own, as FILE.py:NAME)"
            )
        for text in self.callback_texts:
            if not is_code(text):
                problems.append(f"callbacks = {text!r}: give classes as FILE.py:NAME, joined by +")
        problems += self._impossible_saves()
        for key in ("lr", "clip"):
            if not 0 < getattr(self, key) < math.inf:
                problems.append(f"{key} = {getattr(self, key)}: above 0")
        if not 0 <= self.weight_decay < math.inf:
            problems.append(f"weight_decay = {self.weight_decay}: 0 or more")
        for key in ("offload", "offload_grads"):
            if (where := getattr(self, key)) not in ("none", "cpu") and not _folder(where):
                problems.append(f"{key} = {where}: none, cpu, or {DISK}FOLDER")
        if self.full_matrices and (self.offload != "none" or self.states != "fp32"):
            problems.append(
                f"offload = {self.offload} and states = {self.states}: {self.optimizer} keeps its "
                "states on the device in float32; use offload = none and states = fp32, or adamw"
            )
        if self.offload_grads != "none" and self.full_matrices:
            problems.append(
                f"offload_grads = {self.offload_grads}: {self.optimizer} updates full matrices "
                "from gradients on the device; use adamw or sgd, or leave it out"
            )
        if self.copy_every and self.disk is not None:
            problems.append(
                f"copy_every = {self.copy_every} with offload = {self.offload}: states are on a "
                "disk because memory is scarce; leave one of them out"
            )
        if self.copy_domain and not self.copy_every:
            problems.append(f"copy_domain = {self.copy_domain}: nothing is copied; give copy_every")
        if self.eval_data and not self.eval_every:
            problems.append(f"eval_data = {self.eval_data}: nothing is evaluated; give eval_every")
        problems += [*self._impossible_tuning(), *self._impossible_pairs()]
        if problems:
            raise FivefoldError("cannot train with " + "; ".join(problems))

    def _impossible_saves(self) -> list[str]:
        problems: list[str] = []
        every = self.save_every
        if isinstance(every, int) and every < 1:
            problems.append(f"save_every = {every}: at least 1, or auto")
        if self.mtbf_hours is not None and not 0 < self.mtbf_hours < math.inf:
            problems.append(f"mtbf_hours = {self.mtbf_hours}: hours between failures, above 0")
        elif self.mtbf_hours is not None and every != "auto":
            problems.append(f"mtbf_hours = {self.mtbf_hours}: only save_every = auto reads it")
        steps = 0 if every == "auto" else every or 0
        if self.keep_best and (every == "auto" or not self.eval_every or steps % self.eval_every):
            problems.append(
                f"keep_best = {self.keep_best} with save_every = {every} and eval_every ="
                f" {self.eval_every}: every checkpoint needs an evaluation; let save_every be a "
                "multiple of eval_every"
            )
        return problems

    def _impossible_pairs(self) -> list[str]:
        problems: list[str] = []
        if not 0 <= self.dpo_beta < math.inf:
            problems.append(f"dpo_beta = {self.dpo_beta}: 0, which means no DPO, or more")
        if self.dpo_beta and self.loss != "assistant":
            rule = f"loss = {self.loss} with dpo_beta: DPO compares what the assistant says"
            problems.append(f"{rule}; use loss = assistant")
        return problems

    def _impossible_tuning(self) -> list[str]:
        problems: list[str] = []
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            problems.append(f"lora_alpha = {self.lora_alpha}: above 0")
        if not self.lora and (self.lora_alpha is not None or self.lora_targets != ALL):
            problems.append("lora_alpha or lora_targets without adapters: say lora = RANK too")
        if self.tuning is not None and self.full_matrices:
            problems.append(
                f"optimizer = {self.optimizer} with lora or train_only: {self.optimizer} gathers "
                "all matrices, and here only a part of them learns; use adamw or sgd"
            )
        return problems

    def still_yours(self) -> dict[str, tuple[str, str]]:
        """Keys of a real run that have the defaults of a first try: the default of each in words,
        and a line of `[train]` that would replace it."""
        usual = type(self)()
        return {
            key: text
            for key, text in _STILL_YOURS.items()
            if getattr(self, key) == getattr(usual, key)
        }

    @property
    def tuning(self) -> Tuning | None:
        """What learns; None: all weights."""
        if not self.lora and not self.train_only:
            return None
        alpha = 2.0 * self.lora if self.lora_alpha is None else self.lora_alpha
        return Tuning(self.lora, alpha, self.lora_targets, self.train_only)

    def only_tuning(self) -> Recipe:
        """A usual recipe in which the same weights learn: what a model is made by."""
        keys = ("lora", "lora_alpha", "lora_targets", "train_only")
        return Recipe(**{key: getattr(self, key) for key in keys})

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """What is known about its optimizer."""
        kind = optimizer_kind(self.optimizer)
        if self.states == "bf16" and len(kind.states) > 2:
            rule = "random bits round two states of a weight to bfloat16"
            raise FivefoldError(f"states = bf16 with {self.optimizer}: {rule}; use states = fp32")
        return kind

    @property
    def full_matrices(self) -> bool:
        """Whether its optimizer updates full matrices; code of a user does not, and is not loaded
        for this question."""
        return self.optimizer in OPTIMIZERS and OPTIMIZERS[self.optimizer].full_matrices

    @property
    def callback_texts(self) -> list[str]:
        """The classes of a user's callbacks, as `FILE.py:NAME`."""
        texts = (text.strip() for text in self.callbacks.replace(",", "+").split("+"))
        return [text for text in texts if text not in ("", "none")]

    def compiles(self, device: str) -> bool:
        """Whether kernels are compiled on this type of device."""
        return device == "cuda" if self.compile == "auto" else self.compile

    @property
    def kernels(self) -> str:
        """The planner's name for how the kernels of a GPU are made."""
        return "compiled" if self.compiles("cuda") else "eager"

    @property
    def disk(self) -> str | None:
        """The folder of offloaded optimizer states; None without a disk."""
        return _folder(self.offload)

    @property
    def offload_kind(self) -> str:
        """Where optimizer states are: none (on the device), cpu or nvme."""
        return "nvme" if self.disk is not None else self.offload

    def with_offload(self, kind: str) -> Recipe:
        """The recipe with optimizer states there; on disks, in its own folder or in `offload`."""
        if self.offload_kind == kind:
            return self
        return replace(self, offload=f"{DISK}offload" if kind == "nvme" else kind)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states for an element of a weight that AdamW or SGD updates."""
        size = FORMATS["bfloat16" if self.states == "bf16" else "float32"].itemsize
        usual = "adamw" if self.full_matrices else self.optimizer
        return size * len(optimizer_kind(usual).states)

    @property
    def grads_disk(self) -> str | None:
        """The folder of offloaded gradients; None without a disk."""
        return _folder(self.offload_grads)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return max(1, self.steps // _WARM_UP) if self.warmup is None else self.warmup

    def lr_at(self, number: int) -> float:
        """The learning rate of a step, from 1: a linear warmup, then the curve.

        cosine: half a wave down to a tenth. linear: down to zero, which it would reach one step
        after the last. wsd: constant, then down to zero over the last fifth of the steps.
        """
        warmup = self.warmup_steps
        if number <= warmup:
            return self.lr * number / warmup
        done = (number - 1 - warmup) / max(1, self.steps - warmup)
        if self.lr_curve == "cosine":
            share = _LOWEST + (1 - _LOWEST) * (1 + math.cos(math.pi * done)) / 2
        elif self.lr_curve == "linear":
            share = 1 - done
        elif self.lr_curve == "wsd":
            falling = max(1, self.steps // _DECAY)
            share = min(1.0, (self.steps + 1 - number) / falling)
        else:
            share = 1.0
        return self.lr * share

    def is_due(self, every: int | str | None, number: int) -> bool:
        """Whether something that happens every `every` steps happens after this one."""
        return number == self.steps or (isinstance(every, int) and every > 0 and not number % every)


def _folder(where: str) -> str | None:
    """The folder of what is offloaded to a disk."""
    return where.removeprefix(DISK) if where.startswith(DISK) else None
