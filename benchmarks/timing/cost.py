"""Cost of a question until its answer begins, with any kind of context: seconds and floating-point operations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

from benchmarks.timing.phases import Phases, count_flops, time_phases
from benchmarks.timing.speed import FIRST_TOKEN
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import spread_examples
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import (
    EvaluationOptions,
    Key,
    SystemAnswers,
    evaluation_stores,
    system_ratio_keys,
)
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.prompt import Message

K = TypeVar("K")
MakePrompt = Callable[[], Sequence[Message]]


@dataclass(frozen=True)
class Cost:
    """The cost of a question that is asked alone, with its passages already stored.

    The two parts are those of Read As Human (table 3, eq. 10 to 12), except that the second ends at the first token.

    Attributes:
        context_seconds: median time until the prompt's text is ready. For soft contexts this is writing markers, and
            what RAM reads for a question; for baselines, choosing words or sentences.
        first_token_seconds: median time until the answer's first token, `context_seconds` and the fetch included.
        context_flops, first_token_flops: mean operations in these times, counted as they run: matrix products and
            attention, a multiply-add counting as two. ArcAligner's loops are included.
    """

    context_seconds: float
    first_token_seconds: float
    context_flops: float
    first_token_flops: float


def measure(decoder: Decoder, questions: Sequence[Mapping[K, MakePrompt]], progress: bool = True) -> dict[K, Cost]:
    """The cost of each system; a question has, by system, the function that makes its prompt."""
    phases = [{system: _phases(decoder, prompt) for system, prompt in prompts.items()} for prompts in questions]
    times = time_phases(phases, decoder.bundle.backbone.device, progress)
    flops = {system: [count_flops(systems[system]) for systems in phases] for system in times}
    return {
        system: Cost(
            context_seconds=median(context for context, _ in times[system]),
            first_token_seconds=median(context + reading for context, reading in times[system]),
            context_flops=mean(context for context, _ in flops[system]),
            first_token_flops=mean(context + reading for context, reading in flops[system]),
        )
        for system in times
    }


_TIMED = 5  # questions


@dataclass(frozen=True)
class CostTable:
    """A table beside that of `evaluate_sets`: what a question costs with each system, over five questions.

    Attributes:
        ratios: of the soft contexts.
        asking: how the questions are asked.
    """

    ratios: Sequence[int]
    asking: EvaluationOptions

    def __call__(
        self, bundle: Bundle, questions: Sequence[Question], answers: SystemAnswers, folder: Path
    ) -> tuple[str, Any]:
        """The table, and its numbers."""
        asked = spread_examples(questions, _TIMED)
        costs: dict[Key, Cost] = {}
        for group, prompts in evaluation_stores(bundle, asked, self.ratios, **self.asking):
            keys = system_ratio_keys([system for system, _ in answers if (system, None) not in costs], group)
            rounds = [{key: partial(prompts.make, key, q) for key in dict.fromkeys(keys)} for q in asked]
            costs |= measure(prompts.decoder, rounds)
        return cost_table(costs), [{"system": s, "ratio": ratio, **asdict(cost)} for (s, ratio), cost in costs.items()]


def _phases(decoder: Decoder, prompt: MakePrompt) -> Phases:
    def apart(chat: Sequence[Message]) -> object:
        with decoder.bundle.backbone.lock:  # then it shares no passes
            return decoder.generate([chat], FIRST_TOKEN)

    return Phases(prompt, lambda chat: decoder.generate([chat], FIRST_TOKEN), apart)


def cost_table(costs: Mapping[tuple[str, int | None], Cost]) -> str:
    """The costs of systems at their ratios, as a Markdown table."""
    return report.markdown_table(
        [
            {
                "context": system,
                "ratio": report.ratio_text(ratio),
                "ms to first token": f"{1e3 * cost.first_token_seconds:.1f}",
                "of which the context": f"{1e3 * cost.context_seconds:.1f}",
                "GFLOPs": f"{cost.first_token_flops / 1e9:,.2f}",
                "for the context": f"{cost.context_flops / 1e9:,.2f}",
            }
            for (system, ratio), cost in costs.items()
        ]
    )
