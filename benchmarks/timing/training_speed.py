"""Speed of packed training steps against a plain peft step on the same rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from benchmarks.timing.phases import measured
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.training.engine.layers import bfloat16_pays, compile_decoder_layers, round_frozen_weights
from ctx_compress_rag.training.engine.packing import RowPacker, packed_loss

_ANSWER = 24  # tokens to predict at a row's end
_ROWS = 8


@dataclass(frozen=True)
class TrainingSpeed:
    """Speed of forward and backward passes over the same rows, in turn.

    Attributes:
        plain, packed: median tokens per second, without padding.
        factor: median over pairs of packed / plain.
        plain_loss, packed_loss: of the first step.
        dtype: of the matrix products.
    """

    plain: float
    packed: float
    factor: float
    plain_loss: float
    packed_loss: float
    dtype: str


def training_speed(bundle: Bundle, passages: Sequence[str], pairs: int = 3, progress: bool = True) -> TrainingSpeed:
    """Time training a new LoRA adapter of rank 32 for `bundle`'s decoder on the last tokens of passages, in two ways.

    The plain way is peft's layers in transformers' code, with padded rows and the logits of all positions. The other is
    what stages do with `packing` and `compile: true`. Both use bfloat16 if it is faster. The first step of each,
    which compiles, is not timed.
    """
    rows = [torch.tensor(bundle.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in passages]
    rows = [row for row in rows if len(row) > 2 * _ANSWER][:_ROWS]
    if not rows:
        raise ConfigError(f"no passage has more than {2 * _ANSWER} tokens: give a longer text or more --tokens")
    half = bfloat16_pays()
    plain, fast = (_adapted(bundle, half) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    compile_decoder_layers(fast.get_base_model())
    steps = (_plain_step(plain, rows), _packed_step(fast, rows))
    device = bundle.backbone.device.type
    losses = [_timed(step, device, half)[0] for step in steps]
    bar = tqdm(range(pairs), desc="pairs", disable=not progress)
    times = [[_timed(step, device, half)[1] for step in steps] for _ in bar]
    tokens = sum(map(len, rows))
    return TrainingSpeed(
        plain=tokens / median(slow for slow, _ in times),
        packed=tokens / median(quick for _, quick in times),
        factor=median(slow / quick for slow, quick in times),
        plain_loss=losses[0],
        packed_loss=losses[1],
        dtype="bfloat16" if half else "float32",
    )


def training_table(speed: TrainingSpeed) -> str:
    """The speeds as a Markdown table."""
    rows = {
        "tokens per second, plain peft": f"{speed.plain:.0f}",
        "tokens per second, packed and compiled": f"{speed.packed:.0f}",
        "packed over plain (median of pairs)": f"{speed.factor:.2f}",
        "loss, plain and packed": f"{speed.plain_loss:.4f}, {speed.packed_loss:.4f}",
        "products in": speed.dtype,
    }
    return measured(rows)


def _adapted(bundle: Bundle, half: bool) -> Any:
    """A copy of the decoder with an adapter to train, which changes nothing yet."""
    from peft import get_peft_model

    model = get_peft_model(bundle.backbone.copy_model(), lora_config(TuneConfig(rank=32, alpha=32)))
    if half:
        round_frozen_weights(model)
    return model


def _plain_step(model: Any, rows: Sequence[Tensor]) -> Callable[[], Tensor]:
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    wanted = [torch.arange(len(row)) >= len(row) - _ANSWER for row in rows]
    answers = nn.utils.rnn.pad_sequence(wanted, batch_first=True)
    ids, labels = ids.to(model.device), ids.masked_fill(~answers, -100).to(model.device)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss

    return step


def _packed_step(model: Any, rows: Sequence[Tensor]) -> Callable[[], Tensor]:
    packer = RowPacker(len(rows), max(map(len, rows)))
    for row in rows:
        packer.add(row, torch.arange(len(row)) >= len(row) - _ANSWER)
    batch = packer.packed.to(model.device)
    return lambda: packed_loss(model.get_base_model(), batch, input_ids=batch.input_ids)


def _timed(step: Callable[[], Tensor], device: str, half: bool) -> tuple[float, float]:
    """A step's loss, and the seconds of both passes."""
    started = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=half):
        loss = step()
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return float(loss.detach()), time.perf_counter() - started
