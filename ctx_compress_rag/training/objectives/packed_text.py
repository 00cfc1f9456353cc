"""Answers from full text, in packed rows: the teacher's loss at the speed of `objectives.packed`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.text.templates import PromptBuilder, draw_template
from ctx_compress_rag.training.decoder_config import TeacherRecipe
from ctx_compress_rag.training.engine.head import packed_loss
from ctx_compress_rag.training.engine.packing import PackedRows, Packer


class PackedTextLoss(nn.Module):
    """Mean cross-entropy of the answers' tokens.

    Args:
        decoder: a causal LM whose head is frozen, with an adapter to train.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: PackedRows) -> dict[str, Tensor]:
        model = self.decoder.get_base_model()
        batch = batch.to(model.device)
        return {"loss": packed_loss(model, batch, input_ids=batch.input_ids)}


@dataclass
class PackedTextData(Dataset[PackedRows]):
    """The batches of a training, each made on request; the same number gives the same batch.

    Each batch takes the next examples, over and over, and leaves out those without room.
    """

    builder: PromptBuilder
    examples: Sequence[Example]
    recipe: TeacherRecipe

    def __len__(self) -> int:
        return self.recipe.optim.items

    def __getitem__(self, number: int) -> PackedRows:
        packing, data = self.recipe.packing, self.recipe.data
        assert packing is not None
        packer = Packer(packing.rows, packing.length)
        first = number * packing.examples
        numbers = list(range(first, first + packing.examples))
        random.Random(f"{self.recipe.seed}:{number}").shuffle(numbers)
        for place in numbers:
            example = self.examples[place % len(self.examples)]
            prompt = self.builder.text_prompt(example, draw_template(data.templates, example, self.recipe.seed))
            if packer.fits(prompt.length):
                packer.add(prompt.ids(), prompt.answers)
        return packer.packed()
