"""TransformersDecoder: batches, streams and threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ctx_compress_rag.decoding.decoder import Generation, Sampling, TransformersDecoder
from ctx_compress_rag.errors import CtxCompressError
from ctx_compress_rag.store import SoftContextStore
from helpers.decoding import QUESTION, in_thread, wait_for

NO_SLOTS = torch.zeros(1, 1, dtype=torch.bool)


def by_hand(decoder: TransformersDecoder, pieces: list[Any], new_tokens: int) -> str:
    """Greedy decoding by whole forward passes, without cache, batch, or padding."""
    bundle = decoder.bundle
    tokenizer = bundle.tokenizer
    embed = bundle.backbone.embeddings
    parts = [p if torch.is_tensor(p) else embed(torch.tensor(p, dtype=torch.long)) for p in pieces]
    ids: list[int] = []
    soft = any(torch.is_tensor(p) for p in pieces)
    with torch.no_grad(), bundle.soft_decoder(NO_SLOTS) if soft else bundle.text_decoder() as model:
        for _ in range(new_tokens):
            inputs = torch.cat([*parts, embed(torch.tensor(ids, dtype=torch.long))]).unsqueeze(0)
            ids.append(int(model(inputs_embeds=inputs, use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_a_batch_answers_as_each_prompt_alone(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    sampling = Sampling(max_new_tokens=12)
    together = decoder.generate(prompts, sampling)
    assert together == [decoder.generate([prompt], sampling)[0] for prompt in prompts]
    assert [answer.slots > 0 for answer in together] == [True, False, True, True, False, True]
    assert len({answer.text for answer in together}) == len(prompts)
    assert decoder.generate([]) == []


def test_answers_equal_decoding_by_hand(decoder: TransformersDecoder, store: SoftContextStore) -> None:
    tokenizer = decoder.bundle.tokenizer
    slots = []
    for id, ratio in (("a", 4), ("c", 16)):
        [soft] = store.get([id])
        assert soft is not None
        slots.append(decoder.bundle.embed(decoder.bundle.at_ratio(soft, ratio)))
    prompt = f"{store.marker('a', 4)}{store.marker('c', 16)} {QUESTION}"
    question = tokenizer(f" {QUESTION}", add_special_tokens=False)["input_ids"]
    [answer] = decoder.generate([prompt], Sampling(max_new_tokens=10))
    assert answer.text == by_hand(decoder, [*slots, question], 10)
    assert answer.slots == sum(len(s) for s in slots)
    assert answer.prompt_tokens == answer.slots + len(question)

    [plain] = decoder.generate([QUESTION], Sampling(max_new_tokens=10))
    assert plain.text == by_hand(decoder, [tokenizer(QUESTION)["input_ids"]], 10)
    assert (plain.slots, plain.prompt_tokens) == (0, len(tokenizer(QUESTION)["input_ids"]))


def test_passages_of_a_batch_are_fetched_in_one_call(
    decoder: TransformersDecoder, store: SoftContextStore, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fetch = store.fetch
    monkeypatch.setattr(store, "fetch", lambda markers: calls.append(markers) or fetch(markers))
    decoder.generate(prompts, Sampling(max_new_tokens=1))
    assert [len(call) for call in calls] == [4]  # a, b and c at ratio 4, c at 16: each once


# Streams


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_stream_gives_the_same_text_in_pieces(decoder: TransformersDecoder, prompts: list[Any], which: int) -> None:
    sampling = Sampling(max_new_tokens=16)
    *pieces, last = decoder.stream(prompts[which], sampling)
    [whole] = decoder.generate([prompts[which]], sampling)
    assert last == whole
    assert "".join(str(piece) for piece in pieces) == whole.text
    assert len(pieces) > 3 and all(isinstance(piece, str) and piece for piece in pieces)


def test_a_stream_that_nobody_reads_blocks_nobody(decoder: TransformersDecoder) -> None:
    stream = decoder.stream(QUESTION, Sampling(max_new_tokens=30))
    next(stream)
    in_thread(lambda: decoder.generate([QUESTION], Sampling(max_new_tokens=2)))
    assert isinstance(list(stream)[-1], Generation)


def test_the_consumer_may_generate_between_pieces_and_change_threads(decoder: TransformersDecoder) -> None:
    def consume() -> tuple[str, str]:
        stream = decoder.stream(QUESTION, Sampling(max_new_tokens=8))
        text = str(next(stream))
        [nested] = decoder.generate([QUESTION], Sampling(max_new_tokens=8))
        while not isinstance(piece := in_thread(lambda: next(stream)), Generation):
            text += piece
        return text, nested.text

    text, nested = in_thread(consume)
    assert text == nested


def test_streaming_while_holding_the_decoder_is_refused(decoder: TransformersDecoder) -> None:
    def consume() -> None:
        with (
            decoder.bundle.soft_decoder(NO_SLOTS),
            pytest.raises(CtxCompressError, match="this thread holds the decoder"),
        ):
            next(decoder.stream(QUESTION))

    in_thread(consume)
    assert in_thread(lambda: decoder.generate([QUESTION], Sampling(max_new_tokens=1)))


def test_an_error_while_streaming_reaches_the_consumer(
    decoder: TransformersDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = decoder.stream(QUESTION)
    monkeypatch.setattr(decoder.bundle.backbone.model, "forward", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: next(stream))
    monkeypatch.undo()
    assert decoder.generate([QUESTION], Sampling(max_new_tokens=1))


def test_no_thread_is_left_behind(decoder: TransformersDecoder) -> None:
    list(decoder.stream(QUESTION, Sampling(max_new_tokens=2)))
    wait_for(lambda: not any(thread.name.startswith("ctx-compress-stream") for thread in threading.enumerate()))
