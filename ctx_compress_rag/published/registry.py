"""The published formats, and why some checkpoints cannot become bundles."""

from __future__ import annotations

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.published.format import Format
from ctx_compress_rag.published.icae import Icae
from ctx_compress_rag.published.lclm import Lclm
from ctx_compress_rag.published.pisco import Pisco
from ctx_compress_rag.published.remote_files import Checkpoint
from ctx_compress_rag.published.xrag import Xrag

FORMATS: tuple[Format, ...] = (Lclm(), Pisco(), Xrag(), Icae())


def recognized(checkpoint: Checkpoint) -> Format:
    if reason := _refusal(checkpoint):
        raise BundleError(f"{checkpoint} cannot be imported: {reason}")
    for each in FORMATS:
        if each.matches(checkpoint):
            return each
    inside = f", or name one of its folders {checkpoint.folders} as subfolder" if checkpoint.folders else ""
    names = ", ".join(each.name for each in FORMATS)
    raise BundleError(f"{checkpoint} is of no format known here ({names}): give another checkpoint{inside}")


def _refusal(checkpoint: Checkpoint) -> str | None:
    config, files = checkpoint.json("config.json"), checkpoint.sizes
    kind = config.get("model_type")
    if kind == "COCOM" and config.get("compr_model_name") is not None:
        return "it is of OSCAR's kind, whose vectors depend on the question, so that nothing can be stored"
    if kind == "COCOM" and "adapters.pth" not in files:
        return "it is of COCOM's first kind, whose memory tokens come before the text and cannot see it; take PISCO"
    if "summary_length" in config:
        return "an AutoCompressor's vectors depend on all earlier segments, so that no passage has its own"
    if {"connector.pt", "decoder_state.pt"} & files.keys():
        return "it is of PISCO's second implementation, of which no trained weights are known"
    if "500xcompressor" in checkpoint.name.lower():
        return "500xCompressor hands over keys and values of each layer, not embeddings"
    return None
