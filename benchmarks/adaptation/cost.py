"""Cost of adapting to demonstrations and of answering: milliseconds and floating-point operations per question."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.adaptation.systems import System
from benchmarks.timing.phases import Phases, count_flops, time_phases
from ctx_compress_rag.adaptation.stages import Episode
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling

_COUNTED = 4


@dataclass(frozen=True)
class AdaptationCost:
    """The cost of a question that is asked alone.

    Attributes:
        adapt_ms, answer_ms: medians.
        adapt_flops, answer_flops: of matrix products and attention, forward and backward; mean of a few
            questions. The predictor's are included.
    """

    adapt_ms: float
    answer_ms: float
    adapt_flops: float
    answer_flops: float


def measure(
    decoder: Decoder, systems: Sequence[System], episodes: Sequence[Episode], sampling: Sampling, timed: int
) -> dict[str, AdaptationCost]:
    """The cost of each system, by name, over the first `timed` episodes."""
    given = {system.name: system.given(episodes) for system in systems}
    questions = [
        {system.name: phases(decoder, system, given[system.name][n], sampling) for system in systems}
        for n in range(min(timed, len(episodes)))
    ]
    times = time_phases(questions, decoder.bundle.backbone.device, progress=False)
    costs = {}
    for name in given:
        flops = [count_flops(question[name]) for question in questions[:_COUNTED]]
        costs[name] = AdaptationCost(
            adapt_ms=1000 * median(adapt for adapt, _ in times[name]),
            answer_ms=1000 * median(answer for _, answer in times[name]),
            adapt_flops=mean(adapt for adapt, _ in flops),
            answer_flops=mean(answer for _, answer in flops),
        )
    return costs


def phases(decoder: Decoder, system: System, episode: Episode, sampling: Sampling) -> Phases:
    """Adapting to an episode's demonstrations, and answering its question."""
    chat = system.chat(episode)

    def apart(adapted: Decoder) -> object:
        with adapted.bundle.backbone.lock:  # then it shares no passes
            return adapted.generate([chat], sampling)

    return Phases(lambda: system.adapt(decoder, episode), lambda adapted: adapted.generate([chat], sampling), apart)
