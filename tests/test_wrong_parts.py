"""Parts of one's own that are not what they should be are refused by name, before or while the round is traced."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.certificates import certify
from specjax.certificates.tiny import counting_tree
from specjax.drafters import DraftModel, PromptLookup, StopAtConfidence, StopAtEntropy, draft_model, prompt_lookup
from specjax.drafters.base import BoundDrafter
from specjax.row_trees import RowTrees
from specjax.tree import DraftTree, Law
from specjax.verification import Match, Token, Typical, Verdict
from tests import hash_model as tiny

TARGET = tiny.model(tiny.random_table(0))
PARAMS = specjax.SamplingParams(max_tokens=3, seed=0)


def generate(**arguments):
    return specjax.generate(TARGET, [[1, 2, 1, 2]], PARAMS, **{"drafter": prompt_lookup(2), "rule": "match", **arguments})


@dataclasses.dataclass(frozen=True)
class Returns(Match):
    """A rule that returns what it is told to."""

    what: str = "nothing"

    def __call__(self, choices, draft, target_log_probs):
        right = super().__call__(choices, draft, target_log_probs)
        return {
            "nothing": None,
            "a float": right.replace(next_token=right.next_token.astype(jnp.float32)),
            "a short path": Verdict(right.path[:, :1], right.num_accepted, right.next_token),
        }[self.what]


@dataclasses.dataclass(frozen=True)
class Proposes(PromptLookup):
    """A drafter whose proposals have something changed."""

    change: str = "tokens"

    def propose(self, *arguments):
        draft, state = super().propose(*arguments)
        change = {
            "tokens": {"tokens": draft.tokens.astype(jnp.float32)},
            "valid": {"valid": draft.valid.astype(jnp.int32)},
            "tree": {"tree": DraftTree((-1, 0, 0))},
            "row trees": {"tree": RowTrees.from_parents(jnp.array([[-1, 0, 0]]), 1)},
        }[self.change]
        return draft.replace(**change), state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": Token}, "rule is .*Token'>, a class; it must be a name or an object"),
        ({"rule": lambda *_: None}, "rule is .*, without name, lossless, seed_stable, laws, shapes"),
        ({"rule": "typical"}, "rule 'typical' changes the target's distribution; it needs allow_lossy=True"),
        ({"rule": "typical", "allow_lossy": "no"}, "allow_lossy is 'no'; it must be True or False"),
        ({"rule": Returns(what="nothing")}, "rule 'match' returned None; its path must be integers of shape"),
        ({"rule": Returns(what="a float")}, r"rule 'match' returned .*; its next_token must be integers of shape \(1,\)"),
        ({"rule": Returns(what="a short path")}, r"rule 'match' returned .*; its path must be integers of shape \(1, 2\)"),
        ({"drafter": Proposes(2, 3, 2, "tokens")}, "tokens are float32 and valid is bool; they must be integers and booleans"),
        ({"drafter": Proposes(2, 3, 2, "valid")}, "tokens are int32 and valid is int32; they must be integers and booleans"),
        ({"drafter": Proposes(2, 3, 2, "tree")}, r"proposed the tree DraftTree\(parents=\(-1, 0, 0\)\); it must be its own"),
        ({"drafter": Proposes(2, 3, 2, "row trees")}, r"TreeBounds\(num_nodes=2, depth=1\); it must be its own, DraftTree"),
        ({"drafter": DraftModel}, "drafter is the class DraftModel; it must be an object"),
        ({"drafter": draft_model(TARGET, 2, stop=lambda step: True)}, r"stop .* returned True; it must be booleans of shape"),
    ],
)  # fmt: skip
def test_generate(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draft_model("name"), "draft_model: model is 'name'; it must be a specjax.Model"),
        (lambda: draft_model(TARGET, 2, stop=StopAtEntropy), "stop is <class .*; it must be a hook"),
        (lambda: prompt_lookup(2, prompt_lookup_max=2.5), "prompt_lookup_max is 2.5; it must be a whole number from 1 to 64"),
        (lambda: prompt_lookup(2, prompt_lookup_min=True), "prompt_lookup_min is True; it must be a whole number"),
        (lambda: StopAtConfidence("a"), "StopAtConfidence: least is 'a'; it must be from 0 to 1"),
        (lambda: Typical(epsilon=True), r"Typical: epsilon is True; it must be in \(0, 1\]"),
        (lambda: DraftTree((-1, 0.7)), r"DraftTree: parents is \(-1, 0.7\); it must hold whole numbers"),
        (lambda: DraftTree.chain(2.0), "DraftTree.chain: length is 2.0; it must be a whole number"),
        (lambda: DraftTree.from_choices([(0.5,)]), r"path \(0.5,\); it must hold whole numbers"),
        (lambda: BoundDrafter(dataclasses.replace(counting_tree(DraftTree.chain(1)).functions, tree=(-1, 0))),
         r"tree is \(-1, 0\); it must be a DraftTree"),
        (lambda: specjax.stream(TARGET, [1], [PARAMS]), "stream: params is .*; it must be one SamplingParams"),
        (lambda: certify(None), "rule is None, without name"),
        (lambda: certify("token", law="independent"), "law is 'independent'; it must be a specjax.tree.Law"),
        (lambda: certify("token", seed=-1), "seed is -1; it must be a whole number of at least 0"),
        (lambda: certify("token", max_tokens=2), "max_tokens is 2; it must be None or a sequence of budgets"),
        (lambda: certify("token", max_tokens=()), r"max_tokens is \(\); it must be None or a sequence"),
        (lambda: certify("token", target="x"), "target is 'x'; it must be None or a Model"),
        (lambda: certify("token", logits_processor=5), "logits_processor is 5; it must be a hashable function"),
        (lambda: certify("greedy", sampling=PARAMS), "temperature is 1; rule 'greedy' needs 0"),
        (lambda: certify("token", sampling=specjax.SamplingParams(stop_token_ids=[7])), "stop_token_ids holds 7; ids of this"),
        (lambda: certify("token", allowed_tokens=specjax.AllowedTokens(np.zeros((1, 9), int))), "has 9 columns; ids of this"),
        (lambda: certify("token", depth=32), r"make 3\*\*66 outputs; at most"),
        (lambda: specjax.SamplingParams(temperature=1e39), "temperature is 1e\\+39; it must be a number of at least 0"),
        (lambda: specjax.SamplingParams(temperature=10**400), "temperature is 1000"),
        (lambda: specjax.SamplingParams(repetition_penalty=1e-40), "repetition_penalty is 1e-40; it must be a number above 0"),
        (lambda: specjax.SamplingParams(logit_bias={3: -1e39}), "that of 3 is -1e\\+39"),
        (lambda: specjax.SamplingParams(stop_token_ids=b"ab"), "stop_token_ids is b'ab'; it must be a sequence of token ids"),
    ],
)  # fmt: skip
def test_before_anything_runs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    assert draft_model(TARGET, np.int64(3)).functions.tree.num_nodes == 3
    assert certify("match", vocab_size=np.int64(2), depth=1, rounds=1, law=Law.DETERMINISTIC).lossless
