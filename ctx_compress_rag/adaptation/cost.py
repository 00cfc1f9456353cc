"""What it costs to adapt to demonstrations and to answer: milliseconds and floating-point operations per question."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch

from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.episodes import Episode
from ctx_compress_rag.adaptation.systems import System
from ctx_compress_rag.decoding.generation import Sampling
from ctx_compress_rag.flops import counting

_COUNTED = 4


@dataclass(frozen=True)
class AdaptationCost:
    """What a question costs, one at a time.

    Attributes:
        adapt_ms, answer_ms: medians.
        adapt_flops, answer_flops: of matrix products and attention, forward and backward; mean of a few
            questions. The predictor's own are in it.
    """

    adapt_ms: float
    answer_ms: float
    adapt_flops: float
    answer_flops: float


def measure(
    decoder: AdaptiveDecoder, systems: Sequence[System], episodes: Sequence[Episode], sampling: Sampling, timed: int
) -> dict[str, AdaptationCost]:
    """The cost of each system, by name, over the first `timed` episodes.

    Systems take turns at each question, in random order, so that whatever else the machine does falls on all
    of them; the first question is done once more before, for warming up.
    """
    times: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    given = {system.name: system.given(episodes) for system in systems}
    for number in range(-1, min(timed, len(episodes))):
        for system in random.Random(number).sample(list(systems), len(systems)):
            episode = given[system.name][max(number, 0)]
            started = time.perf_counter()
            adapted = decoder.adapt(episode.support, system.adaptation)
            between = _now(decoder)
            adapted.generate([episode.query.chat()], sampling)
            ended = _now(decoder)
            if number >= 0:
                times[system.name].append((between - started, ended - between))
    costs = {}
    for system in systems:
        flops = [flops_of(decoder, system, episode, sampling) for episode in given[system.name][: min(timed, _COUNTED)]]
        costs[system.name] = AdaptationCost(
            adapt_ms=1000 * median(adapt for adapt, _ in times[system.name]),
            answer_ms=1000 * median(answer for _, answer in times[system.name]),
            adapt_flops=mean(adapt for adapt, _ in flops),
            answer_flops=mean(answer for _, answer in flops),
        )
    return costs


def flops_of(decoder: AdaptiveDecoder, system: System, episode: Episode, sampling: Sampling) -> tuple[int, int]:
    """Floating-point operations of adapting to an episode's demonstrations, and of answering its question."""
    with counting() as adapting:
        adapted = decoder.adapt(episode.support, system.adaptation)
    with counting() as answering:
        # In this thread: operations of passes that others share run in another, uncounted.
        adapted.generate_apart(episode.query.chat(), sampling)
    return adapting.get_total_flops(), answering.get_total_flops()


def _now(decoder: AdaptiveDecoder) -> float:
    """The time when the device has done all that it was given."""
    if decoder.bundle.backbone.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
