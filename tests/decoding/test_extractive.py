"""Extractive answers, against the texts themselves."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.decoding.quoting import QuoteProcessor
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.text.quoting import quotable
from ctx_compress_rag.text.tokenising import text_ids
from helpers.decoding import PASSAGES, QUESTION

TEXTS = [
    'In 1903, "Lucas Cranach" (the Elder) paid $1,200.50 at 4:51.\nIt\u2019s state-of-the-art. Na\u00efve \U0001f642.',
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3042\u308b\u3002 Tokyo, too.",
    "Broncos broncos 308-38  x",
]
WORD = re.compile(r"[\u3041-\u30ff\u4e00-\u9fff]|\d+(?:[.,:]\d+)+|[^\W\u3041-\u30ff\u4e00-\u9fff]+")
EXTRACTIVE = Sampling(max_new_tokens=12, extractive=True)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Any:
    return tiny_tokenizer if request.param == "tiny" else Bundle.from_pretrained("demo").tokenizer


def is_quotation(answer: str, text: str) -> bool:
    """Whether an answer stands in a text and cuts none of its words, at whichever of its places."""
    inner = {i for word in WORD.finditer(text) for i in range(word.start() + 1, word.end())}
    places = (m.start() for m in re.finditer(f"(?={re.escape(answer)})", text))
    return any(not {place, place + len(answer)} & inner for place in places)


def test_whatever_the_scores_an_answer_is_a_quotation(tokenizer: Any) -> None:
    """Two answers at a time, of other texts."""
    end, ways = tokenizer.eos_token_id, [TEXTS[:2], TEXTS[2:]]
    seen: set[str] = set()
    for seed in range(150):
        chooser = torch.Generator().manual_seed(seed)
        processor = QuoteProcessor([quotable(texts, tokenizer) for texts in ways], {end})
        ids = torch.empty(2, 0, dtype=torch.long)
        while not (ids == end).any(1).all():
            scores = torch.rand(2, len(tokenizer), generator=chooser)
            ids = torch.cat((ids, processor(ids, scores).argmax(1, keepdim=True)), 1)
        for row, texts in zip(ids.tolist(), ways, strict=True):
            answer = tokenizer.decode(row[: row.index(end)], clean_up_tokenization_spaces=False).strip()
            assert answer and any(is_quotation(answer, text) for text in texts), answer
            seen.add(answer)
    assert len(seen) > 60 and max(map(len, seen)) > 20


def test_every_run_of_words_can_be_an_answer(tokenizer: Any) -> None:
    """With the tokens that it has on its own, as an answer is trained to have them."""
    chance = random.Random(0)
    for text in TEXTS:
        words = list(WORD.finditer(text))
        for _ in range(30):
            first, last = sorted(chance.choices(range(len(words)), k=2))
            span = text[words[first].start() : words[last].end()]
            processor = QuoteProcessor([quotable(TEXTS, tokenizer)], {tokenizer.eos_token_id})
            ids = [*text_ids(tokenizer, span), tokenizer.eos_token_id]
            for done, wanted in enumerate(ids):
                scores = processor(torch.tensor([ids[:done]], dtype=torch.long), torch.zeros(1, len(tokenizer)))
                assert scores[0, wanted] == 0, (span, tokenizer.decode(ids[: done + 1]))


def test_answers_quote_passages_that_the_prompt_has_as_slots(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    """The same alone, in a batch, streamed and by transformers' generate; without the option nothing is quoted."""
    answers = decoder.generate(prompts, EXTRACTIVE)
    texts = [*PASSAGES.values(), QUESTION, "Use this:", "Question:", *(p for p in prompts if isinstance(p, str))]
    for answer in answers:
        quoted = answer.text.strip()
        if answer.finish_reason == "length":  # the last word may have been cut
            assert quoted and any(quoted in text for text in texts), quoted
        else:
            assert any(is_quotation(quoted, text) for text in texts), quoted
    assert any(is_quotation(a.text.strip(), p) for a in answers for p in PASSAGES.values())
    for prompt, answer in zip(prompts, answers, strict=True):
        *pieces, last = decoder.stream(prompt, EXTRACTIVE)
        assert last == answer == decoder.generate_apart(prompt, EXTRACTIVE) and "".join(map(str, pieces)) == answer.text
    for free in decoder.generate(prompts, Sampling(max_new_tokens=12)):
        assert not any(is_quotation(free.text.strip(), text) for text in texts)


def test_a_passage_whose_slots_are_gone_is_quoted_from_its_text(bundle: Any, store: SoftContextStore) -> None:
    lenient = TransformersDecoder(bundle, store, on_unreadable="text")
    marker = store.marker("a", ratio=4)
    gone = marker[:-3] + "]]"
    [answer] = lenient.generate([[{"role": "user", "content": f"Nothing {gone}"}]], EXTRACTIVE)
    assert answer.slots == 0 and answer.text.strip() in f"Nothing {gone}"


def test_quoting_from_very_much_is_refused(
    decoder: TransformersDecoder, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctx_compress_rag.decoding.decoder.MAX_CHARACTERS", 50)
    with pytest.raises(ConfigError, match="prompt 0 and its passages have .* quotes from 50 at most"):
        decoder.generate(prompts[:1], EXTRACTIVE)
    assert decoder.generate(prompts[:1], Sampling(max_new_tokens=1))


def test_json_is_no_quotation() -> None:
    with pytest.raises(ConfigError, match="an extractive answer quotes, and cannot be JSON"):
        Sampling(extractive=True, json_schema='{"type": "object"}')
