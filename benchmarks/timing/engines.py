"""llama.cpp beside transformers: the same answers, how well, and how much sooner."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean, median

from tqdm.auto import tqdm

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import question_chat
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.evaluation.report import standard_error
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.text.answers import token_f1

Chat = Sequence[Message]
_AT_ONCE = 16  # questions between two steps of the progress bar


@dataclass(frozen=True)
class Compared:
    """One engine's greedy answers, compared with those of the first.

    Attributes:
        same: how many are equal.
        gaps: where an answer differs first, how much likelier the first engine's token was than its second choice, in
            natural logarithms: near 0, the two were tied.
        f1, difference: of each question, and less the first engine's.
    """

    same: int
    gaps: list[float]
    f1: list[float]
    difference: list[float]


def compare_answers(
    decoders: Mapping[str, Decoder], store: SoftContextStore, questions: Sequence[Question], ratio: int, template: str
) -> dict[str, Compared]:
    """Have every engine answer every question from its passages at a ratio, and compare with the first engine."""
    sampling = Sampling(max_tokens=32, logprobs=True, top_logprobs=2)
    for question in questions:
        store.ensure(list(question.passages))
    chats = [question_chat(template, mark_texts(store, q.passages, ratio=ratio), q.question) for q in questions]
    given: dict[str, list[Generation]] = {name: [] for name in decoders}
    with tqdm(total=len(decoders) * len(chats), desc="answering", unit="answer") as bar:
        for name, decoder in decoders.items():
            for start in range(0, len(chats), _AT_ONCE):
                given[name] += decoder.generate(chats[start : start + _AT_ONCE], sampling)
                bar.update(len(given[name]) - start)
    first = next(iter(given.values()))
    truth = [token_f1(answer.text, q.answers) for answer, q in zip(first, questions, strict=True)]
    found = {}
    for name, answers in given.items():
        f1 = [token_f1(answer.text, q.answers) for answer, q in zip(answers, questions, strict=True)]
        pairs = [(one, other) for one, other in zip(first, answers, strict=True) if one.text != other.text]
        found[name] = Compared(
            same=len(answers) - len(pairs),
            gaps=sorted(gap for one, other in pairs if (gap := _gap(one, other)) is not None),
            f1=f1,
            difference=[mine - theirs for mine, theirs in zip(f1, truth, strict=True)],
        )
    return found


def _gap(one: Generation, other: Generation) -> float | None:
    for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=False):
        if mine.token != theirs.token:
            return mine.top[0][1] - mine.top[1][1]
    return None  # one ended where the other went on


def answers_table(found: Mapping[str, Compared]) -> str:
    """The comparison as a Markdown table."""
    count = len(next(iter(found.values())).f1)
    return report.markdown_table(
        [
            {
                "engine": name,
                "equal answers": f"{each.same} of {count}",
                "median, largest gap between the tokens that differ": f"{median(each.gaps):.2f}, {each.gaps[-1]:.2f}"
                if each.gaps
                else "",
                "F1": report.mean_text(each.f1),
                "difference in F1": f"{mean(each.difference):+.3f} ± {standard_error(each.difference):.3f}",
            }
            for name, each in found.items()
        ]
    )


def compare_speed(
    decoders: Mapping[str, Decoder], prompts: Mapping[str, Sequence[Chat]], rounds: int
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Seconds of every engine with every kind of prompt, in turn, after a warm-up round.

    Args:
        decoders: the engines.
        prompts: for each kind, one prompt for each caller; none may end an answer early.
        rounds: how often everything is timed, each time with the next prompt.

    Returns: by kind and number of tokens ("1", "30", or "8 callers, 30"), each engine's seconds, round by round.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for kind, chats in prompts.items():
            for at, (tokens, callers) in enumerate(((1, 1), (30, 1), (30, 8))):
                label = f"{tokens}" if callers == 1 else f"{callers} callers, {tokens}"
                # Never the prompt of the call before, whose beginning llama.cpp keeps.
                asked = [chats[(3 * turn + at + place) % len(chats)] for place in range(callers)]
                for name, decoder in decoders.items():
                    seconds = _seconds(decoder, asked, Sampling(max_tokens=tokens))
                    if turn:
                        found.setdefault((kind, label), {}).setdefault(name, []).append(seconds)
    return found


def _seconds(decoder: Decoder, chats: Sequence[Chat], sampling: Sampling) -> float:
    with ThreadPoolExecutor(len(chats)) as pool:
        started = time.perf_counter()
        list(pool.map(lambda chat: decoder.generate([chat], sampling), chats))
        return time.perf_counter() - started


def speed_table(found: Mapping[tuple[str, str], Mapping[str, Sequence[float]]]) -> str:
    """Medians in milliseconds, and how many times faster than the first engine (median of pairs), as Markdown."""
    rows = []
    for (kind, tokens), times in found.items():
        first = next(iter(times.values()))
        row = {"prompt": kind, "tokens": tokens}
        for name, seconds in times.items():
            faster = median(one / other for one, other in zip(first, seconds, strict=True))
            row[name] = f"{median(seconds) * 1e3:,.0f}" + (f" ({faster:.1f}x)" if seconds is not first else "")
        rows.append(row)
    return report.markdown_table(rows)
