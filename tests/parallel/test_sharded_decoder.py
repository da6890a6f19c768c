"""A pass over the shares of two devices is the pass over the whole, with every option of the decoder on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from specjax.cache import KVCache
from specjax.models.config import DecoderConfig, ExpertsConfig, LinearRopeScaling, RopeConfig
from specjax.models.decoder import Decoder
from specjax.parallel.mesh import MODEL
from specjax.parallel.rules import param_specs
from specjax.parallel.sharded_decoder import shard_functions

CONFIG = DecoderConfig(
    vocab_size=22, num_layers=2, width=12, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_width=10, max_positions=64,
    query_key_norm=True, qkv_bias=True, post_norms=True, activation="gelu_tanh", attention_scale=0.4, attention_soft_cap=2.0,
    logit_soft_cap=3.0, embedding_scale=2.0, window=4, local_layers=(0,), local_rope=RopeConfig(50.0, LinearRopeScaling(2.0)),
    experts=ExpertsConfig(4, 2),
)  # fmt: skip


def test_two_devices_compute_what_one_does():
    decoder = Decoder(CONFIG)
    params = decoder.init(jax.random.key(0), scale=0.5)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 22, (2, 6)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(6), tokens.shape)

    def logits(functions, params, cache):
        output = functions.apply(params, tokens, positions, cache)
        # Behind what is committed of the first pass, the same tokens again.
        cache = cache.commit(output.block, positions, jnp.array([6, 3]))
        hidden = functions.apply(params, tokens, cache.lengths[:, None] + positions, cache).hidden
        return functions.unembed(params, hidden)

    share = shard_functions(decoder, 2)
    assert (share.split.heads, share.split.mlp, share.split.vocab) == (True, True, True)
    heads = PartitionSpec(None, MODEL)
    mesh = Mesh(np.array(jax.devices()[:2]), (MODEL,))
    spread = jax.shard_map(
        lambda *inputs: logits(share, *inputs),
        mesh=mesh,
        in_specs=(param_specs(share), KVCache(keys=heads, values=heads, lengths=PartitionSpec())),
        out_specs=PartitionSpec(None, None, MODEL),
        check_vma=False,
    )
    cache = decoder.init_cache(params, 2, 12)
    expected = jax.jit(lambda *inputs: logits(decoder, *inputs))(params, cache)
    assert float(jnp.max(jnp.abs(expected))) < 3
    np.testing.assert_allclose(jax.jit(spread)(params, cache), expected, atol=2e-5)
