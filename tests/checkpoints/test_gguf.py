import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.gguf import load_gguf_params, read_config
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.models.config import Llama3RopeScaling, RopeConfig
from specjax.models.decoder import Decoder
from tests.checkpoints import tiny


def load(path, dtype="float32"):
    file = GGUFFile(path)
    config, architecture = read_config(file)
    return config, load_gguf_params(file, config, architecture, dtype)


def refused(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


def test_query_and_key_rows_are_reordered_per_head(path):
    """Rows of a GGUF llama head lie as 0,4,1,5,2,6,3,7; with 4 query and 2 key heads all must come back in order."""
    tensors = tiny.gguf_tensors(tiny.hf_tensors())
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)):
        rows = np.concatenate([10 * head + np.array([0, 4, 1, 5, 2, 6, 3, 7]) for head in range(heads)])
        tensors[name] = np.broadcast_to(rows[:, None], (8 * heads, 32)).astype(np.float32).copy()
    _, params = load(tiny.write_gguf(path, tensors))
    # [kv head, query heads 0 and 1 of it, key, value; head size]
    rows = np.asarray(params["layers"][0]["attention"]["qkv"][..., 0])
    expected = [[10 * head + np.arange(8) for head in heads] for heads in ((0, 1, 0), (2, 3, 1))]
    np.testing.assert_array_equal(rows[:, :3], expected)


def test_qwen2_rows_are_not_reordered(path):
    source = tiny.hf_tensors(bias=True)
    _, params = load(tiny.write_gguf(path, tiny.gguf_tensors(source, "qwen2"), "qwen2"))
    attention = params["layers"][1]["attention"]
    query = source["model.layers.1.self_attn.q_proj.weight"].reshape(2, 2, 8, 32)
    np.testing.assert_array_equal(attention["qkv"][:, :2], query)
    np.testing.assert_array_equal(attention["qkv_bias"][:, 3], source["model.layers.1.self_attn.v_proj.bias"].reshape(2, 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tree_is_the_decoders(path, dtype):
    config, params = load(tiny.write_gguf(path, tiny.gguf_tensors(tiny.hf_tensors())), dtype)
    wanted = Decoder(config).abstract_params(dtype)
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    assert jax.tree.all(jax.tree.map(lambda ours, want: (ours.shape, ours.dtype) == (want.shape, want.dtype), params, wanted))


def test_absent_output_matrix_is_tied(path):
    config, params = load(tiny.write_gguf(path, tiny.gguf_tensors(tiny.hf_tensors(head=False))))
    assert config.tied_embedding
    assert "unembedding" not in params


def test_present_output_matrix_is_untied(path):
    source = tiny.hf_tensors()
    config, params = load(tiny.write_gguf(path, tiny.gguf_tensors(source)))
    assert not config.tied_embedding
    np.testing.assert_array_equal(params["unembedding"], source["lm_head.weight"])


KINDS = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02, "Q5_0": 0.2, "Q4_0": 0.4, "Q4_1": 0.4}


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_types(path, kind):
    """Every matrix in the type: values within its step of the originals, and no reordering lost on the way."""
    source = tiny.gguf_tensors(tiny.hf_tensors())
    kinds = {name: gguf.GGMLQuantizationType[kind] for name, tensor in source.items() if tensor.ndim == 2}
    _, exact = load(tiny.write_gguf(path, source))
    _, params = load(tiny.write_gguf(path, source, kinds=kinds))
    errors = jax.tree.map(lambda one, two: float(jnp.max(jnp.abs(one - two))), params, exact)
    assert max(jax.tree.leaves(errors)) < KINDS[kind]
    assert errors["embedding"] > 0
    assert errors["final_norm"]["scale"] == 0


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_block_types_that_cannot_be_written_here(path, kind):
    """Blocks of 256 zeros with a scale of 1 and one quant set; the layout is ggml's."""
    kind = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    block = np.zeros((2, block_bytes), np.uint8)
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    if kind.name == "Q4_K":
        block[:, 0:2], block[:, 4], block[:, 16] = one, 3, 5  # d, scale of the first 32, low nibble of value 0
        first, rest = 15, 0
    else:
        block[:, 208:210], block[:, 192:208], block[:, 0] = one, 2, 1  # d, scales, low bits of value 0
        first, rest = 2 * (1 - 32), 2 * -32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", block, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GGUFFile(path).read("x", np.float32)
    assert values.shape == (2, 256)
    assert values[:, 0].tolist() == [first, first]
    assert set(values[:, 1:].ravel()) == {rest}


def test_large_tensors_are_read_in_pieces(path):
    """More values than are dequantised at once; the last piece is shorter."""
    tensor = np.arange(3000 * 96, dtype=np.float32).reshape(3000, 96) % 61
    tiny.write_gguf(path, {"x": tensor}, kinds={"x": gguf.GGMLQuantizationType.F16})
    np.testing.assert_array_equal(GGUFFile(path).read("x", np.float32), tensor)
    assert GGUFFile(path).read("x", jnp.dtype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_type_that_cannot_be_dequantised(path):
    tensors = tiny.gguf_tensors(tiny.hf_tensors())
    tiny.write_gguf(path, tensors)
    data = path.read_bytes()
    # The type number of the embedding (F32, 0) behind its name, two dims and their count.
    place = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    kind = int(gguf.GGMLQuantizationType.I32)
    path.write_bytes(data[:place] + kind.to_bytes(4, "little") + data[place + 4 :])
    refused(path, r"'token_embd.weight' has type I32, which the gguf library cannot dequantise")
    path.write_bytes(data[:place] + (99).to_bytes(4, "little") + data[place + 4 :])
    refused(path, r"'token_embd.weight' has type number 99")


def test_truncated_anywhere(path):
    """Whatever is cut off, the error says so; nothing is read from behind the end."""
    whole = tiny.write_gguf(path, tiny.gguf_tensors(tiny.hf_tensors()), vocabulary=tiny.byte_vocabulary()).read_bytes()
    for size in (5, 20, 100, 1000, 5000, len(whole) // 2):
        path.write_bytes(whole[:size])
        refused(path, "truncated")
    # The writer pads behind the last tensor, so that cutting less than the padding loses nothing.
    path.write_bytes(whole[:-64])
    refused(path, rf"truncated: tensor '.*' ends at byte \d+, the file at {len(whole) - 64}")


@pytest.mark.parametrize(("content", "match"), [(b"", "not a GGUF file"), (b"PK\x03\x04 something", "not a GGUF file")])
def test_not_gguf(path, content, match):
    path.write_bytes(content)
    refused(path, match)


def test_version(path):
    data = tiny.write_gguf(path, tiny.gguf_tensors(tiny.hf_tensors())).read_bytes()
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    refused(path, r"GGUF version 1 cannot be read; supported: \(2, 3\)")


def test_missing_tensor(path):
    tensors = tiny.gguf_tensors(tiny.hf_tensors())
    del tensors["blk.1.ffn_up.weight"]
    refused(tiny.write_gguf(path, tensors), r"'blk.1.ffn_up.weight' of shape \(64, 32\) is missing")


def test_wrong_shape(path):
    tensors = tiny.gguf_tensors(tiny.hf_tensors())
    tensors["blk.1.attn_k.weight"] = tensors["blk.1.attn_q.weight"]
    refused(tiny.write_gguf(path, tensors), r"'blk.1.attn_k.weight' has shape \(32, 32\); the configuration asks for \(16, 32\)")


def test_leftover_tensor(path):
    tensors = tiny.gguf_tensors(tiny.hf_tensors()) | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    refused(tiny.write_gguf(path, tensors), r"1 tensors have no place in this architecture, the first is 'blk.0.attn_q.bias'")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"attention__sliding_window_pattern": [True], "attention__sliding_window": 9}, "an entry for each of 2 layers"),
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
        ({"expert_shared_count": 1}, "llama.expert_shared_count is 1; supported: 0"),
        ({"rope__scaling__type": "dynamic"}, "llama.rope.scaling.type is 'dynamic'; supported: 'none', 'linear', 'yarn'"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope' .*; supported: 'none', 'linear', 'yarn'"),
        ({"rope__scaling__factor": 2.0}, "llama.rope.scaling.factor is 2.0; without rope.scaling.type it must be 1.0"),
        ({"something_new": 1}, "llama.something_new is 1; this key is not known"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"feed_forward_length": [64, 32]}, r"llama.feed_forward_length is \[64, 32\]; it must be one int"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count is 4; it must be the head size, 8"),
        ({"vocab_size": 41}, "llama.vocab_size is 41; tensor 'token_embd.weight' has 40 rows"),
        ({"attention__head_count_kv": 3}, "num_query_heads is 4"),
    ],
)
def test_option_that_cannot_be_honoured(path, options, match):
    refused(tiny.write_gguf(path, tiny.gguf_tensors(tiny.hf_tensors()), **options), match)


