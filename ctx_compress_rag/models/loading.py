"""Load a decoder from a transformers folder, the hub or a GGUF file, onto a device, in a dtype, perhaps quantized."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm.auto import tqdm

from ctx_compress_rag.errors import BundleError, ConfigError, CtxCompressError
from ctx_compress_rag.models.gguf import GgufDecoder, gguf_file, open_gguf
from ctx_compress_rag.models.proof import prove_once
from ctx_compress_rag.models.transformers_internals import hub_commit
from ctx_compress_rag.models.weights import load_own_tensors, own_tensors, weights_from_int8

logger = logging.getLogger(__name__)

INT8_FILE = "model.int8.safetensors"

# Transformers' verbosity and bars are the process's; other threads may load models at the same time.
_loading_lock = threading.Lock()
_before_loading: list[tuple[int, bool]] = []


@dataclass(frozen=True)
class UnloadedModel:
    """A causal LM that is not in memory, with the device and dtype that its weights will have."""

    config: Any  # of transformers
    generation_config: Any
    device: torch.device
    dtype: torch.dtype
    load: Callable[[], Any]  # returns the model in eval mode with frozen parameters, or raises a BundleError


def choose_device(device: str | torch.device | None = None) -> tuple[torch.device, torch.dtype]:
    """Return a device (None: CUDA, MPS or CPU) and bfloat16 on CUDA, else float32. Raise ConfigError if absent."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:  # the latter from a torch built without CUDA
        said = str(error).partition("\n")[0]
        raise ConfigError(f"device={str(device)!r} cannot be used here ({said}): choose cuda, mps or cpu") from error
    dtype = torch.bfloat16 if chosen.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return chosen, dtype


def open_decoder(
    name: str | Path | GgufDecoder,
    revision: str | None = None,
    device: str | torch.device | None = None,
    *,
    subfolder: str | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantization_config: Any = None,
) -> tuple[UnloadedModel, Any]:
    """Open a causal LM and its tokenizer in a folder or on the hub, from safetensors or GGUF, never pickle or code.

    The options are those of `Bundle.from_pretrained`. `subfolder` is the decoder's place in the folder or repository.

    Returns: the model, whose weights are not yet loaded or downloaded, and the tokenizer, which pads on the left.

    Raises:
        ConfigError: an option is impossible, or impossible on this machine.
        BundleError: the decoder cannot be loaded. The message names it.
        MissingExtraError: the decoder is a GGUF file, and a package that reads such files is not installed.
    """
    if device is not None and device_map is not None:
        raise ConfigError(f"device={str(device)!r} and device_map={device_map!r}: give one of them")
    chosen, suited = choose_device(device)
    weights = suited if dtype is None else _dtype(dtype)
    placed = {"device_map": device_map, "quantization_config": quantization_config}
    placed = {key: value for key, value in placed.items() if value is not None}
    if quantization_config is not None:
        placed.setdefault("device_map", {"": chosen})  # weights are quantized on their final device
    load: Callable[[], Any]
    with _errors_named(name), progress_line(f"opening the decoder {name}"):
        if isinstance(name, GgufDecoder):
            config, tokenizer, unpack = open_gguf(gguf_file(name, revision), name.tokenizer)
            settings, load = _settings(config), lambda: _placed(convert_weights(unpack(), weights), placed)
        else:
            place, where = _where(name, revision, subfolder or "")
            config, within, tokenizer, settings = _open_folder(place, where)
            where["revision"] = hub_commit(config) or revision  # a branch may have moved when the weights are loaded
            load = partial(_load_folder, place, config, within, where, weights, placed)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"

    def loaded() -> Any:
        with _errors_named(name), progress_line(f"loading the decoder {name}"):
            model = load()
            model = (model if placed else model.to(chosen)).eval().requires_grad_(False)
            model.generation_config = settings
            if model.device.type != "meta":  # which has no values to compute with
                prove_once(model)
        logger.info("decoder %s on %s in %s", name, device_map or chosen, weights)
        return model

    return UnloadedModel(config, settings, chosen, weights, loaded), tokenizer


