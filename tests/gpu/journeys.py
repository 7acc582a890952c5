"""The journeys that `tests.gpu.accept` makes.

    python -m tests.gpu.journeys FAMILY FOLDER

saves a random model of a family as Hugging Face folders have it, at the family's own widths with
few layers: journeys call it in a process of their own, as a user would download one.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.gpu.journey import Failure, Journey, Trip, check

STEPS = 12
WORDS = [f"w{number}" for number in range(500)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} : {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant : {% endif %}"
)


# Models: on a CPU, where journeys only try themselves, the smallest.


def dense(trip: Trip, layers: int = 4) -> tuple[str, ...]:
    """Widths of Qwen3-0.6B, and a sequence that its layouts divide."""
    if trip.on_gpu:
        return ("qwen3-0.6b", "--seq", "1024", "--set", f"layers={layers}")
    return ("tiny", "--seq", "64")


def experts(trip: Trip) -> tuple[str, ...]:
    """Widths of Qwen3-30B-A3B, with an eighth of its experts."""
    if trip.on_gpu:
        keys = "layers=4 vocab=32768 moe.experts=16 moe.top_k=2"
        return ("qwen3-30b-a3b", "--seq", "1024", "--set", keys)
    return ("tiny-moe", "--seq", "64")


# Training


def first_training(trip: Trip) -> None:
    """Text, a run, its page, another layout, a completion, and a folder that transformers loads."""
    model = dense(trip, layers=8)
    half = (*model, "--batch", "4", "--steps", str(STEPS), "--until", "6")
    trip.train(*half, out="run")
    trip.fivefold("observe", "run", "--text")
    panels = json.loads(trip.fivefold("observe", "run", "--json"))
    check(bool(panels), "observe --json printed nothing")
    html = [sys.executable, "-m", "fivefold", "observe", "run", "--html", "page.html"]
    page = trip.start(html, "page")  # minutes of a small machine: training need not wait for it
    resumed = ("run/plan.toml", "--layout", "dp=2 tp=2", "--batch", "4", "--resume")
    with trip.gpu.joined(4):
        records = trip.train(*resumed, out="run")
    trip.finish(page, "page")
    check("</html>" in (trip.folder / "page.html").read_text("utf-8"), "the page is cut")
    check([each["step"] for each in records] == list(range(1, STEPS + 1)), "steps are missing")
    losses = [each["loss"] for each in records]
    check(losses[-1] < losses[0], f"nothing was learned: {losses}")
    words = ("--prompt", "import ", "--max-tokens", "12", "--json", "--device", trip.device)
    answer = json.loads(trip.fivefold("generate", "run", *words))
    check(len(answer["tokens"]) == 12, f"generate wrote {answer}")
    trip.fivefold("export", "run", "model")
    (trip.folder / "answer.json").write_text(json.dumps(answer), "utf-8")
    apart = float(trip.python("-c", COMPARE).split()[-1])
    # bf16 on the GPU beside float32: rounding, while a wrong weight is nats away.
    check(apart < 0.25, f"log-probabilities of transformers are {apart} nats apart")
    trip.notes |= {"losses": f"{losses[0]:.2f} → {losses[-1]:.2f}", "transformers": f"{apart:.4f}"}


COMPARE = """
import json, torch, transformers
transformers.logging.set_verbosity_error()
answer = json.load(open("answer.json"))
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    "model", dtype=torch.float32, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
tokens = [*answer["prompt"].encode(), *answer["tokens"]]
with torch.no_grad():
    logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
