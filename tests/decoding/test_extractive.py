"""Extractive answers, against the texts themselves."""

import random
import re
import string
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.world import BUNDLE as DEMO
from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.filters import QuoteFilter
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, PayloadError
from ctx_compress_rag.store.record import record_id
from ctx_compress_rag.text.quoting import find_quotations
from ctx_compress_rag.text.templates import TEMPLATES, without_template
from ctx_compress_rag.text.tokenizing import text_ids
from helpers.decoding import PASSAGES, QUESTION, apart, marker_beside

TEXTS = [
    'In 1903, "Lucas Cranach" (the Elder) paid $1,200.50 at 4:51.\nIt\u2019s state-of-the-art. Na\u00efve \U0001f642.',
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3042\u308b\u3002 Tokyo, too.",
    "Broncos broncos 308-38  x EUR1,200.50\r\n|v2.10.3|(the Elder)|",
    # Accents of their own, and vowel signs.
    "Cafe\u0301 Nai\u0308ve \u0939\u093f\u0928\u094d\u0926\u0940 \u304b\u3099\u304f",
]
MARKS = "\u0301\u0308\u093f\u0940\u094d\u3099"
LETTER = rf"[^\W\u3041-\u30ff\u4e00-\u9fff]|[{MARKS}]"
WORD = re.compile(rf"[\u3041-\u3096\u30a1-\u30ff\u4e00-\u9fff]\u3099?|(?:{LETTER}|(?<=\d)[.,:](?=\d))+")
EXTRACTIVE = Sampling(max_tokens=12, extractive=True)


