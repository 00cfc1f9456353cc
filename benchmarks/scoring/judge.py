"""A language model's verdict on answers, right or wrong, in addition to metrics that compare words."""

import json
import pkgutil
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError, CtxCompressError
from ctx_compress_rag.evaluation import report
from ctx_compress_rag.evaluation.answering import Key, SystemAnswers
from ctx_compress_rag.evaluation.questions import Question

PROMPT = """\
Here is a question, a set of golden answers (split with /), an AI-generated answer. Can you judge whether the \
AI-generated answer is correct according to the question and golden answers, simply answer Yes or No.

Question: {question}
Golden answers: {answers}
AI-generated answer: {answer}"""
"""The judge's prompt, in the words of Evaluating Open-QA Evaluation. ArcAligner (appendix B) also has answers judged
right or wrong by question and reference answer, but does not print its prompt."""

# The word must be its own clause: "No doubt it is right" is not a verdict.
_VERDICT = re.compile(r"\W*(yes|no)\b(?![^\S\n]*\w)", re.IGNORECASE)


class JudgeError(CtxCompressError):
    """The judge failed, for example because its server is down."""


class Judge(Protocol):
    """A LangChain chat model, or any object with this method."""

    def invoke(self, input: str, /) -> Any:
        """The reply to a prompt: a string, or a message with the string as `text`."""


def judge_answers(
    judge: Judge,
    asked: Sequence[tuple[str, Sequence[str], str]],
    progress: bool = True,
    log: str | Path | None = None,
) -> list[bool | None]:
    """Whether each answer is right; None if the judge's reply cannot be read.

    Args:
        judge: is asked one prompt after another, equal prompts only once.
        asked: questions, each with its accepted answers and the answer to judge.
        progress: show a progress bar.
        log: a JSONL file that keeps prompts and replies. Its name ends in `.part` until it has all replies; a run
            after an interruption continues from it.

    Raises:
        ConfigError: a reply is neither a string nor a message with a text.
        JudgeError: the judge failed, for example because its server is down.
    """
    prompts = [
        PROMPT.format(question=question, answers=" / ".join(answers), answer=answer)
        for question, answers, answer in asked
    ]
    part = None if log is None else Path(f"{log}.part")
    replies = {} if part is None else _replies(part)
    for prompt in tqdm(dict.fromkeys(prompts), desc="judging", unit="answer", disable=not progress):
        if prompt in replies:
            continue
        replies[prompt] = _reply(judge, prompt)
        if part is not None:
            with part.open("a", encoding="utf-8") as out:
                out.write(f"{json.dumps({'prompt': prompt, 'reply': replies[prompt]}, ensure_ascii=False)}\n")
    if part is not None and part.exists():
        part.replace(str(log))
    return [verdict(replies[prompt]) for prompt in prompts]


@dataclass(frozen=True)
class JudgeTable:
    """A table beside that of `evaluate_sets`: a judge's verdicts on the questions that have an answer.

    Replies go into judged.jsonl in the set's folder.
    """

    judge: Judge

    def __call__(
        self, bundle: Bundle, questions: Sequence[Question], answers: SystemAnswers, folder: Path
    ) -> tuple[str, Any]:
        """The table, and its numbers: the share of right answers among readable verdicts, and how many are not."""
        asked = [
            (key, (q.question, q.answers, text))
            for key, given in answers.items()
            for q, text in zip(questions, given.texts, strict=True)
            if q.answers
        ]
        found = judge_answers(self.judge, [one for _, one in asked], log=folder / "judged.jsonl")
        verdicts: dict[Key, list[float]] = {key: [] for key in answers}
        for (key, _), right in zip(asked, found, strict=True):
            verdicts[key] += [] if right is None else [float(right)]
        count = sum(bool(q.answers) for q in questions)
        rows = [
            {
                "context": system,
                "ratio": report.ratio_text(ratio),
                "judged right": report.mean_text(right) if right else "",
                "verdicts not read": str(count - len(right)),
            }
            for (system, ratio), right in verdicts.items()
        ]
        numbers = [{"system": system, "ratio": ratio, "right": right} for (system, ratio), right in verdicts.items()]
        return report.markdown_table(rows), numbers


def verdict(reply: str) -> bool | None:
    """The verdict in a reply, if it begins with Yes or No as its own clause and does not contain the other word.

    >>> verdict("**Yes**, the golden answer names it."), verdict("No."), verdict("Yes and no.")
    (True, False, None)
    """
    words = set(re.findall(r"\b(?:yes|no)\b", reply.lower()))
    found = _VERDICT.match(reply)
    return found[1].lower() == "yes" if found and len(words) == 1 else None


def _replies(part: Path) -> dict[str, str]:
    """The replies of an interrupted run, by prompt; a line that was cut off is removed from the file."""
    if not part.is_file():
        return {}
    *whole, _ = part.read_text(encoding="utf-8", errors="replace").split("\n")
    part.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    return {row["prompt"]: row["reply"] for row in map(json.loads, whole)}


def load_judge(name: str) -> Judge:
    """Make a judge with a function, named as `module:function`; the module may be in the working folder.

    Raises:
        ConfigError: there is no such function, or the object that it makes has no `invoke`.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script's path begins with its own folder
    try:
        made = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"judge {name!r} cannot be made: {error}; give module:function, a function without arguments that returns "
            "a chat model"
        ) from error
    if not callable(getattr(made, "invoke", None)):
        raise ConfigError(f"judge {name!r} makes a {type(made).__name__}, which has no invoke: return a chat model")
    judge: Judge = made
    return judge


def _reply(judge: Judge, prompt: str) -> str:
    try:
        reply = judge.invoke(prompt)
    except Exception as error:
        raise JudgeError(
            f"the judge failed ({type(error).__name__}: {error}): make sure that it answers, and run this again"
        ) from error
    text = reply if isinstance(reply, str) else getattr(reply, "text", None)
    if not isinstance(text, str):
        raise ConfigError(
            f"the judge replied with a {type(reply).__name__}: its invoke must return a string, or a message with the "
            "string as text"
        )
    return text
