"""Settings of all tests, and the models that several of them share.

The settings are made before JAX starts: eight virtual CPU devices, implicit rank promotion is an error, and the compiler
spends little time on code that runs for milliseconds (compiling tiny models would otherwise be most of the test time).
"""

import gc
import json
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


MAPS = Path("/proc/self/maps")
MANY_MAPS = 30_000
"""Linux gives a process 65,530 memory maps unless told otherwise. Compiled programs take some each; without, a compiler dies."""


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Gives compiled programs back where a long run of tests has made very many; else modules share theirs."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_addoption(parser):
    parser.addoption("--all-lengths", action="store_true", help="the default model with every draft length")
    parser.addoption("--all-families", action="store_true", help="every tiny model with every kind of drafter")
    parser.addoption("--all-meshes", action="store_true", help="every kind of drafter on every mesh")
    parser.addoption("--qwen-path", default=None, help="Qwen2.5-Coder-0.5B-Instruct as .gguf, for its parity test")
    parser.addoption("--qwen-1.5b-path", default=None, help="Qwen2.5-Coder-1.5B-Instruct as .gguf, for its parity test")
    parser.addoption("--gemma-path", default=None, help="Gemma-3-270M as .gguf, for its parity and tokenizer tests")
    parser.addoption(
        "--trees-path",
        default=None,
        help="published trees as JSON, a list of objects with a name and tree_choices (paths of ranks, without the root)",
    )


@pytest.fixture(scope="session")
def smollm2_path():
    """The default model's file, fetched into the user's cache if it is not there."""
    from specjax.checkpoints.download import pull

    return pull("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The default model in float32."""
    import specjax

    return specjax.load_model(str(smollm2_path), dtype="float32")


@pytest.fixture(scope="session")
def qwen_path(request):
    """The path given with ``--qwen-path``."""
    return _given(request, "--qwen-path")


@pytest.fixture(scope="session")
def large_qwen_path(request):
    """The path given with ``--qwen-1.5b-path``."""
    return _given(request, "--qwen-1.5b-path")


@pytest.fixture(scope="session")
def gemma_path(request):
    """The path given with ``--gemma-path``."""
    return _given(request, "--gemma-path")


def _given(request, option):
    path = request.config.getoption(option)
    if path is None:
        pytest.skip(f"the file is large and not the default model: give its path with {option}")
    return path


@pytest.fixture(scope="session")
def published_trees(request):
    """{name: tree} of the file given with ``--trees-path``."""
    from specjax.tree import DraftTree

    path = request.config.getoption("--trees-path")
    if path is None:
        pytest.skip("published trees are not part of the repository: give a file with --trees-path")
    trees = {entry["name"]: DraftTree.from_choices(entry["tree_choices"]) for entry in json.loads(Path(path).read_text())}
    assert trees, f"{path} holds no tree"
    return trees
