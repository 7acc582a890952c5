"""What `--json` prints: one example of each verb, and every key of its answer.

Lines: key, type, meaning. Types are those of JSON; `?` may be null. A test runs the examples and
compares; `python -m tests.reference` makes docs/reference-json.md of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ANSWERS = """
plan MODEL --layout ...
$ plan tiny --layout "dp=2 tp=2" --machine h100 --json
model string Name of the model.
parameters object Parameters: `total`, `active` for a token, and `parts` by kind of layer.
training_flops_per_token number Model FLOPs of forward and backward; recomputation is not counted.
layout string Degrees, as --layout reads them.
world integer Number of ranks.
readings array The layout as a product of degrees, in one or two readings.
zero integer ZeRO stage.
gather string How often ZeRO-3 gathers weights: step or microbatch.
axes object Of each axis: degree, first group and, with a machine, the tier that it crosses.
schedule string Pipeline schedule.
chunks integer Stages on each pipeline rank.
stages array Layers of each stage.
batch object Sequences and tokens of a step, and the product that makes them.
communicators object Communicators of a rank, and the bytes that NCCL holds for them.
traffic array Collectives of rank 0 in a step: axis, kind, bytes, group, count.
notes array Sentences on what was derived or changed.
stack string Software that is priced; only with a machine.
candidates integer Layouts that were estimated; only with a machine.
seconds number Time of the search.
layouts array One estimate; its keys are below.

plan MODEL --gpus N
$ plan tiny --machine h100 --gpus 2 --batch 4 --tokens 1e9 --price 2 --json
model string Name of the model.
machine string Name of the machine.
precision string Precision of the estimate.
stack string Software that is priced.
gpus integer GPUs of the job.
seq integer Tokens in a sequence.
batch integer Sequences in a step.
candidates integer Layouts that were estimated.
passed_over integer Layouts that were skipped, since they cannot win.
seconds number Time of the search.
equal_bar number Share of the fastest step within which estimates are equal.
fastest object The fastest layout, with the keys of `layouts`.
layouts array Estimates, the first choice first; their keys are below.
front array Layouts with less memory, each the fastest of its size.
notes array Sentences on what was derived or changed.
run object Tokens, days, GPU-hours and price of the full run; only with --tokens.

plan: an estimate in layouts
$ plan tiny --machine h100 --gpus 2 --batch 4 --json | layouts
layout string Degrees.
zero integer ZeRO stage.
sp boolean Whether sequence parallelism is on.
context string Context kind.
schedule string Pipeline schedule.
chunks integer Stages on each pipeline rank.
stages array Layers of each stage.
microbatch_size integer Sequences in a microbatch.
microbatches integer Microbatches in a step.
recompute string What is recomputed.
compile boolean Whether kernels are compiled.
offload string Where optimizer states are.
memory_gib object Peak memory of the fullest rank by category, and their total.
host_gib number Host memory of a node.
disk_gib number Bytes on disk of a node.
fits string Whether it fits: fits, tight or no.
step_s number Estimated seconds of a step.
step_s_low number Lower end of its usual error.
step_s_high number Upper end.
error_bar object Usual relative errors of time and memory.
time_s object Seconds by part of the step.
tokens_per_s_per_gpu number Speed.
mfu number Model FLOPs over the peak.
hfu number The same with recomputed FLOPs.
bubble number Idle share of the pipeline.
because array Sentences on why this layout; only of the first.
equal boolean Whether it is as fast as the fastest, as far as estimates can tell.

plan MODEL --serve
$ plan llama-3.1-8b --serve --machine h200 --gpus 1 --json
model string Name of the model.
machine string Name of the machine.
gpus integer Number of GPUs.
precision string Format of weights.
kv string Format of the cache.
prompt integer Tokens of a prompt.
output integer Tokens of an answer.
rate number? Requests a second.
concurrency integer? Requests at a time.
kv_bytes_per_token integer Bytes of the cache for a token, in all layers.
layout string Of the choice, as all down to time_s: fastest answers under a rate, else most tokens.
replicas integer Engines that share nothing.
ttft_s number Seconds to the first token; under a load the median.
ttft_p99_s number? Its 99th percentile; under a load.
tpot_s number Seconds between two tokens of an answer.
tpot_p99_s number? Its 99th percentile; under a load.
tokens_per_s number Output tokens per second of all GPUs.
sequences number Sequences at a time.
max_sequences integer Sequences whose cache fits.
weights_gib number Weights on the fullest GPU.
cache_gib number Room for the cache there.
kv_bytes_per_token_per_gpu integer Bytes of the cache for a token there.
usd_per_million_tokens number? Price of a million output tokens.
time_s object Seconds of a decode step by part.
latency object The layout with the fastest answers, with the same keys.
throughput object The layout with the most tokens, with the same keys.
layouts array All layouts that fit, the most tokens first, with the same keys.
candidates integer Layouts that are legal.
because array Sentences on why these layouts.
rule_of_thumb string The rule of thumb with its numbers.
flags object The choice as commands of vllm, sglang and trtllm.
notes array Sentences on what the estimate leaves out.

