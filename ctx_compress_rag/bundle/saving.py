"""Write the config and the weights of a bundle into its folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from ctx_compress_rag.bundle.files import (
    ADAPTER_FILE,
    CONFIG_FILE,
    DECODER_FOLDER,
    INT8_ADAPTER_FILE,
    REPORT_FILE,
    TEACHER,
    WEIGHTS_FILE,
    check_bundle_folder_free,
)
from ctx_compress_rag.bundle.identity import decoder_digest
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.identity import write_decoder
from ctx_compress_rag.models.int8 import weights_from_int8, weights_to_int8
from ctx_compress_rag.models.loading import INT8_FILE

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle

Pack = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def save_bundle(bundle: Bundle, folder: Path, *, int8: bool) -> None:
    """Write a bundle's config and weights for `Bundle.save_pretrained`, which describes the arguments and errors."""
    check_bundle_folder_free(folder)
    _ = bundle.backbone.model  # it may come from this folder, so it is loaded before anything is written
    old_teacher = TEACHER not in bundle.backbone.adapters and (folder / TEACHER).exists()
    if old_teacher and not (folder / CONFIG_FILE).exists():
        raise ConfigError(f"{folder / TEACHER} would be read as this bundle's teacher: give a new folder")
    # Until all weights are written, what is left of an earlier bundle must not load.
    for name in (CONFIG_FILE, REPORT_FILE, "README.md"):
        (folder / name).unlink(missing_ok=True)
    if old_teacher:
        shutil.rmtree(folder / TEACHER)
    pack: Pack = weights_to_int8 if int8 else _half if bundle.config.source is None else _exact
    for part, module in bundle.parts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        packed = pack(module.saved_state())
        module.load_saved_state(weights_from_int8(packed))
        save_file(packed, folder / part / WEIGHTS_FILE)
    bundle.compressor.save_files(folder)
    for name in bundle.backbone.adapters & {*bundle.parts, TEACHER}:
        lossless = name == TEACHER and not int8
        _save_adapter(bundle, name, folder / name, _exact if lossless else pack, int8=int8)
    shipped = folder / DECODER_FOLDER
    if bundle.config.decoder is None:
        _save_decoder(bundle, shipped, pack, int8=int8)
    digest = decoder_digest(bundle.config, bundle.backbone, shipped)
    bundle.config = bundle.config.model_copy(update={"decoder_digest": digest})
    config = bundle.config.model_dump_json(indent=2)
    (folder / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")


def _save_adapter(bundle: Bundle, name: str, folder: Path, pack: Pack, *, int8: bool) -> None:
    """Write an adapter as a peft folder, with its matrices in 8 bits if `int8`."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = pack(bundle.backbone.adapter_state(name))
    bundle.backbone.load_adapter_state(name, weights_from_int8(packed))
    save_file(packed, folder / (INT8_ADAPTER_FILE if int8 else ADAPTER_FILE))
    # An older file of the other kind could be read instead.
    (folder / (ADAPTER_FILE if int8 else INT8_ADAPTER_FILE)).unlink(missing_ok=True)
    bundle.backbone.save_adapter_config(name, folder)


def _save_decoder(bundle: Bundle, folder: Path, pack: Pack, *, int8: bool) -> None:
    """Write the decoder as a transformers folder, without adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    write_decoder(bundle.backbone.model, bundle.tokenizer, folder)
    packed = pack(bundle.backbone.own_state())
    bundle.backbone.load_own_state(weights_from_int8(packed))
    save_file(packed, folder / (INT8_FILE if int8 else WEIGHTS_FILE), metadata={"format": "pt"})
    # An older file of the other kind could be read instead.
    (folder / (WEIGHTS_FILE if int8 else INT8_FILE)).unlink(missing_ok=True)


def _exact(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a tensor to two bytes only if that is exact, because teachers and imported weights stay as given."""
    return {name: _halved(value) for name, value in state.items()}


def _halved(value: Tensor) -> Tensor:
    halves = (value.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((half for half in halves if torch.equal(half.to(value.dtype), value)), value)


def _half(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(torch.float16) for name, value in state.items()}
