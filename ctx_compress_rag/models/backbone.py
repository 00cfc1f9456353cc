"""The decoder's weights, shared by everything that uses them, with named LoRA adapters on top."""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.inputs import DecoderInputs
from ctx_compress_rag.models.layers import PEFT_PREFIX, fused_experts, is_wanted, lora_places, tuner_layers
from ctx_compress_rag.models.loading import UnloadedModel, convert_weights
from ctx_compress_rag.models.weights import load_own_tensors, own_tensors


class FairLock:
    """A fair lock, which a thread that holds it may take again, and whose owner can ask whether any thread waits.

    A thread that takes an ordinary lock again and again, as a busy decoder does, gets it before the threads that wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        return self._owner == threading.get_ident()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __enter__(self) -> None:
        with self._changed:
            if not self.held:
                turn = object()
                self._waiting.append(turn)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is turn)
                finally:  # also if the wait is interrupted: the next in line must not wait for this thread
                    self._waiting.remove(turn)
                    self._changed.notify_all()
                self._owner = threading.get_ident()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()


class Backbone:
    """A decoder, its tokenizer and LoRA adapters. One thread at a time runs it, with the adapter that the thread chose.

    The argument `model` is a transformers causal LM, or an `UnloadedModel`, which is loaded when it is first needed.
    `lock` is held by the thread that is inside `use`. There, waiting for a thread that needs the model is a deadlock.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model if isinstance(model, UnloadedModel) else model.requires_grad_(False)
        self.tokenizer = tokenizer
        self.lock = FairLock()
        self.adapters: set[str] = set()
        self.adapter_layers: dict[str, list[str]] = {}  # by full names, of adapters that come from files
        self.left_out: dict[str, dict[str, str]] = {}  # of adapters made here: layers that take none, and why
        self._when_loaded: list[Callable[[], None]] = []
        self._when_used: dict[str, list[Callable[[], None]]] = {}  # of adapters that are not made yet
        self._inputs: DecoderInputs | None = None
        self._trained: set[str] = set()
        self._active: Mapping[str, float] = {}
        self._tuned: list[Any] = []  # peft's layers
        self._plans: dict[tuple[tuple[str, float], ...], list[Any]] = {}  # of those that are `AdaptedLinear`, by shares

    @property
    def loaded(self) -> bool:
        return not isinstance(self._model, UnloadedModel)

    @property
    def base(self) -> Any:
        """Return the frozen causal LM, with the adapters made so far, loaded at first use; BundleError if it fails."""
        if not self.loaded:
            with self.lock, torch.inference_mode(False):  # the caller's mode must not make its weights untrainable
                unloaded = self._model
                if isinstance(unloaded, UnloadedModel):
                    self._model = unloaded.load().requires_grad_(False)
                    try:
                        for change in self._when_loaded:
                            change()
                    except BaseException:
                        self._model = unloaded
                        raise
                    self._when_loaded.clear()
        return self._model

    @property
    def model(self) -> Any:
        """Return `base` with all adapters."""
        return self._with(list(self._when_used))

    def _with(self, adapters: Iterable[str]) -> Any:
        """Return `base` once these adapters are made."""
        base = self.base
        for name in adapters:
            if name in self._when_used:
                with self.lock, torch.inference_mode(False):
                    changes = self._when_used.get(name, [])
                    self._when_used[name] = []  # while they run: other threads wait for the lock
                    try:
                        for change in changes:
                            change()
                    except BaseException:
                        self._when_used[name] = changes
                        raise
                    self._when_used.pop(name, None)
        return base

    def when_loaded(self, change: Callable[[], None]) -> None:
        """Call `change`, which changes the model: now if the model is in memory, else as soon as it is loaded."""
        if self.loaded:
            change()
        else:
            self._when_loaded.append(change)

    def when_used(self, name: str, change: Callable[[], None]) -> None:
        """Call `change`, which makes the adapter `name` or loads it, as soon as the adapter is used.

        If the model is in memory, and the adapter does not wait for its use, that is now.
        """
        if self.loaded and not self._when_used.get(name):
            change()
        else:
            self._when_used.setdefault(name, []).append(change)

    @property
    def config(self) -> Any:
        return self._model.config

    @property
    def generation_config(self) -> Any:
        return self._model.generation_config

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype if not self.loaded else self.embeddings.weight.dtype

    @property
    def dim(self) -> int:
        return int(self.embeddings.weight.shape[1] if self.loaded else self.config.get_text_config().hidden_size)

    @property
    def window(self) -> int | None:
        """Return the most positions that prompt and answer may take together; None if the model has no limit."""
        window: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return window

    @property
    def embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    @property
    def inputs(self) -> DecoderInputs:
        """What the decoder reads in place of token ids."""
        self._inputs = self._inputs or DecoderInputs(self.base)
        return self._inputs

    def copy_model(self) -> Any:
        """Return a frozen copy of the causal LM, without adapters, that shares the input embeddings."""
        model = type(self.model)(self.model.config)
        load_own_tensors(model, self.own_state())
        convert_weights(model.to(self.device), self.model.dtype)
        model.set_input_embeddings(self.embeddings)
        model.tie_weights()
        return model.eval().requires_grad_(False)

    def add_adapter(self, name: str, config: Callable[[], Any], layers: int | None = None) -> None:
        """Make an untrained, frozen, inactive LoRA adapter when it is used; `config` gives its LoraConfig.

        It adapts what `lora_places` chooses in the decoder's first `layers` layers (None: all), or, if
        `adapter_layers` has the adapter, the layers of its file.
        """
        self.adapters.add(name)
        self.when_used(name, lambda: self._inject(name, config(), layers))

    def _inject(self, name: str, config: Any, layers: int | None) -> None:
        from peft import inject_adapter_in_model

        from ctx_compress_rag.models.adapted import shorten_forward

        if (stored := self.adapter_layers.get(name)) is None:
            places = lora_places(self.base, config.target_modules, layers)
            config.target_modules, config.target_parameters = places.layers, places.experts
            self.left_out[name] = places.left_out
        else:
            experts = {weight: weight.rpartition(".")[0] for weight in fused_experts(self.base)}
            named = {weight for weight in experts if is_wanted(weight, config.target_modules)}
            config.target_parameters = [*(config.target_parameters or ()), *sorted(named)]
            config.target_modules = [layer for layer in stored if layer not in experts.values()]
        # Weights that a file has are not initialized before, which takes longer than to read them.
        empty = stored is not None and not config.use_dora
        # In a list without a config: by a decoder's type, peft would take names of layers for those of experts, and
        # refuse layers that are not adapted here anyway.
        inject_adapter_in_model(config, nn.ModuleList([self.base]), adapter_name=name, low_cpu_mem_usage=empty)
        self.base.peft_config = {**getattr(self.base, "peft_config", {}), name: config}
        self.base.eval()
        self._tuned = [layer for _, layer in tuner_layers(self.base)]
        for layer in self._tuned:
            shorten_forward(layer)
        self._plans.clear()
        self._activate(self._active)
        self._freeze()

    def train_adapter(self, name: str) -> list[nn.Parameter]:
        """Make the existing adapter `name` trainable, in float32, and return its parameters."""
        parameters = [p for n, p in self.model.named_parameters() if f".{name}." in n and "lora_" in n]
        for parameter in parameters:
            # peft gives adapters the decoder's precision; bfloat16 would lose most of a small step.
            parameter.data = parameter.data.float()
        self._trained.add(name)
        self._freeze()
        return parameters

    @contextmanager
    def use(self, adapters: str | Mapping[str, float] | None) -> Iterator[Any]:
        """Yield the model, locked for this thread, with shares (1: all) of adapters active; ConfigError if unknown."""
        shares = {adapters: 1.0} if isinstance(adapters, str) else adapters or {}
        for adapter in shares.keys() - self.adapters:
            raise ConfigError(f"no adapter {adapter!r}: there are {sorted(self.adapters)}")
        with self.lock:
            model = self._with(shares)
            previous = self._active
            if shares != previous:
                self._activate(shares)
            try:
                yield model
            finally:
                if shares != previous:
                    self._activate(previous)

    def _activate(self, shares: Mapping[str, float]) -> None:
        self._active = shares
        if not self._tuned:
            return
        from ctx_compress_rag.models.adapted import AdaptedLinear

        if (plans := self._plans.get(key := tuple(shares.items()))) is None:
            plans = [layer.plan_of(shares) if isinstance(layer, AdaptedLinear) else None for layer in self._tuned]
            self._plans[key] = plans
        for layer, plan in zip(self._tuned, plans, strict=True):
            if plan is not None:
                layer.plan = plan
                continue
            for adapter in self.adapters:
                layer.set_scale(adapter, shares.get(adapter, 1.0))
            if shares:
                layer.set_adapter(list(shares))
            layer.enable_adapters(bool(shares))
        if None in plans:
            self._freeze()  # peft freezes whatever is not active, and nothing else

    def _freeze(self) -> None:
        """Make what is being trained trainable, and nothing else."""
        for name, parameter in self.base.named_parameters():
            parameter.requires_grad_("lora_" in name and any(f".{trained}." in name for trained in self._trained))

    def embedding_rms(self) -> float:
        """Return the root mean square of the input embeddings as their layer returns them: Gemma's scales them."""
        ids = torch.arange(min(self.embeddings.num_embeddings, 4096), device=self.device)
        with torch.no_grad():
            return float(self.inputs.embed(ids).float().pow(2).mean().sqrt())

    @property
    def quantized(self) -> bool:
        return getattr(self._model, "hf_quantizer", None) is not None

    def own_state(self) -> dict[str, Tensor]:
        """Return the decoder's `own_tensors`, on the CPU; raise a ConfigError if quantized."""
        if self.quantized:
            raise ConfigError("the decoder's weights are quantized: load the bundle without quantization_config")
        return {name: value.cpu().contiguous() for name, value in own_tensors(self.model).items()}

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """Return the weights of the existing adapter `name`, on the CPU, by the names that peft's files use."""
        weights = {key: self.base.get_parameter(own) for key, own in self._adapter_weights(name).items()}
        return {key: value.detach().cpu().contiguous() for key, value in weights.items()}

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Load an `adapter_state` into the existing adapter `name`; raise BundleError if names or shapes differ."""
        names = self._adapter_weights(name)
        expected = {key: self.base.get_parameter(own) for key, own in names.items()}
        if odd := sorted(state.keys() ^ expected.keys()):
            raise BundleError(f"adapter {name!r} does not fit this decoder: {len(odd)} keys differ, such as {odd[0]}")
        for key, value in state.items():
            if value.shape != expected[key].shape:
                raise BundleError(
                    f"adapter {name!r} does not fit its config: {key} has shape {tuple(value.shape)}, "
                    f"not {tuple(expected[key].shape)}"
                )
        with torch.no_grad():
            for key, weight in expected.items():
                if not weight.is_meta:
                    weight.copy_(state[key])
                    continue
                layer, _, _ = names[key].partition(".lora_")
                base = next(self.base.get_submodule(layer).get_base_layer().parameters())
                dtype = base.dtype if base.is_floating_point() else torch.float32
                # A copy: a file that is mapped into memory may be written again.
                value = state[key].to(base.device, dtype, copy=True)
                owner, _, last = names[key].rpartition(".")
                setattr(self.base.get_submodule(owner), last, nn.Parameter(value, requires_grad=False))
        self._plans.clear()
        self._activate(self._active)

    def _adapter_weights(self, adapter: str) -> dict[str, str]:
        """Return the full name of each weight of an adapter, by the name that peft's files use."""
        # peft's own functions would rename, for some decoders, when saving and not when loading, or the reverse.
        own = re.compile(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)")
        names = [name for name, _ in self._with([adapter]).named_parameters() if own.search(name)]
        weights = {own.sub(r"\1", name): name for name in names}
        return {f"{PEFT_PREFIX}{key.replace('_vector.weight', '_vector')}": name for key, name in weights.items()}
