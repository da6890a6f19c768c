"""Programs that are kept from one process to the next."""

import os
import subprocess
import sys

from specjax.user_cache import keep_programs

COMPILE = """
import sys
from specjax.user_cache import keep_programs
keep_programs()
import jax
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("compilation_cache/cache_hits")))
print(jax.jit(lambda x: x * 2 + 1)(3), sum(hits))
"""


def test_a_second_process_need_not_compile(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    outputs = [
        subprocess.run(
            [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert outputs[0] == ["7", "0"]
    assert outputs[1][0] == "7"
    assert int(outputs[1][1]) >= 1
    assert list((tmp_path / "specjax" / "programs").glob("*/*-cache"))


def test_what_the_user_has_set_stays(monkeypatch):
    mine = {"JAX_COMPILATION_CACHE_DIR": "elsewhere", "JAX_COMPILATION_CACHE_MAX_SIZE": "5"}
    environment = {"HOME": os.environ.get("HOME", "/"), **mine}
    monkeypatch.setattr(os, "environ", environment)
    keep_programs()
    assert environment == {"HOME": environment["HOME"], **mine, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
