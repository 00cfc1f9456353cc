"""A threshold on the mean log-probability of an answer: what it does where questions have no answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.evaluation.answering import FULL, SOFT, Key, evaluation_stores
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.evaluation.report import markdown_table, mean_text
from ctx_compress_rag.text.answers import declined, token_f1

_AT_ONCE = 16


@dataclass(frozen=True)
class Sure:
    """An answer: the mean log-probability of its tokens, its score if it is given, and whether there is one.

    As SQuAD 2.0 scores: where there is no answer, declining scores 1 and any answer 0.
    """

    logprob: float
    f1: float
    answerable: bool

    def score(self, threshold: float) -> float:
        """The score if answers below the threshold are declined."""
        return self.f1 if self.logprob >= threshold else float(not self.answerable)


def sure_answers(bundle: Bundle, questions: Sequence[Question], ratio: int) -> dict[str, list[Sure]]:
    """Answers from soft contexts and from full text, with how sure the model was."""
    sampling = Sampling(max_tokens=bundle.config.answer_tokens, logprobs=True)
    keys: list[Key] = [(SOFT, ratio), (FULL, None)]
    sure: dict[str, list[Sure]] = {system: [] for system, _ in keys}
    for _, prompts in evaluation_stores(bundle, questions, [ratio]):
        for key in keys:
            for start in tqdm(range(0, len(questions), _AT_ONCE), desc=key[0]):
                asked = questions[start : start + _AT_ONCE]
                for q, given in zip(
                    asked, prompts.decoder.generate([prompts.make(key, q) for q in asked], sampling), strict=True
                ):
                    probability = float(np.mean([token.logprob for token in given.logprobs or ()]))
                    f1 = token_f1(given.text.strip(), q.answers) if q.answers else declined(given.text)
                    sure[key[0]].append(Sure(probability, f1, bool(q.answers)))
    return sure


def best_threshold(answers: Sequence[Sure]) -> float:
    """The threshold with the highest mean score; -inf, which declines nothing, if none is better."""
    thresholds = [-np.inf, *sorted(a.logprob for a in answers), np.inf]
    return float(max(thresholds, key=lambda t: float(np.mean([a.score(t) for a in answers]))))


def confidence_table(sure: dict[str, list[Sure]]) -> str:
    """Scores without and with a threshold, which is chosen on every other question and scored on the rest.

    The first column of numbers is the probability that an answerable question's answer is surer than another's.

    Raises:
        DataError: no question is answerable, or all are.
    """
    rows = []
    for system, answers in sure.items():
        with_answer = [a.logprob for a in answers if a.answerable]
        without = [a.logprob for a in answers if not a.answerable]
        if not with_answer or not without:
            raise DataError("a threshold needs questions with and without an answer: give a set such as SQuAD 2.0")
        surer = np.mean(np.greater.outer(with_answer, without) + 0.5 * np.equal.outer(with_answer, without))
        chosen, scored = answers[::2], answers[1::2]
        threshold = best_threshold(chosen)
        rightly, wrongly = (
            [float(a.logprob < threshold) for a in scored if a.answerable is kind] for kind in (False, True)
        )
        rows.append(
            {
                "context": system,
                "surer if answerable": f"{surer:.3f}",
                "threshold": f"{threshold:.2f}",
                "score without": mean_text([a.score(-np.inf) for a in scored]),
                "score with": mean_text([a.score(threshold) for a in scored]),
                "declined, rightly": mean_text(rightly),
                "wrongly": mean_text(wrongly),
            }
        )
    return markdown_table(rows)
