"""The job that Explore shows: read from the address, from a plan or from a command line.

dp is not a key of the state: it is the number of GPUs divided by tp, cp and pp. Sequence length,
batch and tokens follow from the model and the number of GPUs until they are typed: `derived` names
those that do, so that another model brings its own.

The job of a state without its layout, and where to go if the planner finds no layout for it.

A change of model, machine, GPUs or batch is another job: its layout is the planner's first choice.
If nothing fits, the leanest layout is shown, with jobs near this one for which something fits. Each
of them was searched, so that no way ends at a job without a layout.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast, get_args

from fivefold.core import (
    PRECISIONS,
    BadFile,
    FivefoldError,
    IllegalLayout,
    UnknownName,
    is_code,
    plan_keys,
)
from fivefold.core import hardware as machine
from fivefold.core.layout import (
    MOST_RANKS,
    MOST_TOKENS,
    ContextKind,
    Layout,
    LayoutRequest,
    Order,
    default_batch,
    parse_zero,
    problems,
)
from fivefold.core.model import Shape, StageRecompute, parameters
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, Recipe, job_of, parse_settings, resolve
from fivefold.core.schedule import AUTO, FAMILIES, Family, family, names
from fivefold.planner import (
    Estimate,
    EstimateSetting,
    NothingFits,
    PlanRanks,
    PlanRequest,
    best_plans,
    estimate_plan,
    estimate_setting,
    gpus_needed,
    has_plan,
    plan_memory,
    plan_request,
    search_layouts,
)
from fivefold_page import Params, View

HEADROOM = 0.05  # of the memory, as in `fivefold plan`
KERNELS = "compiled"
SCHEDULES = tuple(schedule_family.name for schedule_family in FAMILIES)
CONTEXTS = get_args(ContextKind)
ALSO = (
    *("sp", "packed", "balance", "tp_keep", "gather", "ep_nodes", "stage_layers"),
    *("tp_overlap", "grad_dtype", "unit_size", "prefetch"),
)
_ALSO_TRAIN = ("offload", "lora")  # where nothing else fits
DERIVED = ("batch", "seq", "tokens")
_COUNTS = {
    **dict.fromkeys(("gpus", "tp", "cp", "pp", "ep", "etp", "replicate", "chunks"), MOST_RANKS),
    **dict.fromkeys(("microbatch_size", "seq", "batch"), MOST_TOKENS),
}
_MOST_TOKENS_OF_A_RUN = 1e30
_OF_REQUEST = ("batch", "microbatch_size", "chunks", "gpus", "schedule", "seq")
_OF_RULES = (*_OF_REQUEST, "machine", "precision", "also")


@dataclass(frozen=True)
class State:
    """One job with every key decided; by default the job and the degrees of the Llama 3.1 405B run,
    with the planner's first choice of everything else.

    A pasted `config` replaces the `model`. `replicate` is the number of replicas of dp=RxS. `also`
    has further keys of a plan or a model, as `--set` takes them: the page has no controls for them,
    but it shows a plan that uses them.
    """

    model: str = "llama-3.1-405b"
    config: str = ""
    machine: str = "h100"
    gpus: int = 16_384
    tp: int = 8
    cp: int = 1
    pp: int = 16
    ep: int = 1
    etp: int = 1
    replicate: int = 1
    zero: int = 1
    schedule: str = "interleaved"
    chunks: int = 4
    context: str = "zigzag"
    recompute: str = "selective"
    microbatch_size: int = 1
    seq: int = 8192
    batch: int = 2048
    precision: str = "bf16"
    tokens: float = 15.6e12
    also: str = ""
    derived: str = field(default="", compare=False)  # the numbers are the same, typed or not

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> State:
        """Read texts; absent keys have their defaults, and one error lists every problem.

        Without `chunks`, the schedule decides them; the texts of `derived` keys are ignored.
        """
        known = [state_field.name for state_field in fields(cls)]
        for name in params:
            if name not in known:
                raise UnknownName("key", name, known)
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for name, text in params.items():
            if text.strip():
                try:
                    values[name] = _value(name, text.strip())
                except FivefoldError as error:
                    wrong += error.problems if isinstance(error, BadFile) else [str(error)]
        if wrong:
            raise BadFile("what is asked", wrong)
        state = cls(**values).derive(values.get("derived", "").split())
        if "chunks" in values or not {"schedule", "pp"} & values.keys():
            return state
        return replace(state, chunks=state.family.chunks_on(state.pp, None))

    def params(self) -> dict[str, str]:
        """The texts that `parse` reads back to this state; one job has one form."""
        left_out = ["model" if self.config else "config"]
        left_out += [name for name in ("also", "derived") if not getattr(self, name)]
        return {key: _text(value) for key, value in vars(self).items() if key not in left_out}

    def derive(self, names: Iterable[str]) -> State:
        """With these keys as they follow from the model and the number of GPUs."""
        known = sorted({*names})
        if not known:
            return self
        seq = None if "seq" in known else self.seq
        usual = _usual_job(self.config or self.model, self.also, self.gpus, seq)
        return replace(self, derived=" ".join(known), **{name: usual[name] for name in known})

    @property
    def family(self) -> Family:
        """The schedule by its name."""
        return family(self.schedule)

    @property
    def dp(self) -> int:
        """The number of GPUs divided by tp, cp and pp, rounded down."""
        return max(1, self.gpus // (self.tp * self.cp * self.pp))

    def degrees(self) -> str:
        """The degrees as text, legal or not."""
        return f"dp={self.dp} tp={self.tp} pp={self.pp} cp={self.cp} ep={self.ep}"

    def layout(self) -> Layout:
        """The layout; impossible degrees are refused."""
        replicas = self.replicate if self.dp % self.replicate == 0 else 1
        same = ("tp", "pp", "cp", "ep", "etp", "zero", "context", "chunks")
        return Layout(
            replicate=replicas,
            shard=self.dp // replicas,
            sp=_also(self.also).plan.get("sp", True),
            order=cast(Order, _also(self.also).order),
            **self._values(same),
        )

    def _values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def options(self) -> PlanOptions:
        """The job as the options of a plan."""
        also = _also(self.also)
        same = ("machine", "zero", "context", "recompute", *_OF_REQUEST)
        options = PlanOptions(
            model=self.config or self.model,
            layout=str(self.layout()),
            set=also.model,
            **self._values(same),
        )
        keys: dict[str, Any] = plan_keys(self.precision)
        options = replace(options, **keys, train=replace(options.train, **also.train))
        return replace(options, **also.plan)

    def shape(self) -> Shape:
        """The model."""
        return _shape(self.config or self.model, self.also)

    def problems(self) -> list[str]:
        """Every rule that the job breaks; empty if it is legal."""
        return list(_problems(self))

    def with_keys(self, **changes: Any) -> State:
        """With some keys changed: as `replace`, in half of the time."""
        return State(**{**vars(self), **changes})

    def plan(self) -> Plan:
        """The resolved plan; an illegal job is refused with every reason."""
        return _plan(self)

    def setting(self) -> EstimateSetting:
        """Machine, precision and kernels, with the assumptions of `fivefold plan`."""
        return _setting(self.machine, self.precision)[0]

    def ranks(self) -> PlanRanks:
        """The memory of every rank, for the estimate and for its picture."""
        return _ranks(self)

    def estimate(self) -> Estimate:
        """Memory and time of a step, as the planner estimates them."""
        return _estimate(self)


# One GPU with everything on it; chapters change what they are about.
ALONE = State(
    model="llama-3.1-70b",
    gpus=1,
    tp=1,
    pp=1,
    zero=0,
    schedule="1f1b",
    chunks=1,
    seq=8192,
    batch=2,
    tokens=15e12,
)


class _Also(NamedTuple):
    """The keys of `also`, sorted by what they belong to."""

    plan: dict[str, Any]
    train: dict[str, Any]
    model: dict[str, str]
    order: str


@lru_cache(maxsize=8)
def _also(text: str) -> _Also:
    """Parse `sp=false layers=4`; keys that have a control or belong to training are refused."""
    parts = (word.partition("=") for word in text.split())
    pairs = {key: value for key, _, value in parts}
    order = pairs.pop("order", Layout.order)
    if order not in get_args(Order):
        raise UnknownName("order", order, get_args(Order))
    if code := next(filter(is_code, pairs.values()), None):
        raise FivefoldError(f"also=…{code}: the page runs no code; use fivefold plan")
    keys = parse_settings(pairs)
    known = (*ALSO, *_ALSO_TRAIN)
    if wrong := [key for key in (*keys.plan, *keys.train) if key not in known]:
        raise FivefoldError(f"also={wrong[0]}=…: of a plan it takes {', '.join(known)} and order")
    Recipe(**keys.train)  # refuses values that no training has
    return _Also(*keys, order)


@lru_cache(maxsize=8)
def _shape(model: str, also: str) -> Shape:
    return models.with_overrides(models.load(model), _also(also).model)


def _run_tokens(shape: Shape) -> float:
    """Of the whole training run, 20 a parameter: Hoffmann and others, 2022."""
    return float(f"{20 * parameters(shape).total:.3g}")


@lru_cache(maxsize=256)
def _usual_job(model: str, also: str, gpus: int, seq: int | None) -> dict[str, Any]:
    """Sequence length, batch and tokens of the run where nobody says others."""
    shape = _shape(model, also)
    seq = min(State.seq, shape.max_seq) if seq is None else seq
    tokens = State.tokens if model == State.model else _run_tokens(shape)
    return {"seq": seq, "batch": default_batch(gpus, seq, shape), "tokens": tokens}


@lru_cache(maxsize=4096)
def _problems(state: State) -> tuple[str, ...]:
    """Neighbours on a slider have the same neighbours on it."""
    try:
        layout = state.layout()
    except IllegalLayout as error:
        return tuple(error.reasons)
    job = _request(*(getattr(state, name) for name in _OF_RULES))
    return tuple(problems(layout, state.shape(), **job))


@lru_cache(maxsize=256)
def _request(*values: Any) -> LayoutRequest:
    """What the rules check besides the layout; the many values of a slider share one."""
    state = State(**dict(zip(_OF_RULES, values, strict=True)))
    return job_of(state.options(), state.family, state.seq)


@lru_cache(maxsize=64)
def _plan(state: State) -> Plan:
    return resolve(state.options())


@lru_cache(maxsize=16)
def _estimate(state: State) -> Estimate:
    plan, (setting, notes) = state.plan(), _setting(state.machine, state.precision)
    if notes:
        plan = replace(plan, notes=(*plan.notes, *notes))
    return estimate_plan(plan, setting, plan_memory(plan, setting, ranks=state.ranks()))


@lru_cache(maxsize=16)
def _setting(name: str, precision: str) -> tuple[EstimateSetting, list[str]]:
    return estimate_setting(machine.load(name), precision, HEADROOM, KERNELS, 1.0)


@lru_cache(maxsize=16)
def _ranks(state: State) -> PlanRanks:
    return PlanRanks(state.plan(), state.setting())


def degrees_of(layout: Layout) -> dict[str, int]:
    """The degrees of a layout as keys of a state; dp is derived."""
    return {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "ep", "etp", "replicate")}


def keys_of(plan: Plan) -> dict[str, Any]:
    """All keys of a state that the planner chooses."""
    layout = plan.layout
    return {
        **degrees_of(layout),
        "zero": layout.zero,
        "schedule": plan.options.schedule,
        "chunks": layout.chunks,
        "context": layout.context,
        "recompute": str(plan.recompute),
        "microbatch_size": plan.batch.microbatch_size,
    }


def chosen_state(job: State, choice: Estimate) -> State:
    """The state that shows a plan. Its stages have as many layers as usual, for which the page has
    a control, unless only those of the plan fit."""
    state, sizes = replace(job, **keys_of(choice.plan)), choice.plan.stage_layers
    if sizes is None or choice.over > 0 or state.estimate().over <= 0:
        return state
    return replace(state, also=f"{job.also} stage_layers={','.join(map(str, sizes))}".strip())


def _value(name: str, text: str) -> Any:
    """The value of a key from its text."""
    if name in _COUNTS:
        return _count(name, text)
    known = {
        "machine": machine.presets,
        "context": lambda: CONTEXTS,
        "precision": lambda: PRECISIONS,
    }
    if name in known and text not in known[name]():
        raise UnknownName(name, text, known[name]())
    if name == "model":
        return models.preset_name(text)
    if name == "config":
        models.of_text(text)
        return text
    if name == "zero":
        return parse_zero(text)
    if name == "also":
        _also(text)
    if name == "derived" and (wrong := {*text.split()} - {*DERIVED}):
        raise UnknownName(name, min(wrong), DERIVED)
    if name in ("also", "derived"):
        return " ".join(sorted(text.split()))
    if name == "schedule":
        # A schedule family by name; a search would take seconds, and no file is read here.
        if text.lower() not in names() or text.lower() == AUTO:
            raise UnknownName("schedule", text, SCHEDULES)
        return family(text).name
    if name == "recompute":
        return str(StageRecompute.parse(text))
    return _tokens(text) if name == "tokens" else text


def _count(name: str, text: str) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else 0
    if not 1 <= number <= _COUNTS[name]:
        shown = text if len(text) <= 20 else f"{text[:20]}…"
        raise FivefoldError(f"{name}={shown}: give a whole number from 1 to {_COUNTS[name]:,}")
    return number


def _tokens(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and 0 < number < _MOST_TOKENS_OF_A_RUN):
        raise FivefoldError(f"tokens={text[:20]}: give a number above 0, such as 15.6e12")
    return number


def _text(value: float | str) -> str:
    is_integer = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_integer else str(value)


# The state that Explore opens with: that of a command line or of a plan file.

_NO_MACHINE = "laptop"  # if a plan names no machine
_USUAL = ("h100", 8)  # machine and GPUs, if only a model is given
_DERIVED = ("gather", "ep_nodes", "stage_layers")


def state_of(options: PlanOptions, precision: str | None = None) -> State:
    """The state of these options: the default job if none is given; for a model alone, the best
    layout on the GPUs of a node, or on as many as it takes; the planner's best layout if GPUs but
    no layout are given; else the plan itself."""
    default, precision = State(), precision or options.precision
    if options == PlanOptions(model=default.model):
        return replace(default, precision=precision, derived=" ".join(DERIVED))
    model_only = options == PlanOptions(model=options.model)
    if model_only:
        machine_name, gpus = _USUAL
        options = replace(options, machine=machine_name, gpus=gpus)
    options = replace(options, machine=options.machine or _NO_MACHINE)
    if options.layout == PlanOptions.layout and (options.gpus or 1) > 1:
        cluster = machine.load(options.machine or _NO_MACHINE)
        settings: dict[str, Any] = {"headroom": HEADROOM, "kernels": KERNELS}
        # The page has no control for offload.
        offload = {"offload": options.train.offload_kind}
        request = plan_request(options, cluster, offload, precision=precision, **settings)
        try:
            plan = best_plans(request, 1).plans[0].plan
        except NothingFits as refused:
            if not model_only or refused.gpus is None:
                raise
            return state_of(replace(options, gpus=refused.gpus), precision)
    else:
        plan = resolve(options)
    state = of_plan(plan, precision)
    derived = [name for name in DERIVED if getattr(options, name, None) is None]
    for _ in DERIVED:  # the batch follows from the sequence length, typed or derived
        usual = vars(state.derive(derived))
        derived = [name for name in derived if vars(state)[name] == usual[name]]
    return state.derive(derived)


def of_plan(plan: Plan, precision: str) -> State:
    """The state of a resolved plan."""
    options = plan.options
    if options.machine not in machine.presets():
        known = ", ".join(machine.presets())
        raise FivefoldError(f"--machine {options.machine}: the page knows presets only: {known}")
    if options.schedule not in SCHEDULES:
        raise FivefoldError(
            f"--schedule {options.schedule}: the page draws {', '.join(SCHEDULES)}; for others "
            "see fivefold schedule --svg"
        )
    named = options.model in models.presets()
    return State(
        model=options.model if named else State.model,
        config="" if named else models.text_of(options.model),
        machine=options.machine or _NO_MACHINE,
        gpus=plan.layout.world,
        seq=plan.batch.seq,
        batch=plan.batch.sequences,
        precision=precision,
        tokens=_run_tokens(plan.shape),
        also=_also_text(plan),
        **keys_of(plan),
    )


def _also_text(plan: Plan) -> str:
    """The keys of a plan for which the page has no control."""
    options, default = plan.options, PlanOptions(model="")
    # A resolved plan also names what it derived, which is derived again when degrees change.
    plain = resolve(replace(options, **dict.fromkeys(_DERIVED))).options
    also = {
        key: getattr(options, key)
        for key in ALSO
        if getattr(options, key) != getattr(plain if key in _DERIVED else default, key)
    }
    train, usual = options.train, default.train
    also |= {key: vars(train)[key] for key in _ALSO_TRAIN if vars(train)[key] != vars(usual)[key]}
    also |= options.set
    if plan.layout.order != Layout.order:
        also["order"] = plan.layout.order
    return " ".join(f"{key}={str(value).lower()}" for key, value in sorted(also.items()))


# The keys that a search depends on; slow.js has the same.
JOB = ("model", "config", "machine", "gpus", "seq", "batch", "precision", "also", "derived")
LAYOUT = (
    "tp", "cp", "pp", "ep", "etp", "replicate", "zero", "schedule", "chunks", "context",
    "recompute", "microbatch_size",
)  # fmt: skip
# The keys of `also` that the planner decides for each layout.
_OF_LAYOUT = ("sp", "order", "gather", "ep_nodes", "stage_layers")
_LEAN = {"optimizer states in host memory": "offload=cpu", "LoRA adapters of rank 16": "lora=16"}
_SHORTEST = 1024  # tokens of a sequence that is halved until something fits


def requested_state(params: Params) -> State:
    """The job without its layout, as a state on one axis; all of `params` must be valid. What they
    leave out is derived; sequences are not longer than learned positions."""
    state = State.parse(params)
    absent = (name for name in DERIVED if not params.get(name, "").strip())
    state = state.derive([*absent, *state.derived.split()])
    job = {name: getattr(state, name) for name in JOB}
    parts = (word for word in state.also.split() if word.partition("=")[0] not in _OF_LAYOUT)
    job["also"] = " ".join(parts)
    shape = state.shape()
    if shape.positions == "learned":
        job["seq"] = min(state.seq, shape.max_seq)
    return State(**job, tokens=state.tokens, **_ONE_AXIS)


_ONE_AXIS: dict[str, Any] = {"tp": 1, "pp": 1, "zero": 3, "schedule": "1f1b", "chunks": 1}


def request_of(job: State) -> PlanRequest:
    """The search over every layout that a state can describe."""
    return plan_request(
        job.options(),
        machine.load(job.machine),
        {"offload": job.options().train.offload_kind},
        precision=job.precision,
        headroom=HEADROOM,
        kernels=KERNELS,
    )


def job_params(job: State) -> dict[str, str]:
    """The keys of a job as texts; "" for those that it does not have."""
    texts = job.params()
    return {name: texts.get(name, "") for name in JOB}


def layout_params(state: State) -> dict[str, str]:
    """The keys of a layout as texts: what the page sets to show it."""
    texts = state.params()
    return {name: texts.get(name, "") for name in (*LAYOUT, "also")}


def nothing_fits(job: State, request: PlanRequest, refused: NothingFits) -> View:
    """The leanest layout, None if no layout is legal; and jobs near this one that have a layout."""
    plan = refused.leanest
    ways = [_way(job, changes) for changes in _ways(job, request, refused)]
    ways += _lean_ways(job)
    first = State(derived=" ".join(DERIVED))
    name = f"{first.model} on {first.gpus:,} GPUs of {first.machine}"
    return {
        "lean": None if plan is None else layout_params(replace(job, **keys_of(plan))),
        "ways": [*ways, {"label": name, "set": job_params(first)}],
    }


def _lean_ways(job: State) -> Iterator[View]:
    """The same job with less memory a GPU: what trains fewer weights, or keeps them elsewhere."""
    leaner = _LEAN if job.gpus <= machine.load(job.machine).gpus_per_node else {}
    for label, key in leaner.items():
        parts = {word.partition("=")[0]: word for word in job.also.split()}
        also = " ".join(sorted({**parts, key.partition("=")[0]: key}.values()))
        if also != job.also and has_plan(request_of(replace(job, also=also))):
            yield {"label": label, "set": {"also": also}}


def typed(job: State, changes: dict[str, str]) -> dict[str, str]:
    """Changes as the page applies them: what is changed is no longer derived."""
    text = " ".join(name for name in job.derived.split() if name not in changes)
    return changes if text == job.derived else {**changes, "derived": text}


def _way(job: State, changes: dict[str, int]) -> View:
    templates = {
        "gpus": "{:,} GPUs",
        "batch": "a batch of {:,} sequences",
        "seq": "sequences of {:,} tokens",
    }
    label = " and ".join(templates[name].format(value) for name, value in changes.items())
    return {"label": label, "set": typed(job, {name: str(changes[name]) for name in changes})}


def _ways(job: State, request: PlanRequest, refused: NothingFits) -> Iterator[dict[str, int]]:
    """Changes of the job after which something fits, the smallest first."""
    if refused.gpus is not None:
        yield {"gpus": refused.gpus}
        return
    fits = False
    if refused.leanest is None:
        batch = -(-job.batch // job.gpus) * job.gpus
        if batch != job.batch and _fits(request, batch=batch):
            fits = True
            yield {"batch": batch}
        round_number = 1 << (job.gpus.bit_length() - 1)
        if gpus := _enough(request.on(round_number)):
            fits = True
            yield {"gpus": gpus}
    seq = job.seq // 2
    while not fits and seq >= _SHORTEST:
        if fits := _fits(request, seq=seq):
            yield {"seq": seq}
        seq //= 2


def _fits(request: PlanRequest, **changes: int) -> bool:
    return has_plan(replace(request, space=replace(request.space, **changes)))


def _enough(request: PlanRequest) -> int | None:
    """The number of GPUs of this request if something fits on them, else how many it takes."""
    if has_plan(request):
        return request.space.gpus
    result = search_layouts(request.space, request.setting, 1)
    return None if result.leanest is None else gpus_needed(request, result.leanest.bytes)


def command(state: State, config_file: str) -> str:
    """The command that prints the same plan in a terminal; a pasted config is a file."""
    layout = state.layout()
    args = [
        *("fivefold", "plan", config_file if state.config else state.model),
        *("--machine", state.machine, "--layout", str(layout)),
        *("--zero", str(layout.zero), "--recompute", state.recompute),
        *("--microbatch-size", str(state.microbatch_size)),
        *("--seq", str(state.seq), "--batch", str(state.batch)),
        *("--precision", state.precision, "--tokens", f"{state.tokens:g}"),
    ]
    also = [word for word in state.also.split() if not word.startswith("order=")]
    if layout.pp > 1:
        args += ["--schedule", state.schedule]
        also = [f"chunks={layout.chunks}", *also]
    if layout.cp > 1:
        args += ["--context", layout.context]

    if also:
        args += ["--set", " ".join(also)]
    return shlex.join(args)
