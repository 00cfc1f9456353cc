"""The teacher: a decoder trained to answer from full text, on the answers' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.training.data import Example
from ctx_compress_rag.training.prompts import PromptBuilder, draw_template


class AnswerLoss(nn.Module):
    """Next-token loss on answer tokens, and with a small weight on the rest.

    Args:
        decoder: a causal LM.
        context_weight: weight of a token that is not of an answer; 0 trains on answers alone.
    """

    def __init__(self, decoder: nn.Module, context_weight: float) -> None:
        super().__init__()
        self.decoder = decoder
        self.context_weight = context_weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """The loss of a right-padded batch; all arguments are (batch, length).

        The decoder gets no mask: with padding on the right no real token attends to it, and plain
        causal attention is faster.
        """
        logits = self.decoder(input_ids=input_ids, use_cache=False).logits
        targets = input_ids[:, 1:]
        weights = torch.where(answers[:, 1:], 1.0, self.context_weight) * attention_mask[:, 1:]
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
        return {"loss": (losses * weights.flatten()).sum() / weights.sum()}


class TextCollator:
    """Examples -> a right-padded batch of full-text prompts, each with a template drawn for it."""

    def __init__(self, builder: PromptBuilder, templates: Sequence[str], max_context_tokens: int, seed: int) -> None:
        self.builder = builder
        self.templates = templates
        self.max_context_tokens = max_context_tokens
        self.seed = seed

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        rows = []
        for example in examples:
            template = draw_template(self.templates, example, self.seed)
            # Passages are cut, never the row: its end is the answer.
            texts = [text for text, _ in self.builder.shortened(example.passages, self.max_context_tokens)]
            rows.append(self.builder.text_row(example, template, texts))
        ids = nn.utils.rnn.pad_sequence([row.ids for row in rows], batch_first=True)
        answers = nn.utils.rnn.pad_sequence([row.answers for row in rows], batch_first=True)
        lengths = torch.tensor([len(row.ids) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()
        return {"input_ids": ids, "attention_mask": mask, "answers": answers}


def new_decoder(config: dict[str, Any], tokenizer: Any) -> Any:
    """A causal LM with random weights: `config` is a transformers configuration, `model_type` included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    settings.update(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))


def save_decoder(decoder: Any, tokenizer: Any, folder: Path, half: bool = True) -> None:
    """Save a decoder and its tokenizer as a transformers folder, in half precision."""
    dtype = decoder.dtype
    (decoder.half() if half else decoder).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    decoder.to(dtype)
