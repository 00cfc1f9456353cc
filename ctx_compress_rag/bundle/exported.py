"""A bundle that only answers, in files that need neither torch nor transformers, and its tokenizer without these."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from ctx_compress_rag.errors import BundleError, RatioError, StoreWriteError
from ctx_compress_rag.methods.base.config import WrapConfig
from ctx_compress_rag.methods.base.rendering import PassageRenderer
from ctx_compress_rag.models.sentence_embedding import gelu
from ctx_compress_rag.process_bound import ProcessBound
from ctx_compress_rag.prompt import Side
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.strict import Strict, explain_validation_error

if TYPE_CHECKING:  # they import torch
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.bundle.plain_decoder import PlainDecoder


class FastTokenizer:
    """The tokenizer of a `tokenizer.json`, with special tokens by name ("bos_token", ...) and a chat template, if any.

    The methods are those of transformers' tokenizers that this library calls, with the same results.
    """

    def __init__(self, backend: str, special: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer = Tokenizer.from_str(backend)
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.special_tokens_map, self.chat_template = dict(special), chat_template
        self.bos_token, self.eos_token, self.unk_token, self.pad_token = (
            special.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")
        )
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = (
            None if name is None else self.backend_tokenizer.token_to_id(name)
            for name in (self.bos_token, self.eos_token, self.unk_token, self.pad_token)
        )

    @classmethod
    def parts_of(cls, tokenizer: Any) -> dict[str, Any]:
        """Return the arguments, as JSON can hold them, that make a FastTokenizer of one of transformers."""
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None  # some have several, by name
        return {"backend": tokenizer.backend_tokenizer.to_str(), "special": special, "chat_template": template}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __deepcopy__(self, memo: dict[int, Any]) -> FastTokenizer:
        made = copy.copy(self)
        made.backend_tokenizer = copy.deepcopy(self.backend_tokenizer, memo)
        return made

    def __call__(self, text: str, add_special_tokens: bool = True, **unused: Any) -> dict[str, Any]:
        [encoded] = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **unused: Any) -> str:
        return str(self.backend_tokenizer.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens))

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        found: Mapping[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: id for id, token in self.added_tokens_decoder.items()}

    def add_tokens(self, tokens: Sequence[AddedToken], special_tokens: bool = False) -> None:
        self.backend_tokenizer.add_special_tokens(list(tokens))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int | None]:
        return [self.backend_tokenizer.token_to_id(token) for token in tokens]

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **unused: Any) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens_map}
        return str(self._template.render(messages=messages, **given))

    @cached_property
    def _template(self) -> Any:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Reads `{% generation %}`, with which templates for training mark answers."""

            tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def as_json(value: object, **options: Any) -> str:
            return json.dumps(value, **{"ensure_ascii": False, **options})

        # The environment that templates are written for (transformers' documentation, "Writing a chat template").
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = as_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        return environment.from_string(self.chat_template or "")


AnyBundle: TypeAlias = "Bundle | ExportedBundle"
AnyDecoder: TypeAlias = "PlainDecoder | ExportedBundle"
EXPORTED_FILE = "answering.json"
_READER_FILE = "reader.safetensors"


class _Config(BaseModel, extra="allow", frozen=True):
    """A bundle's settings as its `BundleConfig` wrote them; checking all of them would import all methods."""

    name: str
    base_ratio: int = Field(gt=0)
    template: str
    answer_tokens: int = Field(gt=0)
    extractive: bool
    text_share: float | None
    separator: str
    answer_prefix: str


class _Tokenizer(Strict):
    backend: str
    special: dict[str, str]
    chat_template: str | None


class _Answering(Strict):
    """What `EXPORTED_FILE` holds."""

    format: Literal[1]
    fingerprint: str
    config: _Config
    decoder_name: str | None
    tokenizer: _Tokenizer
    generation_config: dict[str, Any]
    nestable: bool
    window: int | None = Field(gt=0)
    sides: tuple[Side, ...] = Field(min_length=1)
    digests: dict[Side, str]  # of the GGUF file of each side
    embeddings: tuple[int, int]  # their width, and how many there are
    wrap: WrapConfig | None


