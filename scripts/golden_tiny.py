"""The tiny random models of ``golden_values.py``: their configurations, and weights under which every part matters."""

import json
import math

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)


def tiny_configs():
    """Small, with every size different, so that no axis can be mistaken for another; no value is a default."""
    sizes = {
        "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 3e-5,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    # Wavelengths 6.3, 14, 30, ... of eight pairs: one above 48/4 turns, two between, five below 48/1.
    scaling = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 700.0}
    return {
        "tiny-llama": LlamaConfig(**sizes, rope_parameters=plain, tie_word_embeddings=True),
        "tiny-llama3": LlamaConfig(**sizes, rope_parameters=scaling, tie_word_embeddings=False),
        "tiny-qwen2": Qwen2Config(**sizes, rope_parameters=plain, tie_word_embeddings=True),
    } | tiny_families()


def tiny_families():
    """One model for each further family: of the least size that has what is special about it, in more than one layer."""
    # A width whose root is a float32: the reference rounds the embedding's scale to that, also in float64.
    sizes = {
        "vocab_size": 72, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 3e-5, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    plain, heads = {"rope_type": "default", "rope_theta": 700.0}, {"head_dim": 8}
    yarn = {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
        "beta_slow": 1.0,
    }  # fmt: skip
    # A rope for each kind of layer; three local layers around a global one.
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    }
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return {
        "tiny-qwen3": Qwen3Config(**sizes, **heads, rope_parameters=yarn, tie_word_embeddings=True),
        "tiny-mistral": MistralConfig(**sizes, **heads, rope_parameters=plain, sliding_window=9),
        "tiny-gemma2": Gemma2Config(
            **sizes | {"num_hidden_layers": 3}, **heads, rope_parameters=plain, sliding_window=10, query_pre_attn_scalar=6,
            attn_logit_softcapping=2.5, final_logit_softcapping=4.0,
        ),
        "tiny-gemma3": Gemma3TextConfig(
            **sizes | {"num_hidden_layers": 3}, **heads, rope_parameters=ropes, sliding_window=7, layer_types=layers,
            query_pre_attn_scalar=8,
        ),
        # Its heads have width / heads numbers.
        "tiny-phi3": Phi3Config(
            **sizes | {"num_attention_heads": 2, "num_key_value_heads": 1}, rope_parameters=plain, sliding_window=11,
            pad_token_id=0,
        ),
        "tiny-qwen3-moe": Qwen3MoeConfig(
            **sizes, **heads, **experts, num_experts=6, norm_topk_prob=False, rope_parameters=plain, tie_word_embeddings=True
        ),
        "tiny-mixtral": MixtralConfig(
            **sizes | {"intermediate_size": 12}, **heads, num_local_experts=4, num_experts_per_tok=2, rope_parameters=plain,
            tie_word_embeddings=True,
        ),
    }  # fmt: skip


@torch.no_grad()
def randomise(model, generator):
    """Weights under which every part matters: peaked attention, norms away from 1, biases away from 0."""
    # Where 1 is added to the scales of norms, so that the sum is exact in float32 they have few digits.
    around_zero = "Gemma" in type(model).__name__
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") and around_zero:
            weight.uniform_(-0.5, 0.5, generator=generator).mul_(1024).round_().div_(1024)
        elif name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            sharp = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            deviation = 0.5 if weight.ndim == 1 or "embed" in name or "lm_head" in name else sharp / math.sqrt(weight.shape[1])
            if name.endswith("mlp.gate.weight"):
                # Of a mixture of experts: no near ties between the chosen experts and the others.
                deviation *= 3
            weight.normal_(0.0, deviation, generator=generator)


def published_form(folder):
    """Rewrites config.json with ``rope_theta`` and ``rope_scaling``, as published checkpoints have it.

    transformers 5 writes ``rope_parameters`` instead; readers must understand both, so some folders have the older form.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    if "sliding_attention" in scaling:
        config["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = scaling["full_attention"]
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
