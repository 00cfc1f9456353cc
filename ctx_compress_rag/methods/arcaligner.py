"""ArcAligner, which refines slots inside the decoder, layer by layer (sections 3.3-3.4, algorithm 1)."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.base.reader import Reader, TwoLayerMap
from ctx_compress_rag.methods.sentence_slots import SentenceSlotsCompressor, SentenceUnits
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.layers import decoder_layers, decoder_trunk, linear_layers, one_stream
from ctx_compress_rag.strict import Size, Strict


class SelectiveLoraConfig(Strict):
    """The settings of LoRA in every linear layer, at slot positions only (ArcAligner, section 3.3 and table 5)."""

    rank: Size = 128
    alpha: int = Field(default=32, gt=0)
    dropout: float = Field(default=0.05, ge=0, lt=1)


class ArcAlignerConfig(SentenceUnits):
    """The settings of ArcAligner (tables 5 and 6): sentence slots, read with selective LoRA and recursive gates.

    Attributes:
        lora: the selective LoRA; None is the paper's ablation without LoRA.
        loops: the most passes after the mandatory one (T of algorithm 1). 0 switches the gates off, for stages I and II
            and for the ablation without recursion. We read "max loops 3" in the tables as T, because algorithm 1, which
            defines the method, and section 3.4 ("up to T additional") count passes after the mandatory one. Appendix E
            also counts the mandatory pass; T would then be 2.
        gated_layers: the decoder's layers that have gates, counted from 0.
        gate: "learned", or "open" for the ablation without gates, in which every slot takes all loops.
        gate_width: the width of the gates' inner layer, which the paper does not give.
    """

    paper = "ArcAligner: Adaptive Recursive Aligner for Compressed Context Embeddings in RAG"

    name: Literal["arcaligner"] = "arcaligner"
    lora: SelectiveLoraConfig | None = SelectiveLoraConfig()
    loops: int = Field(default=3, ge=0)
    gated_layers: Literal["all"] | list[int] = "all"
    gate: Literal["learned", "open"] = "learned"
    gate_width: Size = 128

    def compressor(self, backbone: Backbone) -> SentenceSlotsCompressor:
        return SentenceSlotsCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> "ArcAlignerReader":
        return ArcAlignerReader(backbone, compressor.dim, self)


class SlotPlaces:
    """The positions of slots in a batch of prompts; `mask` is bool (batch, length), True at slots."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.index = mask.flatten().nonzero().squeeze(1)  # int64 (slots,), among all positions, row after row

    def take(self, states: Tensor) -> Tensor:
        """Return the states at slots, (slots, dim), of states (..., dim) of all the prompts' positions, flat or not.

        Raises a ConfigError if a mixture of experts got only some positions.
        """
        rows = states.flatten(0, -2)
        if len(rows) != self.mask.numel():
            raise ConfigError(f"a layer got only {len(rows)} of {self.mask.numel()} positions: choose another decoder")
        return rows[self.index]


