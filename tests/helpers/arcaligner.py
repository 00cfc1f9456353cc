"""ArcAligner readers on tiny decoders, and prompts for them."""

from typing import Any

import torch
from torch import nn

from ctx_compress_rag.decoding.splice import SplicedPrompts, splice_prompts
from ctx_compress_rag.methods.arcaligner import ArcAlignerConfig, ArcAlignerReader
from ctx_compress_rag.models.backbone import Backbone
from helpers import architectures
from helpers.decoding import prompt_of

LORA = {"rank": 4, "alpha": 6, "dropout": 0.0}


def make_reader(
    name: str = "Llama", wide: bool = True, double: bool = False, model: Any = None, **settings: Any
) -> ArcAlignerReader:
    """A reader for a tiny decoder, by default the family's; `wide` weights make every update and gate matter."""
    model = architectures.model(name) if model is None else model
    backbone = Backbone(model.double() if double else model, architectures.tokenizer(name))
    torch.manual_seed(1)
    config = ArcAlignerConfig.model_validate({"lora": LORA, "gate_width": 8, **settings})
    reader = ArcAlignerReader(backbone, 12, config)
    reader.initialize(1.0)
    if wide:
        for part, parameter in [*reader.lora.named_parameters(), *reader.gates.named_parameters()]:
            nn.init.normal_(parameter, std=0.3 if part.endswith((".a", ".b")) else 0.5)
    return reader.double() if double else reader


def prompts(reader: ArcAlignerReader, name: str = "Llama", rows: int = 2, seed: int = 0) -> SplicedPrompts:
    """Prompts of different lengths: text, slots, text, slots, text; padded on the left."""
    shapes = [(5, 4, 3, 2, 6), (2, 3, 1, 1, 4), (7, 1, 2, 5, 1)][:rows]
    torch.manual_seed(seed)
    made = []
    for row, lengths in enumerate(shapes):
        ids = architectures.random_ids(name, lengths, seed=10 * seed + row)
        slots = [torch.randn(n, 64).to(reader.backbone.dtype) * reader.backbone.embedding_rms() for n in lengths]
        made.append(prompt_of(*(slots[i] if i % 2 else ids[i] for i in range(5))))
    with torch.no_grad():
        return splice_prompts(reader.backbone.inputs, made)


def read(reader: ArcAlignerReader, batch: SplicedPrompts, **inputs: Any) -> Any:
    with torch.no_grad(), reader.decoder(batch.slot_mask) as model:
        return model(**(batch.model_inputs() | inputs))


def alone(batch: SplicedPrompts, row: int) -> SplicedPrompts:
    """One prompt of a batch, without its padding."""
    real = batch.attention_mask[row].bool()
    parts = (batch.inputs_embeds, batch.attention_mask, batch.position_ids, batch.slot_mask)
    vectors, *others = (part[row][real].unsqueeze(0) for part in parts)
    return SplicedPrompts({"inputs_embeds": vectors}, *others)