first = len(answer["prompt"].encode())
said = [logits[at - 1, tokens[at]].item() for at in range(first, len(tokens))]
print(max(abs(one - other) for one, other in zip(said, answer["logprobs"], strict=True)))
"""


def fine_tuning(trip: Trip) -> None:
    """A folder of Hugging Face's, LoRA on chats, eval, the merged model, an OpenAI client."""
    trip.python("-m", "tests.gpu.journeys", "chat", "hub")
    trip.fivefold("import", "hub", "-o", "run")
    draw = random.Random(0)
    rows = []
    for _ in range(400):  # an answer is the question's first word, three times
        question = draw.choices(WORDS, k=draw.randint(2, 12))
        messages = [("user", " ".join(question)), ("assistant", " ".join([question[0]] * 3))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in messages]})
    lines = [json.dumps(row) + "\n" for row in rows]
    (trip.folder / "chat.jsonl").write_text("".join(lines[:360]), "utf-8")
    (trip.folder / "held.jsonl").write_text("".join(lines[360:]), "utf-8")
    for name in ("chat", "held"):
        trip.fivefold("tokens", f"{name}.jsonl", "--chat", "--tokenizer", "hub", "-o", name)
    keys = "lora=8 data=chat steps=24 lr=3e-3 eval_every=12 eval_data=held=held"
    words = (
        "run/plan.toml",
        "--resume",
        "--seq",
        "128",
        "--batch",
        "8",
        "--set",
        "packed=true",
        *keys.split(),
    )
    records = trip.train(*words, out="run")
    losses = [each["evals"]["held"]["loss"] for each in records if each["evals"]]
    check(len(losses) == 2 and losses[-1] < losses[0], f"evaluation: {losses}")
    if trip.on_gpu:  # lm-eval is no part of the tests' environment
        _evaluate(trip)
    trip.fivefold("export", "run", "merged")
    trip.fivefold("export", "run", "adapter", "--adapter")
    with trip.served("merged", "--cache-gb", "1") as address:
        said = trip.python("-c", CLIENT, address).strip()
    check(int(said.split()[0]) > 0, f"the client of OpenAI got {said}")
    trip.notes |= {"held-out losses": " → ".join(f"{each:.2f}" for each in losses), "client": said}


CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="any")
asked = {"model": "merged", "messages": [{"role": "user", "content": "w7 w1 w2"}]}
# From now on the prompt is in the cache, and both answers begin with the same kernels.
client.chat.completions.create(**asked, max_tokens=1, temperature=0)
whole = client.chat.completions.create(**asked, max_tokens=6, temperature=0)
parts = client.chat.completions.create(**asked, max_tokens=6, temperature=0, stream=True)
text = "".join(each.choices[0].delta.content or "" for each in parts if each.choices)
assert text == (whole.choices[0].message.content or ""), (text, whole)
print(whole.usage.completion_tokens, repr(text))
"""
TASK = """task: first_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: multiple_choice
doc_to_text: '{{{{question}}}}'
doc_to_target: '{{{{answer}}}}'
doc_to_choice: '{{{{choices}}}}'
metric_list:
  - metric: acc
