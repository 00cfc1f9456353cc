"""What a decoder reads in place of token ids: vectors, and beside them what its architecture looks up by token id."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.models.layers import decoder_layers, decoder_trunk
from ctx_compress_rag.models.transformers_internals import can_share_cache

NO_TOKEN = -1  # in place of the id of a position that stands for no token


def reads_tables_by_layer(config: Any) -> bool:
    """Whether a decoder looks up tokens in tables of its layers, besides the embeddings: Gemma 3n, 4 and Qwen4-exp."""
    return any(getattr(config, name, None) for name in ("hidden_size_per_layer_input", "ple_layer_ids"))


class DecoderInputs:
    """The input side of a transformers causal LM, as the way of its token ids has it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        trunk, config = decoder_trunk(model), model.config.get_text_config()
        self.padding: int = getattr(config, "pad_token_id", None) or 0
        # A state of the whole text, as of RWKV, may take up padding before it; prompts with one are answered alone.
        self.padding_side = "left" if can_share_cache(model) else "right"
        self._by_layer = reads_tables_by_layer(config)
        self._width = getattr(config, "hidden_size_per_layer_input", None)  # None in Qwen4-exp, which takes the ids
        self._table = getattr(trunk, "embed_tokens_per_layer", None)
        self._scale = 1.0
        self._scale = self._measured_scale()

    @property
    def vectors_suffice(self) -> bool:
        """Whether the decoder reads the rows of its embedding table as they are and nothing beside them, as in vLLM."""
        return self._scale == 1.0 and not self._by_layer

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., dim) that stand for token ids (...)."""
        vectors: Tensor = self._model.get_input_embeddings()(ids.to(self.device))
        return vectors if self._scale == 1.0 else vectors * self._scale

    def of(self, vectors: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the decoder's `forward`, or its trunk's, for vectors (batch, length, dim).

        `ids` (batch, length) are the tokens that the vectors stand for, or `NO_TOKEN`: to such positions, as of images,
        Gemma 3n and 4 give the rows that the padding token has in the tables of their layers.
        """
        given = {"inputs_embeds": vectors}
        if self._by_layer:
            ids = ids.to(vectors.device)
            ids = ids.masked_fill(ids == NO_TOKEN, self.padding)
            rows = self._table(ids).unflatten(-1, (-1, self._width)) if self._table is not None else None
            given |= {"ple_input_ids": ids} if rows is None else {"per_layer_inputs": rows}
        return given

    @torch.no_grad()
    def _measured_scale(self) -> float:
        """Return by what a decoder multiplies embeddings of ids, but not those it is given, as Falcon-H1 does."""
        ids = torch.arange(1, 5, device=self.device).unsqueeze(0)
        try:
            first = _read_by_first_layer(self._model, {"input_ids": ids})
            given = _read_by_first_layer(self._model, self.of(self.embed(ids), ids))
        except Exception:  # of an architecture that reads no vectors, or has layers unlike others; its proof says more
            return 1.0
        scale = float((first * given).sum() / given.pow(2).sum())
        rounding = 2 * torch.finfo(self.embed(ids).dtype).eps
        others = float((first - scale * given).norm() / first.norm())  # what no factor explains
        return scale if abs(scale - 1) > rounding > others else 1.0


class _Reached(Exception):
    pass


def _read_by_first_layer(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the hidden states that a decoder's first layer gets, without running it, in float64."""
    states: list[Tensor] = []

    def stop(module: Any, args: Any, kwargs: Any) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).double())
        raise _Reached

    hook = decoder_layers(model)[0].register_forward_pre_hook(stop, with_kwargs=True)
    with hook, suppress(_Reached):
        model(**inputs, use_cache=False)
    return states[0]
