"""ICAE, second version (arXiv 2307.06945): github.com/getao/icae."""

import re

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.models.layers import PEFT_PREFIX
from ctx_compress_rag.published.format import ConvertedCheckpoint, PublishedDecoder, PublishedFormat
from ctx_compress_rag.published.remote_files import PublishedCheckpoint

_FILE = re.compile(r"[\w.-]*ft_icae\.safetensors")
_DECODER = "mistralai/Mistral-7B-Instruct-v0.2"
_MEMORY = "memory_token_embed.weight"
_PREFIX, _INFIX = "icae.base_model.model.", ".default."
_RATIO = 4  # its code's mean_compression_rate: the file does not say it
_ALPHA = 32


class IcaeFormat(PublishedFormat):
    """ICAE's format, an adapter of the encoder and the embeddings of added tokens; the decoder is frozen."""

    name = "icae"
    known = (("sggetao/icae", "apache-2.0"),)
    caution = "its files do not name the decoder: any other of the same shape would be accepted"

    def matches(self, checkpoint: PublishedCheckpoint) -> bool:
        return any(map(_FILE.fullmatch, checkpoint.sizes))

    def files(self, checkpoint: PublishedCheckpoint) -> list[str]:
        found = sorted(filter(_FILE.fullmatch, checkpoint.sizes))
        if len(found) > 1:
            raise BundleError(f"{checkpoint} has {len(found)} checkpoints, {found}: copy one of them into a folder")
        return found

    def decoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint:
        return PublishedCheckpoint.open(given or _DECODER)

    def convert(self, checkpoint: PublishedCheckpoint, decoder: PublishedDecoder) -> ConvertedCheckpoint:
        [file] = self.files(checkpoint)
        tensors = checkpoint.tensors(file)
        memory = tensors.pop(_MEMORY, None)
        if memory is None:
            raise BundleError(f"{checkpoint}: {file} lacks {_MEMORY}: it is of another version")
        adapter = {
            PEFT_PREFIX + key.removeprefix(_PREFIX).replace(_INFIX, "."): value for key, value in tensors.items()
        }
        ranks = {len(value) for key, value in adapter.items() if ".lora_A." in key}
        if len(ranks) != 1:
            raise BundleError(f"{checkpoint}: {file} has adapters of ranks {sorted(ranks)}: one is needed")
        slots = len(memory) - 3  # after them: for autoencoding, for continuation, for answers
        return ConvertedCheckpoint(
            {
                "method": {
                    "name": "memory_tokens",
                    "ratio": _RATIO,
                    "slots": slots,
                    "bos": "first",
                    "equal": True,
                    "encoder": {
                        "rank": ranks.pop(),
                        "alpha": _ALPHA,
                        "target_modules": sorted({key.split(".lora_")[0].rpartition(".")[2] for key in adapter}),
                    },
                    "decoder": {"mode": "frozen"},
                    "wrap": {"after": 1},
                },
                "window": _RATIO * slots,
                # The question is tokenized alone there.
                "template": "{context} {question}" if decoder.spaces == "first" else "{context}{question}",
                "separator": "",
                "answer_tokens": 512,
                "chat_template": decoder.instruct_format("[INST]"),
            },
            compressor={"memory": memory[:slots], "begin": memory[:0]},
            reader={"wrap.before": memory[:0], "wrap.after": memory[-1:]},
            adapters={"compressor": adapter},
        )