schedule NAME
$ schedule 1f1b --stages 2 --microbatches 2 --json
name string Schedule.
stages integer Pipeline ranks.
microbatches integer Microbatches in a step.
chunks integer Stages on each rank.
placement string How stages are placed: linear, loop, v or mirrored.
asynchronous boolean Whether gradients are of older weights.
makespan number Time from zero to the last end.
span number Longest time of a rank from its first start to its last end.
ideal number Time without any wait.
bubble_makespan number Idle share of the makespan.
bubble_span number Idle share of the span.
bubble_ratio number Idle time over the ideal time.
peak_activations array Of each rank, in microbatches of a full stage.
order array Actions of each rank, in torch's text form.
because array Sentences on why ranks idle.

rehearse MODEL
$ rehearse tiny --layout "dp=2" --rank 0 --json
model string Name of the model.
layout string Degrees.
world integer Number of ranks.
routing string How tokens go to experts in the rehearsal.
ranks array Each rehearsed rank: coord, peak memory, collectives.
worst_rank integer The rank with the highest peak memory.
memory_gib object Peak memory of that rank by category.
planned_gib object? The planner's estimate of it; with --machine.
traffic object Predicted and observed collectives of a rank, and whether they match.
matched boolean Whether every rank calls what was predicted.
mismatches array Pairs of ranks that would hang, with their collectives.
order object Whether a step ends if every call blocks its rank.
without_replay object Ranks that were run once more without replayed layers, and whether they agree.
time object? Measured kernels and the forecast of a step; with --device cuda.
passed boolean Whether all of it agrees.
seconds number Time of the rehearsal.

verify MODEL
$ verify tiny --layout "dp=2" --steps 1 --json
model string Name of the model.
layout string Degrees.
world integer Number of ranks.
zero integer ZeRO stage.
loss_err number Largest relative error of a loss.
grad_err number Largest error of a gradient.
norm_err number Largest error of the gradient norm.
clip_err number Largest error of the clipping factor.
weight_err number Largest error of a weight after the steps.
tolerance object What each error may be.
passed boolean Whether errors and collectives are as they should be.
diverges_at string? First tensor that differs, in forward order.
disorder string? Ranks that gather flat units in different orders.
traffic object Predicted and observed collectives of a rank, and whether all ranks match.
seconds number Time of the proof.
notes array Sentences on what was derived or changed.

verify MODEL --generate
$ verify tiny --layout "dp=2" --generate --json
model string Name of the model.
layout string Degrees.
world integer Number of ranks.
dtype string Type of the numbers.
passed boolean Whether every way to generate agrees with the plain forward.
logit_err number Largest error of a logit.
logprob_err number Largest error of a log-probability.
tokens_equal boolean Whether every way writes the same tokens.
tolerance number? What an error may be; null if rounding may choose other experts.
batch_invariant boolean Whether --batch-invariant was given.
batch_diff number Largest difference between batches.
batch_bound number? What it may be.
tokens_bound boolean Whether tokens have to be equal.
errors object Largest error of each way to generate.
tokens integer Tokens written.
preempted integer Preemptions.
reused integer Tokens from shared blocks.
complete boolean Whether every request was finished.
batch_cost number? Times the time without batch invariance.
trained_err number Largest error against the training forward.
trained_layout string Layout of that forward.
seconds number Time of the proof.
notes array Sentences on what was derived or changed.

launch TARGET PLAN.toml
$ launch torchrun plan.toml --json
target string slurm, torchrun or kubernetes.
plan string Plan file, as given.
model string Name of the model.
layout string Degrees.
world integer Number of ranks.
nodes integer Nodes of the job.
gpus_per_node integer Ranks on each node.
device string Device of a rank: cuda, cpu or auto.
name string Name of the job.
run string Run folder.
start string Command that starts it.
file string? File that was written; null if there is none.
script string The script itself.

tokens INPUT -o FOLDER
$ tokens text.txt -o corpus --json
folder string Folder that was written.
tokens integer Tokens in it.
documents integer Documents.
shards integer Files of tokens.
bytes integer Bytes of these files.
dtype string Type of a token.
vocab integer Size of the vocabulary.
end integer? Token after each document.
tokenizer string Tokenizer.
fingerprint string Hash of what the tokenizer does.
masked boolean Whether tokens have a loss mask.
paired boolean Whether documents are preference pairs.
empty integer Empty documents.
left_out object Documents left out, by reason.
files integer Input files.
skipped object Rows that could not be read, by reason.
skipped_files object Files that could not be read, by reason.
resumed integer Shards that were there already.

train MODEL
$ train tiny --layout "dp=2" --batch 4 --seq 32 --steps 2 --out run --json
model string Name of the model.
layout string Degrees.
world integer Number of ranks.
zero integer ZeRO stage.
schedule string Pipeline schedule.
dtype string Type of weights and activations.
corpus string What was read.
tokens_per_step integer Tokens in a step.
steps array Of each step: loss, norm, learning rate, seconds and what else metrics.jsonl has.
notes array Sentences on what was derived or changed.
memory object Planned and measured bytes of the fullest rank.
traffic object Planned and measured collectives, and whether they match.
check object? Difference from one process; with --check.
stopped boolean Whether a signal stopped the run.
run string Run folder.
summary object What summary.json has: steps, tokens, goodput, speed, MFU, memory.
seconds number Time of the run.