"""


def _evaluate(trip: Trip) -> None:
    """A task of lm-eval: which word begins the answer."""
    draw, rows = random.Random(1), []
    for _ in range(20):
        first, other = draw.sample(WORDS, k=2)
        question = f"<|im_start|>user : {first} w1 <|im_end|> <|im_start|>assistant :"
        rows.append({"question": question, "choices": [f" {first}", f" {other}"], "answer": 0})
    path = trip.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (trip.folder / "tasks").mkdir()
    (trip.folder / "tasks" / "first_word.yaml").write_text(TASK.format(rows=path), "utf-8")
    words = ("--tasks", "first_word", "--include-path", "tasks", "--json", "--device", trip.device)
    name = "eval"
    process = trip.start([sys.executable, "-m", "fivefold", "eval", "run", *words], name)
    table = json.loads(trip.ended(process, name)[0])  # lm-eval prints bars on stderr
    accuracy = table["tasks"]["first_word"]["metrics"]["acc"]["value"]
    check(0 <= accuracy <= 1, f"eval: {table}")
    trip.notes["accuracy"] = accuracy


def layout_of(
    trip: Trip, model: Callable[[Trip], tuple[str, ...]], layout: str, words: tuple[str, ...] = ()
) -> None:
    """Twelve steps with the defaults of a user, beside those of one rank."""
    # At the usual rate losses of random weights jump, and tokens change their experts.
    words = (*model(trip), "--layout", layout, "--steps", str(STEPS), "--set", "lr=1e-4", *words)
    ranks = math.prod(int(each[3:]) for each in layout.split() if not each.startswith("ep"))
    with trip.gpu.joined(ranks):
        out = trip.fivefold(
            "train", *words, "--check", "--json", "--device", trip.device, "--out", "run"
        )
    answer = json.loads(out)
    trip.records("run")
    judged = answer["check"]
    check(judged["passed"], f"it differs from one rank: {judged}")
    check(answer["traffic"]["match"], f"traffic is not as planned: {answer['traffic']}")
    difference = f"{judged['difference']:.1e} of {judged['allowed']:.1e} nats"
    trip.notes |= {"layout": layout, "difference": difference}
    if gradients := judged["gradients"]:
        trip.notes["gradients"] = f"{gradients['difference']:.1e} of {gradients['allowed']:.1e}"


def fp8(trip: Trip) -> None:
    """Linears in fp8, beside bf16."""
    if trip.on_gpu:
        model = ("llama-3.2-1b", "--seq", "1024", "--batch", "4", "--set", "layers=4 lr=3e-4")
    else:
        model = ("tiny", "--seq", "64")
    eight = ("--precision", "fp8", *(() if trip.on_gpu else ("--set", "fp8_matmul=emulated")))
    late = {
        name: trip.timed_train(*model, *words, steps=STEPS, out=name)
        for name, words in (("fp8", eight), ("plain", ()))
    }
    losses = {name: trip.records(name)[-1]["loss"] for name in late}
    apart = abs(losses["fp8"] / losses["plain"] - 1)
    check(apart < 0.05, f"the losses of fp8 and bf16 are far apart: {losses}")
    trip.notes["losses"] = f"fp8 {losses['fp8']:.3f}, bf16 {losses['plain']:.3f}"
    trip.notes["records beside the host's clock"] = f"{max(late.values()):.2%} apart"


def long_rows(trip: Trip) -> None:
    """Rows of 32,768 tokens over two context ranks."""
    seq, keys = ("32768", "layers=8") if trip.on_gpu else ("256", "layers=2")
    words = (dense(trip)[0], "--seq", seq, "--microbatches", "1", "--set", keys)
    with trip.gpu.joined(2):
        apart = trip.timed_train(*words, "--layout", "cp=2", steps=4, out="run")
    trip.notes["GiB"] = round(trip.records("run")[-1]["memory_gib"], 1)
    trip.notes["records beside the host's clock"] = f"{apart:.2%} apart"


def kill(trip: Trip) -> None:
    """A rank is killed; the run says so, leaves no process, and resumes without a lost sample."""
    words = (*dense(trip), "--batch", "4", "--steps", "16", "--layout", "dp=2")
    words += ("--deterministic", "--set", "save_every=3 lr=3e-4")
    trip.train(*words, out="calm")
    name = "killed"
    command = [sys.executable, "-m", "fivefold", "train", *words, "--device", trip.device]
    process = trip.start([*command, "--out", "run"], name)
    metrics, until = trip.folder / "run" / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or len(metrics.read_text("utf-8").splitlines()) < 7:
        check(process.poll() is None, f"it ended by itself: {trip.tail(name)}")
        check(time.monotonic() < until, f"no 7 steps: {trip.tail(name)}")
        time.sleep(0.05)
    ranks = _children(process.pid)
    os.kill(ranks[-1], signal.SIGKILL)
    check(process.wait(120) == 1, f"exit code {process.returncode}: {trip.tail(name)}")
    check("was killed by SIGKILL" in trip.tail(name), f"nobody was named: {trip.tail(name)}")
    left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    check(not left, f"ranks {left} are left")
    records = trip.train(*words, "--resume", out="run")
    samples = [each["first_sample"] for each in records]
    check(samples == list(range(0, 64, 4)), f"samples were lost or read twice: {samples}")
    calm = [each["loss"] for each in trip.records("calm")]
    check([each["loss"] for each in records] == calm, "losses are not those of a calm run")
    trip.notes["steps"] = "16 losses equal to the bit"


def _children(pid: int) -> list[int]:
    """Ranks that a process has forked."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [
        int(each)
        for each in text.split()
        if "fivefold" in Path(f"/proc/{each}/cmdline").read_text()
    ]


