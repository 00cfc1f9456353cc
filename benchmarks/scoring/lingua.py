"""The baseline LLMLingua-2: the passages without the words that a classifier finds unimportant."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.evaluation.answering import (
    FULL,
    NONE,
    Answers,
    SystemAnswers,
    count_tokens,
    evaluation_stores,
    question_chat,
    truncate_passages,
)
from ctx_compress_rag.evaluation.harness import score_answers, score_table
from ctx_compress_rag.evaluation.questions import Question

_KINDS = ("xlm-roberta-large", "bert-base-multilingual-cased")


class LLMLingua2:
    """The compressor of the package `llmlingua`, which does not know the question.

    Args:
        model: folder or hub id of an LLMLingua-2 model, such as
            microsoft/llmlingua-2-xlm-roberta-large-meetingbank.
        device: "cpu", "cuda" or "mps".

    Raises:
        ConfigError: the name does not tell the kind of model, or the model cannot be loaded.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        self.model = model
        from llmlingua import PromptCompressor

        if not any(kind in model for kind in _KINDS):
            raise ConfigError(
                f"LLMLingua-2 model {model!r}: the package tells from the name how to join tokens to words; name a "
                f"folder or hub id with {' or '.join(_KINDS)} in it"
            )
        try:
            self._compressor = PromptCompressor(
                model, device, model_config={"trust_remote_code": False}, use_llmlingua2=True
            )
        except OSError as error:  # from the model, or from the tokenizer that the package counts with
            said = str(error).partition("\n")[0]
            raise ConfigError(f"LLMLingua-2 model {model!r} cannot be loaded: {said}; give a folder") from error

    def shorten(self, passages: Sequence[str], tokenizer: Any, budget: int) -> list[str]:
        """The words to keep of each passage, in order; at most `budget` tokens together.

        Args:
            passages: texts.
            tokenizer: the decoder's transformers tokenizer.
            budget: tokens in all, 0 or more.
        """

        def length(texts: Sequence[str]) -> int:
            return sum(count_tokens(text, tokenizer) for text in texts)

        kept, total = list(passages), length(passages)
        if 0 < budget < total:
            rate = budget / total + 0.01  # the package rounds down to a whole percent, and subtracts one more
            kept = self._keep(passages, rate)
            if (spent := length(kept)) < 0.9 * budget:  # it keeps too little of short passages
                kept = self._keep(passages, rate * min(2.0, budget / max(spent, 1)))
        return truncate_passages(kept, tokenizer, budget)

    def _keep(self, passages: Sequence[str], rate: float) -> list[str]:
        found = self._compressor.compress_prompt(list(passages), rate=rate, use_context_level_filter=False)
        kept: list[str] = found["compressed_prompt_list"]
        return kept


@dataclass(frozen=True)
class LinguaTable:
    """A table beside that of `evaluate_sets`: scores of what LLMLingua-2 keeps, in prompts of as many tokens.

    Attributes:
        lingua: what shortens passages.
        ratios: of the soft contexts, whose positions are the budgets.
        extractive: whether answers are quotations.
    """

    lingua: LLMLingua2
    ratios: Sequence[int]
    extractive: bool

    def __call__(
        self, bundle: Bundle, questions: Sequence[Question], answers: SystemAnswers, folder: Path
    ) -> tuple[str, Any]:
        """The table, and its numbers."""
        sampling = Sampling(max_tokens=bundle.config.answer_tokens, extractive=self.extractive)
        found: SystemAnswers = {(system, None): answers[system, None] for system in (FULL, NONE)}
        for group, prompts in evaluation_stores(bundle, questions, self.ratios):
            for ratio in group:
                texts = [
                    self.lingua.shorten(q.passages, bundle.tokenizer, prompts.text_budget(q, ratio)) for q in questions
                ]
                chats = [
                    question_chat(prompts.template, own, q.question) for own, q in zip(texts, questions, strict=True)
                ]
                made = prompts.decoder.generate(chats, sampling)
                found["LLMLingua-2", ratio] = Answers([a.text.strip() for a in made], [a.prompt_tokens for a in made])
        scores = score_answers(questions, found)
        return score_table(scores), [asdict(score) for score in scores]
