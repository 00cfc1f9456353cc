"""PISCO (arXiv 2501.16075) and CLaRa (arXiv 2511.18659, github.com/apple/ml-clara), which has the same format."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.layers import PEFT_PREFIX
from ctx_compress_rag.published.format import EMBEDDINGS, HEAD, ConvertedCheckpoint, PublishedDecoder, PublishedFormat
from ctx_compress_rag.published.remote_files import PublishedCheckpoint
from ctx_compress_rag.text.chat import takes_system

_ADAPTERS = "adapters.pth"
_LAYERS = "decoder_first_last_layers.pth"
_PROMPT = (
    "You are a helpful assistant. Your task is to extract relevant information from provided documents and to answer "
    "to questions as briefly as possible.|||Background:\n{context}\n\nQuestion:{question}"
)

_CLARA = "--subfolder compression-16 --decoder mistralai/Mistral-7B-Instruct-v0.2"


class PiscoFormat(PublishedFormat):
    """The format of PISCO and CLaRa, two adapters of one decoder and the embeddings of tokens that were added to it.

    Both adapters are always loaded. CLaRa's own loader, with the settings of the Instruct checkpoints, puts an
    untrained adapter in the place of the decoder's adapter.
    """

    name = "pisco"
    known = (
        *((f"naver/pisco-{decoder}", "cc-by-nc-4.0") for decoder in ("mistral", "llama", "solar")),
        *((f"apple/CLaRa-7B-{stage} {_CLARA}", "apple-amlr") for stage in ("Base", "Instruct", "E2E")),
    )
    decoder_tensors = (EMBEDDINGS, HEAD)

    def license(self, checkpoint: PublishedCheckpoint) -> str:
        if checkpoint.json("config.json")["model_type"] == "COCOM":
            return "cc-by-nc-4.0"  # the card's text; its metadata says cc-by-4.0
        return "apple-amlr" if checkpoint.license == "none given" else checkpoint.license

    def matches(self, checkpoint: PublishedCheckpoint) -> bool:
        config = checkpoint.json("config.json")
        # OSCAR's has another model for its vectors, which depend on the question: nothing could be stored.
        is_oscar = config.get("compr_model_name") is not None
        return config.get("model_type") in ("COCOM", "CLaRa") and _ADAPTERS in checkpoint.sizes and not is_oscar

    def files(self, checkpoint: PublishedCheckpoint) -> list[str]:
        return ["config.json", _ADAPTERS, _LAYERS]  # pisco-llama has old shards beside them

    def decoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint:
        named = str(given or checkpoint.json("config.json").get("decoder_model_name"))
        if given is None and (named == "None" or named.startswith("/")):
            raise ConfigError(
                f"{checkpoint} names as its decoder {named!r}, which is not on the hub: give the decoder's hub id or "
                "folder with --decoder (decoder= in Python)"
            )
        return PublishedCheckpoint.open(named)

    def convert(self, checkpoint: PublishedCheckpoint, decoder: PublishedDecoder) -> ConvertedCheckpoint:
        fixed = {"sep": True, "different_mem_tokens": True, "lora": True}
        settings = checkpoint.settings("config.json", "compr_rate", "lora_r", "doc_max_length", **fixed)
        ratio, rank = settings["compr_rate"], settings["lora_r"]
        slots = settings["doc_max_length"] // ratio
        adapters = checkpoint.groups(_ADAPTERS)
        # CLaRa's end-to-end checkpoints have a third adapter, which ranks passages.
        adapters.pop("query_reasoner_adapter", None)
        checkpoint.check_tensors(adapters, ["encoder_adapter", "decoder_adapter"])
        layers = checkpoint.tensors(_LAYERS)
        rows = self._added_rows(checkpoint, layers, decoder, slots + 3)
        tune = {"rank": rank, "alpha": 2 * rank}
        method: dict[str, Any] = {
            "name": "memory_tokens",
            "ratio": ratio,
            "slots": slots,
            "begin": 1,
            "eos": True,
            "encoder": tune,
            "decoder": tune,
            "wrap": {"after": 1, "every": slots},
        }
        layers.setdefault(HEAD, layers[EMBEDDINGS])  # tied
        memory, _, begin, separator = rows.split([slots, 1, 1, 1])
        prompt = _PROMPT if takes_system(decoder.tokenizer) else _PROMPT.replace("|||", "\n")
        return ConvertedCheckpoint(
            {"method": method, "window": ratio * slots, "template": prompt, "separator": "", "answer_tokens": 128},
            compressor={"memory": memory, "begin": begin},
            reader={"wrap.before": separator[:0], "wrap.after": separator},
            adapters={
                part: _lora_tensors(adapters[name], layers, f"{checkpoint}: {name}")
                for part, name in (("compressor", "encoder_adapter"), ("reader", "decoder_adapter"))
            },
        )

    @staticmethod
    def _added_rows(
        checkpoint: PublishedCheckpoint, layers: Mapping[str, Tensor], decoder: PublishedDecoder, count: int
    ) -> Any:
        """Return the embeddings of the added tokens, after checking that all others are the decoder's."""
        checkpoint.check_tensors(layers.keys() | {HEAD}, [EMBEDDINGS, HEAD], _LAYERS)
        embeddings = layers[EMBEDDINGS]
        known = len(decoder.tokenizer)
        if decoder.tokenizer.bos_token_id is None:
            raise BundleError(f"the decoder {decoder.files} has no BOS: give the one it was trained with")
        if len(embeddings) != known + count:
            raise BundleError(
                f"{checkpoint}: {_LAYERS} has embeddings of {len(embeddings)} tokens, and the decoder {decoder.files} "
                f"has {known}, to which {count} were added: give the right one with --decoder (decoder= in Python)"
            )
        for what, rows in layers.items():
            decoder.check_rows(what, rows)
        return embeddings[known:]


def _lora_tensors(state: Mapping[str, Tensor], known: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return an adapter's LoRA tensors, without the decoder's own (`known`), which newer peft writes, too.

    Raises BundleError for any other tensor, and for one that differs from the known one.
    """
    for key, value in state.items():
        if "lora_" not in key and not (key in known and torch.equal(value, known[key])):
            raise BundleError(f"{where} trained {key}, beside the adapter's own tensors: this cannot be imported")
    return {f"{PEFT_PREFIX}{key}": value for key, value in state.items() if "lora_" in key}