class SelectiveLoraLayer(nn.Module):
    """The low-rank update of one frozen linear layer, (alpha / rank) B A x, which is zero before training."""

    def __init__(self, linear: nn.Linear, config: SelectiveLoraConfig) -> None:
        super().__init__()
        self.scale = config.alpha / config.rank
        self.dropout = config.dropout
        self.a = nn.Parameter(torch.empty(config.rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, config.rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the update for the layer's inputs at slots: (slots, in) -> (slots, out)."""
        x = F.dropout(x.to(self.a.dtype), self.dropout, self.training and torch.is_grad_enabled())
        return self.scale * F.linear(F.linear(x, self.a), self.b)


class SelectiveLora(nn.Module):
    """LoRA of all linear layers of one decoder layer, at slots only: each adds M * (B A x) to its output.

    Equation 3 writes the layer as F(H) + M * dF(H) and does not say where the mask M enters. If M entered at the
    decoder layer's output, the layer would need two runs, and two sets of keys and values for each position, because a
    text position on the frozen path would have to see the slots' frozen keys, and a slot the text's adapted keys. Here
    M enters at each linear layer, W x + M * B A x, as in the method that the paper cites (P-LoRA; Dong et al., 2024),
    so dF is everything that these updates change. A text position then uses only frozen weights at every layer, and its
    keys and values are those that the frozen decoder computes from its state. The state of a text position before any
    slot is the frozen decoder's. A text position after a slot has read the slot's adapted keys and values, as intended.

    Raises ConfigError if the decoder layer has no linear layers.
    """

    def __init__(self, layer: nn.Module, config: SelectiveLoraConfig) -> None:
        super().__init__()
        linears = {name.replace(".", "_"): linear for name, linear in linear_layers(layer)}
        if not linears:
            raise ConfigError(
                f"{type(layer).__name__} has no nn.Linear to adapt: this decoder cannot take selective LoRA"
            )
        self.updates = nn.ModuleDict({name: SelectiveLoraLayer(linear, config) for name, linear in linears.items()})
        self._linears = list(linears.values())  # torch registers no list, so it is not saved with these weights
        # Where updates are added now; None outside `at_slots`. Gradient checkpointing reads this attribute.
        self.slots: SlotPlaces | None = None

    @contextmanager
    def at_slots(self, slots: SlotPlaces) -> Iterator[None]:
        """Add the updates at `slots` within the context; a nested context uses its own slots."""
        outer, self.slots = self.slots, slots
        with ExitStack() as hooks:
            if outer is None:
                for linear, update in zip(self._linears, self.updates.values(), strict=True):
                    hooks.callback(linear.register_forward_hook(partial(self._add, update)).remove)
            try:
                yield
            finally:
                self.slots = outer

    def _add(self, update: nn.Module, linear: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        assert self.slots is not None  # within `at_slots`
        # In place, at slots only: other positions stay bit-identical and cost nothing.
        change = update(self.slots.take(args[0])).to(output.dtype)
        output.view(-1, output.shape[-1]).index_add_(0, self.slots.index, change)


# The logit of new gates, just below the threshold. An untrained gate changes nothing, so that stage III
# starts with the model that stage II left, and a few steps are enough to open a gate.
_START = -0.01


class LayerGate(nn.Sequential):
    """The MLP of one layer's gate (eq. 5), which maps a slot's state to a logit. Before training the gate is closed."""

    def __init__(self, dim: int, width: int) -> None:
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, _START)
        super().__init__(nn.Linear(dim, width), nn.SiLU(), last)


class ArcAlignerReader(Reader):
    """A reader of projected slots: the frozen decoder with selective LoRA and recursive gates.

    A pass over a whole prompt runs algorithm 1. A pass that continues from cached positions is the plain decoder's: it
    reads text, which takes the frozen path (eq. 3), and costs nothing extra. It is correct because the cache holds what
    the algorithm would compute again. At layer l a text position reads the keys and values of the mandatory pass (eq.
    4), which are computed from H^(l,0) and cached once for each position. The passes of eq. 6 compute keys and values
    from H^(l+1,t-1), but only their outputs at slots are kept (eq. 9). Attention is causal, so a slot sees nothing
    after itself. Later positions neither change nor read the keys and values of eq. 6, so these are not cached.

    A pass counts as one over the whole prompt if its cache is empty. It must be at least as long as the slot mask;
    positions beyond the mask are text.

    The last layer's states at slots are read only by predictions at slots. If text follows the slots, as in every
    prompt with a question, the last layer's gate has no effect; `gated_layers` may leave it out.

    Dropout in the LoRA, and eq. 7 in place of the hard gate, are used only in training mode with gradients enabled.

    All of this, the projector included, runs in the precision of its weights (float32 for LoRA and gates), without the
    autocast that training uses. Gates that are rounded differently in training and in use would decide differently.

    `last_loops` has, for each gated layer, the number of passes after the mandatory one that each slot of the last
    prompts took: int64 (batch, length), 0 to `loops`, and -1 at other positions. (The paper counts from 1.)

    `slot_dim` is the width of a stored slot. Raises ConfigError if a gated layer does not exist, or the decoder's
    layers cannot be adapted.
    """

    def __init__(self, backbone: Backbone, slot_dim: int, config: ArcAlignerConfig) -> None:
        super().__init__(backbone, TwoLayerMap(slot_dim, backbone.dim), TuneConfig(mode="frozen"))
        self.config = config
        # All hooks are on a twin that nothing else holds, and that shares the decoder's tensors: readers of plain text,
        # in any thread, inside `decoder` or outside, have an unchanged decoder.
        tensors = chain(backbone.model.parameters(), backbone.model.buffers())
        model = copy.deepcopy(backbone.model, {id(tensor): tensor for tensor in tensors})
        trunk, layers = decoder_trunk(model), decoder_layers(model)
        trunk.forward = partial(self._forward, trunk.forward)
        self._layers = list(layers)
        self._twin = [model]  # torch registers no list, so the decoder is not saved with the reader
        gated = range(len(layers)) if config.gated_layers == "all" else config.gated_layers
        if not set(gated) <= set(range(len(layers))):
            raise ConfigError(f"gated_layers {sorted(gated)}: the decoder has layers 0 to {len(layers) - 1}")
        self.lora = nn.ModuleList(SelectiveLora(layer, config.lora) for layer in layers if config.lora)
        # Kept even without loops: stage II leaves them unchanged for stage III.
        self.gates = nn.ModuleDict({str(layer): LayerGate(backbone.dim, config.gate_width) for layer in sorted(gated)})
        for added in (self.lora, self.gates):
            added.to(backbone.device).requires_grad_(False)
        self.eval()
        self._slot_mask: Tensor | None = None
        self.last_loops: dict[int, Tensor] = {}

    def trained_parameters(self) -> list[nn.Parameter]:
        trained = super().trained_parameters() + list(self.lora.requires_grad_(True).parameters())
        if self.config.loops and self.config.gate == "learned":
            trained += self.gates.requires_grad_(True).parameters()
        return trained

    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        with torch.autocast(slots.device.type, enabled=False):
            return super().forward(slots, token_counts)

    @contextmanager
    def decoder(self, slot_mask: Tensor) -> Iterator[Any]:
        """Yield the decoder, locked for this thread. It refines the slots at `slot_mask`; prompts must fit the mask."""
        with self.backbone.use(None):
            outer, self._slot_mask = self._slot_mask, slot_mask
            try:
                yield self._twin[0]
            finally:
                self._slot_mask = outer

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `forward`, the method of the twin's trunk that this one replaces; if there are slots, by algorithm 1."""
        cached = any(isinstance(value, Cache) and _is_read_on(value) for value in (*args, *kwargs.values()))
        inputs = kwargs.get("inputs_embeds")
        if inputs is None:
            inputs = args[0] if args else kwargs["input_ids"]  # every trunk's first argument
        slots = None if cached else self._places(inputs)
        if slots is None:
            return forward(*args, **kwargs)
        self.last_loops = {}
        with ExitStack() as hooks:
            hooks.enter_context(torch.autocast(slots.mask.device.type, enabled=False))
            for lora in self.lora:
                hooks.enter_context(cast(SelectiveLora, lora).at_slots(slots))
            for number, gate in self.gates.items() if self.config.loops else ():
                hook = partial(self._refine, int(number), gate, slots)
                # First, so that what other hooks record (`output_hidden_states`) is the refined state.
                handle = self._layers[int(number)].register_forward_hook(hook, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
            return forward(*args, **kwargs)

    def _places(self, inputs: Tensor) -> SlotPlaces | None:
        """Return the places of the slots in a prompt (batch, length, ...), or None if the prompt has no slots."""
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
        """Run lines 4 to 15 of algorithm 1 for one layer, with LoRA on, after the layer's mandatory pass.

        The mandatory pass was called with `args`, which begin with H^(l,0), and `kwargs`. It returned `made`:
        H^(l+1,0), (batch, length, dim), or a tuple that begins with it. Returns `made` with H^(l+1,T) in place of
        H^(l+1,0), which is the next layer's input.
        """
        state = one_stream(layer, made)
        training = self.training and torch.is_grad_enabled()
        # Only the mandatory pass writes to the layer's cache, whatever its argument is called.
        given = [None if isinstance(value, Cache) else value for value in args[1:]]
        named = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
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
                candidate = one_stream(layer, layer.forward(state, *given, **named))[at]  # eq. 6
                soft = logits.sigmoid()  # eq. 5
                g = hard.to(soft.dtype) + (soft - soft.detach())  # eq. 7: exactly 0 or 1, with the gradient of eq. 5
                # Eq. 8. As current + g (candidate - current), half precision would round the candidate.
                updated = g * candidate + (1 - g) * current
            else:
                # A slot whose gate closes does not change, so the gate stays closed.
                at = at.masked_scatter(at, hard)
                if not at.any():
                    break
                updated = one_stream(layer, layer.forward(state, *given, **named))[at]
            state = state.masked_scatter(at.unsqueeze(-1), updated.to(state.dtype))  # eq. 9
        self.last_loops[number] = loops
        return (state, *made[1:]) if isinstance(made, tuple) else state


def _is_read_on(cache: Cache) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # of states alone, as Mamba's
        return bool(cache.has_previous_state())
