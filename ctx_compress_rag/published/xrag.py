"""xRAG (arXiv 2405.13792): github.com/Hannibal046/xRAG."""

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.published.format import EMBEDDINGS, ConvertedCheckpoint, PublishedDecoder, PublishedFormat
from ctx_compress_rag.published.remote_files import PublishedCheckpoint

_NAMES = {
    f"projector.projector.{theirs}.{kind}": f"projection.{own}.{kind}"
    for theirs, own in ((0, "inner"), (2, "outer"))
    for kind in ("weight", "bias")
}
_DECODER = "mistralai/Mistral-7B-Instruct-v0.2"
_ENCODER = "Salesforce/SFR-Embedding-Mistral"
_WINDOW = 178  # its 180 tokens, less the two that the tokenizer adds


class XragFormat(PublishedFormat):
    """xRAG's format, a map from a retriever's vectors, one for each passage, to a frozen decoder."""

    name = "xrag"
    known = (("Hannibal046/xrag-v1.1-7b", "apache-2.0"), ("Hannibal046/xrag-7b", "none given"))
    decoder_tensors = (EMBEDDINGS,)

    def matches(self, checkpoint: PublishedCheckpoint) -> bool:
        return "XMistralForCausalLM" in (checkpoint.json("config.json").get("architectures") or ())

    def files(self, checkpoint: PublishedCheckpoint) -> list[str]:
        return ["config.json", *sorted({checkpoint.shard(key) for key in _NAMES})]

    def decoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint:
        if given is not None:
            return PublishedCheckpoint.open(given)
        # A pickled decoder is not loaded, and it is the original one.
        safe = checkpoint.shard(EMBEDDINGS).endswith(".safetensors")
        return checkpoint if safe else PublishedCheckpoint.open(_DECODER)

    def encoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint | None:
        width = checkpoint.json("config.json").get("retriever_hidden_size")
        encoder = PublishedCheckpoint.open(given or _ENCODER)
        if width != (found := encoder.json("config.json").get("hidden_size")):
            raise ConfigError(
                f"{checkpoint} reads vectors of width {width}, and those of {encoder} have {found}: give its retriever "
                "with --encoder (encoder= in Python)"
            )
        return encoder

    def convert(self, checkpoint: PublishedCheckpoint, decoder: PublishedDecoder) -> ConvertedCheckpoint:
        settings = checkpoint.settings("config.json", "retriever_hidden_size", projector_type="mlp2x_gelu")
        tensors = {key: value for key in _NAMES if (value := checkpoint.tensor(key)) is not None}
        checkpoint.check_tensors(tensors, _NAMES)
        if decoder.files != checkpoint and (rows := checkpoint.tensor(EMBEDDINGS)) is not None:
            decoder.check_rows(EMBEDDINGS, rows)
        return ConvertedCheckpoint(
            {
                "method": {
                    "name": "own_encoder",
                    "ratio": _WINDOW,
                    "dim": settings["retriever_hidden_size"],
                    "pooling": "last",
                    "bos": True,
                    "eos": True,
                },
                "window": _WINDOW,
                "template": (
                    "Refer to the background document and answer the questions:\n\nBackground: {context}\n\n"
                    "Question: {question}"
                ),
                "separator": " ",
                "answer_prefix": " The answer is:",
                "answer_tokens": 30,
                "chat_template": decoder.instruct_format("[INST] "),
            },
            reader={own: tensors[theirs] for theirs, own in _NAMES.items()},
        )
