"""ArcAligner readers on tiny decoders, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.decoding.splice import Spliced, splice
from ctx_compress_rag.methods.arcaligner.config import ArcAlignerConfig
from ctx_compress_rag.methods.arcaligner.reader import ArcAlignerReader
from ctx_compress_rag.prompt import Prompt
from helpers import architectures

LORA = {"rank": 4, "alpha": 6, "dropout": 0.0}


def make_reader(name: str = "Llama", wide: bool = True, double: bool = False, **settings: Any) -> ArcAlignerReader:
    """A reader for a tiny decoder; `wide` weights make every update and gate matter."""
    model = architectures.model(name)
    backbone = Backbone(model.double() if double else model, architectures.tokenizer(name))
    torch.manual_seed(1)
    reader = ArcAlignerReader(backbone, 12, ArcAlignerConfig(**({"lora": LORA, "gate_width": 8} | settings)))
    reader.initialise(1.0)
    if wide:
        for part, parameter in [*reader.lora.named_parameters(), *reader.gates.named_parameters()]:
            nn.init.normal_(parameter, std=0.3 if part.endswith((".a", ".b")) else 0.5)
    return reader.double() if double else reader


def prompts(reader: ArcAlignerReader, name: str = "Llama", rows: int = 2, seed: int = 0) -> Spliced:
    """Prompts of different lengths: text, slots, text, slots, text; padded on the left."""
    shapes = [(5, 4, 3, 2, 6), (2, 3, 1, 1, 4), (7, 1, 2, 5, 1)][:rows]
    torch.manual_seed(seed)
    embeddings = reader.backbone.embeddings
    made = []
    for row, lengths in enumerate(shapes):
        ids = architectures.random_ids(name, lengths, seed=10 * seed + row)
        slots = [torch.randn(n, 64).to(embeddings.weight.dtype) * reader.backbone.embedding_rms() for n in lengths]
        made.append(Prompt.of(*(slots[i] if i % 2 else ids[i] for i in range(5))))
    with torch.no_grad():
        return splice(embeddings, made)


def read(reader: ArcAlignerReader, batch: Spliced, **inputs: Any) -> Any:
    with torch.no_grad(), reader.decoder(batch.slot_mask) as model:
        return model(**(batch.model_inputs() | inputs))


def alone(batch: Spliced, row: int) -> Spliced:
    """One prompt of a batch, without its padding."""
    real = batch.attention_mask[row].bool()
    return Spliced(*(t[row][real].unsqueeze(0) for t in vars(batch).values()))
