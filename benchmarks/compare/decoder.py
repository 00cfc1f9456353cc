"""The decoder that all entries of a comparison start from, and the hashes that identify it."""

import hashlib
import shutil
from pathlib import Path
from tempfile import mkdtemp

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file

from ctx_compress_rag.bundle import SHIPPED
from ctx_compress_rag.bundle.bundle import add_teacher
from ctx_compress_rag.bundle.files import TEACHER, WEIGHTS_FILE
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder, gguf_file
from ctx_compress_rag.models.identity import file_sha256, model_folder_digest, write_decoder
from ctx_compress_rag.models.loading import load_decoder


def teacher_folder(name: str) -> Path:
    """A teacher's peft folder: `name` itself, or that of the shipped bundle of this name."""
    return SHIPPED[name] / TEACHER if name in SHIPPED else Path(name)


def merge_teacher(decoder: str | GgufDecoder, teacher: str, folder: Path) -> None:
    """Write a decoder with a LoRA adapter merged into its weights, unless it is there already.

    The weights are bfloat16, so that training can hold them frozen in bfloat16 without changing them.
    """
    if folder.exists():
        return
    backbone = Backbone(*load_decoder(decoder, device="cpu", dtype="float32"))
    add_teacher(backbone, teacher_folder(teacher))
    for module in backbone.model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge(adapter_names=[TEACHER])
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(mkdtemp(dir=folder.parent, prefix=folder.name))
    write_decoder(backbone.model, backbone.tokenizer, part)
    weights = {name: value.to(torch.bfloat16) for name, value in backbone.own_state().items()}
    save_file(weights, part / WEIGHTS_FILE, metadata={"format": "pt"})
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not folder.exists():
            raise
        # Otherwise another run of the same comparison has just written the same decoder.


def decoder_sha256(decoder: str | GgufDecoder) -> str | None:
    """SHA-256 of a decoder's weights in a folder or GGUF file; None for one on the hub."""
    if isinstance(decoder, GgufDecoder):
        return file_sha256(gguf_file(decoder))
    digest = hashlib.sha256()
    files = sorted(Path(decoder).glob("*.safetensors"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else None


def teacher_sha256(teacher: str | None) -> str | None:
    """SHA-256 of a teacher's settings and weights."""
    return None if teacher is None else model_folder_digest(teacher_folder(teacher))
