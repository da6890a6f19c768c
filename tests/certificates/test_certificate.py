"""What the call itself takes, refuses and says."""

import pytest

from specjax.certificates import certify
from specjax.certificates.tiny import counting_tree, table_drafter
from specjax.decoding import round as rounds_
from specjax.row_trees import TreeBounds
from specjax.sampling import SamplingParams
from specjax.tree import DraftTree, Law
from specjax.verification import Match

TREE = DraftTree((-1, 0, 0, 1))
FORK = counting_tree(TREE)
SMALL = {"vocab_size": 2, "depth": 1, "rounds": 2}
STOPPING = SamplingParams(stop_token_ids=(1,))


def test_outputs_end_at_stop_ids():
    whole, stopped = certify("match", **SMALL), certify("match", **SMALL, sampling=STOPPING)
    assert whole.lossless
    assert stopped.lossless, stopped.counterexample
    assert stopped.expected_tokens < whole.expected_tokens


def test_outputs_that_go_on_behind_a_stop_id_are_found(monkeypatch):
    monkeypatch.setattr(rounds_.Round, "_ends", goes_on(rounds_.Round._ends))

    class Again(Match):
        """A rule of another class shares no compiled code with other tests."""

    found = certify(Again(), vocab_size=2, depth=1, rounds=1, sampling=STOPPING)
    assert found.max_error > 0.1
    assert found.counterexample == "after the prompt (1,), (1, 0) does not end at the first of the ids (1,)"


def goes_on(ends):
    def wrong(self, state, emitted, verdict, log_probs):
        return ends(self, state.replace(stop_token_ids=state.stop_token_ids - 7), emitted, verdict, log_probs)

    return wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "tokens"}, r"rule is 'tokens'; it must be one of \['block', 'greedy', 'gumbel', "),
        ({"rule": "match", "vocab_size": 1}, "vocab_size is 1; it must be a whole number of at least 2"),
        ({"rule": "match", "depth": -1}, "depth is -1; it must be a whole number of at least 0"),
        ({"rule": "match", "rounds": 0}, "rounds is 0; it must be a whole number of at least 1"),
        ({"rule": "match", "max_tokens": (7,)}, r"max_tokens is \(7,\); each must be from 1 to 6"),
        ({"rule": "match", "depth": 20}, "at most 200000 can be gone through"),
        ({"rule": "token", "law": Law.COUPLED}, r"rule 'token' is right for the laws .*; this drafter draws 'coupled'"),
        ({"rule": "token", "drafter": FORK}, r"rule 'token' takes drafts of shape \['chain'\]; this drafter proposes a tree"),
        ({"rule": "token", "tree": TREE}, r"rule 'token' takes drafts of shape \['chain'\]; this drafter proposes a tree"),
        (
            {"rule": "traversal", "tree": TreeBounds(3, 2)},
            r"rule 'traversal' takes drafts of shape \['chain', 'tree'\]; this drafter proposes a row_tree: where the shape is",
        ),
        ({"rule": "match", "tree": TreeBounds(3, 2), "law": (Law.DETERMINISTIC,) * 3}, "one for the whole draft of this drafter"),
        ({"rule": "match", "tree": (-1, 0)}, r"tree is \(-1, 0\); it must be None or a DraftTree or TreeBounds"),
        ({"rule": "match", "drafter": FORK, "tree": TREE}, "beside a drafter, which has a tree of its own"),
        ({"rule": "match", "tree": TREE, "law": (Law.DETERMINISTIC,)}, "it must be one for each of 3 draft nodes"),
        ({"rule": "token", "law": (Law.DETERMINISTIC,) * 2}, "it must be one for the whole draft of this drafter"),
        (
            {"rule": "multi_round", "tree": TREE, "law": (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT)},
            "rule 'multi_round' is right for the laws .*; this drafter draws 'without_replacement'",
        ),
        (
            {"rule": "match", "drafter": table_drafter(TREE, laws=(Law.COUPLED,) * 3), "law": Law.COUPLED},
            "this drafter has its laws already",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        certify(**arguments)
