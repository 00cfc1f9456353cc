"""Answer questions from contexts that are shortened in different ways (systems); soft contexts go through a store.

A baseline keeps one text per passage, in order (empty if nothing of a passage is left), so that prompts are built as
from the full passages. Its budget, the most tokens of all passages together, is what the soft context takes.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from tqdm.auto import tqdm

from ctx_compress_rag import __version__
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder, is_server_address
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation.questions import Question, questions_digest
from ctx_compress_rag.marking.budget import (
    NOTHING,
    Budget,
    RetrievedText,
    ScoredSentence,
    ShownPassage,
    nearest_sentences,
)
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.models.sentence_embedding import embed_passages, embed_questions
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.codec import DEFAULT_CODEC
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, question_messages

FULL, NONE, SOFT, TRUNCATED, EXTRACTED = "full text", "no context", "soft context", "truncation", "best sentences"
BEST, MIXED, DEFAULT = "best passage", "half sentences, half slots", "default"
SEVERAL = (BEST, MIXED, DEFAULT)
"""Systems for several passages in a prompt: the best passage alone, as text if it fits, else as slots; sentences of all
passages and slots of the best one; and what the postprocessors do by default."""

_AT_ONCE = 16  # questions between two saves of the log; the store must keep slots made for them until then


@dataclass(frozen=True)
class Answers:
    """The answers of one system at one ratio, in the questions' order."""

    texts: list[str]
    prompt_tokens: list[int]  # a slot counts as one


class EvaluationOptions(TypedDict, total=False):
    """How to ask: keywords of `answer_questions`, `evaluate` and `evaluate_sets`; None is the bundle's or store's."""

    sentences: bool  # also score what needs MiniLM: best sentences, and `SEVERAL`; True by default
    codec: str | None
    max_tokens: int | None
    extractive: bool | None  # each system's answers quote what it is given, text or the passages of its slots
    batch_size: int  # a server chooses its own
    engine: str  # see `Decoder`
    options: Mapping[str, Any]  # of the engine, besides `batch_size`


Key = tuple[str, int | None]
"""A system and its ratio, which is None for full text and no context."""
SystemAnswers = dict[Key, Answers]


def evaluation_conditions(
    bundle: Bundle, questions: Sequence[Question], **asking: Unpack[EvaluationOptions]
) -> dict[str, Any]:
    """Return all that answers depend on except system (way to make the context) and ratio, as JSON values."""
    return {
        "version": __version__,
        "fingerprint": bundle.fingerprint,
        "engine": asking.get("engine", "transformers"),
        "weights": asking.get("options", {}).get("weights"),
        "decoder": f"{bundle.backbone.embeddings.weight.dtype} on {bundle.backbone.device.type}",
        "questions_sha256": questions_digest(questions),
        "template": bundle.config.template,
        "max_tokens": asking.get("max_tokens") or bundle.config.answer_tokens,
        "extractive": bundle.config.extractive if (quoted := asking.get("extractive")) is None else quoted,
        "codec": asking.get("codec") or DEFAULT_CODEC,
        "text_share": bundle.config.text_share,
        "reader_share": bundle.config.reader_share,
    }


def answer_questions(
    bundle: Bundle,
    questions: Sequence[Question],
    ratios: Sequence[int],
    systems: Sequence[str],
    *,
    log: str | Path | None = None,
    **asking: Unpack[EvaluationOptions],
) -> SystemAnswers:
    """Return each system's answers at every ratio, or once (FULL, NONE); the file `log`, if any, lets a run resume."""
    for ratio in ratios:
        if bundle.compressor.nestable or bundle.can_read(ratio):
            bundle.compressor.check_ratio(ratio, bundle.config.base_ratio)
        else:  # each ratio is compressed separately
            bundle.check_ratio(ratio)
    about = evaluation_conditions(bundle, questions, **asking)
    sampling = Sampling(max_tokens=about["max_tokens"], extractive=about["extractive"])
    kept = None if log is None else AnswerLog(log, about, questions)
    answers: SystemAnswers = {}
    for group, prompts in evaluation_stores(bundle, questions, ratios, **asking):
        left = [system for system in systems if (system, None) not in answers]  # full text and no context: once
        answers |= answer_with_systems(prompts, questions, system_ratio_keys(left, group), sampling, kept)
    return answers


def shows_several(bundle: Bundle, questions: Sequence[Question]) -> bool:
    """Whether a prompt has several passages, which the postprocessors then show by the question."""
    return any(len(q.passages) > 1 for q in questions) and not bundle.compressor.needs_question


def system_ratio_keys(systems: Sequence[str], ratios: Sequence[int]) -> list[Key]:
    """Return each system with each ratio, in the order of a table; full text and no context come once, with None."""
    keys: list[Key] = [(system, None) for system in (FULL, NONE) if system in systems]
    return keys + [(system, ratio) for ratio in ratios for system in systems if system not in (FULL, NONE)]


