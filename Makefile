# `make train`: raw text to a trained GPT. `make test`: the tests. Both set up .venv themselves.
PY := .venv/bin/python

.PHONY: train test test-all test-layouts test-gpu check setup clean

train: setup
	$(PY) examples/train_on_python_source/run.py

test: setup check
	$(PY) -m pytest -n 2 --dist loadscope -m "not slow and not gpu" tests

test-all: setup check
	$(PY) -m pytest -n 2 --dist loadscope -m "not gpu" tests

test-layouts: setup
	$(PY) -m pytest -n 2 --dist loadscope -m "not gpu" tests/parallel_equivalence tests/functional/test_layout_mixtures.py

test-gpu: setup
	$(PY) -m pytest -n 8 --dist worksteal -m gpu tests

check: setup
	$(PY) -m ruff check .
	$(PY) -m mypy megatron tools tests examples pretrain_gpt.py pretrain_llama.py

setup:
	@python3 tools/setup_venv.py

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache
