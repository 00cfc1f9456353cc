"""Run a GGUF file's model with llama.cpp, and check the size of every input.

llama.cpp ends the process on an input of a wrong size, so no other module gives llama.cpp inputs.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from ctx_compress_rag.decoding.filters import Scores
from ctx_compress_rag.errors import BundleError, ConfigError, CtxCompressError, DecoderMemoryError, needs
from ctx_compress_rag.prompt import Prompt, is_vectors

logger = logging.getLogger(__name__)

_LOG_ERROR = 4  # llama.cpp's number of the level
_BATCH = 512  # most positions in a pass
KEPT = 256  # most tokens of a prompt's beginning that are kept for the next prompt
_FIRST = 512  # positions that there is memory for at first
# How an architecture treats embeddings, as transformers sees them: it multiplies tokens' by sqrt(dim) before the first
# layer; llama.cpp does so with all embeddings that it is given ("all"), or with tokens only ("tokens").
_SCALED = {"gemma": "all", "gemma2": "all", "gemma3": "tokens", "gemma4": "tokens"}


def threads() -> int:
    """Return how many threads llama.cpp may use: as many as OpenMP's programs, else the CPUs of this process."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def load_llama_cpp() -> Any:
    """Return llama-cpp-python's low-level functions, whose messages go to this module's log."""
    with needs("llama-cpp"):
        from llama_cpp import llama_cpp  # type: ignore[attr-defined,unused-ignore]

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, data: Any) -> None:
        logger.log(logging.ERROR if level == _LOG_ERROR else logging.DEBUG, text.decode(errors="replace").rstrip())

    llama_cpp.llama_log_set(log, None)
    llama_cpp.ctx_compress_log = log  # type: ignore[attr-defined,unused-ignore]  # collected, it would crash the process at the next message
    return llama_cpp


