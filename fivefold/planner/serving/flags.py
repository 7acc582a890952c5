"""A serving plan as the command line of another engine: vLLM, SGLang or TensorRT-LLM.

One command starts one engine; replicas that share nothing are as many commands behind a balancer.
What an engine cannot express is said, with the nearest that it can. Names of options are those of
vLLM and SGLang of August 2026 (commits a014e35 and cce0a12) and of trtllm-serve 1.x; the precision
of a checkpoint that is stored in fp8 (DeepSeek-V3) is left to the engine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fivefold.core import UnknownName
from fivefold.core.model import STEP_TOKENS, Shape
from fivefold.planner.serving.fit import MOST_SEQUENCES
from fivefold.planner.serving.plans import ServingPlan

_HOSTED = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+?)(?:/|$|,| )")
_STORED_IN_FP8 = ("deepseek_v3",)
_NODE, _HEAD = "$NODE_RANK", "$HEAD_NODE"  # which the launcher of each node sets


@dataclass(frozen=True)
class EngineCommand:
    """The words of a command, files that it reads, and what it cannot express."""

    args: tuple[str, ...]
    replicas: int
    files: dict[str, str] = field(default_factory=dict[str, str])
    losses: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """One line for a shell; variables stay variables."""
        return " ".join(arg if arg.startswith("$") else shlex.quote(arg) for arg in self.args)

    @property
    def script(self) -> str:
        """The command with what surrounds it."""
        lines = [f"# {loss}" for loss in self.losses]
        if self.replicas > 1:
            lines.append(
                f"# {self.replicas} of these, each on GPUs of its own, and a balancer in front"
            )
        for name, text in self.files.items():
            lines += [f"cat > {name} <<'END'", text.rstrip("\n"), "END"]
        return "\n".join([*lines, self.line]) + "\n"


def hosted_name(shape: Shape) -> str:
    """The repository of a model on Hugging Face, if its source is there."""
    match = _HOSTED.search(shape.source)
    return shape.name if match is None else match[1]


def emit_flags(name: str, plan: ServingPlan) -> EngineCommand:
    """The plan for one engine."""
    if name not in EMITTERS:
        raise UnknownName("emit target", name, list(EMITTERS))
    return EMITTERS[name](plan)


class _Engine:
    """What all engines ask of a plan."""

    def __init__(self, plan: ServingPlan) -> None:
        layout, request = plan.layout, plan.fit.request
        self.plan, self.layout, self.request = plan, layout, request
        self.model = hosted_name(request.shape)
        self.attention_dp = max(layout.tp, layout.ep) // layout.tp  # replicas that share experts
        self.ranks = self.attention_dp * layout.tp * layout.pp
        self.nodes = -(-self.ranks // request.machine.gpus_per_node)
        self.longest = request.prompt + request.output
        self.sequences = max(1, min(plan.fit.replica_room, MOST_SEQUENCES))

    def options(self, **settings: object) -> Iterator[str]:
        """`--name value`; True is a switch, None is left out."""
        for name, value in settings.items():
            if value is True:
                yield f"--{name}"
            elif value is not None and value is not False:
                yield from (f"--{name}", f"{value:.2f}" if isinstance(value, float) else str(value))

    @property
    def fp8_weights(self) -> bool:
        stored = self.request.shape.family in _STORED_IN_FP8
        return self.request.precision == "fp8" and not stored

    @property
    def fp8_cache(self) -> bool:
        return self.request.cache_itemsize == 1

    def losses(self) -> Iterator[str]:
        layout, moe = self.layout, self.request.shape.moe
        if moe is not None and layout.tp > 1 and layout.ep * layout.etp == 1:
            yield f"every GPU has all experts in {layout}; here they are split over tp={layout.tp}"
        if self.request.precision not in ("bf16", "fp8", "fp16"):
            yield f"{self.request.precision} needs a checkpoint that is stored so: name that"


def _dashed(**settings: object) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in settings.items()}


def vllm_command(plan: ServingPlan) -> EngineCommand:
    """`vllm serve`: ep is tp times dp there."""
    engine, layout = _Engine(plan), plan.layout
    losses = [*engine.losses()]
    spread = engine.nodes > 1 and engine.attention_dp > 1
    local = max(1, engine.request.machine.gpus_per_node // (layout.tp * layout.pp))
    args = engine.options(
        **_dashed(
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp if layout.pp > 1 else None,
            data_parallel_size=engine.attention_dp if engine.attention_dp > 1 else None,
            data_parallel_size_local=local if spread else None,
            data_parallel_address=_HEAD if spread else None,
            enable_expert_parallel=layout.ep > 1,
            nnodes=engine.nodes if engine.nodes > 1 and not spread else None,
            node_rank=_NODE if engine.nodes > 1 and not spread else None,
            master_addr=_HEAD if engine.nodes > 1 and not spread else None,
            quantization="fp8" if engine.fp8_weights else None,
            kv_cache_dtype="fp8" if engine.fp8_cache else None,
            max_model_len=engine.longest,
            max_num_seqs=engine.sequences,
            max_num_batched_tokens=STEP_TOKENS,
            gpu_memory_utilization=1 - engine.request.headroom,
        )
    )
    if spread:
        losses.append("on every node but the first also --headless and --data-parallel-start-rank")
    short = engine.request.shape.outgrown_at
    if short is not None and engine.longest > short:
        losses.append(
            f"vLLM takes longrope's long factors for all texts if max-model-len exceeds {short:,}; "
            "transformers, and generation here, only for those that are longer"
        )
    return EngineCommand(("vllm", "serve", engine.model, *args), plan.replicas, {}, tuple(losses))


def sglang_command(plan: ServingPlan) -> EngineCommand:
    """`sglang.launch_server`: its tp counts all ranks of a stage, dp divides them for attention."""
    engine, layout = _Engine(plan), plan.layout
    fraction = (plan.fit.weights + plan.fit.cache) / engine.request.machine.memory
    args = engine.options(
        **_dashed(
            tp_size=layout.tp * engine.attention_dp,
            pp_size=layout.pp if layout.pp > 1 else None,
            dp_size=engine.attention_dp if engine.attention_dp > 1 else None,
            enable_dp_attention=engine.attention_dp > 1,
            ep_size=layout.ep if layout.ep > 1 else None,
            nnodes=engine.nodes if engine.nodes > 1 else None,
            node_rank=_NODE if engine.nodes > 1 else None,
            dist_init_addr=f"{_HEAD}:5000" if engine.nodes > 1 else None,
            quantization="fp8" if engine.fp8_weights else None,
            kv_cache_dtype="fp8_e4m3" if engine.fp8_cache else None,
            context_length=engine.longest,
            max_running_requests=engine.sequences * engine.attention_dp,
            chunked_prefill_size=STEP_TOKENS,
            mem_fraction_static=min(0.98, fraction),
        )
    )
    start = ("python", "-m", "sglang.launch_server", "--model-path", engine.model)
    return EngineCommand((*start, *args), plan.replicas, {}, tuple(engine.losses()))


def trtllm_command(plan: ServingPlan) -> EngineCommand:
    """`trtllm-serve`: attention is split over all ranks of a stage or over none."""
    engine, layout = _Engine(plan), plan.layout
    losses, extra = [*engine.losses()], list[str]()
    if engine.attention_dp > 1:
        extra.append("enable_attention_dp: true")
        if layout.tp > 1:
            losses.append(
                f"attention over tp={layout.tp} inside ep={layout.ep} is not there: every rank has "
                "sequences of its own instead (enable_attention_dp)"
            )
    if engine.fp8_cache:
        extra += ["kv_cache_config:", "  dtype: fp8"]
    if engine.fp8_weights:
        losses.append("fp8 needs a checkpoint that ModelOpt quantized: name it as the model")
    files = {"trtllm.yaml": "\n".join(extra) + "\n"} if extra else {}
    memory = engine.request.machine.memory
    args = engine.options(
        tp_size=layout.tp * engine.attention_dp,
        pp_size=layout.pp if layout.pp > 1 else None,
        ep_size=layout.ep if layout.ep > 1 else None,
        gpus_per_node=engine.request.machine.gpus_per_node if engine.nodes > 1 else None,
        max_batch_size=engine.sequences,
        max_num_tokens=STEP_TOKENS,
        max_seq_len=engine.longest,
        kv_cache_free_gpu_memory_fraction=min(0.95, plan.fit.cache / (memory - plan.fit.weights)),
        enable_chunked_prefill=True,
        extra_llm_api_options="trtllm.yaml" if extra else None,
    )
    started = ("trtllm-serve", engine.model, *args)
    return EngineCommand(started, plan.replicas, files, tuple(losses))


EMITTERS: dict[str, Callable[[ServingPlan], EngineCommand]] = {
    "vllm": vllm_command,
    "sglang": sglang_command,
    "trtllm": trtllm_command,
}
