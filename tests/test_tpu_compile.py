"""What scripts/tpu_compile.py says of compiled programs: its reading of HLO anywhere, the TPU compiler's where libtpu is."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hlo():
    spec = importlib.util.spec_from_file_location("tpu_hlo", ROOT / "scripts" / "tpu_hlo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


TEXT = """HloModule jit_run, is_scheduled=true

%body (p: (s32[], f32[256,128])) -> (s32[], f32[256,128]) {
  %p = (s32[], f32[256,128]{1,0:T(8,128)}) parameter(0)
  %cache = f32[256,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %sum = f32[256,128]{1,0:T(8,128)} all-reduce(%cache), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[256,128]{1,0:T(8,128)}) tuple(%p, %sum)
}

%goes (p.1: (s32[], f32[256,128])) -> pred[] {
  %p.1 = (s32[], f32[256,128]{1,0:T(8,128)}) parameter(0)
  ROOT %less = pred[]{:T(512)} constant(true)
}

%cheap (q: f32[256,128]) -> f32[256,128] {
  ROOT %q = f32[256,128]{1,0:T(8,128)} parameter(0)
}

%dear (q.1: f32[256,128]) -> f32[256,128] {
  %q.1 = f32[256,128]{1,0:T(8,128)} parameter(0)
  ROOT %turned = f32[256,128]{0,1:T(8,128)} copy(%q.1)
}