def planned(trip: Trip) -> None:
    """Two jobs: the plan, the rehearsal with real kernels and the measured step side by side.

    A plan knows neither this GPU's clock nor its host: nine in ten jobs are within its range. A
    rehearsal on this very GPU knows both, and is held to the plan's median error.
    """
    jobs = {
        "llama-3.2-1b": ("--seq", "8192", "--microbatch-size", "2"),
        "qwen3-0.6b": ("--seq", "4096", "--microbatch-size", "4"),
    }
    if not trip.on_gpu:
        jobs = {"tiny": ("--seq", "64", "--microbatch-size", "2")}
    # Commands of one user: what the rehearsal has compiled, the training finds.
    for name in ("TORCHINDUCTOR", "TRITON"):
        trip.environment[f"{name}_CACHE_DIR"] = str(trip.folder / name)
    for model, words in jobs.items():
        job = (model, *words, "--microbatches", "1", "--layout", "dp=1", "--machine", "h200")
        plan = json.loads(trip.fivefold("plan", *job, "--json"))["layouts"][0]
        rehearsal = json.loads(trip.fivefold("rehearse", *job, "--device", trip.device, "--json"))
        check(rehearsal["passed"], f"the rehearsal of {model} failed: {rehearsal}")
        records = trip.train(*job, "--steps", "30", out=model)
        if not trip.on_gpu:
            continue
        measured, rehearsed = median(each["seconds"] for each in records[8:]), rehearsal["time"]
        times = {"planned": plan["step_s"], "measured": measured}
        times["rehearsed"] = rehearsed["forecast_s"]
        memory = {"planned": plan["memory_gib"]["total"], "measured": records[-1]["memory_gib"]}
        memory["live tensors rehearsed"] = rehearsal["memory_gib"]["total"]
        trip.notes[model] = ", ".join(
            [f"{name} {1e3 * value:.0f} ms" for name, value in times.items()]
            + [f"{name} {value:.1f} GiB" for name, value in memory.items()]
        )
        low, high, bars = plan["step_s_low"], plan["step_s_high"], plan["error_bar"]
        check(low <= measured <= high, f"{model} is not within its plan: {trip.notes[model]}")
        share = times["rehearsed"] / measured - 1
        check(abs(share) <= bars["time"], f"{model} is {share:+.1%} off: {trip.notes[model]}")
        share = memory["measured"] / memory["planned"] - 1
        check(
            abs(share) <= bars["memory"],
            f"memory of {model} is {share:+.1%} off: {trip.notes[model]}",
        )


# Longer, and only by name.


FRESH = {
    "qwen3-0.6b": "layers=4",
    "llama-3.2-1b": "layers=4",
    "qwen3-30b-a3b": "layers=4 vocab=32768 moe.experts=8 moe.top_k=2",
    "deepseek-v2-lite": "layers=4 moe.experts=8 moe.top_k=2",
}


def fresh(trip: Trip, model: str) -> None:
    """First trainings of a model in five layouts: their times beside the host's."""
    layouts = ("dp=1", "dp=2", "pp=4", "dp=2 tp=2", "tp=2 pp=2")
    job = (model, "--set", FRESH[model])
    if not trip.on_gpu:
        job, layouts = ("tiny", "--set", "layers=4"), layouts[:2]

    def apart_of(layout: str) -> float:
        run = layout.replace(" ", "-").replace("=", "")
        ranks = math.prod(int(each[3:]) for each in layout.split())
        with trip.gpu.joined(ranks):
            apart = trip.timed_train(*job, "--seq", "512", "--layout", layout, steps=10, out=run)
        shutil.rmtree(trip.folder / run / "checkpoints")  # those of all would fill a disk
        return apart

    with ThreadPoolExecutor(6) as pool:
        # Under MPS the first to fail ends all others: it is the one to name.
        runs = {pool.submit(apart_of, layout): layout for layout in layouts}
        apart: list[float] = []
        for run in as_completed(runs):
            apart.append(run.result())
            print(f"{model} {runs[run]}: its times are {apart[-1]:.2%} apart", flush=True)
    trip.notes |= {"runs": len(apart), "most apart": f"{max(apart):.2%}"}


def timed(path: Path, steps: int, words: Sequence[str]) -> None:
    """Train so many steps, and write the host's seconds from the first request for rows to the end
    of the last update, for which the rank then waits."""
    import torch
    import torch.distributed as dist

    from fivefold.cli import main
    from fivefold.train.clock import StepClock

    moments: list[float] = []
    ask, mark = StepClock.ask, StepClock.mark

    def first(clock: StepClock) -> None:
        moments.append(time.perf_counter())
        ask(clock)

    def last(clock: StepClock) -> Any:
        marked = mark(clock)
        if len(moments) == steps:
            if clock.device.type == "cuda":
                torch.cuda.synchronize(clock.device)
            seconds = time.perf_counter() - moments[0]
            # Ranks ask for their first rows at different times; rank 0 writes the records.
            if not dist.is_initialized() or dist.get_rank() == 0:
                path.write_text(json.dumps({"seconds": seconds}), "utf-8")
        return marked

    StepClock.ask, StepClock.mark = first, last
    main(["train", *words])


