"""ArcAligner readers on tiny decoders, prompts for them, and the same decoders built from merged weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.decoding.splice import SplicedPrompts, splice_prompts
from ctx_compress_rag.methods.arcaligner import ArcAlignerConfig, ArcAlignerReader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.layers import decoder_layers
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


class PerPosition(nn.Module):
    """A linear layer with merged weights at slots and its own elsewhere."""

    def __init__(self, linear: nn.Linear, merged: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.linear, self.merged, self.mask = linear, merged, mask

    def forward(self, x: Tensor) -> Tensor:
        mask = F.pad(self.mask, (0, x.shape[1] - self.mask.shape[1])).unsqueeze(-1)
        return torch.where(mask, F.linear(x, self.merged, self.linear.bias), self.linear(x))


class Looped(nn.Module):
    """A decoder layer and its loops, without a cache, decided at every position and kept at slots.

    `decided` is what each loop's gates decided at the last input: (batch, length, 1), 0 or 1.
    """

    def __init__(self, layer: nn.Module, gate: dict[str, Tensor], mask: Tensor, loops: int) -> None:
        super().__init__()
        self.layer, self.gate, self.mask, self.loops = layer, gate, mask, loops

    def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = self.layer(h, *args, **kwargs)  # eq. 3, 4
        h = made[0] if isinstance(made, tuple) else made
        mask = F.pad(self.mask, (0, h.shape[1] - self.mask.shape[1])).unsqueeze(-1)
        self.decided = []
        for _ in range(self.loops):
            inner = F.silu(F.linear(h, self.gate["0.weight"], self.gate["0.bias"]))
            soft = F.linear(inner, self.gate["2.weight"], self.gate["2.bias"]).sigmoid()  # eq. 5
            hard = (soft >= 0.5).to(h.dtype)
            self.decided.append(hard)
            g = mask * (hard + (soft - soft.detach()))  # eq. 7
            again = self.layer(h, *args, **kwargs)  # eq. 6
            h = g * (again[0] if isinstance(again, tuple) else again) + (1 - g) * h  # eq. 8, 9
        return (h, *made[1:]) if isinstance(made, tuple) else h


def merged_model(reader: ArcAlignerReader, mask: Tensor, weights: dict[str, Tensor] | None = None) -> Any:
    """The reader's decoder for prompts with these slots, built from merged weights; without a cache only.

    `weights` take the place of the reader's, and get gradients.
    """
    model = copy.deepcopy(reader.backbone.model)
    state = weights or reader.state_dict()
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                a, b = (state[f"lora.{number}.updates.{name.replace('.', '_')}.{which}"] for which in "ab")
                merged = linear.weight + LORA["alpha"] / LORA["rank"] * b @ a
                layer.set_submodule(name, PerPosition(linear, merged, mask))
        gate = {n.removeprefix(f"gates.{number}."): p for n, p in state.items() if n.startswith(f"gates.{number}.")}
        layers[number] = Looped(layer, gate, mask, reader.config.loops)
    return model
