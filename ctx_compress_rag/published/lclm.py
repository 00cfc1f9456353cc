"""Latent Context Language Models (arXiv 2606.09659): github.com/LeonLixyz/LCLM."""

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.published.format import EMBEDDINGS, ConvertedCheckpoint, PublishedDecoder, PublishedFormat
from ctx_compress_rag.published.remote_files import PublishedCheckpoint

_CONFIG = "model_config.json"
_ADAPTER = "adapter/adapter.safetensors"
_NAMES = {
    "norm.weight": "norm.weight",
    "fc1.weight": "inner.weight",
    "fc1.bias": "inner.bias",
    "fc2.weight": "outer.weight",
    "fc2.bias": "outer.bias",
}


class LclmFormat(PublishedFormat):
    """LCLM's format, an encoder, a two-layer map and a decoder, all three trained and published together."""

    name = "lclm"
    known = tuple((f"latent-context/0.6b-4b-LCLM-{ratio}x", "apache-2.0") for ratio in (4, 8, 16))
    decoder_tensors = (EMBEDDINGS,)

    def matches(self, checkpoint: PublishedCheckpoint) -> bool:
        return {_CONFIG, _ADAPTER, "encoder/config.json", "decoder/config.json"} <= checkpoint.sizes.keys()

    def files(self, checkpoint: PublishedCheckpoint) -> list[str]:
        return [_CONFIG, _ADAPTER]

    def decoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint:
        if given is not None:
            raise ConfigError(f"decoder={given!r}: {checkpoint} has a decoder of its own: leave it out")
        return checkpoint.in_subfolder("decoder")

    def encoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint | None:
        super().encoder(checkpoint, given)
        return checkpoint.in_subfolder("encoder")

    def convert(self, checkpoint: PublishedCheckpoint, decoder: PublishedDecoder) -> ConvertedCheckpoint:
        # Its bidirectional mask has no effect with some attention implementations.
        plain = {"pooling": "mean", "encoder_mask_type": "causal", "boundary_overlap": 0, "adapter_type": "mlp"}
        settings = checkpoint.settings(_CONFIG, "compression_ratio", "encoder_window_size", **plain)
        encoder = checkpoint.in_subfolder("encoder").settings("config.json", "hidden_size")
        adapter = checkpoint.tensors(_ADAPTER)
        checkpoint.check_tensors(adapter, _NAMES, _ADAPTER)
        reader = {f"projection.{own}": adapter[theirs] for theirs, own in _NAMES.items()}
        reader["wrap.before"] = decoder.token("<|memory_start|>")
        reader["wrap.after"] = decoder.token("<|memory_end|>")
        method = {
            "name": "own_encoder",
            "ratio": settings["compression_ratio"],
            "dim": encoder["hidden_size"],
            "normed": True,
            "wrap": {"before": 1, "after": 1},
        }
        return ConvertedCheckpoint(
            {
                "method": method,
                "window": settings["encoder_window_size"],
                "template": "{context}\n\nQuestion: {question}",
                "separator": "\n",
                "answer_tokens": 512,
            },
            reader=reader,
        )
