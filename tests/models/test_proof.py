"""Proofs of decoders when they are opened: faults of an architecture are refused, whatever way they are met."""

import inspect
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.export import export_for_vllm
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.methods.comprexit import ComprexitCompressor, ComprexitConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.inputs import DecoderInputs
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.models.proof import prove_decoder
from ctx_compress_rag.models.transformers_internals import cache_argument
from helpers import architectures
from helpers.arcaligner import make_reader, prompts, read
from helpers.methods import COMPREXIT
from helpers.models import tiny_config

SHAPE: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = SHAPE | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tiny(kind: str, **shape: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | {"initializer_range": 0.2} | shape)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # of some, zeros would hide others
        parameter if parameter.any() else parameter.normal_()
    return model


Given = dict[str, Any]
CALLS = count()


def fault(before: Callable[[Any, Given], None] | None = None, after: Callable[[Given, Any], None] | None = None) -> Any:
    """What puts a fault into a model's forward pass: a change of its arguments, or of its output."""

    def install(model: Any) -> None:
        def pre(module: Any, args: Any, given: Given) -> tuple[Any, Given]:
            if before:
                before(module, given)
            return args, given

        def post(module: Any, args: Any, given: Given, out: Any) -> None:
            if after:
                after(given, out)

        model.register_forward_pre_hook(pre, with_kwargs=True)
        model.register_forward_hook(post, with_kwargs=True)

    return install


def cached(model: Any, given: Given) -> int:
    cache = given.get(cache_argument(model))
    return cache.get_seq_length() if cache is not None else 0


def ids_scaled(model: Any, given: Given) -> None:
    if (ids := given.pop("input_ids", None)) is not None:
        given["inputs_embeds"] = model.get_input_embeddings()(ids) * (1 + ids % 3).unsqueeze(-1)


def buffer_for_ids(model: Any, given: Given) -> None:
    if (ids := given.pop("input_ids", None)) is not None:
        vectors = model.get_input_embeddings()(ids)
        given["inputs_embeds"] = vectors + torch.linspace(-1, 1, 32).to(vectors.dtype)


def no_vectors(model: Any, given: Given) -> None:
    if given.get("inputs_embeds") is not None:
        raise TypeError("unexpected inputs_embeds")


def counted(given: Given, out: Any) -> None:
    out.logits += next(CALLS) * out.logits.roll(1, -1)


def forgotten(model: Any, given: Given) -> None:
    if cached(model, given):
        given[cache_argument(model)] = transformers.DynamicCache()
        given["attention_mask"] = given["attention_mask"][:, -1:]


def forgotten_state(model: Any, given: Given) -> None:
    if given.get("input_ids") is not None:
        given.update(dict.fromkeys({"cache", "cache_params", "past_key_values"} & given.keys()))


def at_once(given: Given, out: Any) -> None:
    out.logits += out.logits.roll(1, -1) * bool(given.get("use_cache"))