def watched(trip: Trip) -> None:
    """The usual 3D layout at real widths: 200 steps, no alarm; and a flipped bit is found."""
    words = (*dense(trip), "--layout", "dp=2 tp=2 pp=2")
    with trip.gpu.joined(8):
        calm = trip.train(*words, "--steps", "200", out="calm")
    check(not any(each["again"] for each in calm), "a healthy step ran again")
    name = "flipped"
    command = [sys.executable, "-m", "tests.gpu.journeys", "flipped", *words, "--steps", "40"]
    process = trip.start([*command, "--device", trip.device, "--out", name], name)
    out, err = trip.ended(process, name, code=1)
    named = re.search(r"ranks? .*\b3 on .*weights of", err)
    check("step 13" in err and named is not None, f"{out}{err}")
    trip.notes["found"] = " ".join(err.split())[:200]


def flipped(words: Sequence[str]) -> None:
    """Train; in step 13 a bit of what rank 3 has gathered flips."""
    from benchmarks.flips import flip
    from fivefold.cli import main
    from fivefold.train.loop import _Loop

    advance = _Loop._advance

    def disturbed(loop: Any, take_batches: Any) -> None:
        if loop.run.progress.step == 12 and loop.run.rank.job.mesh.rank == 3:
            units = [unit for unit in loop.run.rank.job.units if unit.sliced]
            flip(units[0].full, 0.5, 9)
        advance(loop, take_batches)

    _Loop._advance = disturbed
    main(["train", *words])


# Serving