%updated (c: f32[256,128], u: f32[8,128], i: s32[]) -> f32[256,128] {
  %c = f32[256,128]{1,0:T(8,128)} parameter(0)
  %u = f32[8,128]{1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  ROOT %new = f32[256,128]{1,0:T(8,128)} dynamic-update-slice(%c, %u, %i, %i)
}

%looked_up (table: f32[256,128], at: s32[]) -> f32[3,128] {
  %table = f32[256,128]{1,0:T(8,128)} parameter(0)
  %at = s32[]{:T(128)} parameter(1)
  ROOT %rows = f32[3,128]{1,0:T(8,128)} dynamic-slice(%table, %at, %at), dynamic_slice_sizes={3,128}
}

ENTRY %main (a: f32[256,128], b: f32[8,128], n: s32[]) -> f32[256,128] {
  %a = f32[256,128]{1,0:T(8,128)} parameter(0)
  %b = f32[8,128]{1,0:T(8,128)} parameter(1)
  %n = s32[]{:T(128)} parameter(2)
  %write = f32[256,128]{1,0:T(8,128)} fusion(%a, %b, %n), kind=kLoop, calls=%updated
  %read = f32[3,128]{1,0:T(8,128)S(1)} fusion(%write, %n), kind=kLoop, calls=%looked_up
  %near = (f32[256,128]{1,0:T(8,128)S(1)}, f32[256,128]{1,0:T(8,128)}, u32[]) copy-start(%write)
  %early = (f32[256,128]{1,0:T(8,128)S(1)}, f32[256,128]{1,0:T(8,128)}, u32[]) copy-start(%a), cross_program_prefetch_index=0
  %near.1 = f32[256,128]{1,0:T(8,128)S(1)} copy-done(%near)
  %start = (s32[], f32[256,128]{1,0:T(8,128)}) tuple(%n, %write)
  %loop = (s32[], f32[256,128]{1,0:T(8,128)}) while(%start), condition=%goes, body=%body, metadata={op_name="jit(f)/draft/while"}
  %out = f32[256,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  ROOT %end = f32[256,128]{1,0:T(8,128)} conditional(%n, %out, %out), branch_computations={%cheap, %dear}
}
"""
ARRAY, TILE, NUMBER = 256 * 128 * 4, 8 * 128 * 4, 4


def test_bytes_are_those_that_move(hlo):
    program = hlo.Program(TEXT)
    cost = {
        name: program.cost("main", program.computations["main"][name]) for name in ("write", "read", "near", "near.1", "early")
    }
    # Updates in place and look-ups touch their rows alone, in whole tiles; a prefetch is a read, unless the last run made it.
    assert cost == {"write": 2 * TILE + NUMBER, "read": TILE + NUMBER, "near": ARRAY, "near.1": 0, "early": 0}


def test_loops_and_branches_count_as_they_run(hlo):
    program = hlo.Program(TEXT)
    rest = 3 * TILE + 2 * NUMBER + ARRAY
    assert program.bytes() == rest + 2 * ARRAY + 2 * ARRAY
    scenario = hlo.Scenario(trips=lambda loop: 5 if loop.scope.endswith("draft/while") else None, branch=lambda condition: 0)
    assert program.bytes(scenario) == rest + 5 * 2 * ARRAY
    assert program.collectives(scenario) == {
        "all-reduce": {"count": 5, "bytes": 5 * ARRAY, "largest": "f32[256,128]{1,0}", "largest_bytes": ARRAY}
    }


def test_moves_are_what_computes_nothing(hlo):
    program = hlo.Program(TEXT)
    (move,) = program.moves(ARRAY)
    assert (move["kind"], move["array"], move["place"], move["count"]) == ("copy", "f32[256,128]{0,1}", "in HBM", 1)
    assert program.moves(ARRAY + 1) == []
    assert program.moves(ARRAY, hlo.Scenario(branch=lambda condition: 0)) == []


def test_a_reshape_that_is_left_is_a_move(hlo):
    text = TEXT.replace("%turned = f32[256,128]{0,1:T(8,128)} copy", "%turned = f32[32768]{0:T(1024)} reshape")
    (move,) = hlo.Program(text).moves(ARRAY)
    assert (move["kind"], move["array"], move["bytes"]) == ("reshape", "f32[32768]{0}", ARRAY)


def test_text_that_is_no_module_is_refused(hlo):
    with pytest.raises(ValueError, match="must be that of a compiled HLO module"):
        hlo.Program("module @jit_run")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_tpu_programs_copy_no_cache_and_gather_no_weights(tmp_path):
    # The draft model's heads have 64 numbers, which a TPU stores in another order than larger ones.
    command = [sys.executable, "scripts/tpu_compile.py", "--target", "tiny", "--topology", "v5e:2x2", "--capacity", "512"]
    command += ["--programs", "pass 1", "draft pass", "draft pass split", "--large", "100000"]
    command += ["--output", str(tmp_path / "found.json")]
    ran = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["mesh"] == {"data": 1, "model": 4}
    for name, program in found["programs"].items():
        assert 0 < program["memory"] < program["memory_of_chip"], name
        assert program["float32_moves"] == 0, (name, program["moves"])
        # What is left are logits on their way to the chip that judges them.
        caches = [move for move in program["moves"] if ",512," in move["array"]]
        assert not caches, name
    # Two sums for each layer, one for the embedding, one of the verdicts, and none larger than the stream of all rows.
    collectives = found["programs"]["pass 1"]["collectives"]
    assert collectives["all-reduce"]["count"] <= 6
    assert collectives["all-reduce"]["largest_bytes"] == 8 * 512 * 2
    assert collectives.get("all-gather", {"largest_bytes": 0})["largest_bytes"] <= 4096
    assert found["programs"]["draft pass"]["collectives"] == {}
    # Split, its one layer and its embedding are three sums, and the logits of 8 rows come to every chip.
    split = found["programs"]["draft pass split"]
    assert split["memory"] < found["programs"]["draft pass"]["memory"] / 2
    assert (split["collectives"]["all-reduce"]["count"], split["collectives"]["all-gather"]["count"]) == (3, 1)
    assert split["collectives"]["all-reduce"]["largest_bytes"] == 8 * 256 * 2
    assert split["collectives"]["all-gather"]["largest_bytes"] == 8 * 8192 * 4
    assert split["collectives"].keys() == {"all-reduce", "all-gather"}


def _environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
