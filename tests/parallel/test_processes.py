"""Two processes on loopback: what they tell each other, and a model that is spread over both. Rows over both: tests/cli."""

import json

import jax
import numpy as np
import pytest

import specjax
from specjax.checkpoints.heads import load_head, save_head
from specjax.checkpoints.model_folder import save_model
from specjax.parallel import ALONE, Processes, make_mesh
from tests import heads
from tests.parallel.shared import decoder, several_requests
from tests.together import ROOT, free_address, run_together

COUNT = 2


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Folder of a trained head."""
    return save_head(heads.medusa_heads(), tmp_path_factory.mktemp("heads") / "head")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model, as ``specjax convert`` writes it."""
    return save_model(decoder(), tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def found(head, folder):
    """What each of two processes found."""
    address, script = free_address(), str(ROOT / "tests" / "parallel" / "one_of_several.py")
    calls = [[script, address, str(COUNT), str(index), str(head), str(folder)] for index in range(COUNT)]
    outcomes = run_together(calls, [ROOT] * COUNT)
    for code, _, err in outcomes:
        assert code == 0, err
    return [json.loads(out.splitlines()[-1]) for _, out, _ in outcomes]


def test_processes_come_to_know_and_decide_the_same(found):
    for index, process in enumerate(found):
        assert process["broadcast"] == {"from": 0, "text": "ö" * 3000}
        assert process["least"] == 2**40 + 6
        assert process["any"] == [True, False]
        # Only the second process says yes, and only now and then they are asked.
        assert process["agreed"] == [True, *[False] * 15, True]
        assert process["share"] == [[n, "line"] for n in range(5)]
        assert process["whole blocks"] == [0, 1, 2, 3]
        assert process["on_first"] == [None if index else 0, 1]
        assert process["same"] is None
        assert process["own devices"] is True


def test_what_cannot_go_on_is_told_on_both(found):
    first, second = found
    assert first["failure"] == "no such file"
    assert second["failure"] == "ProcessError: process 0 failed: no such file"
    assert "another process was started with another command than this one" in first["different"]
    assert (
        "process 1 was started with another command than process 0: its slots is 4, that of process 0 is 3" in second["different"]
    )
    for process in found:
        assert "mesh data=1,model=1 has 1 devices, which are those of 1 of the 2 processes" in process["mesh of one"]
        assert "a mesh of data=3,model=1 takes 3 devices; there are 2" in process["too large a mesh"]


def test_a_model_over_both_gives_the_tokens_of_one(found):
    """Each process has read its part of the model's folder."""
    (tokens, seeds), second = ((process["tokens"], process["seeds"]) for process in found)
    assert (tokens, seeds) == second
    asked = several_requests()
    settings = [with_seed(request.params, seed) for request, seed in zip(asked, seeds, strict=True)]
    alone = specjax.generate(decoder(), [request.prompt for request in asked], settings, rule="gumbel")
    assert tokens == [completion.token_ids for completion in alone]


def with_seed(params, seed):
    assert params.seed in (None, seed)
    return specjax.SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens, seed=seed)


def test_each_reads_trained_heads(found, head):
    whole = sum(float(np.abs(np.asarray(leaf, np.float32)).sum()) for leaf in jax.tree.leaves(load_head(head).params))
    assert whole > 0
    assert [process["head"] for process in found] == [pytest.approx(whole, rel=1e-2)] * COUNT


def test_one_process_is_alone():
    assert Processes.of(None) == Processes.of(make_mesh(2)) == Processes.all_of(make_mesh(2)) == ALONE
    assert ALONE.first
    ALONE.check_same({"slots": 3})
    with pytest.raises(OSError, match="no such file"):
        ALONE.on_first(lambda: (_ for _ in ()).throw(OSError("no such file")))
