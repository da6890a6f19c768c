"""Models in int8: what is quantised, and that speculation is lossless to them as it is to others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.certificates import certify
from specjax.drafters import draft_model, eagle, medusa, prompt_lookup, stacked
from specjax.models.config import ExpertsConfig
from specjax.models.decoder import Decoder
from specjax.models.int8_model import quantise_model
from specjax.models.quantised import QuantisedMatrix, dequantise, is_quantised
from specjax.models.shallow import keep_layers
from specjax.training.material import Material
from specjax.tree import DraftTree
from tests import hash_model, heads

SPECIAL = dataclasses.replace(
    heads.CONFIG, qkv_bias=True, query_key_norm=True, tied_embedding=False, experts=ExpertsConfig(4, 2), post_norms=True,
    embedding_scale=2.0,
)  # fmt: skip
FORK = DraftTree((-1, 0, 0, 1, 1))


def logits_of(model, tokens):
    cache = model.init_cache(len(tokens), 4)
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(model.unembed(model.params, model.apply(model.params, tokens, positions, cache).hidden))


@pytest.mark.parametrize("config", [heads.CONFIG, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_matrices_are_quantised_and_nothing_else(config, stream):
    model = heads.target(config=config)
    quantised = quantise_model(model, stream)
    assert quantised.dtype == jnp.int8
    assert quantised.init_cache(2, 8).keys[0].dtype == stream
    jax.tree.map(
        lambda want, leaf: None if (want.shape, want.dtype) == (leaf.shape, leaf.dtype) else pytest.fail(f"{want} {leaf}"),
        quantised.functions.abstract_params(), quantised.params,
    )  # fmt: skip
    for path, leaf in jax.tree.leaves_with_path(quantised.params, is_leaf=is_quantised):
        name = path[-1].key
        assert is_quantised(leaf) == (name not in ("scale", "qkv_bias", "router")), name
        assert leaf.dtype == (jnp.float32 if name == "scale" else stream), name
    # The decoder computes what it would with the matrices that the int8 ones stand for, but for the rounding of activations.
    floats = jax.tree.map(lambda leaf: dequantise(leaf.astype("float32")) if is_quantised(leaf) else leaf, quantised.params,
                          is_leaf=is_quantised)  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 23, (2, 9))
    ours, theirs = logits_of(quantised, tokens), logits_of(dataclasses.replace(model, params=floats), tokens)
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.99
    assert ours.dtype == np.float32


def test_a_random_int8_decoder():
    config = dataclasses.replace(heads.CONFIG, int8_stream="float32")
    decoder = Decoder(config)
    params = decoder.init(jax.random.key(3))
    expected = quantise_model(heads.target()).functions.abstract_params()
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert isinstance(params["layers"][1]["mlp"]["down"], QuantisedMatrix)


def test_configurations_that_contradict_themselves():
    floats, int8 = Decoder(heads.CONFIG), Decoder(dataclasses.replace(heads.CONFIG, int8_stream="float32"))
    with pytest.raises(ValueError, match=r"dtype is 'int8', and config.int8_stream is None; it must be a dtype of floats, or"):
        floats.abstract_params("int8")
    with pytest.raises(ValueError, match=r"dtype is 'float32', and config.int8_stream is 'float32'; it must be int8"):
        int8.init(jax.random.key(0), "float32")
    with pytest.raises(ValueError, match=r"int8_stream is 'int8'; it must be None or one of float32, bfloat16"):
        dataclasses.replace(heads.CONFIG, int8_stream="int8")
    with pytest.raises(ValueError, match=r"int8_digits is 3; it must be 1 or 2"):
        quantise_model(heads.target(), digits=3)
    with pytest.raises(ValueError, match=r"product_parts is 2; int8 products, whose sums are exact, take 1 only"):
        dataclasses.replace(int8.config, product_parts=2)
    model = quantise_model(heads.target())
    with pytest.raises(ValueError, match=r"model 'tiny' is int8 already"):
        quantise_model(model)
    with pytest.raises(ValueError, match=r"is a HashModel; it must be a Decoder"):
        quantise_model(hash_model.model(hash_model.random_table()))
    with pytest.raises(ValueError, match=r"model 'tiny' is int8, through whose products nothing can be learned; load it in"):
        Material.prepare(model, None, "states")
    with pytest.raises(ValueError, match=r"DraftConfig: decoder has int8_stream 'float32'; trained layers are floats"):
        heads.draft_layers(model)


PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 1, 2], [7]]
SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=34),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=30, seed=5),
    SamplingParams(temperature=0.7, top_k=5, max_tokens=34, seed=2**40 + 11),
]
FLOATS = heads.cycling_target()
"""What heads are trained for."""
TARGET = quantise_model(FLOATS)
DRAFTERS = {
    "stacked": lambda: stacked(prompt_lookup(4, prompt_lookup_min=1), draft_model(keep_layers(TARGET, [0]), tree=FORK)),
    "medusa_tree": lambda: medusa(heads.medusa_heads(FLOATS, num_heads=2), tree=FORK),
    "lookup": lambda: prompt_lookup(4, prompt_lookup_min=1),
    "draft_model": lambda: draft_model(keep_layers(FLOATS, [1]), 3),
    "eagle": lambda: eagle(heads.eagle_head(FLOATS), 2),
    "draft_layers": lambda: draft_model(heads.draft_layers(FLOATS), 2),
}
ALWAYS = ("stacked", "medusa_tree")


@pytest.fixture(scope="module")
def plain():
    return [completion.token_ids for completion in specjax.generate(TARGET, PROMPTS, SETTINGS, rule="gumbel")]


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_no_token(name, plain, request):
    """A greedy row and two sampled ones in one batch, with drafts in int8, floats, or both."""
    if name not in ALWAYS and not request.config.getoption("--all-families"):
        pytest.skip("a round is compiled for each: two of them unless --all-families is given")
    completions = specjax.generate(TARGET, PROMPTS, SETTINGS, drafter=DRAFTERS[name](), rule="gumbel")
    assert [completion.token_ids for completion in completions] == plain
    assert sum(c.stats.num_accepted_tokens for c in completions) > 0
    assert sum(c.stats.num_tested - c.stats.num_accepted_tokens for c in completions) > 0


def test_heads_know_their_target_in_int8_and_no_other():
    head = heads.eagle_head(FLOATS)
    head.target.check(TARGET, "head")
    with pytest.raises(ValueError, match=r"the same sizes and other weights"):
        head.target.check(dataclasses.replace(TARGET, params=TARGET.functions.init(jax.random.key(9))), "head")


TINY = dataclasses.replace(heads.CONFIG, vocab_size=3, width=4, num_query_heads=2, num_kv_heads=1, head_dim=2, mlp_width=4)


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("block", lambda floats, int8: eagle(heads.eagle_head(floats, np.array([0, 2], np.int32)), 2)),
        ("gumbel", lambda floats, int8: medusa(heads.medusa_heads(floats, None), tree=DraftTree((-1, 0, 0, 1)))),
    ],
    ids=["block", "gumbel"],
)
def test_certificates(rule, drafter):
    """The distribution of whole outputs is that of the int8 target itself, to 1e-12."""
    with jax.enable_x64(True):
        floats = heads.target(config=TINY, dtype="float64")
        int8 = quantise_model(floats, "float64")
        certificate = certify(rule, target=int8, drafter=drafter(floats, int8))
    assert certificate.lossless, certificate.counterexample
    assert certificate.max_error <= 1e-12
    assert certificate.expected_tokens > 1.1
