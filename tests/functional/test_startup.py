"""What a start costs, and what it needs: torch and numpy, everything else only where it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runner import ROOT, argv, environment, on, train

OPTIONAL = {
    *("PIL", "apex", "deep_ep", "flash_attn", "flash_attn_interface", "fsspec", "matplotlib", "modelopt", "nltk", "pandas", "regex"),
    *("safetensors", "scipy"),
    *("sentencepiece", "tensorboard", "tiktoken", "tokenizers", "tqdm", "transformer_engine", "transformers", "triton", "wandb", "yaml"),
    "zstandard",
}
# Runs with this in front see none of these packages, whatever is installed.
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {sorted(OPTIONAL)!r} else PathFinder.find_spec(name, path, target)
    def invalidate_caches(self):
        PathFinder.invalidate_caches()
    def find_distributions(self, *args, **kwargs):
        return PathFinder.find_distributions(*args, **kwargs)
sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not PathFinder] + [Finder()]
"""


def run_python(code: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)


def modules() -> list[str]:
    files = [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "tools").rglob("*.py"), ROOT / "pretrain_gpt.py", ROOT / "pretrain_llama.py"]
    names = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in files]
    names = [name for name in names if not name.startswith("megatron.core.fusions.kernels.")]  # imported where Triton is alone
    return sorted(name for name in names if all(part.isidentifier() for part in name.split(".")))


def test_every_module_imports_without_optional_packages() -> None:
    names = modules()
    assert len(names) > 80
    code = BLOCKER + "import importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\nprint(len(sys.argv) - 1)"
    done = run_python(code, *names)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == len(names)


def test_training_works_without_optional_packages(corpus: Path, tmp_path: Path) -> None:
    code = BLOCKER + "import runpy\nsys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\nrunpy.run_path('pretrain_gpt.py', run_name='__main__')"
    done = run_python(code, *argv(*on(corpus, f"--train-iters 2 --save {tmp_path}")))
    assert done.returncode == 0, done.stderr
    assert "successfully saved checkpoint from iteration       2" in done.stdout


@pytest.mark.parametrize(
    ("flags", "package"),
    [
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model {file}", "sentencepiece"),
        ("--tensorboard-dir {folder}", "tensorboard"),
        ("--wandb-project p --wandb-exp-name n", "wandb"),
    ],
)
def test_an_option_says_at_once_which_package_it_lacks(corpus: Path, tmp_path: Path, flags: str, package: str) -> None:
    (tmp_path / "file").write_text("")
    code = BLOCKER + "import runpy\nsys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\nrunpy.run_path('pretrain_gpt.py', run_name='__main__')"
    done = run_python(code, *argv(*on(corpus, flags.format(file=tmp_path / "file", folder=tmp_path))))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"needs the package {package}" in done.stderr and f"pip install {package}" in done.stderr
    assert flags.split()[0] in done.stderr


def test_flex_without_deepep_is_refused_at_once(corpus: Path) -> None:
    """With its name, how to have it and what works without it."""
    code = BLOCKER + "import runpy\nsys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\nrunpy.run_path('pretrain_gpt.py', run_name='__main__')"
    words = argv(*on(corpus, "--num-experts 4 --bf16 --moe-token-dispatcher-type flex --moe-enable-deepep"))
    done = run_python(code, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "1 problem in the command line" in done.stderr
    assert "--moe-token-dispatcher-type flex: needs the package deep_ep" in done.stderr
    assert "https://github.com/deepseek-ai/DeepEP" in done.stderr and "(works: --moe-token-dispatcher-type alltoall)" in done.stderr


def test_the_missing_backend_is_announced_and_recorded(corpus: Path, tmp_path: Path) -> None:
    """transformer_engine is the default; on a machine without it `local` takes over with one line, and the checkpoint says so."""
    from megatron.core import dist_checkpointing
    from tests.functional.runner import TINY

    result = train(*on(corpus), f"--save {tmp_path}", base=TINY.replace("--transformer-impl local ", ""))
    assert result.code == 0
    (line,) = [text for text in result.err.splitlines() if "transformer_engine" in text]
    assert line.startswith("WARNING: ") and "--transformer-impl local is used instead of transformer_engine" in line
    saved = dist_checkpointing.load_common_state_dict(tmp_path / "iter_0000004")["args"]
    assert saved.transformer_impl == "local" and saved.requested_transformer_impl == "transformer_engine"


def test_a_log_level_shows_which_kernel_attention_runs_on(corpus: Path) -> None:
    words = argv(*on(corpus, "--train-iters 1 --logging-level 20"))
    done = run_python("import runpy\nrunpy.run_path('pretrain_gpt.py', run_name='__main__')", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if "attention runs on" in line] == ["attention runs on torch's scaled_dot_product_attention (auto)"]


WORDS = {
    "help": ["--help"],
    "bad value": argv("--mock-data --hidden-size 65"),
    "a package that is missing": argv("--mock-data --num-experts 4 --bf16 --moe-token-dispatcher-type flex --moe-enable-deepep"),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
def test_help_and_argument_errors_import_torch_and_no_more(words: list[str]) -> None:
    """A start is imports, nearly all of it: what comes on top of `import torch` is this package, and numpy's random numbers."""
    plain = run_python("import sys, torch, numpy.random\nprint(*sys.modules)")
    code = BLOCKER + (
        "import runpy\nsys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\n"
        "try:\n    runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "finally:\n    print('MODULES', *sys.modules)"
    )
    done = run_python(code, *words)
    assert done.returncode == (0 if words == ["--help"] else 2), done.stderr
    loaded = done.stdout.rpartition("MODULES ")[2].split()
    assert "megatron.training.training" in loaded
    more = {name for name in loaded if name.partition(".")[0] not in (*sys.stdlib_module_names, "megatron")} - set(plain.stdout.split())
    assert not more, sorted(more)


def test_help_lists_every_flag_once() -> None:
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--help"], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for flag in ("--num-layers", "--metrics-file", "--exit-signal-handler", "--lr-wsd-decay-style", "--use-checkpoint-args"):
        assert f"{flag} " in done.stdout or f"{flag}\n" in done.stdout


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "pretrain_llama.py"])
def test_the_scripts_are_short(script: str) -> None:
    """A reader sees a whole step in one file."""
    assert len((ROOT / script).read_text().splitlines()) < 200
