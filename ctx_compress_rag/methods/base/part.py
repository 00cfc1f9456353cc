"""What the two parts of a method, compressor and reader, have in common."""

from abc import ABC
from typing import ClassVar

import torch
from torch import Tensor, nn

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.models.backbone import Backbone


class MethodPart(nn.Module, ABC):
    """One of the two parts of a method, compressor or reader, made for one decoder and saved separately from it."""

    part: ClassVar[str]  # "compressor" or "reader", also the name of the part's folder in a bundle and of its adapter

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone  # no submodule, so that the decoder's weights are not saved with the part

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make the parameters that training changes trainable, and return them; by default all of this part's own."""
        return list(self.requires_grad_(True).parameters())

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights that a bundle stores for this part, by name, not adapters or the decoder's embeddings."""
        shared = self.backbone.embeddings.weight if self.backbone.loaded else None
        return {name: p for name, p in self.named_parameters() if p is not shared}

    def saved_state(self) -> dict[str, Tensor]:
        """Return the tensors that a bundle stores for this part, by name, on the CPU."""
        return {name: p.detach().cpu().contiguous() for name, p in self.saved_parameters().items()}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """Copy what `saved_state` returned into this part; raise BundleError if names or shapes differ."""
        parameters = self.saved_parameters()
        if odd := sorted(state.keys() ^ parameters.keys()):
            raise BundleError(
                f"the {self.part}'s weights do not fit its config: {len(odd)} names differ, for example {odd[0]}"
            )
        with torch.no_grad():
            for name, value in state.items():
                if parameters[name].shape != value.shape:
                    shapes = f"{tuple(value.shape)}, its config needs {tuple(parameters[name].shape)}"
                    raise BundleError(f"the {self.part}'s {name} has shape {shapes}")
                parameters[name].copy_(value)


def train_decoder_copy(model: nn.Module) -> list[nn.Parameter]:
    """Make `model`, a copy of the decoder, trainable but for the shared embeddings; return the trainable parameters.

    If the decoder's head is tied to its embeddings, the head is also shared, and frozen.

    Trainable parameters become float32, because in bfloat16 the steps of a usual learning rate round to nothing. The
    embeddings keep their precision, so on a GPU the copy needs autocast.
    """
    model.train().requires_grad_(True)
    model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    return trained
