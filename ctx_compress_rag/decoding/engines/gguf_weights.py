"""Write a bundle's decoder for llama.cpp in GGUF, with LoRA merged, a file each for prompts with slots and without."""

import ctypes
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.exported import write_exported_bundle
from ctx_compress_rag.bundle.files import TEACHER, WEIGHTS_FILE
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.engines.gguf_conversion import CONVERTER, convert_checkpoint
from ctx_compress_rag.decoding.engines.llama_cpp_context import KEPT, load_llama_cpp, threads
from ctx_compress_rag.decoding.engines.llama_cpp_proof import REMEDY, TOKENS, distance, scores_of, spread
from ctx_compress_rag.decoding.engines.protocol import EngineOptions
from ctx_compress_rag.decoding.export import plain_reader
from ctx_compress_rag.drafts import draft
from ctx_compress_rag.errors import BundleError, ConfigError, needs
from ctx_compress_rag.models.gguf import GgufDecoder, gguf_file
from ctx_compress_rag.models.gguf_tensors import changed, file_changes
from ctx_compress_rag.models.identity import write_decoder
from ctx_compress_rag.models.layers import added_to_weights, merged_copy
from ctx_compress_rag.prompt import Side

logger = logging.getLogger(__name__)

GgufWeights = Literal["F32", "BF16", "Q8_0", "Q4_0"]

_FTYPES = {"F32": 0, "BF16": 32, "Q8_0": 7, "Q4_0": 2}  # llama.cpp's numbers
_DIGEST = "general.description"  # a field that llama.cpp's own converter can write, too
_NO_WINDOW = ("mistral", "phi3", "qwen2", "starcoder2")  # all of their layers attend to everything in llama.cpp
UNLIKE = 0.05  # of the largest score: rounding of memory to half precision, of weights to bfloat16


def gguf_weights_digest(bundle: Bundle, side: Side) -> str:
    """Return 64 hex digits that name one side's weights; its GGUF file has them in the field `general.description`."""
    said = bundle.config.reader_share if side == "blend" else ""
    return hashlib.sha256(f"{bundle.fingerprint} {side} {bundle.teacher_digest}{said}".encode()).hexdigest()


def saved_bundle(bundle: PlainDecoder) -> Bundle:
    if type(bundle) is not Bundle:
        raise ConfigError(f"engine='llama.cpp' runs a bundle as it was saved, not a {type(bundle).__name__}")
    return bundle


def weights_digests(bundle: Bundle) -> dict[Side, str]:
    """Return the digests of the sides that need a file; of "text" alone if the same weights read all prompts."""
    reader = plain_reader(bundle, "llama.cpp")
    frozen = reader.tune.mode == "frozen" and TEACHER not in bundle.backbone.adapters
    return {side: gguf_weights_digest(bundle, side) for side in (("text",) if frozen else bundle.sides)}


def gguf_weights(bundle: Bundle, weights: str) -> Path:
    """Return the folder that `weights` names; for a type such as BF16, one in the cache that is made on first use."""
    if weights not in get_args(GgufWeights):
        if not Path(weights).is_dir():
            raise ConfigError(f"weights={weights!r}: give one of {', '.join(get_args(GgufWeights))}, or a folder")
        return Path(weights)
    _check_convertible(bundle, None)
    from huggingface_hub import cached_assets_path

    key = hashlib.sha256("".join(weights_digests(bundle).values()).encode()).hexdigest()
    folder = Path(cached_assets_path("ctx_compress_rag", "llama.cpp"), f"{key}-{weights}")
    if not folder.is_dir():
        logger.info("writing %s for llama.cpp: once for this bundle", folder)
        try:
            with draft(folder) as made:
                export_for_llama_cpp(bundle, made, weights)
        except OSError as error:
            if not folder.is_dir():  # else another process was faster
                raise ConfigError(f"cannot write {folder} ({error}): free some space, or export elsewhere") from error
    return folder


def export_for_llama_cpp(bundle: Bundle, folder: Path, weights: str = "BF16", converter: Path | None = None) -> None:
    """Write GGUF files, by llama.cpp's `converter` if the decoder is none; raise ConfigError if scores change."""
    _check_convertible(bundle, converter)
    folder.mkdir(parents=True, exist_ok=True)
    decoder, digests = bundle.config.decoder, weights_digests(bundle)
    if not bundle.compressor.needs_question:
        write_exported_bundle(bundle, folder, digests, longest(bundle.backbone.config.get_text_config(), bundle.window))
    for side in digests:
        with draft(folder / f"{side}.gguf") as made:
            plain = made.with_name("f32.gguf")
            if isinstance(decoder, GgufDecoder):
                _write(bundle, gguf_file(decoder, bundle.config.revision), _added(bundle, side), side, plain)
            else:
                write_checkpoint(bundle, side, made.with_name(side))
                convert_checkpoint(Path(str(converter)), made.with_name(side), plain)
            _check_scores(bundle, side, plain)
            _quantize(plain, made, weights)


def longest(config: Any, window: int | None) -> int | None:
    """Return the most positions that llama.cpp reads as transformers does; None if there is no limit."""
    limits, rope = [window], getattr(config, "rope_parameters", None) or {}
    if config.model_type in _NO_WINDOW:
        limits.append(config.sliding_window)
    if rope.get("rope_type") == "longrope" and rope["long_factor"] != rope["short_factor"]:
        # transformers takes the long factors for long prompts, llama.cpp for all if its memory is larger than this.
        limits.append(rope["original_max_position_embeddings"] - KEPT)
    return min((limit for limit in limits if limit), default=None)


