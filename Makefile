# The two commands: `make train` and `make test`. Both set everything up in .venv first.
# `make nightly` runs everything.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
BASE := .venv/.base
READY := .venv/.ready
# Hundreds of interpreters start in the tests: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup train test test-map mutants nightly test-page bench-page page-pictures docs reference lint types verify-all bench-schedule bench-overlap bench-tensor bench-pipeline bench-context bench-expert bench-gpu bench-rank bench-eight bench-decode bench-sampling bench-serve bench-door bench-step bench-logging bench-clock bench-checkpoint bench-plan bench-tokens chaos recover stress flips bench-flips verify-nccl accept-gpu device-env learn score clean

setup: $(READY)

# What training and the page need; the tests need more, and come later.
$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fivefold needs Python 3.11 or newer: set PYTHON=/path/to/python"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[page]"
	@touch $@

$(READY): $(BASE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

# All five dimensions on 16 local processes, and the loss of one process beside theirs.
train: $(BASE)
	$(BIN)/fivefold train tiny-moe --layout "dp=2 tp=2 pp=2 cp=2 ep=2" --schedule zb-h1 --zero 1 \
		--microbatches 2 --microbatch-size 4 --seq 64 --set balance=aux packed=true --steps 10 --check
	@printf '%s\n' '' 'Next, after `source .venv/bin/activate`:' \
		'  fivefold plan llama-3.1-405b --machine h100 --gpus 16384' \
		'  fivefold verify tiny --layout "dp=2 tp=2" --seq 64' \
		'  fivefold observe      (a page in the browser; docs/first-hour.md goes on from here)'

# At most 10 minutes on two cores, without the browser: all that a change touches, as far as its seconds go, and a sample of
# the long lists by a salt that changes with the commit. FIVEFOLD_SALT, which the report prints, repeats a sample.
test: setup lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/page tests

# Which cases run which functions, in how many seconds: tests/data/coverage_map.json.xz, by which `make test` chooses. All
# cases run once, for hours on two cores. Where there is no git, FIVEFOLD_COVERAGE_BASE is the commit.
test-map: setup
	$(BIN)/python -m tests.coverage_map record

# Mutation testing: at most 40 faults that have no valid result, and the table of all in docs/how-it-is-verified.md.
mutants: setup
	$(BIN)/python -m tests.mutants run
	$(BIN)/python -m tests.mutants page

# Everything, in about three hours on two cores and half an hour on sixteen: all cases, clocks, two hosts, every table of
# verify-all, the page where a browser is installed, ten kills. One table says what passed.
nightly: setup lint
	$(BIN)/python -m tests.nightly

# The page in a real browser: Debian's chromium, or another that is installed. axe-core, which looks
# for issues of accessibility, is fetched where npm is installed.
test-page: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[browser]"
	@test -f build/axe.min.js || { mkdir -p build && cd build && npm pack --silent axe-core@4 >/dev/null 2>&1 \
		&& tar -xzf axe-core-4*.tgz --strip-components=1 package/axe.min.js && rm axe-core-4*.tgz; } || true
	$(BIN)/python -m pytest -q -rs -s tests/page

# How soon the page follows a slider at 16,384 GPUs; it fails at a median of 100 ms or a worst of 250.
bench-page: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[browser]"
	FIVEFOLD_BENCH=1 $(BIN)/python -m pytest -q -s tests/page/test_explore.py -k delay

# The pictures of the page in README and docs.
page-pictures: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[browser]"
	$(BIN)/python -m tests.page.pictures

# The documentation site in build/site; a warning fails it.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

# The pages of the reference, from options, keys, presets and answers.
reference: setup
	$(BIN)/python -m tests.reference

lint: setup
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .

types: setup
	$(BIN)/pyright

# Every layout of 2, 4 and 8 ranks, every pipeline, every kind of context, every pair of values,
# trainings in many layouts and at real widths, compiled ranks, recomputation, the planner's first choices, fp8, generation,
# and every case of the traffic list; the tables go to docs.
verify-all: setup
	$(BIN)/python -m tests.ranks.sweep > docs/verified-layouts.md
	$(BIN)/python -m tests.ranks.pipelines > docs/verified-pipelines.md
	$(BIN)/python -m tests.ranks.contexts > docs/verified-contexts.md
	$(BIN)/python -m tests.ranks.covering > docs/verified-combinations.md
	$(BIN)/python -m tests.ranks.invariance > docs/verified-training.md
	$(BIN)/python -m tests.ranks.real_widths > docs/verified-widths.md
	$(BIN)/python -m tests.ranks.compiled > docs/verified-compiled.md
	$(BIN)/python -m tests.ranks.recomputed > docs/verified-recompute.md
	$(BIN)/python -m tests.ranks.first_choices > docs/verified-choices.md
	$(BIN)/python -m tests.ranks.fp8_layouts > docs/verified-fp8.md
	$(BIN)/python -m tests.ranks.generations > docs/verified-generation.md
	FIVEFOLD_ALL_CASES=1 $(BIN)/python -m pytest -q tests/ranks/test_traffic_real.py tests/ranks/test_survival.py \
		tests/ranks/test_balance_ranks.py tests/ranks/test_two_hosts.py tests/test_readme.py

# Ten SIGKILLs at random ranks and times over one run, each resumed; at most 5 minutes.
chaos: setup
	$(BIN)/python benchmarks/chaos.py

# Ranks are killed at random, and a run goes on from copies in memory; then memory beside the disk.
recover: setup
	$(BIN)/python benchmarks/recovery.py kills
	$(BIN)/python benchmarks/recovery.py kills --shrink --seed 1
	$(BIN)/python benchmarks/recovery.py read

# Flipped bits in memory and in compute, a long healthy run, and slow ranks and links; about an hour.
flips: setup
	$(BIN)/python benchmarks/flips.py rest
	$(BIN)/python benchmarks/flips.py compute --flips 60
	$(BIN)/python benchmarks/stragglers.py
	$(BIN)/python benchmarks/flips.py healthy --steps $(or $(FIVEFOLD_STEPS),5000)

# What looking for flipped bits costs: on a GPU where there is one.
bench-flips: setup
	$(BIN)/python benchmarks/flips.py cost --device $(or $(DEVICE),cpu)

# 50,000 steps in five layouts under the checks of the heap; FIVEFOLD_STEPS for another number.
stress: setup
	$(BIN)/python benchmarks/stress.py --steps $(or $(FIVEFOLD_STEPS),50000)

# On a GPU, with an NCCL that lets ranks share it: docs/verified-nccl.md says how.
verify-nccl: setup
	$(BIN)/python -m tests.gpu.nccl
	$(BIN)/python -m tests.gpu.train_nccl
	$(BIN)/python -m tests.gpu.recover_nccl

# On a GPU: whole journeys through the command line, at most 8 minutes; the record goes to docs/accepted-gpu.md.
# A machine on which nothing can be installed uses its own Python, and what `make device-env` has put into carry/.
accept-gpu:
	$(if $(wildcard $(READY)),$(BIN)/python,python3) -m tests.gpu.accept $(JOURNEYS)

device-env: setup
	$(BIN)/python -m tests.gpu.device_env

bench-overlap: setup
	$(BIN)/python benchmarks/overlap.py

# Needs a GPU: tensor collectives beside matmuls, in a trace of two ranks over NCCL.
bench-tensor: setup
	$(BIN)/python benchmarks/tensor_overlap.py

bench-context: setup
	$(BIN)/python benchmarks/context.py

bench-expert: setup
	$(BIN)/python benchmarks/expert.py

bench-pipeline: setup
	$(BIN)/python benchmarks/pipeline.py

# PEER is a folder with TorchTitan 0.2.2 and a runner for it; without a GPU this says so.
bench-gpu: setup
	@test -n "$(PEER)" || test -d build/peer || $(BIN)/python benchmarks/peer.py build/peer
	$(BIN)/python benchmarks/gpu.py compare --peer $(or $(PEER),build/peer)
	$(BIN)/python benchmarks/gpu.py offload

# Generation on a GPU beside its limits and transformers; it fails below 0.75 of the bandwidth for one sequence.
bench-decode: setup
	$(BIN)/python benchmarks/decode.py

# Draws of 1, 64 and 256 tokens by temperature and filters beside greedy ones; on a GPU it fails where one takes 1 ms more.
bench-sampling: setup
	$(BIN)/python benchmarks/sampling.py $(ARGS)

# Poisson arrivals at a server of a random model: TTFT, TPOT, goodput. ARGS for another model, device or rates; it fails if a request is lost.
bench-serve: setup
	$(BIN)/python benchmarks/serve.py $(ARGS)

# CPU time per token in the processes of a server that speak HTTP, with engines that only send tokens. ARGS="--doors 1 4 8 --replicas 8" for many cores.
bench-door: setup
	$(BIN)/python benchmarks/door.py $(ARGS)

# One rank of four large jobs alone on a GPU, compiled against operator by operator; it fails below 1.05 (1.15 with experts).
bench-rank: setup
	$(BIN)/python benchmarks/one_rank.py

# On eight GPUs: three trainings beside what was planned for them; ARGS=--dry runs tiny ones on CPUs.
bench-eight: setup
	$(BIN)/python benchmarks/eight.py $(ARGS)

# On a GPU: what the training loop adds to a step (it fails above 1%), and eight microbatches against one (above 8.05).
bench-step: setup
	$(BIN)/python benchmarks/step_costs.py

# 300 steps of a model of bytes in one process and in 2D; it fails at 2.0 nats a byte or above.
learn: setup
	$(BIN)/python benchmarks/learn.py

# RUNS are files of measured runs, as docs/planner-accuracy.md describes them; it is made anew.
score: setup
	@test -n "$(RUNS)" || { echo 'give files of measured runs: make score RUNS="a.jsonl b.jsonl"'; exit 2; }
	$(BIN)/fivefold score $(RUNS) --page docs/planner-accuracy.md

# CPU-seconds of whole answers; it fails where one takes more than 3, or below 500,000 layouts a second.
bench-plan: setup
	$(BIN)/python benchmarks/plan.py

# What metrics and events add to a step; it fails above 1%.
bench-logging: setup
	$(BIN)/python benchmarks/recording.py

# 50 steps of a 1B model on a GPU: their wall time beside their records; it fails at 1%. On a CPU a tiny model, which only prints.
bench-clock: setup
	$(BIN)/python benchmarks/clock.py

# How fast checkpoints are saved and loaded, beside plain files on the same disk (FOLDER, GIB, default 20 on a GPU and 0.5 on a CPU);
# it fails below 0.8 of their speed.
bench-checkpoint: setup
	$(BIN)/python benchmarks/checkpoint.py $(if $(GIB),--gib $(GIB)) $(if $(FOLDER),--folder $(FOLDER))

# JSONL to tokens beside the batch encoder of the tokenizers library, with as many workers; it fails below 0.9 of its speed.
bench-tokens: setup
	$(BIN)/python benchmarks/tokens.py $(if $(MB),--mb $(MB))

bench-schedule: setup
	$(BIN)/python benchmarks/schedule.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
