# make demo          train over a slow link with DDP and with DGC, and compare; make help lists the rest
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo kernels test test-slow test-wheel test-clients reliability surface bench gpu gpu-lab lint docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1\t/' | expand -t 20

venv: $(STAMP)  ## create the virtual environment with the pinned dependencies

# torch comes first and alone: it is what takes long, and a later failure then does not repeat it. Bytecode is made of
# what is imported, when it is: of all that is installed it takes as long as the rest. The pip that comes with Python is
# that of its release, and older ones take twice as long to find out what to install.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(RUN) -m pip install --quiet --no-compile -c constraints.txt torch
	$(RUN) -m pip install --quiet --no-compile -c constraints.txt -e ".[demo,dev,docs,elastic]"
	touch $@

docs: $(STAMP)  ## build the site into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

demo: $(STAMP)  ## train over a slow link with DDP and with DGC; table, and a plot in demo_results
	$(RUN) -m lightning_lowbw.tools.demo

# Three at a time: a test of several ranks waits much of the time for their messages. A file's tests share their ranks, and
# the long files come first (tests/durations.json). A test that measures time is slow, too, and runs by itself.
# Bytecode is kept even where it is not otherwise: each of some hundred processes would compile what it imports.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# What has failed is tried once more by itself: on a busy machine a second of one process is five seconds of another one.
ALONE := $(RUN) -m pytest --last-failed --last-failed-no-failures none --maxfail 1 -m "not slow"
test test-slow kernels: export PYTHONDONTWRITEBYTECODE =
test: kernels  ## run the tests
	$(RUN) -m pytest $(PARALLEL) -m "not slow" || $(ALONE)

# numba's, which are kept beside the sources: all processes of the tests would wait for the first one that needs them.
kernels: $(STAMP)
	$(RUN) -m tests.preloaded

test-slow: kernels docs test-wheel  ## before a release: slow tests, the site, the wheel, documents of runs
	$(RUN) -m pytest $(PARALLEL) -m "slow and not alone"
	$(RUN) -m pytest -m "slow and alone" $$(grep -rl "mark\.alone" tests --include="test_*.py")
	$(MAKE) reliability surface test-clients

# The newest releases that the package's ranges allow; torch is the one of the other environment, linked, because a plain
# install may bring one with CUDA. What torch requires is installed as everything else is.
test-wheel: $(STAMP)  ## build the wheel from what is committed, install it into an empty environment, and train with it
	rm -rf build/wheel && mkdir -p build/wheel/source build/wheel/empty
	git archive HEAD | tar x -C build/wheel/source
	$(PYTHON) -m venv --without-pip build/wheel/venv
	site=$$($(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))") && ln -s "$$site"/torch "$$site"/torchgen \
		"$$site"/functorch "$$site"/torch-*.dist-info build/wheel/venv/lib/python3.*/site-packages/
	$(RUN) -m pip wheel --quiet --no-deps --wheel-dir build/wheel ./build/wheel/source
	$(RUN) -m pip --python build/wheel/venv/bin/python install --quiet --no-compile build/wheel/*.whl
	cd build/wheel/empty && ../venv/bin/lowbw-train +model.num_layers=1 trainer.max_steps=10 trainer.limit_val_batches=1
	ls build/wheel/empty/outputs/*/*/checkpoints/*.ckpt

# Other people's projects bring half of PyPI: an environment of their own.
test-clients:  ## train with other people's projects, and write benchmarks/results/compatibility.md (under 40 minutes)
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet -c clients/constraints.txt torch
	$(VENV)-clients/bin/python -m pip install --quiet -c clients/constraints.txt -r clients/requirements.txt -e .
	$(VENV)-clients/bin/python -m clients.run --again

reliability: $(STAMP)  ## run the tests of faults, also under Lightning's ddp, and write benchmarks/results/reliability.md
	$(RUN) -m pytest -m fault --rewrite-reliability tests

surface: $(STAMP)  ## try what Lightning offers with every strategy, and write benchmarks/results/lightning.md
	$(RUN) -c "from benchmarks import surface; surface.write_page()"

bench: $(STAMP)  ## measure on a throttled link: step time against bandwidth (needs iproute2)
	$(RUN) benchmarks/slow_link.py

# With the torch that is there: a plain install would bring another one. A test that fails does not cost the benchmark.
gpu-lab:  ## two ranks share an NVIDIA GPU, each behind a slow link: NCCL over sockets, in nine minutes; OUT=folder, again to go on
	$(PYTHON) benchmarks/gpu_lab.py --out $(or $(OUT),outputs/gpu_lab)

gpu:  ## on a machine with an NVIDIA GPU: proofs and a benchmark in eight minutes, with PYTHON's own torch; OUT=folder
	$(PYTHON) benchmarks/gpu.py $(if $(OUT),--out $(OUT))

lint: $(STAMP)  ## check style, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:  ## remove the virtual environment and everything that was generated
	rm -rf $(VENV) $(VENV)-clients demo_results site outputs multirun lightning_logs build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
