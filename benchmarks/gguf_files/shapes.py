"""Tiny models with random weights, one for each thing that a GGUF file says of a model in its own way."""

from typing import Any

import torch

_LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_FACTORS = {"short_factor": [1.0 + at / 16 for at in range(8)], "long_factor": [2.0 + at / 4 for at in range(8)]}
_SLIDING = ["sliding_attention"] * 5 + ["full_attention"]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


_YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
_HALF = _rope(rope_type="default", partial_rotary_factor=0.5)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}  # fmt: skip
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
           "num_key_value_heads": 4}  # fmt: skip
_DELTA = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "num_hidden_layers": 4}  # fmt: skip
_SECTIONS = _rope(rope_type="default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0])
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_SCALES = {"embedding_multiplier": 4.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
_GEMMA_4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 12,
            "layer_types": _SLIDING * 2}  # fmt: skip
_OWN_HEAD = {"tie_word_embeddings": False}

# Name in the table: transformers' classes without their ends, and what differs from the common shape.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, scaled as 3.1 (llama3)": ("Llama", _rope(rope_type="llama3", **_LLAMA_3)),
    "Llama, scaled (linear)": ("Llama", _rope(rope_type="linear", factor=4.0)),
    "Llama, scaled (yarn)": ("Llama", _YARN),
    "Llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama 4": ("Llama4", _LOCAL | _OWN_HEAD | {
        "head_dim": 16, "num_hidden_layers": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, window": ("Mistral", {"sliding_window": 8}),
    "Mixtral": ("Mixtral", _LOCAL | _OWN_HEAD | {"sliding_window": None}),
    "Ministral 3": ("Ministral3", {"head_dim": 16, "sliding_window": None, **_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1)}),
    "Arcee": ("Arcee", {}),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen 2 MoE": ("Qwen2Moe", _OWN_HEAD | _EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "Qwen 3": ("Qwen3", {"head_dim": 32}),
    "Qwen 3, scaled (yarn)": ("Qwen3", _YARN),
    "Qwen 3 MoE": ("Qwen3Moe", _EXPERTS | {"norm_topk_prob": True}),
    "Qwen 3 MoE, norm_topk_prob: false": ("Qwen3Moe", _EXPERTS | {"norm_topk_prob": False}),
    "Qwen3-Next": ("Qwen3Next", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Qwen 3.5": ("Qwen3_5", _DELTA | _SECTIONS),
    "Qwen 3.5 MoE": ("Qwen3_5Moe", _DELTA | _SECTIONS | _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma 2": ("Gemma2", _GEMMA),
    "Gemma 2, 46 layers as 27B": ("Gemma2", _GEMMA | {"head_dim": 32, "num_hidden_layers": 46}),
    "Gemma 3": ("Gemma3", _GEMMA | {"num_hidden_layers": 6}),
    "Gemma 3, scaled (4B and larger)": ("Gemma3", _GEMMA | {
        "num_hidden_layers": 6,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "Gemma 4": ("Gemma4", _GEMMA_4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "Gemma 4, vectors per layer": ("Gemma4", _GEMMA_4 | {
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 6}),
    "Phi 2": ("Phi", _OWN_HEAD | _HALF | {"num_key_value_heads": 4, "intermediate_size": 256}),
    "Phi 3": ("Phi3", {"sliding_window": None}),
    "Phi 3, window": ("Phi3", {"sliding_window": 8}),
    "Phi 3, longrope": ("Phi3", {
        "sliding_window": None, "original_max_position_embeddings": 512, "max_position_embeddings": 1024,
        **_rope(rope_type="longrope", original_max_position_embeddings=512, **_FACTORS)}),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 4}),
    "SmolLM3, positions in every second layer": ("SmolLM3", {
        "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "Granite": ("Granite", _SCALES),
    "Granite MoE": ("GraniteMoe", _SCALES | _LOCAL),
    "Granite hybrid": ("GraniteMoeHybrid", _SCALES | _STATES | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 64, "position_embedding_type": "nope"}),
    "Granite hybrid MoE": ("GraniteMoeHybrid", _SCALES | _STATES | _LOCAL | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "position_embedding_type": "nope"}),
    "OLMo 2": ("Olmo2", _OWN_HEAD),
    "OLMo 3": ("Olmo3", _OWN_HEAD | {"sliding_window": 8, "num_hidden_layers": 4, "layer_types": _SLIDING[2:]}),
    "OLMoE": ("Olmoe", _OWN_HEAD | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
                                     "norm_topk_prob": False}),
    "Command R": ("Cohere", {"logit_scale": 0.25}),
    "Cohere 2": ("Cohere2", {"sliding_window": 8, "num_hidden_layers": 4, "logit_scale": 0.25, "rotary_pct": 1.0}),
    "EXAONE 4": ("Exaone4", {"sliding_window": None, "sliding_window_pattern": None,
                              "layer_types": ["full_attention"] * 2}),
    "EXAONE 4, windows as 32B": ("Exaone4", {"sliding_window": 8, "sliding_window_pattern": 4, "num_hidden_layers": 64,
                                              "layer_types": _SLIDING[2:] * 16}),
    "StableLM": ("StableLm", _OWN_HEAD | {"use_qkv_bias": True}),
    "StarCoder 2": ("Starcoder2", {"sliding_window": None}),
    "Nemotron": ("Nemotron", _OWN_HEAD | _HALF | {"head_dim": 16}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "LFM2 MoE": ("Lfm2Moe", _EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                                         "num_dense_layers": 1}),
    "Mamba": ("Mamba", {"intermediate_size": 128}),
    "Mamba 2": ("Mamba2", _OWN_HEAD | {"intermediate_size": 128, "num_heads": 8, "head_dim": 16, "state_size": 16,
                                        "n_groups": 1, "chunk_size": 16}),
    "Jamba": ("Jamba", _OWN_HEAD | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                                     "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False}),
    "Falcon-H1": ("FalconH1", _OWN_HEAD | _STATES | {"head_dim": 16, "mamba_d_ssm": 128}),
    "DeepSeek V2": ("DeepseekV2", _OWN_HEAD | _ROUTED | _LATENT | {"q_lora_rank": None}),
    "DeepSeek V3": ("DeepseekV3", _OWN_HEAD | _ROUTED | _LATENT | {
        "q_lora_rank": 16, "n_routed_experts": 8, "n_group": 2, "routed_scaling_factor": 2.5}),
    "GLM 4": ("Glm4", _HALF | {"head_dim": 16}),
    "GLM 4 MoE": ("Glm4Moe", _OWN_HEAD | _ROUTED | _HALF | {
        "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0}),
    "Hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "Ernie 4.5": ("Ernie4_5", {"head_dim": 16}),
    "Seed-OSS": ("SeedOss", {"head_dim": 16}),
    "gpt-oss": ("GptOss", _OWN_HEAD | _LOCAL | {"head_dim": 16, "sliding_window": 8, **_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
        truncate=False)}),
}  # fmt: skip


def tiny_config(name: str, vocab_size: int) -> Any:
    """Return the transformers config of a shape."""
    import transformers

    family, shape = SHAPES[name]
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
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
    text = "Text" if family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
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