class ExportedBundle(ProcessBound):
    """A bundle that `ctx-compress export --engine llama.cpp` wrote: it answers with llama.cpp, and compresses nothing.

    It stands for a `Bundle` in stores, decoders, postprocessors and LLM classes whose engine is "llama.cpp", and needs
    neither torch nor transformers. Passages that are not stored stay text.

    ```python
    store = SoftContextStore("./chroma", ExportedBundle("./for-llama-cpp"))
    decoder = Decoder(store.bundle, store, engine="llama.cpp")
    ```

    Args:
        folder: the folder that `ctx-compress export` wrote.

    Raises BundleError if the folder holds no exported bundle.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            said = _Answering.model_validate_json((self.folder / EXPORTED_FILE).read_bytes())
            self._weights = load_file(self.folder / _READER_FILE)
            self.tokenizer: Any = FastTokenizer(**dict(said.tokenizer))
            self._wrap = said.wrap or WrapConfig()
            self.dim, self.vocabulary = said.embeddings
            maps = [self._weights[name] for name in ("weight", "inner.weight") if name in self._weights]
            width = maps[0].shape[1] if maps else self.dim
            one = self.embed(SoftContext(np.zeros((1, width), np.float32), np.ones(1, np.int64)))
            if one.shape != (self.positions(1), self.dim) or not np.isfinite(one).all():
                raise ValueError(f"{_READER_FILE} does not fit {EXPORTED_FILE}")
        except Exception as error:  # of a file, pydantic, safetensors, tokenizers or NumPy
            what = explain_validation_error(error) if isinstance(error, ValidationError) else error
            how = "run ctx-compress export --engine llama.cpp"
            raise BundleError(f"{str(folder)!r} holds no exported bundle ({what}): {how}") from error
        self.config: Any = said.config
        self.generation_config = SimpleNamespace(**said.generation_config)
        self.compressor = PassageRenderer()
        self.compressor.nestable = said.nestable
        self.fingerprint = said.fingerprint
        self.decoder_name = said.decoder_name
        self.window, self.digests, self.sides = said.window, said.digests, said.sides
        self.separator, self.answer_prefix = said.config.separator, said.config.answer_prefix

    def __repr__(self) -> str:
        return f"ExportedBundle({str(self.folder)!r}, {self.config.name!r})"

    def positions(self, slots: int) -> int:
        """Return how many positions of a prompt a passage of so many slots takes."""
        return self._wrap.positions(slots)

    def check_ratio(self, ratio: int) -> None:
        """Raise RatioError for a ratio other than the base ratio, because nothing is compressed here."""
        if ratio != self.config.base_ratio:
            raise RatioError(f"ratio={ratio}: an exported bundle compresses nothing: leave the ratio out")

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> NoReturn:
        """Raise StoreWriteError, because an exported bundle has no compressor."""
        raise StoreWriteError("an exported bundle has no compressor: add passages with the bundle itself")

    def embed(self, soft: SoftContext) -> NDArray[np.float32]:
        """Return a soft context as the decoder's input embeddings, (`positions(slots)`, dim)."""
        vectors, weights = soft.slots, self._weights
        if "weight" in weights:
            vectors = vectors @ weights["weight"].T
        elif "inner.weight" in weights:
            if "norm.weight" in weights:
                vectors = vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6) * weights["norm.weight"]
            inner = gelu(vectors @ weights["inner.weight"].T + weights["inner.bias"])
            vectors = inner @ weights["outer.weight"].T + weights["outer.bias"]
        if "before" not in weights:
            return vectors.astype(np.float32)
        size = self._wrap.every or max(1, len(vectors))
        runs = np.split(vectors, range(size, len(vectors), size))
        return np.concatenate([each for run in runs for each in (weights["before"], run, weights["after"])])


def write_exported_bundle(bundle: Bundle, folder: Path, digests: Mapping[Side, str], window: int | None) -> None:
    """Write the files of an ExportedBundle beside the GGUF files, whose digests, by side, are given."""
    reader = bundle.reader
    parts = [part for part in (reader.projection, reader.wrap) if part is not None]
    state = {name: value for part in parts for name, value in part.state_dict().items()}
    save_file({name: value.float().cpu().numpy() for name, value in state.items()}, folder / _READER_FILE)
    about = {
        "format": 1,
        "fingerprint": bundle.fingerprint,
        "config": bundle.config.model_dump(mode="json"),
        "decoder_name": bundle.decoder_name,
        "tokenizer": FastTokenizer.parts_of(bundle.tokenizer),
        "generation_config": bundle.generation_config.to_dict(),
        "nestable": bundle.compressor.nestable,
        "window": window,
        "sides": bundle.sides,
        "digests": digests,
        "embeddings": [bundle.backbone.dim, bundle.backbone.config.get_text_config().vocab_size],
        "wrap": None if reader.wrap is None else reader.wrap.config.model_dump(),
    }
    (folder / EXPORTED_FILE).write_text(json.dumps(about), encoding="utf-8")
