"""PISCO (arXiv 2501.16075) and CLaRa (arXiv 2511.18659), which has the same form: github.com/apple/ml-clara."""

from __future__ import annotations

from typing import Any

from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.published.checkpoint import Checkpoint
from ctx_compress_rag.published.format import (
    EMBEDDINGS,
    HEAD,
    Conversion,
    Format,
    Skeleton,
    exactly,
    lora_only,
    same_rows,
    supported,
)

_ADAPTERS = "adapters.pth"
_LAYERS = "decoder_first_last_layers.pth"
_PROMPT = (
    "You are a helpful assistant. Your task is to extract relevant information from provided documents and to answer "
    "to questions as briefly as possible.|||Background:\n{context}\n\nQuestion:{question}"
)


class Pisco(Format):
    """Two adapters of one decoder, and the embeddings of the tokens that were added to it.

    Both adapters are always loaded. CLaRa's own loader, with the settings that its Instruct checkpoints have, puts an
    untrained adapter in the place of the decoder's.
    """

    name = "pisco"

    def license(self, checkpoint: Checkpoint) -> str:
        if checkpoint.json("config.json")["model_type"] == "COCOM":
            return "cc-by-nc-4.0"  # the card's text; its metadata says cc-by-4.0
        return checkpoint.license or "apple-amlr"

    def matches(self, checkpoint: Checkpoint) -> bool:
        kind = checkpoint.json("config.json").get("model_type")
        return kind in ("COCOM", "CLaRa") and _ADAPTERS in checkpoint.sizes

    def files(self, checkpoint: Checkpoint) -> list[str]:
        return ["config.json", _ADAPTERS, _LAYERS]  # pisco-llama has old shards beside them

    def decoder(self, checkpoint: Checkpoint, given: str | None) -> Checkpoint:
        named = str(given or checkpoint.json("config.json")["decoder_model_name"])
        if given is None and named.startswith("/"):
            raise ConfigError(
                f"{checkpoint} names its decoder by a path on its authors' machine, {named!r}: give the decoder's hub "
                "id or folder with --decoder (decoder= in Python)"
            )
        return Checkpoint.open(named)

    def convert(self, checkpoint: Checkpoint, skeleton: Skeleton, encoder: Checkpoint | None) -> Conversion:
        settings = supported(checkpoint, "config.json", sep=True, different_mem_tokens=True, lora=True)
        ratio, rank = settings["compr_rate"], settings["lora_r"]
        slots = settings["doc_max_length"] // ratio
        adapters = checkpoint.tensors(_ADAPTERS)
        # CLaRa's end-to-end checkpoints have a third adapter, which ranks passages.
        exactly(adapters.keys() - {"query_reasoner_adapter"}, ["encoder_adapter", "decoder_adapter"], str(checkpoint))
        rows = self._added_rows(checkpoint, skeleton, slots + 3)
        tune = {"rank": rank, "alpha": 2 * rank}
        method: dict[str, Any] = {
            "name": "memory_tokens",
            "ratio": ratio,
            "slots": slots,
            "begin": True,
            "eos": True,
            "encoder": tune,
            "decoder": tune,
            "wrap": {"after": 1, "every": slots},
        }
        memory, _, begin, separator = rows.split([slots, 1, 1, 1])
        return Conversion(
            {
                "method": method,
                "base_ratio": ratio,
                "max_tokens": ratio * slots,
                "template": _PROMPT,
                "separator": "",
                "answer_tokens": 128,
            },
            compressor={"memory": memory, "begin": begin},
            reader={"wrap.before": separator[:0], "wrap.after": separator},
            adapters={
                "compressor": lora_only(adapters["encoder_adapter"]),
                "reader": lora_only(adapters["decoder_adapter"]),
            },
        )

    @staticmethod
    def _added_rows(checkpoint: Checkpoint, skeleton: Skeleton, count: int) -> Any:
        """The embeddings of the added tokens, after checking that all others are the decoder's."""
        layers = checkpoint.tensors(_LAYERS)
        exactly(layers.keys() | {HEAD}, [EMBEDDINGS, HEAD], f"{checkpoint}: {_LAYERS}")
        embeddings = layers[EMBEDDINGS]
        known = len(skeleton.tokenizer)
        if len(embeddings) != known + count:
            raise BundleError(
                f"{checkpoint}: {_LAYERS} has embeddings of {len(embeddings)} tokens, and the decoder {skeleton.files} "
                f"has {known}, to which {count} were added: give the right one with --decoder (decoder= in Python)"
            )
        same_rows(embeddings, skeleton.vocabulary, EMBEDDINGS, skeleton)
        if HEAD in layers:
            own = skeleton.files.tensor(HEAD)
            same_rows(layers[HEAD], skeleton.vocabulary if own is None else own, HEAD, skeleton)
        return embeddings[known:]