def served(trip: Trip, family: str, cache_gb: float) -> None:
    """A server under load: random lengths, clients that go, and a cache too small for all."""
    trip.python("-m", "tests.gpu.journeys", family, "hub")
    # Some sequence must lose its cache, though the longest request fits.
    size = cache_gb if trip.on_gpu else {"experts": 0.001, "latents": 0.001}.get(family, 0.002)
    with trip.served("hub", "--cache-gb", str(size)) as address:
        server = urlsplit(address)
        place = (server.hostname or "", server.port or 0)
        # One token: of a longer prompt in the cache fewer are computed, by other kernels.
        before = ask(place, [4], 16)
        draw = random.Random(0)
        longest = 700 if trip.on_gpu else 60
        loads = [
            (
                [draw.randrange(500) for _ in range(draw.randint(1, longest))],
                draw.randint(1, longest // 3),
                draw.random() < 0.2,
            )
            for _ in range(160 if trip.on_gpu else 40)
        ]
        with ThreadPoolExecutor(48) as clients:
            answers = list(clients.map(lambda load: ask(place, *load), loads))
        for (_, most, leaves), answer in zip(loads, answers, strict=True):
            complete = answer.tokens == most or answer.reason == "stop"
            check(leaves or complete, f"{most} tokens were asked for: {answer}")
        after = ask(place, [4], 16)
        check(after == before, f"the answer changed under load: {before} and {after}")
        preempted = metric(place, "fivefold_preempted")
        check(preempted > 0, "no sequence lost its cache: the load is too small to say anything")
    left = sum(leaves for _, _, leaves in loads)
    trip.notes |= {"requests": len(loads), "left": left, "preempted": round(preempted)}


class Answer(NamedTuple):
    """What a client has read: the text, why it ended, and how many tokens it has."""

    text: str
    reason: str | None
    tokens: int


def generated(trip: Trip, family: str, layouts: Sequence[str]) -> None:
    """Completions over ranks, whose decode steps are captured, are those of one rank."""
    trip.python("-m", "tests.gpu.journeys", family, "hub")
    draw = random.Random(1)
    rows = [
        {"prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 60))), "id": str(number)}
        for number in range(24)
    ]
    path = trip.folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    command = ("hub", "--file", str(path), "--max-tokens", "40", "--json", "--dtype", "float32")
    answers: list[dict[str, list[int]]] = []
    for layout in ("dp=1", *layouts):
        with trip.gpu.joined(1 + (layout != "dp=1")):
            out = trip.fivefold("generate", *command, "--device", trip.device, "--layout", layout)
        lines = [json.loads(line) for line in out.splitlines()]
        answers.append({line["id"]: line["tokens"] for line in lines})
    check(len(answers[0]) == len(rows), f"{len(answers[0])} of {len(rows)} prompts were answered")
    for layout, answer in zip(layouts, answers[1:], strict=True):
        others = [number for number, tokens in answers[0].items() if answer.get(number) != tokens]
        check(not others, f"{layout} gave other tokens for the prompts {others}")
    trip.notes["tokens"] = sum(map(len, answers[0].values()))
    trip.notes["layouts"] = ", ".join(layouts)


def ask(place: tuple[str, int], prompt: list[int], most: int, leaves: bool = False) -> Answer:
    """A greedy answer, streamed; who leaves closes the connection after the first piece of it."""
    connection = http.client.HTTPConnection(*place, timeout=120)
    body = {"model": "hub", "prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    text, reason, tokens = "", None, 0
    try:
        if response.status != 200:
            raise Failure(f"status {response.status}: {response.read()[:300]!r}")
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            check("error" not in event, f"an answer ended with {event}")
            for choice in event["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"] or reason
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if leaves and text:
                break
    finally:
        connection.close()
    return Answer(text, reason, tokens)


def metric(place: tuple[str, int], name: str) -> float:
    """A number of the server's metrics, summed over replicas."""
    connection = http.client.HTTPConnection(*place, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def save(family: str, folder: Path) -> None:
    """A random model and a tokenizer of words, as transformers saves them."""
    import tokenizers
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    special = ["<|im_start|>", "<|im_end|>", "[UNK]", "user", "assistant", ":"]
    vocab = {word: number for number, word in enumerate([*special, *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.add_special_tokens(special[:3])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, chat_template=TEMPLATE, eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    keys = {"vocab_size": 512, "max_position_embeddings": 4096, "num_hidden_layers": 4}
    keys |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    name, sizes = FAMILIES[family]
    if not torch.cuda.is_available():
        keys["num_hidden_layers"] = 2
        sizes = sizes | {"hidden_size": 64, "intermediate_size": 96}
    config = getattr(transformers, f"{name}Config")(**keys, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("Qwen3", {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}),
    "dense": ("Qwen3", {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}),
    "experts": ("Olmoe", {"num_experts": 16, "num_experts_per_tok": 4}),
    "latents": (
        "DeepseekV2",
        {
            **{"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 2},
            **{"num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_method": "greedy"},
            **{"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        },
    ),
    "caps": ("Gemma2", {"hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256}),
}
for _heads in ("chat", "dense"):
    FAMILIES[_heads][1].update(num_attention_heads=16, num_key_value_heads=8)


def _layout(
    name: str, model: Callable[[Trip], tuple[str, ...]], layout: str, *words: str
) -> Journey:
    way = partial(layout_of, model=model, layout=layout, words=words)
    return Journey(name, way, together=True)


def _generated(name: str, family: str, *layouts: str) -> Journey:
    return Journey(name, partial(generated, family=family, layouts=layouts), together=True)


def _served(family: str, cache_gb: float) -> Journey:
    return Journey(f"serve-{family}", partial(served, family=family, cache_gb=cache_gb))


JOURNEYS = {
    each.name: each
    for each in (
        Journey("planned", planned, alone=True),
        _layout("experts-5d", experts, "dp=2 tp=2 pp=2 cp=2 ep=2"),
        Journey("first-training", first_training, together=True),
        Journey("fine-tuning", fine_tuning),
        Journey("long-rows", long_rows, together=True),
        Journey("kill", kill),
        _layout("dense-4d-packed", dense, "dp=2 tp=2 pp=2 cp=2", "--set", "packed=true"),
        _layout("dense-3d", dense, "dp=2 tp=2 pp=2"),
        _layout("experts-4d", experts, "dp=2 tp=2 pp=2 ep=2"),
        Journey("fp8", fp8),
        _generated("generate-tp", "dense", "tp=2"),
        _generated("generate-ep", "experts", "dp=2 ep=2", "pp=2"),
        _served("dense", 0.05),
        _served("experts", 0.1),
        _served("latents", 0.03),
        _served("caps", 0.1),
        replace(_layout("experts-3d", experts, "tp=2 pp=2 ep=2"), extra=True),
        *(
            Journey(f"fresh-{model}", partial(fresh, model=model), together=True, extra=True)
            for model in FRESH
        ),
        Journey("watched", watched, together=True, extra=True),
    )
}


if __name__ == "__main__":
    if sys.argv[1] == "timed":
        timed(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1] == "flipped":
        flipped(sys.argv[2:])
    else:
        save(sys.argv[1], Path(sys.argv[2]))
