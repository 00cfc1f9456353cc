"""Splice token ids and slots into one `inputs_embeds` batch for a decoder, and compute the logits of its answers."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.inputs import NO_TOKEN, DecoderInputs
from ctx_compress_rag.models.layers import logits_at
from ctx_compress_rag.prompt import Prompt, Side, is_vectors


@dataclass(frozen=True)
class SplicedPrompts:
    """Prompts as one batch for a decoder, padded on its `padding_side`."""

    inputs: Mapping[str, Tensor]  # what `DecoderInputs.of` returns
    attention_mask: Tensor  # int64 (batch, length), 0 at padding
    position_ids: Tensor  # int64 (batch, length), counted from each prompt's first position
    slot_mask: Tensor  # bool (batch, length), True at slots

    @property
    def inputs_embeds(self) -> Tensor:
        """The embeddings and slots, (batch, length, dim)."""
        return self.inputs["inputs_embeds"]

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the batch as arguments of the decoder's `forward`."""
        return {**self.inputs, "attention_mask": self.attention_mask, "position_ids": self.position_ids}


def splice_prompts(inputs: DecoderInputs, prompts: Sequence[Prompt]) -> SplicedPrompts:
    """Return a batch of the prompts' embeddings and slots; raise ConfigError for an empty prompt or a wrong width."""
    lengths, side = torch.tensor([prompt.length for prompt in prompts]), inputs.padding_side
    rows: list[Tensor] = []
    for index, (prompt, missing) in enumerate(zip(prompts, (lengths.max() - lengths).tolist(), strict=True)):
        if not prompt.length:
            raise ConfigError(f"prompt {index} is empty: give it at least one token")
        # No position is all zeros, of which some architectures' gradients are NaN.
        padding = np.full(missing, inputs.padding)
        pieces = [padding, *prompt.pieces] if side == "left" else [*prompt.pieces, padding]
        tensors = [torch.as_tensor(piece, device=inputs.device) for piece in pieces]
        parts = [tensor if is_vectors(tensor) else inputs.embed(tensor) for tensor in tensors]
        dtype = reduce(torch.promote_types, (part.dtype for part in parts))
        if len(widths := {part.shape[1] for part in parts}) > 1:
            raise ConfigError(f"slots and token embeddings of prompt {index} differ in width: {sorted(widths)}")
        rows.append(torch.cat([part.to(dtype) for part in parts]))
    slot_mask = _padded((prompt.vector_mask() for prompt in prompts), side).to(inputs.device)
    positions = _padded((np.arange(prompt.length) for prompt in prompts), side).to(inputs.device)
    mask = _padded((np.ones(prompt.length, np.int64) for prompt in prompts), side).to(inputs.device)
    ids = _padded((prompt.ids() for prompt in prompts), side).to(inputs.device)
    given = inputs.of(torch.stack(rows), ids.masked_fill(slot_mask | (mask == 0), NO_TOKEN))
    return SplicedPrompts(given, mask, positions, slot_mask)


def open_decoder_model(bundle: PlainDecoder, side: Side, slot_mask: Tensor) -> AbstractContextManager[Any]:
    """Return a context manager that gives the model, locked for this thread, with the weights of one side."""
    if side == "text" or not isinstance(bundle, Bundle):
        return bundle.text_decoder()
    return bundle.soft_decoder(slot_mask, side)


def answer_token_logits(model: Any, batch: SplicedPrompts, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return the logits (answer tokens, vocabulary) at the places that predict answers, and the answers' token ids."""
    mask = batch.attention_mask.bool()
    mask[mask.clone()] = torch.from_numpy(np.concatenate([prompt.answers for prompt in prompts])).to(mask.device)
    predicting = F.pad(mask[:, 1:], (0, 1))  # the logits at a position predict the token after it
    logits = logits_at(model, predicting, **batch.model_inputs())
    ids = np.concatenate([prompt.ids()[prompt.answers] for prompt in prompts])
    return logits, torch.from_numpy(ids).to(logits.device)


def _padded(rows: Iterable[NDArray[Any]], side: str) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, rows)), batch_first=True, padding_side=side)
