"""A distilled draft model is a model that shares its target's matrices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.decoder import Decoder
from specjax.models.draft_layers import layers_of
from tests import heads

TOKENS = jnp.array([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
POSITIONS = jnp.broadcast_to(jnp.arange(5), (2, 5))


def test_it_computes_what_a_model_with_copies_computes():
    """All tokens: the same bits. A reduced vocabulary: the same logits for its tokens, -inf for the others. All are capped."""
    model = heads.cycling_target()
    model = dataclasses.replace(model, functions=Decoder(dataclasses.replace(model.config, logit_soft_cap=2.0)))
    for ids in (None, heads.IDS):
        trained = heads.draft_layers(model, ids, num_layers=2)
        params = {"own": trained.params, "shared": trained.shared(model)}
        cache = trained.functions.init_cache(params, 2, 1)
        draft = trained.functions.unembed(params, trained.functions.apply(params, TOKENS, POSITIONS, cache).hidden)
        copies = {name: jnp.array(model.params[name]) for name in ("embedding", "unembedding")}
        decoder, whole = Decoder(model.config), trained.params | copies
        logits = decoder.unembed(whole, decoder.apply(whole, TOKENS, POSITIONS, cache).hidden)
        known = np.arange(23) if ids is None else ids
        np.testing.assert_allclose(draft[..., known], logits[..., known], rtol=1e-6, atol=1e-6)
        assert np.all(np.delete(np.asarray(draft), known, axis=-1) == -np.inf)


def test_nothing_of_the_target_is_copied():
    model = heads.target()
    functions, params = layers_of(model, [1], draft_vocab_size=5)
    assert functions.config.decoder.num_layers == 1
    for own, theirs in zip(jax.tree.leaves(params["layers"][0]), jax.tree.leaves(model.params["layers"][1]), strict=True):
        assert own is theirs
    shared = heads.draft_layers(ids=None).shared(model)
    assert shared["embedding"] is shared["output"] is model.params["embedding"]