def _check_convertible(bundle: Bundle, converter: Path | None) -> None:
    if converter is None and not isinstance(bundle.config.decoder, GgufDecoder):
        raise ConfigError(
            f"the decoder of {bundle.config.name} is not a GGUF file: run ctx-compress export BUNDLE DIR --engine "
            f"llama.cpp --convert {CONVERTER}, llama.cpp's converter, and give DIR as weights"
        )


def _added(bundle: Bundle, side: Side) -> dict[str, Tensor]:
    """Return what one side adds to the decoder's weights that it changes, by transformers' names, in float32."""
    backbone, reader = bundle.backbone, bundle.reader
    if side == "reader" and reader.own is not None:
        own = dict(reader.own.named_parameters())
        return {name: own[name].float() - base.float() for name, base in backbone.own_state().items() if name in own}
    with backbone.lock:
        return added_to_weights(backbone.model, bundle.adapter_shares(side))


def write_checkpoint(bundle: Bundle, side: Side, folder: Path) -> None:
    """Write one side's weights as a transformers checkpoint for llama.cpp's converter."""
    folder.mkdir(parents=True, exist_ok=True)
    added, model = _added(bundle, side), bundle.backbone.model
    model.config.architectures = model.config.architectures or [type(model).__name__]  # the converter asks for it
    write_decoder(model, bundle.tokenizer, folder)
    state = bundle.backbone.own_state()
    merged = {name: (value.float() + added[name]).to(value.dtype) for name, value in state.items() if name in added}
    save_file(state | merged, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    about = f'{{"{_DIGEST}": "{gguf_weights_digest(bundle, side)}"}}\n'
    (folder / "metadata.json").write_text(about, encoding="utf-8")


def _check_scores(bundle: Bundle, side: Side, file: Path) -> None:
    """Raise ConfigError if llama.cpp has other scores than transformers, for a short text and one beyond windows."""
    backbone, own, name = bundle.backbone, bundle.reader.own, bundle.config.name
    config, size = backbone.config.get_text_config(), EngineOptions().context_size
    size = min(size, longest(config, bundle.window) or size)
    windows = (getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size"))
    lengths = sorted({min(TOKENS + window, size - 1) for window in (0, *windows)})
    if lengths[0] < 1:
        raise ConfigError(f"llama.cpp reads no more than {size} positions of {name!r}: use the engine 'transformers'")
    with backbone.lock, torch.no_grad():
        model = own if side == "reader" and own is not None else None
        model = model or merged_copy(backbone.model, bundle.adapter_shares(side))
        texts = [torch.tensor([spread(config.vocab_size, length)], device=backbone.device) for length in lengths]
        expected = [model(ids).logits[0, -TOKENS:].float().cpu().numpy() for ids in texts]
    try:
        found = scores_of(file, gguf_weights_digest(bundle, side), backbone.dim, config.vocab_size, size, lengths)
    except BundleError as error:
        raise ConfigError(f"llama.cpp cannot run {name!r} ({config.model_type}; it said: {error}): {REMEDY}") from error
    for length, ours, theirs in zip(lengths, found, expected, strict=True):
        if (off := distance(ours, theirs)) > UNLIKE:
            raise ConfigError(
                f"llama.cpp computes {name!r} otherwise than transformers ({config.model_type}): after {length} "
                f"tokens, scores differ by {off:.2g} of the largest: {REMEDY}"
            )


def _write(bundle: Bundle, source: Path, added: Mapping[str, Tensor], side: Side, plain: Path) -> None:
    """Write a decoder's GGUF file with other weights, and without its tokenizer, which llama.cpp does not need here."""
    with needs("llama-cpp"):
        import gguf

    reader = gguf.GGUFReader(source)
    try:
        changes = file_changes(reader, added, bundle.backbone.config.get_text_config())
    except KeyError as error:
        raise ConfigError(f"{source} has no tensor {error}, which the bundle's adapters change") from None
    writer = gguf.GGUFWriter(plain, reader.fields["general.architecture"].contents())
    _copy_fields(reader, writer, bundle.backbone.embeddings.num_embeddings)
    writer.add_description(gguf_weights_digest(bundle, side))
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if (change := changes.get(tensor.name)) is not None:
            values = changed(values, tensor.name, change)
        writer.write_tensor_data(values)
    writer.close()


def _copy_fields(reader: Any, writer: Any, vocabulary: int) -> None:
    """Copy a file's settings without its tokenizer, because this library tokenizes and llama.cpp then loads faster."""
    import gguf

    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.", "general.")) or name.endswith(".vocab_size"):
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _quantize(plain: Path, file: Path, weights: str) -> None:
    llama = load_llama_cpp()
    if weights == "F32":
        plain.rename(file)
        return
    options = llama.llama_model_quantize_default_params()
    options.ftype, options.nthread = _FTYPES[weights], threads()
    if llama.llama_model_quantize(bytes(plain), bytes(file), ctypes.byref(options)):
        raise ConfigError(f"llama.cpp cannot write {weights} weights of this decoder: try another type")
