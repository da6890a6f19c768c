"""One process of test_processes.py: ``one_of_several.py ADDRESS COUNT INDEX HEAD MODEL``. Its last line of output is JSON."""

import dataclasses
import json
import sys

import jax
import numpy as np

from specjax import load_model
from specjax.checkpoints.heads import load_head
from specjax.drafters import prompt_lookup
from specjax.parallel import ALONE, ProcessError, Processes, joined, make_mesh
from specjax.serving import Engine
from tests.parallel.shared import VOCAB_SIZE, several_requests


def refusal(call):
    try:
        call()
    except (ValueError, ProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def no_file():
    raise OSError("no such file")


def agreements(us):
    """What the processes tell each other; each puts in something else."""
    us_first = us.first
    asked = us.agreed(lambda: not us_first)
    return {
        "broadcast": us.broadcast({"from": us.index, "text": "ö" * 3000}),
        "least": us.least(2**40 + 7 - us.index),
        "any": [us.any(us.index == 1), us.any(False)],
        "agreed": [asked() for _ in range(17)],
        "share": list(us.share([[n, "line"] for n in range(5)] if us_first else [], block=2)),
        "whole blocks": list(us.share(range(4) if us_first else [], block=2)),
        "on_first": us.on_first(lambda: us.index, lambda made: made + 1),
        "failure": refusal(lambda: us.on_first(no_file)) if not us_first else refusal_of_os(us),
        "same": refusal(lambda: us.check_same({"dtype": "float32", "slots": 3})),
        "different": refusal(lambda: us.check_same({"dtype": "float32", "slots": 3 + us.index})),
        "mesh of one": refusal(lambda: Processes.all_of(make_mesh(devices=jax.devices()[:1]))),
        "too large a mesh": refusal(lambda: make_mesh(3)),
        "own devices": Processes.of(make_mesh(devices=jax.local_devices())) == ALONE,
    }


def refusal_of_os(us):
    try:
        us.on_first(no_file)
    except OSError as error:
        return str(error)
    return None


def tokens_over(mesh, folder):
    """Tokens of all completions, and seeds, from an engine that all processes run, of a model that each reads its part of."""
    # A folder without a tokenizer does not say that some rows of the embedding are nobody's.
    model = dataclasses.replace(load_model(folder, mesh=mesh), vocab_size=VOCAB_SIZE)
    assert not model.params["embedding"].is_fully_addressable
    with Engine(model, drafter=prompt_lookup(2), rule="gumbel", slots=2, capacity=48, mesh=mesh) as engine:
        done = engine.run(several_requests())
        assert (
            np.prod(engine._batch.state.cache.keys[0].addressable_shards[0].data.shape) * 2
            == engine._batch.state.cache.keys[0].size
        )
    return [completion.token_ids for completion in done], [completion.seed for completion in done]


def head_read(folder):
    """Sum of a trained head's parameters, which every process reads for itself."""
    params = load_head(folder).params
    return float(sum(np.abs(np.asarray(leaf, np.float32)).sum() for leaf in jax.tree.leaves(params)))


if __name__ == "__main__":
    address, count, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with joined(coordinator_address=address, num_processes=count, process_id=index):
        found = agreements(Processes.all_of(make_mesh(count)))
        found["head"] = head_read(sys.argv[4])
        found["tokens"], found["seeds"] = tokens_over(f"model={count}", sys.argv[5])
    print(json.dumps(found))