VECTORS, PADDED, CACHE = "reads vectors", "padded on the left", "goes on from its cache"
FAULTS: dict[str, tuple[str, str, Any]] = {
    "embeddings scaled on the way of ids only": (VECTORS, "Llama", fault(ids_scaled)),
    "a buffer added on the way of ids only": (VECTORS, "Llama", fault(buffer_for_ids)),
    "vectors refused": (VECTORS, "Llama", fault(no_vectors)),
    "a buffer that changes with each call": (VECTORS, "Llama", fault(after=counted)),
    "rows that see each other": (VECTORS, "Llama", fault(after=lambda _, out: out.logits.add_(out.logits.mean(0)))),
    "a future that is seen": (
        VECTORS, "Llama", fault(after=lambda _, out: out.logits.add_(out.logits.mean(1, keepdim=True)))
    ),
    "tables of layers left out": (VECTORS, "Gemma3nText", fault(lambda _, given: given.pop("per_layer_inputs", None))),
    "no mask": (PADDED, "Llama", fault(lambda _, given: given.pop("attention_mask", None))),
    "padding that leaks": (PADDED, "Llama", fault(after=lambda _, out: out.logits.add_(0.1 * out.logits[:, :1]))),
    "positions ignored": (PADDED, "GPT2", fault(lambda _, given: given.pop("position_ids", None))),
    "a cache that forgets": (CACHE, "Llama", fault(forgotten)),
    "a state that forgets": (CACHE, "Mamba2", fault(forgotten_state)),
    "a first position again": (
        CACHE, "Llama", fault(lambda model, given: cached(model, given) and given["position_ids"].zero_())
    ),
    "padding read in a step": (
        CACHE, "Llama", fault(lambda model, given: cached(model, given) and given["attention_mask"].fill_(1))
    ),
    "other weights with a cache": (VECTORS, "Llama", fault(after=at_once)),
    "overflow": ("NaN or infinity", "Llama", fault(after=lambda _, out: out.logits.div_(0.0))),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Gemma3nText": {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_hidden_layers": 4, "head_dim": 16,
        "intermediate_size": [32] * 4, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "num_key_value_heads": 1,
    },
    "Mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 4},
    "FalconH1": {
        "embedding_multiplier": 5.5, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_chunk_size": 4, "mamba_n_groups": 1, "num_key_value_heads": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(name: str, dtype: torch.dtype) -> None:
    way, kind, install = FAULTS[name]
    model = tiny(kind, **SHAPES.get(kind, {})).to(dtype)
    prove_decoder(model)
    install(model)
    with pytest.raises(ValueError, match=way):
        prove_decoder(model)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", *SHAPES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_no_fault(kind: str, dtype: torch.dtype) -> None:
    prove_decoder(tiny(kind, **SHAPES.get(kind, {})).to(dtype))


def test_a_decoder_is_proved_once_and_named_when_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", tmp_path / "assets")
    passes: list[Any] = []
    forward = transformers.LlamaForCausalLM.forward

    def counting(self: Any, *args: Any, **given: Any) -> Any:
        passes.append(given)
        return forward(self, *args, **given)

    counting.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counting)
    folder = tmp_path / "decoder"
    model = tiny("Llama")
    model.save_pretrained(folder)
    architectures.tokenizer("Llama").save_pretrained(folder)
    load_decoder(folder)
    assert passes
    passes.clear()
    load_decoder(folder)
    assert not passes
    load_decoder(folder, dtype="bfloat16")  # rounds otherwise, and may overflow
    assert passes
    tiny("OpenAIGPT").save_pretrained(folder)
    for _ in range(2):  # what is refused is not kept
        with pytest.raises(BundleError, match=f"'{folder}'.*OpenAIGPT.*goes on from its cache.*choose another"):
            load_decoder(folder)


@pytest.mark.parametrize("kind", ["Gemma3nText", "FalconH1"])
def test_slots_that_are_text_change_nothing_beside_what_ids_bring(kind: str) -> None:
    model = tiny(kind, **SHAPES[kind])
    inputs, ids = DecoderInputs(model), torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    assert not inputs.vectors_suffice
    with torch.no_grad():
        found = model(**inputs.of(inputs.embed(ids), ids)).logits
        bare = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert (bare - expected).abs().max() > 0.1


def test_methods_that_read_layers_refuse_several_streams() -> None:
    wide = {"hidden_size": 64, "vocab_size": 400, "vocab_size_per_layer_input": 400}
    model = tiny("Gemma3nText", **SHAPES["Gemma3nText"] | wide)
    reader = make_reader(model=model)
    with pytest.raises(ConfigError, match=r"returns states of shape \(4, .*mean_pooling"):
        read(reader, prompts(reader))
    compressor = ComprexitCompressor(Backbone(model, architectures.tokenizer("Llama")), ComprexitConfig(**COMPREXIT))
    with pytest.raises(ConfigError, match=r"returns states of shape \(4, .*mean_pooling"):
        compressor.hidden_states(torch.ones(1, 16, dtype=torch.long))


@pytest.mark.parametrize(("kind", "reason"), [("Gemma3nText", "look up token ids"), ("FalconH1", "scales embeddings")])
def test_a_server_that_reads_vectors_alone_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    tokenizer = architectures.tokenizer("Llama")
    model = tiny(kind, **SHAPES[kind] | {"vocab_size": len(tokenizer)})
    config = tiny_config(method={"name": "mean_pooling", "layers": 0, "encoder": {"mode": "frozen"}}, base_ratio=4)
    with pytest.raises(ConfigError, match=f"{reason}.*use the engine 'transformers'"):
        export_for_vllm(Bundle.build(config, Backbone(model, tokenizer)), tmp_path)