def load_decoder(
    name: str | Path | GgufDecoder,
    revision: str | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a causal LM, in eval mode with frozen parameters, and its tokenizer at once; else like `open_decoder`."""
    model, tokenizer = open_decoder(name, revision, device, **options)
    return model.load(), tokenizer


@contextmanager
def progress_line(what: str) -> Iterator[None]:
    """Show a line on stderr, if a terminal, within the context, in place of transformers' bars and loading reports."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    with _loading_lock:
        found = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        verbosity, bars = _before_loading[0] if _before_loading else found
        _before_loading.append((verbosity, bars))
        transformers_logging.set_verbosity_error()  # it reports what nothing reads, as xRAG's map beside its decoder
        if bars:
            transformers_logging.disable_progress_bar()
            enable_progress_bars()  # of downloads, which the line above also disables
    try:
        with tqdm(desc=what, bar_format="{desc} ...", leave=False, disable=None):
            yield
    finally:
        with _loading_lock:
            _before_loading.pop()
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


@contextmanager
def _errors_named(name: str | Path | GgufDecoder) -> Iterator[None]:
    """Turn whatever transformers raises (OSError, ValueError, SafetensorError, ...) into a BundleError."""
    try:
        yield
    except CtxCompressError:
        raise
    except Exception as error:
        of_hub = not isinstance(name, GgufDecoder | Path) and not _is_path(name) and not Path(name).is_dir()
        where = "there is no such folder, and the hub says: " if of_hub else ""
        raise BundleError(f"cannot load the decoder {str(name)!r}: {where}{error}") from error


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~"))


def _dtype(name: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ConfigError(f"dtype={name!r}: choose float32, bfloat16 or float16")
    return found


def _where(name: str | Path, revision: str | None, subfolder: str) -> tuple[str | Path, dict[str, Any]]:
    """Return a transformers folder, here or on the hub, and transformers' arguments for it."""
    if (isinstance(name, Path) or _is_path(name)) and not Path(name).is_dir():  # transformers calls it a bad hub id
        raise ValueError("there is no such folder")
    if subfolder and Path(name).is_dir():
        name, subfolder = Path(name, subfolder), ""
    return name, {"revision": revision, "subfolder": subfolder, "trust_remote_code": False}


def _open_folder(name: str | Path, where: dict[str, Any]) -> tuple[Any, bool, Any, Any]:
    """Return the decoder's config, whether it is a part of the checkpoint's, tokenizer and generation settings."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig, __version__

    whole = AutoConfig.from_pretrained(name, **where)
    config = whole if type(whole) in MODEL_FOR_CAUSAL_LM_MAPPING else whole.get_text_config()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers {__version__} has no causal LM for the type {config.model_type!r}")
    config._commit_hash = hub_commit(whole)
    if config is not whole:
        config.tie_word_embeddings = whole.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    try:
        settings: Any = GenerationConfig.from_pretrained(name, **where)
    except OSError:  # it has no such file
        settings = _settings(config)
    return config, config is not whole, tokenizer, settings


def _settings(config: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(config)


# Where multimodal checkpoints hold their text model, as transformers has saved them now and before.
_TEXT_MODELS = {r"^(model\.language_model|language_model\.model)\.": "model.", r"^language_model\.lm_head": "lm_head"}


def _load_folder(
    name: str | Path, config: Any, within: bool, where: dict[str, Any], dtype: torch.dtype, placed: Mapping[str, Any]
) -> Any:
    from transformers import AutoModelForCausalLM

    packed = Path(name) / INT8_FILE
    if packed.exists():
        return _placed(_from_int8(packed, dtype), placed)
    # Its annotations omit the loading info, which it returns with the model.
    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    if within:
        options |= {"config": config, "key_mapping": _TEXT_MODELS}
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options, **where, **placed)
    model, found = loaded
    if missing := found["missing_keys"]:  # transformers initializes them at random and only logs it
        raise ValueError(f"its config names {len(missing)} weights that are not in its files, such as {min(missing)}")
    return model


def _placed(model: Any, placed: Mapping[str, Any]) -> Any:
    """Place and quantize a model that is already in memory, as `from_pretrained` would."""
    if not placed:
        return model
    # Each weight once: of a tied one given twice, older transformers compare the data, which may be on the disk.
    state = own_tensors(model)
    return type(model).from_pretrained(None, config=model.config, state_dict=state, dtype=model.dtype, **placed)


def _from_int8(file: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    state = weights_from_int8(load_file(file))
    if odd := state.keys() ^ own_tensors(model).keys():
        raise ValueError(f"{file} does not fit its config: {len(odd)} names differ, for example {min(odd)}")
    load_own_tensors(model, state)
    return convert_weights(model, dtype)


def convert_weights(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model's weights in place, and return it; buffers stay, as bfloat16 would shift rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
