"""Tiny random models of every decoder-only type that transformers maps to a causal LM, and their tokenizer."""

from functools import cache
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TEXTS = [
    "The lighthouse of Brenmoor was built in 1874 by Ada Quill. It stands on a basalt cliff.",
    "Pell trades in salt.",
    "Orla Reedwen keeps a goat, and it has two lamps; the ferry leaves at dawn, every day but on Sundays.",
]
_CHAT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_NO_DECODERS = {
    "halves of encoder-decoders": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart "
    "prophetnet trocr whisper",
    "encoders": "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
    "other objectives": "reformer xlm xlnet",
    "sound": "moshi musicgen musicgen_melody",
    "readers of images or sound": "dots3_note emu3 fuyu gemma3n git got_ocr2 mllama moss_transcribe_diarize "
    "phi4_multimodal",
    "drafters": "gemma4_assistant gemma4_unified_assistant",
    "no tokens": "blt cpmant",
}
WRAPPERS = ["gemma3", "gemma4", "gemma4_unified", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl"]
"""Checkpoints that also read images, whose text model is the decoder."""

_SIZES = {
    64: "attention_hidden_size d_model dim embed_dim embedding_size hidden_size lru_width n_embd word_embed_proj_dim",
    96: "dense_intermediate_size dff ffn_dim ffn_hidden_size intermediate_size intermediate_size_mlp n_inner",
    32: "expert_ffn_hidden_size expert_intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size",
    24: "q_lora_rank",
    16: "attention_head_dim global_head_dim head_dim index_head_dim index_n_heads kv_lora_rank linear_key_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim o_lora_rank qk_head_dim swa_head_dim v_head_dim",
    8: "attention_chunk_size attention_window_size hidden_size_per_layer_input index_topk laurel_rank local_attention "
    "mamba_d_state mamba_n_heads mamba_num_heads qk_nope_head_dim qk_rope_head_dim rotary_dim sliding_window "
    "ssm_state_size state_size window_size",
    4: "chunk_size linear_num_value_heads mamba_chunk_size mamba_dt_rank moe_num_experts n_head n_heads "
    "n_routed_experts num_attention_heads num_experts num_heads num_local_experts swa_num_attention_heads "
    "time_step_rank",
    2: "linear_num_key_heads mamba_expand moe_k moe_top_k moe_topk n_layer n_layers n_mamba_heads num_decoder_layers "
    "num_experts_per_tok num_experts_per_token num_global_key_value_heads num_hidden_layers num_key_value_heads "
    "num_layers num_query_groups o_groups swa_num_key_value_heads top_k_experts",
    1: "first_k_dense_replace mamba_n_groups mamba_ngroups moe_num_shared_experts n_group n_groups n_groups_router "
    "n_shared_experts num_dense_layers num_expert_group num_shared_experts topk_group",
    0: "num_nextn_predict_layers",
    128: "mamba_d_ssm",
    256: "context_length max_position_embeddings max_seq_len max_sequence_length model_max_length n_ctx n_positions "
    "original_max_position_embeddings seq_length",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}


def _kinds(kinds: str) -> list[str]:
    """Layer kinds by initials: a(ttention), s(liding), l(inear), c(onv), i(ndexed), m(lp), h(ybrid)."""
    names = {"a": "full", "s": "sliding", "l": "linear", "i": "indexed"}
    return [{"c": "conv", "m": "mlp", "h": "hybrid"}.get(kind) or f"{names[kind]}_attention" for kind in kinds]


_OLD_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_SPARSE = ["dense", "sparse", "sparse"]
_MLA = {"num_key_value_heads": 4, "head_dim": 8}
_MULTIPLIED = {
    "embedding_multiplier": 4.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2
}  # fmt: skip
_KDA = {"layer_types": _kinds("lla"), "mlp_layer_types": _SPARSE, "linear_head_dim": 16, "linear_num_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ZAMBA: dict[str, Any] = {
    "num_hidden_layers": 6, "layers_block_type": _kinds("lhlhll"), "attention_hidden_size": 128,
    "attention_head_dim": 32, "num_key_value_heads": 4, "use_mamba_kernels": False,
}  # fmt: skip
_FOUR_LAYERS = {  # of which two are not of all kinds, or whose answers two windows keep from their slots
    "afmoe", "beam", "deepseek_v4", "exaone_moe", "flint", "hy_v4", "kolibri1", "lara_mini", "lfm3", "llama4_text",
    "mistral", "modernbert-decoder", "recurrent_gemma",
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "axk1": {**_MLA, "n_group": 2, "mlp_layer_types": ["dense", "sparse"]},
    "bailing_hybrid": {**_KDA, "head_dim": 8, "num_expert_group": 2},
    "bamba": {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "layer_types": _kinds("sa")},
    "cohere2_moe": {"layer_types": _kinds("sa")},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}, "num_key_value_heads": 4,
        "layer_types": _kinds("sa"),
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2},
    "deepseek_v3": {**_MLA, "n_group": 2},
    "dory": {
        "num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,
        "layer_types": _kinds("smsmamam"),
    },
    "dots1": {
        "layer_types": _kinds("asa"), "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "dots3_note_text": {
        "layer_types": _kinds("iis"), "mlp_layer_types": _SPARSE, "per_layer_config": {},
        "shared_experts_intermediate_size": 32,
    },
    "exaone4": {"layer_types": _kinds("sa")},
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "gemma3n_text": {
        "intermediate_size": [96] * 4, "layer_types": _kinds("sasa"), "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma3_text": {"layer_types": _kinds("sa"), "query_pre_attn_scalar": 16},
    "gemma4_text": {"layer_types": _kinds("sa")},
    "gemma4_unified_text": {"layer_types": _kinds("sa")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granite": _MULTIPLIED,
    "granitemoe": _MULTIPLIED,
    "granitemoehybrid": {**_MULTIPLIED, "layer_types": _kinds("la")},
    "granitemoeshared": _MULTIPLIED,
    "hunyuan_v1_dense": {"head_dim": 16, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_key_value_heads": 2},
    "hyperclovax": {"logits_scaling": 4.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {**_KDA, "head_dim": 8},
    "lfm2": {"layer_types": _kinds("ca")},
    "lfm2_moe": {"layer_types": _kinds("cca")},
    "longcat_flash": {**_MLA, "num_layers": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16, "layer_types": _kinds("sa")},
    "nemotron": {"num_key_value_heads": 2},
    "olmo3": {"layer_types": _kinds("sa")},
    "qwen3_5_moe_text": {"layer_types": _kinds("la")},
    "qwen3_5_text": {"layer_types": _kinds("la")},
    "qwen3_next": {"layer_types": _kinds("la")},
    "qwen4_exp_text": {
        "layer_types": _kinds("lli"), "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1],
        "ple_embed_dim": 16, "ngram_vocab_size_base": 97, "heads_per_ngram": 2, "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
    },
    "sarvam_mla": {**_MLA, "n_group": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlstm": {"embedding_dim": 64, "num_blocks": 2, "chunk_size": 8, "qk_dim_factor": 1.0},
    "youtu": _MLA,
    "zamba": _ZAMBA,
    "zamba2": {
        **_ZAMBA, "n_mamba_heads": 8, "mamba_headdim": 16, "num_query_groups": 4, "kv_channels": 16,
        "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1, "adapter_rank": 8,
    },
}  # fmt: skip


def decoder_types() -> list[str]:
    """Return the types of transformers' causal LMs that read left to right and know text alone."""
    left_out = {name for names in _NO_DECODERS.values() for name in names.split()} | {*WRAPPERS, "qwen4_exp"}
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in left_out)


@cache
def tiny_tokenizer() -> Any:
    """Return a byte-level tokenizer of 400 tokens, without BOS, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS * 2, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=special[2:],
        chat_template=_CHAT,
        padding_side="left",
    )


def tiny_config(name: str) -> Any:
    """Return a config of a type, of few and narrow layers, for the tiny tokenizer."""
    kind: Any = CONFIG_MAPPING[name]
    if name not in WRAPPERS:
        return kind(**_shrunk(kind))
    text = type(kind().text_config)
    own = kind().vision_config
    seen = (own or kind.sub_configs["vision_config"]()).to_dict()
    unused = tiny_tokenizer().convert_tokens_to_ids(list("õö÷øùúû"))  # bytes that no text has
    special = [key for key in kind().to_dict() if key.endswith(("_token_id", "_token_index")) and key[:3] not in _ENDS]
    return kind(
        text_config={"model_type": text.model_type} | _shrunk(text),
        vision_config={key: value for key, value in _VISION.items() if key in seen},
        **({"audio_config": None} if name.startswith("gemma4") else {}),
        **dict(zip(special, unused, strict=False)),
    )


_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
_ENDS = ("pad", "bos", "eos")
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14, "num_channels": 3,
    "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [], "vision_output_dim": 64,
    "projector_input_dim": 64, "projector_output_dim": 64, "global_head_dim": 16,
}  # fmt: skip


def _shrunk(kind: Any) -> dict[str, Any]:
    full, tokenizer = kind().to_dict(), tiny_tokenizer()
    sizes = {key: _SIZE_OF[key] for key, value in full.items() if key in _SIZE_OF and type(value) in (int, float)}
    for experts in ("n_shared_experts", "num_experts", "num_experts_per_tok", "moe_topk", "moe_top_k"):
        if experts in sizes:
            sizes[experts] = min(sizes[experts], full[experts])  # a type without experts stays one
    if full.get("num_attention_heads") and full.get("num_key_value_heads") == full["num_attention_heads"]:
        sizes["num_key_value_heads"] = 4
    vocabulary = {key: len(tokenizer) for key in _VOCABULARIES if full.get(key)}
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    own = dict(_OWN.get(kind.model_type, {}))
    for key in ("layer_types", "layers_block_type"):
        if "mamba" in (full.get(key) or ()):  # before transformers 5.24
            own[key] = [_OLD_KINDS.get(each, each) for each in own.get(key, full[key])]
    if "layer_types" in own:
        sizes["num_hidden_layers"] = len(own["layer_types"])
    elif kind.model_type in _FOUR_LAYERS:
        sizes["num_hidden_layers"] = 4
    return sizes | vocabulary | {key: value for key, value in ends.items() if key in full} | own


def tiny_model(name: str, seed: int = 0) -> Any:
    """Return a causal LM of a type, in eval mode, frozen, with wide random weights that half precision holds exactly.

    Buffers that hold trained values are drawn, too.
    """
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForImageTextToText if name in WRAPPERS else transformers.AutoModelForCausalLM
    model = auto.from_config(tiny_config(name), dtype=torch.float32)
    _widen(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _widen(model: Any) -> None:
    """Draw matrices so wide that logits depend strongly on every input; recurrences stay as initialized, and stable."""
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is embed.weight
    for name, weight in model.named_parameters():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        fixed = any(part in name.lower() for part in ("a_log", "dt_bias", "conv", "time_", "rg_lru", "recurrent"))
        if weight.is_floating_point() and not fixed:
            if weight.ndim > 1 and weight.numel() > 64:
                wide = (
                    (0.1 if tied else 1.0) if isinstance(module, torch.nn.Embedding) else 1.3 / weight.shape[-1] ** 0.5
                )
                weight.normal_(std=wide)
            elif weight.ndim == 1 and "bias" in own:
                weight.normal_(std=0.1)
            elif weight.ndim == 1 and not weight.any():
                weight.normal_(std=0.3)
        weight.copy_(weight.half())
    stored = model.state_dict()
    for name, value in model.named_buffers():
        if name in stored and value.is_floating_point():
            if "bias" in name:
                value.normal_(std=0.3)
            elif "layer_scalar" in name:
                value.fill_(0.75)
