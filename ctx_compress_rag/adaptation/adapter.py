"""Low-rank changes of a decoder's Q/K/V projections, applied temporarily and saved as peft adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctx_compress_rag.bundle.files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.layers import PEFT_PREFIX

SEPARATE = frozenset({"q_proj", "k_proj", "v_proj"})
FUSED = "qkv_proj"

# Settings of peft adapters that are not plain low-rank factors, and that we cannot read.
_UNREAD = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "layers_to_transform", "modules_to_save")


def qkv_projections(model: Any) -> dict[str, tuple[int, int]]:
    """Return the Q/K/V projections of every attention block, as name in the model -> (d_in, d_out).

    A decoder that computes the three with one matrix (Phi-3's `qkv_proj`) has one projection per block, and one adapter
    on it, whose outputs are Q, K and V one after another, which then share the factor `a`.

    Raises ConfigError if an attention block has other projections.
    """
    found: dict[str, tuple[int, int]] = {}
    blocks: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        block, _, last = name.rpartition(".")
        if last in SEPARATE or last == FUSED:
            found[name] = (int(module.in_features), int(module.out_features))
            blocks.setdefault(block, set()).add(last)
    odd = {block: sorted(names) for block, names in blocks.items() if names not in (SEPARATE, {FUSED})}
    if odd or not found:
        what = f"only {next(iter(odd.values()))} in {next(iter(odd))}" if odd else "none of them"
        raise ConfigError(
            f"cannot adapt a {type(model).__name__}: its attention needs q_proj, k_proj and v_proj, or qkv_proj, "
            f"and has {what}"
        )
    return found


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank change of each projection's weight, scale * b @ a.

    An adapter may hold several such changes, called its rows, one for each prompt of a batch or each support context.

    Attributes:
        a: for each projection (rank, d_in), or (rows, rank, d_in) in an adapter with rows.
        b: for each projection (d_out, rank), or (rows, d_out, rank) in an adapter with rows.
        scale: peft's lora_alpha / r; 1 for updates.
    """

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return next(iter(self.b.values())).shape[-1]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each projection, by name."""
        return {name: (a.shape[-1], self.b[name].shape[-2]) for name, a in self.a.items()}

    def plus(self, update: Adapter) -> Adapter:
        """Return the exact sum of this change and `update`: [scale b, update's b] @ [a; update's a].

        The rank of the sum is the sum of both ranks. If the update has rows, the sum has as many.
        """
        a, b = {}, {}
        for name, update_a in update.a.items():
            rows = update_a.shape[:-2]
            a[name] = torch.cat([self.a[name].expand(*rows, -1, -1), update_a], dim=-2)
            own_b = (self.scale * self.b[name]).expand(*rows, -1, -1)
            b[name] = torch.cat([own_b, update.scale * update.b[name]], dim=-1)
        return Adapter(a, b)

    def rows(self, indices: Tensor | Sequence[int]) -> Adapter:
        """Return an adapter whose row i is row `indices[i]` of this adapter, or this adapter if it has no rows."""
        if next(iter(self.a.values())).ndim == 2:
            return self
        index = torch.as_tensor(indices, device=next(iter(self.a.values())).device)
        return self._each(lambda factor: factor[index])

    def row(self, index: int) -> Adapter:
        return self._each(lambda factor: factor[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Adapter:
        a, b = ({name: change(factor) for name, factor in side.items()} for side in (self.a, self.b))
        return Adapter(a, b, self.scale)

    def save_pretrained(self, folder: str | Path, decoder: str | None = None) -> None:
        """Write this adapter, which must have no rows, as a peft LoRA adapter in float32 that other engines can serve.

        `decoder` is the decoder's hub id or path, for the file's `base_model_name_or_path`.
        """
        from peft import LoraConfig

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        alpha = self.scale * self.rank
        LoraConfig(
            r=self.rank,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]  # peft itself divides it
            target_modules=sorted({name.rpartition(".")[2] for name in self.a}),
            base_model_name_or_path=decoder,
            task_type="CAUSAL_LM",
            inference_mode=True,
        ).save_pretrained(str(folder))
        tensors = {}
        for name in self.a:
            tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = self.a[name].detach().float().cpu().contiguous()
            tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = self.b[name].detach().float().cpu().contiguous()
        save_file(tensors, folder / ADAPTER_FILE)

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: Any) -> Adapter:
        """Read a peft LoRA adapter of the Q/K/V projections of the decoder `model`, to the decoder's device.

        Raises BundleError if the adapter is missing, is no plain LoRA of one rank, or does not fit the decoder.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
            tensors = load_file(folder / ADAPTER_FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise BundleError(f"{str(folder)!r} is not a peft adapter folder ({error})") from error
        unread = [key for key in _UNREAD if config.get(key)]
        if config.get("peft_type") != "LORA" or unread:
            what = unread or [f"peft_type {config.get('peft_type')!r}"]
            raise BundleError(
                f"the adapter in {folder} has {what[0]}: only plain LoRA of one rank can be adapted further"
            )
        shapes, rank = qkv_projections(model), int(config["r"])
        expected = {f"{PEFT_PREFIX}{n}.lora_A.weight": (rank, shape[0]) for n, shape in shapes.items()}
        expected |= {f"{PEFT_PREFIX}{n}.lora_B.weight": (shape[1], rank) for n, shape in shapes.items()}
        given = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        if odd := sorted({key for key, _ in given.items() ^ expected.items()}):
            raise BundleError(
                f"the adapter in {folder} does not fit this decoder's Q/K/V projections: {len(odd)} tensors are "
                f"missing, unexpected or of another shape, for example {odd[0]}"
            )
        device = model.device
        return cls(
            {n: tensors[f"{PEFT_PREFIX}{n}.lora_A.weight"].float().to(device) for n in shapes},
            {n: tensors[f"{PEFT_PREFIX}{n}.lora_B.weight"].float().to(device) for n in shapes},
            config["lora_alpha"] / rank,
        )


@contextmanager
def apply_adapter(model: Any, adapter: Adapter | None) -> Iterator[None]:
    """Add an adapter's change to the projections' outputs within the context; None adds nothing.

    Weights stay as they are, and active peft adapters stay active, because the change is added on top. If the adapter
    has rows, row i changes the outputs for row i of every batch. The caller must hold the model's lock.
    """
    with ExitStack() as hooks:
        if adapter is not None:
            for name in adapter.a:
                hook = partial(_add_change, adapter.a[name], adapter.b[name], adapter.scale)
                hooks.enter_context(model.get_submodule(name).register_forward_hook(hook))
        yield


def _add_change(a: Tensor, b: Tensor, scale: float, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return output + scale * x a^T b^T, computed in the factors' precision. This is a forward hook."""
    change = (inputs[0].to(a.dtype) @ a.mT) @ b.mT
    return output + (scale * change).to(output.dtype)
