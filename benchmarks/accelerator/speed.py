"""Speed and memory of decoders with random weights: `python -m benchmarks.accelerator.speed SHAPE`."""

import json
import random
import sys
import tempfile
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.timing.concurrency import concurrency, endless
from benchmarks.timing.speed import seconds_of
from benchmarks.world import BUNDLE
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, question_messages

SHAPES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (32, 64, 2, 2),
    "0.6B": (1024, 3072, 28, 16),
    "4B": (2560, 9728, 36, 20),
    "8B": (4096, 12288, 36, 32),
}
"""Of a decoder: width, width of its MLPs, layers, heads."""

_CALLERS = 8
_ROUNDS = 5


def measure(shape: str) -> dict[str, float]:
    """Seconds to the first token and to 30, from full text and from slots; eight callers' rate; most memory.

    A prompt has eight passages of 256 tokens. Weights are random, so answers say nothing.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLE / "decoder")
    bundle = _random_bundle(tokenizer, SHAPES[shape])
    rng, found = random.Random(0), dict[str, float]()
    passages = [str(tokenizer.decode(rng.choices(range(300, 1000), k=256))) for _ in range(8)]
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, bundle) as store, endless(bundle):
        decoder = Decoder(bundle, store, batch_size=_CALLERS)
        for name, ratio in (("text", None), ("4x", 4), ("16x", 16)):
            shown = passages if ratio is None else mark_texts(store, passages, ratio=ratio)
            chat = question_messages(TEMPLATES[0], PASSAGE_SEPARATOR.join(shown), "What is it about?")
            for tokens in (1, 30):
                sampling = Sampling(max_tokens=tokens)
                times = [seconds_of(partial(decoder.generate, [chat], sampling)) for _ in range(_ROUNDS + 1)]
                found[f"{name}: seconds to {tokens} tokens"] = median(times[1:])
            rate = concurrency(decoder, [chat] * _CALLERS, new_tokens=30, rounds=2).stream_rate
            found[f"{name}: tokens/s of {_CALLERS} callers"] = rate
    if torch.cuda.is_available():
        found["most memory, GB"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def _random_bundle(tokenizer: Any, shape: tuple[int, int, int, int]) -> Bundle:
    """A mean-pooling bundle on a Llama with random weights, for timing only; `shape` is as in `SHAPES`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ctx_compress_rag.bundle.config import BundleConfig
    from ctx_compress_rag.methods.mean_pooling import MeanPoolingConfig
    from ctx_compress_rag.models.backbone import Backbone
    from ctx_compress_rag.models.loading import choose_device

    device, dtype = choose_device()
    torch.manual_seed(0)
    width, inner, layers, heads = shape
    llama = LlamaConfig(
        vocab_size=max(32_000, len(tokenizer)),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with device:
        model: Any = AutoModelForCausalLM.from_config(llama, dtype=dtype)
    config = BundleConfig(name="random", method=MeanPoolingConfig(), base_ratio=4, ratios=[4, 8, 16], window=1024)
    bundle = Bundle.build(config, Backbone(model.eval(), tokenizer))
    bundle.reader.initialize(1.0)
    return bundle


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1]), indent=1) + "\n")
