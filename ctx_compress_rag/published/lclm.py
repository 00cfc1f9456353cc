"""Latent Context Language Models (arXiv 2606.09659): github.com/LeonLixyz/LCLM."""

from __future__ import annotations

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.published.format import (
    EMBEDDINGS,
    Conversion,
    DecoderWithoutWeights,
    Format,
    check_tensor_names,
    read_required_settings,
)
from ctx_compress_rag.published.remote_files import Checkpoint

_CONFIG = "model_config.json"
_ADAPTER = "adapter/adapter.safetensors"
_NAMES = {
    "norm.weight": "norm.weight",
    "fc1.weight": "inner.weight",
    "fc1.bias": "inner.bias",
    "fc2.weight": "outer.weight",
    "fc2.bias": "outer.bias",
}


class Lclm(Format):
    """LCLM's format, an encoder, a two-layer map and a decoder, all three trained and published together."""

    name = "lclm"
    known = tuple((f"latent-context/0.6b-4b-LCLM-{ratio}x", "apache-2.0") for ratio in (4, 8, 16))
    decoder_tensors = (EMBEDDINGS,)

    def matches(self, checkpoint: Checkpoint) -> bool:
        return {_CONFIG, _ADAPTER, "encoder/config.json", "decoder/config.json"} <= checkpoint.sizes.keys()

    def files(self, checkpoint: Checkpoint) -> list[str]:
        return [_CONFIG, _ADAPTER]

    def decoder(self, checkpoint: Checkpoint, given: str | None) -> Checkpoint:
        if given is not None:
            raise ConfigError(f"decoder={given!r}: {checkpoint} has a decoder of its own: leave it out")
        return checkpoint.within("decoder")

    def encoder(self, checkpoint: Checkpoint, given: str | None) -> Checkpoint | None:
        super().encoder(checkpoint, given)
        return checkpoint.within("encoder")

    def convert(self, checkpoint: Checkpoint, decoder: DecoderWithoutWeights, encoder: Checkpoint | None) -> Conversion:
        assert encoder is not None
        # Its bidirectional mask has no effect with some attention implementations.
        plain = {"pooling": "mean", "encoder_mask_type": "causal", "boundary_overlap": 0, "adapter_type": "mlp"}
        settings = read_required_settings(checkpoint, _CONFIG, "compression_ratio", "encoder_window_size", **plain)
        adapter = checkpoint.tensors(_ADAPTER)
        check_tensor_names(adapter, _NAMES, f"{checkpoint}: {_ADAPTER}")
        reader = {f"projection.{own}": adapter[theirs] for theirs, own in _NAMES.items()}
        reader["wrap.before"] = decoder.token("<|memory_start|>")
        reader["wrap.after"] = decoder.token("<|memory_end|>")
        ratio = settings["compression_ratio"]
        method = {
            "name": "own_encoder",
            "ratio": ratio,
            "dim": read_required_settings(encoder, "config.json", "hidden_size")["hidden_size"],
            "normed": True,
            "wrap": {"before": 1, "after": 1},
        }
        return Conversion(
            {
                "method": method,
                "base_ratio": ratio,
                "max_tokens": settings["encoder_window_size"],
                "template": "{context}\n\nQuestion: {question}",
                "separator": "\n",
                "answer_tokens": 512,
            },
            reader=reader,
        )