class LlamaCppContext:
    """A GGUF file's model with memory for several sequences, until `close()`; one thread at a time may use it.

    `digest` is what the file's field `general.description` must say, `dim` and `vocabulary` are the shape of its token
    embeddings. At most `sequences` sequences may have at most `size` positions together, once `make_room` has made
    memory for them: 8,192 positions of a small decoder take as much as its weights.
    """

    def __init__(self, file: Path, digest: str, dim: int, vocabulary: int, size: int, sequences: int) -> None:
        import gguf

        self._llama = llama = load_llama_cpp()
        frees = ExitStack()
        self.close = finalize(self, frees.close)
        self.close.atexit = False  # a thread may still be inside; the system frees the memory
        if not file.is_file():
            raise BundleError(f"there is no file {file}: run ctx-compress export --engine llama.cpp")
        self._model = model = llama.llama_model_load_from_file(bytes(file), llama.llama_model_default_params())
        if model is None:
            raise BundleError(f"llama.cpp cannot read {file}: delete it, so that it is made again")
        frees.callback(llama.llama_model_free, model)
        vocab = llama.llama_model_get_vocab(model)
        found = self._about("general.description"), llama.llama_model_n_embd(model), llama.llama_vocab_n_tokens(vocab)
        if found != (digest, dim, vocabulary):
            raise BundleError(f"{file} has the weights of another bundle, reader or decoder: export this one's")
        # Pages of the file's token embeddings, read where they lie.
        [self._table] = [each for each in gguf.GGUFReader(file).tensors if each.name == "token_embd.weight"]
        treated = _SCALED.get(self._about("general.architecture"), "")
        self._vector_scale = dim**-0.5 if treated == "all" else 1.0
        self._row_scale = dim**0.5 if treated == "tokens" else 1.0
        self.size, self._dim, self._vocabulary, self._sequences = size, dim, vocabulary, sequences
        self._kept: list[int] = []
        self._opened: list[Any] = []
        frees.callback(_free, self._opened)
        self._context, self._room = self._open(min(size, _FIRST))
        self._memory = llama.llama_get_memory(self._context)
        # A vector in a multimodal decoder (M-RoPE) has four positions, for which a longer batch has room.
        multimodal = llama.LLAMA_ROPE_TYPE_MROPE, getattr(llama, "LLAMA_ROPE_TYPE_IMROPE", 40)
        self._axes = 4 if llama.llama_model_rope_type(model) in multimodal else 1
        room = max(_BATCH, sequences)
        self._batches = [llama.llama_batch_init(room * self._axes, width, 1) for width in (0, dim)]
        for batch in self._batches:
            frees.callback(llama.llama_batch_free, batch)
        # A recurrent state is of the whole text, so none of its beginning can be kept.
        self._keeps = not (llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))

    def make_room(self, positions: int) -> None:
        """Have memory for so many positions of all sequences, which keep what they have. Raise DecoderMemoryError."""
        if positions <= self._room:
            return
        llama, old = self._llama, self._context
        context, self._room = self._open(min(self.size, max(positions, 2 * self._room)))
        for number in range(self._sequences):
            if llama.llama_memory_seq_pos_max(self._memory, number) >= 0:
                state = (ctypes.c_uint8 * llama.llama_state_seq_get_size(old, number))()
                llama.llama_state_seq_get_data(old, state, len(state), number)
                if not llama.llama_state_seq_set_data(context, state, len(state), number):
                    raise CtxCompressError(f"llama.cpp could not move the {len(state)} bytes of a sequence's state")
        self._context, self._memory, self._kept = context, llama.llama_get_memory(context), []
        self._opened.remove(old)
        llama.llama_free(old)

    def _open(self, room: int) -> tuple[Any, int]:
        options = self._llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = room + KEPT, max(_BATCH, self._sequences), _BATCH
        options.n_seq_max, options.kv_unified = self._sequences + 1, True
        options.n_threads = options.n_threads_batch = threads()
        context = self._llama.llama_init_from_model(self._model, options)
        if context is None:
            raise DecoderMemoryError(f"llama.cpp has too little memory for {room} positions: lower context_size")
        self._opened.append(context)
        return context, room

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError for slots of another width, and for tokens that are not in the vocabulary."""
        for piece in prompt.pieces:
            if is_vectors(piece):
                if piece.shape[1] != self._dim:
                    raise ConfigError(f"slots of shape {tuple(piece.shape)} do not fit a decoder of width {self._dim}")
            elif len(piece) and not (piece.min() >= 0 and piece.max() < self._vocabulary):
                raise ConfigError(f"a token is not one of the decoder's {self._vocabulary}")

    def read(self, prompts: Sequence[tuple[int, Prompt]]) -> Scores:
        """Read prompts that `check` admitted into their numbers' sequences; return scores (prompts, vocabulary)."""
        runs, positions, numbers, last = [], [], [], []
        for number, prompt in prompts:
            start = self._reuse(number, prompt)
            rows = np.concatenate([self._vectors(piece) for piece in prompt.pieces])[start:]
            runs.append(rows)
            positions.append(np.arange(start, prompt.length))
            numbers.append(np.full(len(rows), number))
            last.append(sum(map(len, runs)) - 1)
        vectors, place, number_of = map(np.concatenate, (runs, positions, numbers))
        ends = np.isin(np.arange(len(vectors)), last)
        scores = []
        for at in range(0, len(vectors), _BATCH):
            part = slice(at, at + _BATCH)
            scores.append(self._decode(vectors[part], place[part], number_of[part], ends[part]))
        for number, prompt in prompts:
            self._keep(number, prompt)
        return np.concatenate(scores)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> Scores:
        """Read tokens (sequence's number, place in it, id); return scores (tokens, vocabulary) of the next ones."""
        number, place, ids = (np.asarray(each) for each in zip(*tokens, strict=True))
        return self._decode(ids, place, number, np.ones(len(ids), dtype=bool))

    def score(self, ids: Any, vectors: bool) -> Any:
        """Read ids (tokens,) or their vectors into an empty memory, left empty; return scores (tokens, vocabulary)."""
        self.make_room(len(ids))
        inputs, scores = self._rows(ids) if vectors else ids, []
        for at in range(0, len(ids), _BATCH):
            part = inputs[at : at + _BATCH]
            places, first = np.arange(at, at + len(part)), np.zeros(len(part), int)
            scores.append(np.asarray(self._decode(part, places, first, first == 0)))
        self.clear()
        return np.concatenate(scores)

    def drop(self, number: int) -> None:
        """Empty one sequence."""
        self._llama.llama_memory_seq_rm(self._memory, number, -1, -1)

    def clear(self) -> None:
        self._kept = []
        self._llama.llama_memory_clear(self._memory, True)

    def _about(self, field: str) -> str:
        text = ctypes.create_string_buffer(256)
        self._llama.llama_model_meta_val_str(self._model, field.encode(), text, len(text))
        return str(text.value.decode(errors="replace"))

    def _vectors(self, piece: Any) -> Any:
        """Return a piece of a prompt in llama.cpp's form of embeddings, float32 (length, dim)."""
        if is_vectors(piece):
            return (piece if isinstance(piece, np.ndarray) else piece.float().cpu().numpy()) * np.float32(
                self._vector_scale
            )
        return self._rows(np.asarray(piece))

    def _rows(self, ids: Any) -> Any:
        import gguf

        rows = gguf.quants.dequantize(self._table.data[ids], self._table.tensor_type)
        return rows.astype(np.float32).reshape(len(ids), self._dim) * np.float32(self._row_scale)

    def _reuse(self, number: int, prompt: Prompt) -> int:
        """Copy what is kept of an earlier prompt's beginning into a sequence; return how many positions were copied."""
        new = _beginning(prompt)[: prompt.length - 1]  # the last position is read, for its scores
        same = next((at for at, (a, b) in enumerate(zip(self._kept, new, strict=False)) if a != b), None)
        same = min(len(self._kept), len(new)) if same is None else same
        if same:
            self._llama.llama_memory_seq_cp(self._memory, self._sequences, number, 0, same)
        return same

    def _keep(self, number: int, prompt: Prompt) -> None:
        new = _beginning(prompt)
        if self._keeps and new != self._kept:
            self.drop(self._sequences)
            self._llama.llama_memory_seq_cp(self._memory, number, self._sequences, 0, len(new))
            self._kept = new

    def _decode(self, inputs: Any, places: Any, numbers: Any, wanted: Any) -> Scores:
        """Run ids (length,) or vectors (length, dim) through the model; return the scores at the wanted positions."""
        count, batch = len(inputs), self._batches[inputs.ndim - 1]
        if count > _BATCH or numbers.max() >= self._sequences or places.max() >= self.size:
            raise CtxCompressError(f"{count} positions up to {places.max()} in {self._sequences} sequences: too many")
        batch.n_tokens = count
        target = batch.embd if inputs.ndim == 2 else batch.token
        np.ctypeslib.as_array(target, (inputs.size,))[:] = inputs.reshape(-1)
        if inputs.ndim == 2 and self._axes > 1:  # of text, all are equal, but for the last
            places = np.concatenate([*[places] * (self._axes - 1), np.zeros_like(places)])
        np.ctypeslib.as_array(batch.pos, (len(places),))[:] = places
        np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
        np.ctypeslib.as_array(batch.logits, (count,))[:] = wanted
        for at, number in enumerate(numbers.tolist()):
            batch.seq_id[at][0] = number
        if (code := self._llama.llama_decode(self._context, batch)) != 0:
            self.clear()
            raise CtxCompressError(f"llama.cpp could not read {count} positions (llama_decode returned {code})")
        rows = [self._llama.llama_get_logits_ith(self._context, at) for at in np.flatnonzero(wanted).tolist()]
        scores = [np.ctypeslib.as_array(row, (self._vocabulary,)) for row in rows]
        return np.array(scores, np.float32).reshape(-1, self._vocabulary)


def _free(contexts: list[Any]) -> None:
    for context in contexts:
        load_llama_cpp().llama_free(context)


def _beginning(prompt: Prompt) -> list[int]:
    first = prompt.pieces[0]
    return [] if is_vectors(first) else first[:KEPT].tolist()