def evaluation_stores(
    bundle: Bundle, questions: Sequence[Question], ratios: Sequence[int], **asking: Unpack[EvaluationOptions]
) -> Iterator[tuple[list[int], "EvaluationPrompts"]]:
    """Yield groups of ratios, each with a maker of prompts from a temporary store that is closed before the next."""
    # One store serves all ratios that can be made of what it holds; otherwise each ratio needs its own.
    shared = all(map(bundle.can_read, ratios))
    for group in [list(ratios)] if shared else [[ratio] for ratio in ratios]:
        base = None if shared else group[0]
        with (
            tempfile.TemporaryDirectory() as folder,
            SoftContextStore(folder, bundle, codec=asking.get("codec"), ratio=base) as store,
        ):
            engine = asking.get("engine", "transformers")
            options = dict(asking.get("options", {}))
            if not is_server_address(engine):
                options["batch_size"] = asking.get("batch_size", 16)
            decoder = Decoder(bundle, store, engine=engine, **options)
            store.ensure([passage for q in questions for passage in q.passages])
            yield group, EvaluationPrompts(decoder, store, bundle.config.template)


@dataclass(frozen=True)
class EvaluationPrompts:
    """A maker of prompts for each system and question, with passages from the store."""

    decoder: Decoder
    store: SoftContextStore
    template: str
    ids: Mapping[str, str] = field(default_factory=dict)  # by passages' texts; others have their hash as id
    _budgets: dict[tuple[Question, int], int] = field(default_factory=dict)
    _relevance: dict[Question, list[float]] = field(default_factory=dict)

    def make(self, key: Key, q: Question) -> Sequence[Message]:
        """Return the chat that asks a question with a system's context at a ratio."""
        return question_chat(self.template, self._texts(*key, q), q.question)

    def _texts(self, system: str, ratio: int | None, q: Question) -> list[str]:
        if ratio is None:
            return list(q.passages) if system == FULL else []
        if system == SOFT:
            return self._soft(q, ratio)
        budget = self._budget(q, ratio)
        if system == EXTRACTED:
            return extract_sentences(nearest_sentences(q.passages, q.question), self.decoder.preparer.token_ids, budget)
        if system == DEFAULT:
            return self._marked(q.passages, q, ratio=ratio, scores=self._scores(q))
        if system == MIXED:
            return self._marked(q.passages, q, token_budget=budget, text_share=0.5, scores=self._scores(q))
        if system == BEST:
            best = q.passages[int(np.argmax(self._scores(q)))]
            return self._marked([best], q, token_budget=budget, text_share=0)
        return truncate_passages(q.passages, self.decoder.bundle.tokenizer, self.text_budget(q, ratio))

    def text_budget(self, q: Question, ratio: int) -> int:
        """Return the tokens that texts of all passages may take together, beside the separators between them."""
        separators = (len(q.passages) - 1) * len(self.decoder.preparer.token_ids(PASSAGE_SEPARATOR))
        return self._budget(q, ratio) - separators

    def _soft(self, q: Question, ratio: int) -> list[str]:
        return self._marked(q.passages, q, ratio=ratio, text_share=0)

    def _marked(self, passages: Sequence[str], q: Question, **options: Any) -> list[str]:
        return mark_texts(self.store, passages, [self.ids.get(p) for p in passages], question=q.question, **options)

    def _budget(self, q: Question, ratio: int) -> int:
        """Return the positions that the soft context takes in the prompt, with text that RAM keeps and separators."""
        if (q, ratio) not in self._budgets:
            self._budgets[q, ratio] = len(self.decoder.preparer.token_ids(_joined(self._soft(q, ratio))))
        return self._budgets[q, ratio]

    def _scores(self, q: Question) -> list[float]:
        """Return the cosine of the question with each passage, as a retriever would give it."""
        if q not in self._relevance:
            self._relevance[q] = (embed_passages(q.passages) @ embed_questions([q.question])[0]).tolist()
        return self._relevance[q]


def answer_with_systems(
    prompts: EvaluationPrompts,
    questions: Sequence[Question],
    keys: Sequence[Key],
    sampling: Sampling,
    log: "AnswerLog | None" = None,
) -> SystemAnswers:
    """Return the answers of each system at its ratio; those that the log has are not generated again."""
    answers: SystemAnswers = {}
    made: dict[str, tuple[str, int]] = {}  # several systems and ratios may make the same prompt
    with tqdm(total=len(keys) * len(questions), desc="answering", unit="answer") as bar:
        for key in keys:
            given = [] if log is None else log.given(key)
            bar.update(len(given))
            for start in range(len(given), len(questions), _AT_ONCE):
                asked = questions[start : start + _AT_ONCE]
                chats = [(str(chat), chat) for chat in (prompts.make(key, q) for q in asked)]
                anew = {prompt: chat for prompt, chat in chats if prompt not in made}
                for prompt, g in zip(anew, prompts.decoder.generate([*anew.values()], sampling), strict=True):
                    made[prompt] = (g.text.strip(), g.prompt_tokens)
                new = [made[prompt] for prompt, _ in chats]
                if log is not None:
                    log.add(key, asked, new)
                given += new
                bar.update(len(new))
            answers[key] = Answers([text for text, _ in given], [tokens for _, tokens in given])
    return answers


