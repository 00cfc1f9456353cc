"""Tiny models with random weights, one for each thing that a GGUF file says of a model in its own way."""

from typing import Any

import torch

_LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_FACTORS = {"short_factor": [1.0 + at / 16 for at in range(8)], "long_factor": [2.0 + at / 4 for at in range(8)]}
_SLIDING = ["sliding_attention"] * 5 + ["full_attention"]
_PAIR = ["sliding_attention", "full_attention"]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


# Name in the table: transformers' classes without their ends, and what differs from the common shape.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, scaled as 3.1 (llama3)": ("Llama", _rope(rope_type="llama3", **_LLAMA_3)),
    "Llama, scaled (linear)": ("Llama", _rope(rope_type="linear", factor=4.0)),
    "Llama, scaled (yarn)": ("Llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 2 MoE": ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                 "shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "Qwen 3": ("Qwen3", {"head_dim": 32}),
    "Qwen 3 MoE": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                 "norm_topk_prob": True}),
    "Qwen 3.5": ("Qwen3_5", {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                              "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4,
                              "mtp_num_hidden_layers": 0}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma 2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "Gemma 2, 46 layers as 27B": ("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 8,
                                              "num_hidden_layers": 46}),
    "Gemma 3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6}),
    "Gemma 3, scaled (4B and larger)": ("Gemma3", {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "Phi 3": ("Phi3", {"sliding_window": None}),
    "Phi 3, longrope": ("Phi3", {
        "sliding_window": None, "original_max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
                            **_FACTORS}}),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 4}),
    "Granite": ("Granite", {"embedding_multiplier": 4.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                             "attention_multiplier": 0.2}),
    "Granite hybrid": ("GraniteMoeHybrid", {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_groups": 1, "mamba_chunk_size": 16, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 64, "position_embedding_type": "nope"}),
    "OLMo 2": ("Olmo2", {}),
    "Cohere 2": ("Cohere2", {"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.25, "rotary_pct": 1.0}),
    "EXAONE 4": ("Exaone4", {"sliding_window": None, "sliding_window_pattern": None,
                              "layer_types": ["full_attention"] * 2}),
    "StableLM": ("StableLm", {"use_qkv_bias": True}),
    "StarCoder 2": ("Starcoder2", {"sliding_window": None}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "Mamba": ("Mamba", {}),
    "GLM 4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
}  # fmt: skip


def tiny_config(name: str, vocab_size: int) -> Any:
    """Return the transformers config of a shape."""
    import transformers

    family, shape = SHAPES[name]
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128 if family == "Mamba" else 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    text = "Text" if family in ("Gemma3", "Qwen3_5") else ""
    return getattr(transformers, f"{family}{text}Config")(**settings | shape)


def tiny_model(name: str, vocab_size: int) -> Any:
    """Return a causal LM whose logits depend strongly on every input, in float32."""
    import transformers

    config = tiny_config(name, vocab_size)
    torch.manual_seed(0)
    model = getattr(transformers, f"{SHAPES[name][0]}ForCausalLM")(config).float().eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if key.endswith(("bias", "norm.weight", "layernorm.weight")):  # else zeros and ones, which hide an error
            parameter.add_(torch.randn_like(parameter) * 0.2)
        parameter.copy_(parameter.half().float())
    return model
