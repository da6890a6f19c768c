"""How formats and families call the tensors of a decoder.

Letters in shapes: V vocabulary, E width, F MLP width, H query heads, K key/value heads, D head size, X experts.
"""

import dataclasses

from specjax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """What a format calls its tensors; ``{i}`` stands for the layer, ``{e}`` for the expert.

    A bias is called like its weight, with ``bias``. ``qkv`` and ``gate_up`` are set where the format has the rows of query,
    key and value, or of gate and up, in one tensor.
    """

    embedding: str
    final_norm: str
    unembedding: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    query_norm: str
    key_norm: str
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    router: str = ""
    qkv: str | None = None
    gate_up: str | None = None

    def bias(self, part: str) -> str:
        """Name of the bias beside the weight ``part`` ("query", "key" or "value")."""
        return getattr(self, part).removesuffix("weight") + "bias"

    def of_layer(self, index: int) -> "TensorNames":
        """The names of one layer."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return TensorNames(**{key: name and name.replace("{i}", str(index)) for key, name in named.items()})


HUGGING_FACE = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    unembedding="lm_head.weight",
    attention_norm="model.layers.{i}.input_layernorm.weight",
    query="model.layers.{i}.self_attn.q_proj.weight",
    key="model.layers.{i}.self_attn.k_proj.weight",
    value="model.layers.{i}.self_attn.v_proj.weight",
    out="model.layers.{i}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
    query_norm="model.layers.{i}.self_attn.q_norm.weight",
    key_norm="model.layers.{i}.self_attn.k_norm.weight",
)
HUGGING_FACE_GEMMA = dataclasses.replace(
    HUGGING_FACE,
    attention_post_norm="model.layers.{i}.post_attention_layernorm.weight",
    mlp_norm="model.layers.{i}.pre_feedforward_layernorm.weight",
    mlp_post_norm="model.layers.{i}.post_feedforward_layernorm.weight",
)
HUGGING_FACE_PHI3 = dataclasses.replace(
    HUGGING_FACE, qkv="model.layers.{i}.self_attn.qkv_proj.weight", gate_up="model.layers.{i}.mlp.gate_up_proj.weight"
)
HUGGING_FACE_QWEN3_MOE = dataclasses.replace(
    HUGGING_FACE,
    router="model.layers.{i}.mlp.gate.weight",
    gate="model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
    up="model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    down="model.layers.{i}.mlp.experts.{e}.down_proj.weight",
)
HUGGING_FACE_MIXTRAL = dataclasses.replace(
    HUGGING_FACE,
    router="model.layers.{i}.block_sparse_moe.gate.weight",
    gate="model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    up="model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    down="model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
)
GGUF = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    unembedding="output.weight",
    attention_norm="blk.{i}.attn_norm.weight",
    query="blk.{i}.attn_q.weight",
    key="blk.{i}.attn_k.weight",
    value="blk.{i}.attn_v.weight",
    out="blk.{i}.attn_output.weight",
    mlp_norm="blk.{i}.ffn_norm.weight",
    gate="blk.{i}.ffn_gate.weight",
    up="blk.{i}.ffn_up.weight",
    down="blk.{i}.ffn_down.weight",
    query_norm="blk.{i}.attn_q_norm.weight",
    key_norm="blk.{i}.attn_k_norm.weight",
    attention_post_norm="blk.{i}.post_attention_norm.weight",
    mlp_post_norm="blk.{i}.post_ffw_norm.weight",
)
GGUF_FUSED = dataclasses.replace(GGUF, qkv="blk.{i}.attn_qkv.weight", gate_up="blk.{i}.ffn_up.weight")
GGUF_EXPERTS = dataclasses.replace(
    GGUF,
    router="blk.{i}.ffn_gate_inp.weight",
    gate="blk.{i}.ffn_gate_exps.weight",
    up="blk.{i}.ffn_up_exps.weight",
    down="blk.{i}.ffn_down_exps.weight",
)


def expected_shapes(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a decoder needs."""
    width = config.width
    shapes = {names.embedding: (config.vocab_size, width), names.final_norm: (width,)}
    if not config.tied_embedding:
        shapes[names.unembedding] = (config.vocab_size, width)
    layer = {names.attention_norm: (width,), names.mlp_norm: (width,)} | _attention_shapes(config, names)
    if config.post_norms:
        layer |= {names.attention_post_norm: (width,), names.mlp_post_norm: (width,)}
    layer |= _mlp_shapes(config, names)
    for index in range(config.num_layers):
        shapes |= {name.replace("{i}", str(index)): shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    width, size = config.width, config.head_dim
    query, key = config.num_query_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {names.out: (width, query)}
    if names.qkv is not None:
        shapes[names.qkv] = (query + 2 * key, width)
    else:
        shapes |= {names.query: (query, width), names.key: (key, width), names.value: (key, width)}
    if config.qkv_bias:
        shapes |= {names.bias("query"): (query,), names.bias("key"): (key,), names.bias("value"): (key,)}
    if config.query_key_norm:
        shapes |= {names.query_norm: (size,), names.key_norm: (size,)}
    return shapes


def _mlp_shapes(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    width, mlp = config.width, config.mlp_width
    if config.experts is None:
        if names.gate_up is not None:
            return {names.gate_up: (2 * mlp, width), names.down: (width, mlp)}
        return {names.gate: (mlp, width), names.up: (mlp, width), names.down: (width, mlp)}
    count = config.experts.num_experts
    shapes: dict[str, tuple[int, ...]] = {names.router: (count, width)}
    for name, shape in ((names.gate, (mlp, width)), (names.up, (mlp, width)), (names.down, (width, mlp))):
        if "{e}" in name:
            shapes |= {name.replace("{e}", str(expert)): shape for expert in range(count)}
        else:
            shapes[name] = (count, *shape)
    return shapes