export RUN DIR
$ export run model --json
folder string Folder that was written.
step integer Step of the checkpoint.
model string Name of the model.
family string Family of weight names.
parameters integer Parameters.
dtype string Type of the weights.
adapter boolean Whether only adapters were written.
files array Files of weights.
beside array Other files.

import DIR
$ import model -o imported --json
run string Run folder.
checkpoint string Folder of step 0.
model string Name of the model.
family string Family of weight names.
parameters integer Parameters.
tensors integer Tensors that were read.
dtype string Type of the weights.
lr number Learning rate of the recipe.
tokenizer string? File of the tokenizer.
next array Commands that can follow.

generate RUN: one line for each prompt, without schema_version
$ generate run --prompt hello --max-tokens 4 --json
id string Id of the prompt.
prompt string The prompt.
text string What was written.
tokens array Its tokens.
logprobs array Their log-probabilities.
reason string Why it ended: length, end or stop.
ttft_s number Seconds to the first token.
tpot_s number Seconds for each further token.

observe MODEL --panel NAME: one key, explore, learn or run
$ observe tiny --machine h100 --gpus 2 --batch 4 --panel memory --json
explore object Data of the pictures of Explore; the page reads the same.

observe RUN --panel NAME
$ observe run --panel loss --json
run object Data of the pictures of a run; the page reads the same.

score RUNS.jsonl
$ score runs.jsonl --json
leave_one_out object Errors on sources that no constant was fitted on.
fitted object Numbers that were fitted, and to what.
rows integer Rows that were read.
time object Errors of step times.
memory object Errors of peak memory.
oom object Whether jobs that ran out of memory were foreseen.
rank object Whether faster layouts are ranked before slower ones.
intervals object Rows that leave something open.
from_tflops object Rows whose time comes from a published rate.
held_out object Errors of sources that were held out.
groups object Errors by family.
sets array Errors by set of rows.
assumptions object What rows leave out, and how often.
specified object Rows that leave nothing out.
skipped array Rows that were not scored, with reasons.
internal_errors array Impossible estimates; the exit code is 70 if there are any.
unmeasured array Rows without a measurement.
repeated integer Rows that were there twice.

calibrate
$ calibrate --seconds 3 --device cpu -o machine.toml --json
written string Machine file.
seconds number Time of the measurement.
base string Preset for all other constants.
device string Device that was measured.
dtype string Type of the numbers.
ranks integer Ranks of the rings.
constants object Of each constant: planned, measured, rate, errors of the fit.
launch_s number Seconds of a small kernel.
samples object Every measurement.
machine object The machine file as a table.
notes array Sentences on what was guessed.

eval RUN --tasks NAMES
model string The folder.
layout string Degrees.
dtype string Type of the numbers.
limit integer? Maximum number of samples of a task.
tasks object Metrics of each task.
truncated_contexts integer Contexts that were cut to the model's maximum.
seconds number Time of the evaluation.
"""
BEFORE = {  # commands that an example needs
    "export run model --json": ["train"],
    "import model -o imported --json": ["train", "export"],
    "generate run --prompt hello --max-tokens 4 --json": ["train"],
    "observe run --panel loss --json": ["train"],
}
_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class JsonKey(NamedTuple):
    """One key of an answer."""

    name: str
    type: str
    meaning: str


class JsonAnswer(NamedTuple):
    """What a verb prints with `--json`; without an example where it needs another package."""

    title: str
    example: str | None
    keys: list[JsonKey]


def answers() -> list[JsonAnswer]:
    """All answers."""
    found: list[JsonAnswer] = []
    for block in ANSWERS.strip().split("\n\n"):
        title, *lines = block.splitlines()
        example = lines.pop(0).removeprefix("$ ") if lines[0].startswith("$ ") else None
        keys = [JsonKey(*line.split(" ", 2)) for line in lines]
        found.append(JsonAnswer(title, example, keys))
    return found


def problems(answer: JsonAnswer, table: dict[str, Any]) -> list[str]:
    """What is different in an answer: keys that are missing or unknown, and other types."""
    documented = {key.name: key.type for key in answer.keys}
    given = {key: value for key, value in table.items() if key != "schema_version"}
    found = [f"{key} is not documented" for key in given.keys() - documented.keys()]
    found += [f"{key} is not there" for key in documented.keys() - given.keys()]
    for key, value in given.items():
        kind = documented.get(key, "")
        if value is None:
            found += [] if kind.endswith("?") else [f"{key} is null"]
        elif _TYPES[type(value)] != kind.rstrip("?") and not (
            isinstance(value, int) and kind.startswith("number")
        ):
            found.append(f"{key} is {_TYPES[type(value)]}, not {kind}")
    return sorted(found)
