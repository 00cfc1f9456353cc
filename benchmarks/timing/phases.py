"""Time and floating-point operations of systems that answer in two phases: preparing, and answering."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm.auto import tqdm

from ctx_compress_rag.evaluation import report

K = TypeVar("K")


@dataclass(frozen=True)
class Phases:
    """One question to one system, asked alone.

    Attributes:
        prepare: the first phase; returns what the second needs.
        answer: the second.
        answer_apart: the second in the caller's thread: `answer` may run in another, where operations are not counted.
    """

    prepare: Callable[[], Any]
    answer: Callable[[Any], object]
    answer_apart: Callable[[Any], object]


def time_phases(
    questions: Sequence[Mapping[K, Phases]], device: torch.device, progress: bool = True
) -> dict[K, list[tuple[float, float]]]:
    """Seconds of both phases for each question, by system.

    Systems take turns at each question, in random order, so that other load on the machine affects all of them. The
    first question is asked one more time before the others, as a warm-up.
    """
    times: dict[K, list[tuple[float, float]]] = {system: [] for system in questions[0]}
    rounds = [questions[0], *questions]
    for number, systems in enumerate(tqdm(rounds, desc="timing", unit="question", disable=not progress)):
        for system in random.Random(number).sample(list(systems), len(systems)):
            started = _now(device)
            prepared = systems[system].prepare()
            between = _now(device)
            systems[system].answer(prepared)
            if number:
                times[system].append((between - started, _now(device) - between))
    return times


def count_flops(phases: Phases) -> tuple[int, int]:
    """Operations of both phases: matrix products and attention, a multiply-add counting as two."""
    with counting() as preparing:
        prepared = phases.prepare()
    with counting() as answering:
        phases.answer_apart(prepared)
    return preparing.get_total_flops(), answering.get_total_flops()


def counting() -> FlopCounterMode:
    """A context that counts operations of matrix products and attention, forward and backward, in this thread.

    The operations of a compiled model are not counted.
    """
    # torch counts only its attention kernels for GPUs; the one for CPUs has the same products.
    aten: Any = torch.ops.aten
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
            sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    return FlopCounterMode(display=False, custom_mapping=kernels)


def _now(device: torch.device) -> float:
    """The time, after waiting until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measured(values: Mapping[str, str]) -> str:
    """Named measurements as a Markdown table of two columns."""
    return report.markdown_table([{"measured": name, "": value} for name, value in values.items()])