@pytest.fixture(scope="module", params=["tiny", "demo", "Qwen", "Llama 2", "unknown"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Any:
    match request.param:
        case "tiny":
            return tiny_tokenizer
        case "demo":
            return Bundle.from_pretrained(DEMO).tokenizer
        case "Qwen":
            return mark_and_word_tokenizer()
    return space_first_tokenizer(byte_fallback=request.param == "Llama 2")


def mark_and_word_tokenizer() -> Any:
    """One whose tokens may hold a mark and the word after it, as those of Qwen and Llama 3."""
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([words, byte_level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["</s>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXTS[0], TEXTS[2]] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


def space_first_tokenizer(byte_fallback: bool) -> Any:
    """One that puts a space before a text; what it does not know are bytes, or lost."""
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*special, *string.ascii_letters, *string.digits, *'.,:-"', "\u2581", "th", "the", "\u2581the"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    bpe = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    undo = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(undo)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", eos_token="</s>")


def is_quotation(answer: str, text: str) -> bool:
    """Whether an answer stands in a text and cuts none of its words, at whichever of its places."""
    inner = {i for word in WORD.finditer(text) for i in range(word.start() + 1, word.end())}
    places = (m.start() for m in re.finditer(f"(?={re.escape(answer)})", text))
    return any(not {place, place + len(answer)} & inner for place in places)


def test_whatever_the_scores_an_answer_is_a_quotation(tokenizer: Any) -> None:
    end, ways = tokenizer.eos_token_id, [[*TEXTS[:2], f"the </s>Elder{tokenizer.eos_token}"], TEXTS[2:]]
    quotables = [find_quotations(texts, tokenizer) for texts in ways]
    seen: set[str] = set()
    for seed in range(600):
        chooser = np.random.default_rng(seed)
        limit = int(chooser.integers(1, 40))
        quoting = QuoteFilter(
            quotables[seed % 2], {end, len(tokenizer) + seed}, limit
        )  # the latter is in no vocabulary
        ids: list[int] = []
        while len(ids) < limit and ids[-1:] != [end]:
            ids.append(int(quoting(ids, chooser.random(len(tokenizer), np.float32)).argmax()))
        answer = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        assert not answer or any(is_quotation(answer, text) for text in ways[seed % 2]), answer
        seen.add(answer)
    assert len(seen) > 40 and max(map(len, seen)) > 12


def test_every_run_of_words_can_be_an_answer(tokenizer: Any) -> None:
    """With the tokens that it has on its own, as an answer is trained to have them."""
    chance, quotables = random.Random(0), find_quotations(TEXTS, tokenizer)
    for text in TEXTS:
        words = list(WORD.finditer(text))
        for _ in range(30):
            first, last = sorted(chance.choices(range(len(words)), k=2))
            span = text[words[first].start() : words[last].end()]
            ids = [*text_ids(tokenizer, span), tokenizer.eos_token_id]
            if tokenizer.decode(ids[:-1]) != span:  # it does not know all characters
                continue
            quoting = QuoteFilter(quotables, {tokenizer.eos_token_id}, len(ids))
            for done, wanted in enumerate(ids):
                scores = quoting(ids[:done], np.zeros(len(tokenizer), np.float32))
                assert scores[wanted] == 0, (span, tokenizer.decode(ids[: done + 1]))


def test_no_answer_goes_on_over_a_blank_line(tokenizer: Any) -> None:
    quotables = find_quotations(["the end \n \nthe Elder"], tokenizer)
    ids = text_ids(tokenizer, "the end \n \nthe Elder")
    quoting = QuoteFilter(quotables, {tokenizer.eos_token_id}, len(ids) + 1)
    allowed = [
        quoting(ids[:done], np.zeros(len(tokenizer), np.float32))[wanted] == 0 for done, wanted in enumerate(ids)
    ]
    begun = len(text_ids(tokenizer, "the end"))
    assert all(allowed[:begun]) and not all(allowed)


def test_answers_quote_passages_that_the_prompt_has_as_slots(decoder: Decoder, prompts: list[Any]) -> None:
    """The same alone, in a batch, streamed and by transformers' generate; without the option nothing is quoted."""
    answers = decoder.generate(prompts, EXTRACTIVE)
    texts = [*PASSAGES.values(), QUESTION, "Use this:", "Question:", *(p for p in prompts if isinstance(p, str))]
    nothing = [prepared.quotable is None for prepared in decoder.preparer.prepare(prompts, extractive=True)]
    assert nothing.count(True) == 2  # two prompts are a question alone
    for answer, free in zip(answers, nothing, strict=True):
        assert any(is_quotation(answer.text.strip(), text) for text in texts) != free, answer.text
    assert any(is_quotation(a.text.strip(), p) for a in answers for p in PASSAGES.values())
    for prompt, answer in zip(prompts, answers, strict=True):
        *pieces, last = decoder.stream(prompt, EXTRACTIVE)
        assert last == answer == apart(decoder, prompt, EXTRACTIVE) and "".join(map(str, pieces)) == answer.text
    for free in decoder.generate(prompts, Sampling(max_tokens=12)):
        assert not any(is_quotation(free.text.strip(), text) for text in texts)


def test_a_damaged_text_is_not_quoted_and_its_slots_are_read(
    bundle: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = chromadb.PersistentClient(tmp_path)
    store = SoftContextStore(client, bundle, key=b"k" * 16)
    store.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
    markers = store.markers(["a", "b"], ratio=4)
    [raw] = [c for c in client.list_collections() if "ctx_format" in c.metadata]
    raw.update(ids=[record_id("a", "default")], metadatas=[{"text": "no longer there"}])
    prompt = [{"role": "user", "content": f"{markers[0]} {markers[1]}"}]
    with pytest.raises(PayloadError, match="'a' is damaged"):
        Decoder(bundle, store).generate([prompt], EXTRACTIVE)
    lenient = Decoder(bundle, store, on_unreadable="text")
    [answer] = lenient.generate([prompt], EXTRACTIVE)
    assert is_quotation(answer.text.strip(), PASSAGES["b"]) and "'a' is damaged" in caplog.text
    assert answer.slots == lenient.generate([prompt], Sampling(max_tokens=2))[0].slots


def test_quoting_from_much_is_refused(decoder: Decoder, prompts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctx_compress_rag.decoding.preparer.MAX_CHARACTERS", 50)
    with pytest.raises(ConfigError, match="prompt 0 and its passages have .* quotes from 50 at most"):
        decoder.generate(prompts[:1], EXTRACTIVE)
    assert decoder.generate(prompts[:1], Sampling(max_tokens=1))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\n\nQuestion: Who?", ""),
        (" Who?\n", ""),
        ("A mill.\n\nSummarize it:", "A mill."),
        ("", ""),
    ],
)
def test_a_message_without_its_question(text: str, left: str) -> None:
    assert without_template(text) == left


OWN = [template.replace("|||", "\n") for template in TEMPLATES]
KNOWN = [
    *OWN[1:2],
    *OWN[3:],
    "Use the context to answer. If you do not know, say so.\nQuestion: {question} \nContext: {context} \nAnswer:",
    "Here is some context: {context}\n\n{question}",
    "{question}\n\n{context}",
    "<context>\n{context}\n</context>\n\nQuestion: {question}",
    "{context}\n\nQuestion: {question}\nHelpful Answer:",
]
SAID = "The pump was made in Turin.\nIts warranty: five years.\n\nOak floats."


@pytest.mark.parametrize("template", KNOWN)
def test_passages_are_told_from_a_template_without_markers(template: str) -> None:
    assert without_template(template.format(context=SAID, question="Where was it made?")).strip() == SAID


def test_a_request_to_rephrase_a_question_has_no_passages() -> None:
    assert without_template("Rephrase it.\nChat History:\nuser: Hi\nFollow Up Input: Who?\nStandalone question:") == ""


def test_no_answer_quotes_the_question(make_tiny_bundle: Any) -> None:
    store = SoftContextStore(chromadb.EphemeralClient(), bundle := make_tiny_bundle(), collection="asked")
    store.add(["1 2 3 4"], ids=["digits"], progress=False)
    preparer = Decoder(bundle, store).preparer
    marker = store.marker("digits", 4)

    def words(*messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        [prepared] = preparer.prepare([chat], extractive=True)
        assert prepared.quotable is not None
        return bundle.tokenizer.decode([token.id for token in prepared.quotable.tokens if token is not None])

    said = words(
        ("system", "Be brief?"), ("user", f"A mill. {marker}\n\nWho?"), ("assistant", "Orla."), ("user", "Why?")
    )
    assert all(word in said for word in ("A mill.", "1 2 3 4", "Orla."))
    assert not any(word in said for word in ("Be brief", "Who", "Why"))
    # Wherever the question stands, and whatever the template says: an earlier answer, the passages, text beside them.
    first = words(("user", f"Use this. Say so.\nQuestion: Who?\nContext: A mill. {marker}\nOld.\nAnswer:"))
    assert "A mill." in first and "1 2 3 4" in first and not any(each in first for each in ("Use", "Who", "Con", "Old"))
    for before in ("We have an existing answer: Orla.\n", "Existing Answer:\nOrla.\n"):
        refined = words(("user", f"The query is: Who?\n{before}Some context.\n----\n{marker}\n----\nRefined Answer:"))
        assert "Orla." in refined and not any(each in refined for each in ("Who", "Some", "Refined"))
    # Text that ends with a marker without slots is a passage, and costs nothing.
    end = marker_beside(store, "digits", 0, len("1 2\n\n3"))
    plain, marked = (
        [{"role": "user", "content": f"Context: {text}\nQuestion: 4"}] for text in ("1 2\n\n3", f"1 2\n\n3 {end}")
    )
    one, other = preparer.prepare([plain, marked], extractive=True)
    assert one.ids().tolist() == other.ids().tolist() and other.slots == 0 and other.side == "text"
    assert words(("system", marked[0]["content"]), ("user", "Why?")).split() == ["1", "2", "3"]
    for before in ([("system", "A mill.")], [("user", "Who?"), ("assistant", "Orla.")]):
        chat = [{"role": role, "content": content} for role, content in (*before, ("user", "Why?"))]
        assert preparer.prepare([chat], extractive=True)[0].quotable is None
    [greeting] = preparer.prepare([[{"role": "user", "content": "\n\nWho?"}]], extractive=True)
    assert greeting.quotable is None  # there is nothing else: the answer is free