def question_chat(template: str, texts: Sequence[str], question: str) -> Sequence[Message]:
    """Return the chat that asks a question about texts; empty texts are left out."""
    return question_messages(template, _joined(texts), question)


def _joined(texts: Sequence[str]) -> str:
    return PASSAGE_SEPARATOR.join(filter(None, texts))


class AnswerLog:
    """A JSONL file with a line that says what answers depend on (`about`), then a line for each answer.

    A file of the same run is continued, any other file is replaced. If a line was deleted, or a second process wrote
    one, later answers of the system do not belong to its next question, so they are given again.
    """

    def __init__(self, file: str | Path, about: Mapping[str, Any], questions: Sequence[Question]) -> None:
        self._file = Path(file)
        self._given: dict[tuple[str, int | None], list[tuple[str, int]]] = defaultdict(list)
        head = json.dumps({"run": about}, ensure_ascii=False)
        lines: list[str] = []
        if self._file.is_file():
            with self._file.open(encoding="utf-8", errors="replace") as there:
                lines = there.readlines()
        kept = [f"{head}\n"]
        for line in lines[1:] if lines[:1] == kept else []:
            try:
                row = json.loads(line if line.endswith("\n") else "")
                given, answer = self._given[row["system"], row["ratio"]], (row["answer"], row["prompt_tokens"])
                fits = row["question"] == questions[len(given)].question
            except (ValueError, TypeError, LookupError):
                continue  # cut off when the run was interrupted, damaged, or of a question too many
            if fits:
                given.append(answer)
                kept.append(line)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(kept), encoding="utf-8")

    def given(self, key: tuple[str, int | None]) -> list[tuple[str, int]]:
        """Return a system's answers at a ratio so far, in the questions' order, each with its prompt's token count."""
        return list(self._given[key])

    def add(self, key: tuple[str, int | None], asked: Sequence[Question], given: Sequence[tuple[str, int]]) -> None:
        """Append a system's answers to its next questions; `given` has the form that the method `given` returns."""
        rows = [
            {"system": key[0], "ratio": key[1], "question": q.question, "accepted": list(q.answers)}
            | {"answer": answer, "prompt_tokens": tokens}
            for q, (answer, tokens) in zip(asked, given, strict=True)
        ]
        with self._file.open("a", encoding="utf-8") as out:
            out.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def truncate_passages(passages: Sequence[str], tokenizer: Any, budget: int) -> list[str]:
    """Return the first tokens of each passage as text; the passages share the budget in proportion to their lengths.

    Shares are whole tokens by the method of largest remainders, so that they sum to the budget; passages within it stay
    whole. The tokenizer must be a fast one, because offsets are needed.
    """
    lengths = [count_tokens(text, tokenizer) for text in passages]
    total = sum(lengths)
    if total <= budget:
        return list(passages)
    shares = [budget * length // total for length in lengths]
    by_remainder = sorted(range(len(lengths)), key=lambda i: -(budget * lengths[i] % total))
    for i in by_remainder[: budget - sum(shares)]:
        shares[i] += 1
    return [_head(text, tokenizer, share) for text, share in zip(passages, shares, strict=True)]


def extract_sentences(
    near: Sequence[Sequence[ScoredSentence]], tokens: Callable[[str], Sequence[int]], budget: int
) -> list[str]:
    """Return, per passage, its sentences nearest to the question that fit, in order; the first that does not is cut."""

    def count(shown: Sequence[ShownPassage]) -> int:
        return len(tokens(PASSAGE_SEPARATOR.join(each.text for each in shown if each.text)))

    passages = [RetrievedText("", sentences=own) for own in near]
    return [each.text for each in Budget(passages, budget, count).with_sentences([NOTHING] * len(near))]


def count_tokens(text: str, tokenizer: Any) -> int:
    """Return the number of tokens of a text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _head(text: str, tokenizer: Any, tokens: int) -> str:
    """Return the longest start of a text that ends with one of its tokens and has at most `tokens` by itself."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= tokens:
        return text
    for keep in range(tokens, 0, -1):
        head = text[: offsets[keep - 1][1]]
        if count_tokens(head, tokenizer) <= tokens:
            return head
    return ""
