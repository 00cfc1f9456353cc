"""Proofs of decoders when they are opened: faults of an architecture are refused, whatever way they are met."""

import inspect
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.decoders.build import tiny_model, tiny_tokenizer
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
        given["inputs_embeds"] = model.get_input_embeddings()(ids) * (1 + ids % 5).unsqueeze(-1)


def buffer_for_ids(model: Any, given: Given) -> None:
    if (ids := given.pop("input_ids", None)) is not None:
        vectors = model.get_input_embeddings()(ids)
        given["inputs_embeds"] = vectors + torch.linspace(-1, 1, 64).to(vectors.dtype)


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
    "embeddings scaled on the way of ids only": (VECTORS, "llama", fault(ids_scaled)),
    "a buffer added on the way of ids only": (VECTORS, "llama", fault(buffer_for_ids)),
    "vectors refused": (VECTORS, "llama", fault(no_vectors)),
    "a buffer that changes with each call": (VECTORS, "llama", fault(after=counted)),
    "rows that see each other": (VECTORS, "llama", fault(after=lambda _, out: out.logits.add_(out.logits.mean(0)))),
    "a future that is seen": (
        VECTORS, "llama", fault(after=lambda _, out: out.logits.add_(out.logits.mean(1, keepdim=True)))
    ),
    "tables of layers left out": (VECTORS, "gemma3n_text", fault(lambda _, given: given.pop("per_layer_inputs", None))),
    "no mask": (PADDED, "llama", fault(lambda _, given: given.pop("attention_mask", None))),
    "padding that leaks": (PADDED, "llama", fault(after=lambda _, out: out.logits.add_(0.1 * out.logits[:, :1]))),
    "positions ignored": (PADDED, "gpt2", fault(lambda _, given: given.pop("position_ids", None))),
    "a cache that forgets": (CACHE, "llama", fault(forgotten)),
    "a state that forgets": (CACHE, "mamba2", fault(forgotten_state)),
    "a first position again": (
        CACHE, "llama", fault(lambda model, given: cached(model, given) and given["position_ids"].zero_())
    ),
    "padding read in a step": (
        CACHE, "llama", fault(lambda model, given: cached(model, given) and given["attention_mask"].fill_(1))
    ),
    "other weights with a cache": (VECTORS, "llama", fault(after=at_once)),
    "overflow": ("NaN or infinity", "llama", fault(after=lambda _, out: out.logits.div_(0.0))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused(name: str, dtype: torch.dtype) -> None:
    way, kind, install = FAULTS[name]
    model = tiny_model(kind).to(dtype)
    prove_decoder(model)
    install(model)
    with pytest.raises(ValueError, match=way):
        prove_decoder(model)


@pytest.mark.parametrize("kind", ["falcon_h1", "gemma3n_text", "gpt2", "llama", "mamba2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_no_fault(kind: str, dtype: torch.dtype) -> None:
    prove_decoder(tiny_model(kind).to(dtype))


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
    model = tiny_model("llama")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    load_decoder(folder)
    assert passes
    passes.clear()
    load_decoder(folder)
    assert not passes
    load_decoder(folder, dtype="bfloat16")  # rounds otherwise, and may overflow
    assert passes
    tiny_model("openai-gpt").save_pretrained(folder)
    for _ in range(2):  # what is refused is not kept
        with pytest.raises(BundleError, match=f"'{folder}'.*OpenAIGPT.*goes on from its cache.*choose another"):
            load_decoder(folder)


def reading_more(kind: str) -> Any:
    """A decoder that reads token ids in a way in which it does not read vectors."""
    model = tiny_model(kind)
    if kind == "falcon_h1":
        model.model.embedding_multiplier = 5.5
    return model


@pytest.mark.parametrize("kind", ["gemma3n_text", "falcon_h1"])
def test_slots_that_are_text_change_nothing_beside_what_ids_bring(kind: str) -> None:
    model = reading_more(kind)
    inputs, ids = DecoderInputs(model), torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    assert not inputs.vectors_suffice
    with torch.no_grad():
        found = model(**inputs.of(inputs.embed(ids), ids)).logits
        bare = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert (bare - expected).abs().max() > 0.1


def test_methods_that_read_layers_refuse_several_streams() -> None:
    model = tiny_model("gemma3n_text")
    reader = make_reader(model=model)
    with pytest.raises(ConfigError, match=r"returns states of shape \(4, .*mean_pooling"):
        read(reader, prompts(reader))
    compressor = ComprexitCompressor(Backbone(model, architectures.tokenizer("Llama")), ComprexitConfig(**COMPREXIT))
    with pytest.raises(ConfigError, match=r"returns states of shape \(4, .*mean_pooling"):
        compressor.hidden_states(torch.ones(1, 16, dtype=torch.long))


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma3n_text", "look up token ids"), ("falcon_h1", "scales embeddings")]
)
def test_a_server_that_reads_vectors_alone_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    config = tiny_config(method={"name": "mean_pooling", "layers": 0, "encoder": {"mode": "frozen"}}, base_ratio=4)
    with pytest.raises(ConfigError, match=f"{reason}.*use the engine 'transformers'"):
        export_for_vllm(Bundle.build(config, Backbone(reading_more(kind), tiny_tokenizer())), tmp_path)
