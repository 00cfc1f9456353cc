"""The fingerprint of a bundle, which ties a store to the bundle that made its slots."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.identity import decoder_digest_in_memory, decoder_files_digest, model_folder_digest

_ASKING = {"template", "answer_tokens", "extractive", "text_share", "separator", "answer_prefix", "chat_template"}
_CHANGES_NO_SLOT = {"name", "reads", "decoder_digest", "source", "subfolder", "reader_share", *_ASKING}


def decoder_digest(config: BundleConfig, backbone: Backbone, shipped: Path | None = None) -> str:
    """Return 64 hex digits that identify the decoder's files; "" for one on the hub (commit) or in GGUF (own SHA-256).

    They identify a tokenizer beside a GGUF file. `shipped` is the folder of a decoder that is part of the bundle; None
    reads the decoder in memory instead.
    """
    if config.decoder is None:
        if shipped is None:
            return decoder_digest_in_memory(backbone.model, backbone.tokenizer)
        return decoder_files_digest(shipped)
    if isinstance(config.decoder, GgufDecoder) and config.decoder.tokenizer:
        return hashlib.sha256(backbone.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    in_folder = isinstance(config.decoder, str) and Path(config.decoder).is_dir()
    return model_folder_digest(Path(str(config.decoder), config.subfolder or "")) if in_folder else ""


def bundle_fingerprint(
    config: BundleConfig, commit: str, decoder: str, states: Mapping[str, Mapping[str, Tensor]]
) -> str:
    """Return the SHA-256 (hex) of the settings that affect slots, the decoder's commit and digest, and all tensors.

    Weights are hashed in half precision, as stored, so that the device's precision does not change the fingerprint.
    """
    settings = config.model_dump(mode="json", exclude=_CHANGES_NO_SLOT)
    if config.subfolder:
        settings |= {"subfolder": config.subfolder}
    if isinstance(config.decoder, GgufDecoder):
        # Only the file's content counts, not where it is.
        settings |= {"decoder": config.decoder.sha256, "revision": None}
    digest = hashlib.sha256(json.dumps([settings, commit, decoder], sort_keys=True).encode())
    for part in sorted(states):
        for name in sorted(states[part]):
            value = states[part][name]  # one by one: a large decoder's are read from files
            digest.update(f"{part} {name}".encode())
            digest.update(value.detach().to("cpu", torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of tensors by name, in bfloat16, so that the dtype of a loaded decoder has no effect."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().bfloat16().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