def test_unknown_architecture(path):
    tiny.write_gguf(path, tiny.gguf_tensors(tiny.hf_tensors()), "mamba")
    refused(path, "general.architecture is 'mamba'; supported: llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, phi3")


def test_llama3_frequency_factors(path):
    """The divisors that converters write for Llama 3.1 give the frequencies of the formula."""
    scaling = Llama3RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
    plain = RopeConfig(theta=500.0)
    wanted = RopeConfig(theta=500.0, scaling=scaling).frequencies(8)
    factors = (plain.frequencies(8) / wanted).astype(np.float32)
    assert factors[0] == 1
    assert factors[-1] == 32
    tensors = tiny.gguf_tensors(tiny.hf_tensors()) | {"rope_freqs.weight": factors}
    config, _ = load(tiny.write_gguf(path, tensors, rope__freq_base=500.0))
    np.testing.assert_allclose(config.rope.frequencies(8), wanted, rtol=1e-6)
    tensors["rope_freqs.weight"] = factors[:3]
    refused(tiny.write_gguf(path, tensors), r"'rope_freqs.weight' has shape \(3,\); it must be \(4,\)")
    tensors["rope_freqs.weight"] = 0 * factors
    refused(tiny.write_gguf(path, tensors), r"factors\[0\] is 0.0")


def test_float16_overflow_is_reported(path):
    tensors = tiny.gguf_tensors(tiny.hf_tensors())
    tensors["blk.0.ffn_up.weight"][3, 4] = 1e5
    tiny.write_gguf(path, tensors)
    load(path, "bfloat16")
    with pytest.raises(ValueError, match=r"'blk.0.ffn_up.weight' has values beyond float16's largest"):
        load(path, "float16")
