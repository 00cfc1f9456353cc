"""ArcAligner: slots refined inside the decoder, layer by layer (sections 3.3-3.4, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.arcaligner.config import ArcAlignerConfig
from ctx_compress_rag.methods.arcaligner.recursion import Recursion, named, states_of
from ctx_compress_rag.methods.arcaligner.selective_lora import SelectiveLora, SlotPlaces, twin
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.base.part import UnregisteredModule
from ctx_compress_rag.methods.base.projections import TwoLayerMap
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.backbone import Backbone, decoder_layers

# The logit of new gates, just below the threshold. An untrained gate changes nothing, so that stage III
# starts with the model that stage II left, and a few steps are enough to open a gate.
_START = -0.01


class Gate(nn.Sequential):
    """The MLP of one layer's slot-wise gate (eq. 5): states -> logits, closed until it is trained."""

    def __init__(self, dim: int, width: int) -> None:
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, _START)
        super().__init__(nn.Linear(dim, width), nn.SiLU(), last)


class ArcAlignerReader(Reader):
    """Projected slots, read by the frozen decoder with selective LoRA and recursive gates.

    A pass over a prompt runs algorithm 1. Passes that continue from cached positions are the decoder's own:
    they read text, which takes the frozen path (eq. 3), and cost nothing extra. They are correct because
    the cache holds what the algorithm would compute again. A text position of layer l reads the keys and
    values of the mandatory pass (eq. 4), computed from H^(l,0) and cached once for each position. The passes
    of eq. 6 differ: their keys and values are computed from H^(l+1,t-1), only their outputs at slots are
    kept (eq. 9), and attention is causal, so a slot sees nothing after itself. Later positions neither
    change nor read these keys and values, so they are not cached.

    A pass counts as one over the prompt if its cache is empty; it must be at least as long as the mask.
    Positions beyond the mask are text.

    The last layer's states at slots are read only by predictions at slots. If text follows the slots, as in
    every prompt with a question, that layer's gate learns nothing and its loops change no answer;
    `gated_layers` may leave it out.

    Training mode (dropout in the LoRA, eq. 7 instead of the hard gate) applies if the module is in it and
    gradients are enabled.

    All of this, and the projector, runs in its weights' precision, LoRA and gates in float32: autocast, which
    training uses, is off. Gates that are rounded differently in training and in use would decide differently.

    Args:
        backbone: the decoder.
        slot_dim: width of a stored slot.
        config: the method's settings.

    Attributes:
        last_loops: for each gated layer, how many passes each slot of the last prompts got after the mandatory one:
            int64 (batch, length), 0 to `loops`, and -1 at other positions. (The paper's case studies count from 1.)

    Raises:
        ConfigError: a gated layer does not exist, or the decoder's layers cannot be adapted.
    """

    def __init__(self, backbone: Backbone, slot_dim: int, config: ArcAlignerConfig) -> None:
        super().__init__(backbone, TwoLayerMap(slot_dim, backbone.dim), TuneConfig(mode="frozen"))
        self.config = config
        # All hooks are on a twin that nothing else holds: readers of plain text, in any thread, inside
        # `decoder` or outside, have an unchanged decoder.
        model = twin(backbone.model)
        trunk = model.get_decoder()
        layers = decoder_layers(trunk, model.config.get_text_config().num_hidden_layers)
        trunk.forward = partial(self._forward, trunk, trunk.forward)
        self._twin = UnregisteredModule(model)
        self._layers = UnregisteredModule(list(layers))
        gated = range(len(layers)) if config.gated_layers == "all" else config.gated_layers
        if not set(gated) <= set(range(len(layers))):
            raise ConfigError(f"gated_layers {sorted(gated)}: the decoder has layers 0 to {len(layers) - 1}")
        self.lora = nn.ModuleList(SelectiveLora(layer, config.lora) for layer in layers if config.lora)
        # Kept even without loops: stage II leaves them unchanged for stage III.
        self.gates = nn.ModuleDict({str(layer): Gate(backbone.dim, config.gate_width) for layer in sorted(gated)})
        for added in (self.lora, self.gates):
            added.to(backbone.device).requires_grad_(False)
        self.eval()
        self._slot_mask: Tensor | None = None
        self.last_loops: dict[int, Tensor] = {}

    def trained_parameters(self) -> list[nn.Parameter]:
        """Make projector and LoRA trainable, and the gates if they are in use (section 3.5); returns them."""
        trained = super().trained_parameters() + list(self.lora.requires_grad_(True).parameters())
        if self.config.loops and self.config.gate == "learned":
            trained += self.gates.requires_grad_(True).parameters()
        return trained

    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        with torch.autocast(slots.device.type, enabled=False):
            return super().forward(slots, token_counts)

    @contextmanager
    def decoder(self, slot_mask: Tensor) -> Iterator[Any]:
        """Lock the decoder for this thread; it refines the slots at `slot_mask`.

        Raises:
            ConfigError: the model is given a prompt that is shorter than the mask, or of another batch.
        """
        with self.backbone.use(None):
            outer, self._slot_mask = self._slot_mask, slot_mask
            try:
                yield self._twin.value
            finally:
                self._slot_mask = outer

    def _forward(self, trunk: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The twin's trunk: its own `forward`, with algorithm 1 if a prompt has slots."""
        inputs = named(trunk, args, kwargs)
        cache = inputs.get("past_key_values")
        if self._slot_mask is None or (cache is not None and cache.get_seq_length()):
            return forward(**inputs)
        given = inputs.get("inputs_embeds")
        slots = self._places(given if given is not None else inputs["input_ids"])
        if slots is None:
            return forward(**inputs)
        self.last_loops = {}
        with ExitStack() as hooks:
            hooks.enter_context(torch.autocast(slots.mask.device.type, enabled=False))
            for lora in self.lora:
                hooks.enter_context(cast(SelectiveLora, lora).on(slots))
            for number, gate in self.gates.items() if self.config.loops else ():
                hook = partial(self._refine, int(number), gate, slots)
                # First, so that what other hooks record (`output_hidden_states`) is the refined state.
                handle = self._layers.value[int(number)].register_forward_hook(hook, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
            return forward(**inputs)

    def _places(self, inputs: Tensor) -> SlotPlaces | None:
        """The places of the slots in a prompt (batch, length, ...); None if it has no slots."""
        mask = self._slot_mask
        if mask is None or not mask.any():
            return None
        batch, length = inputs.shape[:2]
        if mask.shape[0] != batch or mask.shape[1] > length:
            raise ConfigError(
                f"slot_mask is for {mask.shape[0]} prompts of {mask.shape[1]} positions, but the decoder was given "
                f"{batch} of {length}: give it the whole prompts that the mask was made for, in one pass"
            )
        return SlotPlaces(F.pad(mask.to(inputs.device), (0, length - mask.shape[1])))

    def _refine(
        self,
        number: int,
        gate: nn.Module,
        slots: SlotPlaces,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
    ) -> Any:
        """Run lines 4 to 15 of algorithm 1 for one layer, with LoRA on, after its mandatory pass.

        The mandatory pass was called with `args`, which begin with H^(l,0), and `kwargs`. It returned `made`:
        H^(l+1,0), (batch, length, dim), or a tuple that begins with it. Returns `made` with H^(l+1,T) in place of
        H^(l+1,0), as the next layer's input.
        """
        state = states_of(made)
        training = self.training and torch.is_grad_enabled()
        lora = cast(SelectiveLora, self.lora[number]) if self.config.lora else None
        candidates = Recursion(layer, lora, slots, args, kwargs)
        at = slots.mask  # the slots that a pass refines: in training all, for the gates' gradients
        loops = at.long() - 1
        for _ in range(self.config.loops):
            current = state[at]
            if self.config.gate == "open":
                logits = torch.zeros(len(current), 1, device=current.device)
            else:
                logits = gate(current.to(next(gate.parameters()).dtype))
            hard = logits >= 0  # sigmoid(logits) >= 0.5, without its rounding
            loops[at] += hard.squeeze(1).long()
            if training:
                candidate, soft = candidates(state, at), logits.sigmoid()  # eq. 6, 5
                g = hard.to(soft.dtype) + (soft - soft.detach())  # eq. 7: exactly 0 or 1, with the gradient of eq. 5
                # Eq. 8. As current + g (candidate - current), half precision would round the candidate.
                updated = g * candidate + (1 - g) * current
            else:
                # A slot whose gate closes does not change, so the gate stays closed.
                at = at.masked_scatter(at, hard)
                if not at.any():
                    break
                updated = candidates(state, at)
            state = state.masked_scatter(at.unsqueeze(-1), updated.to(state.dtype))  # eq. 9
        self.last_loops[number] = loops
        return (state, *made[1:]) if isinstance(made, tuple) else state
