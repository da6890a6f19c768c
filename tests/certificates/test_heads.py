"""Trained heads under the enumerator: a tiny decoder as target, heads with random parameters and a reduced vocabulary."""

import numpy as np
import pytest

from specjax.certificates import certify
from specjax.drafters import draft_model, eagle, medusa
from specjax.models.config import DecoderConfig
from specjax.tree import DraftTree
from tests import heads

CONFIG = DecoderConfig(
    vocab_size=3, num_layers=2, width=4, num_query_heads=2, num_kv_heads=1, head_dim=2, mlp_width=4, max_positions=32
)
FORK = DraftTree((-1, 0, 0, 1))
IDS = np.array([0, 2], np.int32)


KINDS = {
    "eagle": (eagle, heads.eagle_head),
    "medusa": (medusa, heads.medusa_heads),
    "draft": (draft_model, heads.draft_layers),
}


@pytest.mark.parametrize(
    ("kind", "rule", "shape"),
    [
        ("eagle", "block", {"num_speculative_tokens": 2}),
        ("eagle", "traversal", {"tree": FORK}),
        ("eagle", "gumbel", {"tree": FORK}),
        ("medusa", "token", {"num_speculative_tokens": 2}),
        ("medusa", "without_replacement", {"tree": FORK}),
        ("medusa", "membership", {"tree": FORK}),
        ("draft", "token", {"num_speculative_tokens": 2}),
        ("draft", "without_replacement", {"tree": FORK}),
    ],
)
def test_heads_change_no_distribution(kind, rule, shape):
    model = heads.target(config=CONFIG, dtype="float64")
    bind, make = KINDS[kind]
    certificate = certify(rule, target=model, drafter=bind(make(model, IDS), **shape))
    assert certificate.lossless, certificate.counterexample
    assert certificate.max_error <= 1e-12
    assert certificate.expected_tokens > 1.1  # drafts are accepted
