"""Splice identity: slots that are the embeddings of the text they replace change nothing."""

from typing import Any

import chromadb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.text.chat import PromptTokenizer, chat_text
from helpers import architectures
from helpers.decoding import by_transformers, prompt_of
from helpers.models import tiny_config

# A row is a list of (length, is it a hole?). All are longer than the sliding window of 8.
ROWS = [
    [(7, False), (12, True), (5, False), (9, True), (6, False)],  # two holes
    [(20, True), (3, False)],  # begins with a hole
    [(4, False), (6, True), (5, True), (1, True)],  # neighbors, and ends with a hole
    [(17, False)],  # none
]


@pytest.fixture(scope="module", params=architectures.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return architectures.model(name)


def test_slots_that_are_token_embeddings_give_the_same_logits(name: str, model: Any) -> None:
    embed = model.get_input_embeddings()
    rows, plain = [], []
    for number, row in enumerate(ROWS):
        ids = architectures.random_ids(name, [length for length, _ in row], seed=number)
        plain.append(torch.cat(ids))
        rows.append(prompt_of(*(embed(i) if hole else i for i, (_, hole) in zip(ids, row, strict=True))))
    spliced = splice_prompts(embed, rows)
    with torch.no_grad():
        logits = model(**spliced.model_inputs()).logits
        for number, ids in enumerate(plain):
            expected = model(input_ids=ids.unsqueeze(0)).logits[0]
            real = spliced.attention_mask[number].bool()
            torch.testing.assert_close(logits[number][real], expected, atol=2e-4, rtol=1e-4)
            # The logits tell inputs apart: otherwise the identity would prove nothing.
            other = model(input_ids=ids.roll(1).unsqueeze(0)).logits[0]
            assert (other - expected).abs().max() > 0.1


@given(
    lengths=st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5
    )
)
@settings(deadline=None, max_examples=40)
def test_masks_and_positions(lengths: list[list[tuple[int, bool]]]) -> None:
    embed = torch.nn.Embedding(50, 3)
    rows = [
        prompt_of(*(torch.full((n, 3), 0.5) if hole else torch.randint(0, 50, (n,)) for n, hole in row))
        for row in lengths
    ]
    totals = [sum(n for n, _ in row) for row in lengths]
    if 0 in totals:
        with pytest.raises(ConfigError, match=f"prompt {totals.index(0)} is empty"):
            splice_prompts(embed, rows)
        return
    spliced = splice_prompts(embed, rows)
    longest = max(totals)
    assert spliced.inputs_embeds.shape == (len(rows), longest, 3)
    for number, total in enumerate(totals):
        padding = [0] * (longest - total)
        slots = [hole for n, hole in lengths[number] for _ in range(n)]
        assert spliced.attention_mask[number].tolist() == padding + [1] * total
        assert spliced.position_ids[number].tolist() == padding + list(range(total))
        assert spliced.slot_mask[number].tolist() == [False] * len(padding) + slots
        assert (rows[number].length, rows[number].slots) == (total, sum(slots))


def test_slots_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"differ in width: \[3, 4\]"):
        splice_prompts(torch.nn.Embedding(5, 3), [prompt_of(torch.tensor([1]), torch.zeros(2, 4))])


@pytest.fixture(scope="module")
def decoder(name: str, model: Any) -> Decoder:
    """Its slots are one token's embedding each: what it reads is the plain prompt."""
    frozen = {"mode": "frozen"}
    method = {"name": "mean_pooling", "layers": 0, "linear": False, "encoder": frozen, "decoder": frozen}
    config = tiny_config(name=name, method=method, base_ratio=1, ratios=[1], max_tokens=16)
    bundle = Bundle.build(config, Backbone(model, architectures.tokenizer(name)))
    store = SoftContextStore(
        chromadb.EphemeralClient(), bundle, collection=f"identity-{name}", codec="fp16", key=b"k" * 16
    )
    return Decoder(bundle, store)


QUESTION = "who built it?"
PASSAGES = ["The lighthouse of Brenmoor was built in 1874 by Ada Quill.", "It has two lamps."]


def chats(*contexts: str) -> list[list[dict[str, str]]]:
    """Chats as RAG chains make them: context in the user's message, in the system's, in an earlier turn."""
    first, second = contexts
    return [
        [{"role": "user", "content": f"Context: {first}\n\n{second}\nQuestion: {QUESTION}"}],
        [{"role": "system", "content": f"Answer in few words.\n{first}"}, {"role": "user", "content": QUESTION}],
        [
            {"role": "user", "content": second},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": QUESTION},
        ],
    ]


def test_greedy_answers_equal_transformers_own(decoder: Decoder, model: Any) -> None:
    """Batched, chats with one and two passages and none, against generate() on each plain prompt."""
    tokenizer = decoder.bundle.tokenizer
    assert decoder.store is not None
    ids = decoder.store.ensure(PASSAGES)
    with_markers = chats(*decoder.store.markers(ids, ratio=1))
    plain = chats("", "")[:1]
    answers = decoder.generate([*with_markers, *plain], Sampling(max_tokens=12))

    passage_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PASSAGES]
    holes = ([0, 1], [0], [1], [])
    for answer, chat, used in zip(answers, [*chats("\ue000", "\ue000"), *plain], holes, strict=True):
        around = PromptTokenizer(tokenizer).encode(chat_text(tokenizer, chat).split("\ue000"))
        expected = around[0].tolist()
        for part, passage in zip(around[1:], used, strict=True):
            expected += passage_ids[passage] + part.tolist()
        assert answer.prompt_tokens == len(expected)
        assert answer.slots == sum(len(passage_ids[passage]) for passage in used)
        assert answer.text == by_transformers(model, tokenizer, expected, 12)


def test_prompts_are_tokenized_as_transformers_does(decoder: Decoder, model: Any, name: str) -> None:
    """Chats and raw text without markers: the ids of apply_chat_template and of the tokenizer, one BOS."""
    tokenizer = decoder.bundle.tokenizer
    chat = [{"role": "user", "content": "Question: who built it?"}]
    by_template = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    raw = "Answer in few words. Who built it?"
    by_tokenizer = tokenizer(raw)["input_ids"]
    style = architectures.family(name)
    if style.bos and style.bos != style.eos:
        assert by_template.count(tokenizer.bos_token_id) == int("bos_token" in style.template)
        assert by_tokenizer.count(tokenizer.bos_token_id) == int(style.adds_bos)
    # The rendered chat as a raw prompt begins with its BOS already.
    answers = decoder.generate([chat, raw, rendered], Sampling(max_tokens=12))
    for answer, ids in zip(answers, (by_template, by_tokenizer, by_template), strict=True):
        assert answer.prompt_tokens == len(ids)
        assert answer.text == by_transformers(model, tokenizer, ids, 12)


def test_holes_add_no_characters(name: str) -> None:
    """Around a hole the text's tokens are those of the whole text where no token crosses the hole."""
    tokenizer = architectures.tokenizer(name)
    before, after = PromptTokenizer(tokenizer).encode(["Context:\n", "\nQuestion: who built it?"])
    assert tokenizer.decode(torch.cat([before, after])) == "Context:\n\nQuestion: who built it?"
