"""TransformersDecoder: batches, streams and threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ctx_compress_rag.decoding.decoder import Generation, Sampling, TransformersDecoder
from ctx_compress_rag.errors import CtxCompressError
from helpers.decoding import QUESTION, in_thread, wait_for


def test_a_batch_answers_as_each_prompt_alone(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    sampling = Sampling(max_new_tokens=12)
    together = decoder.generate(prompts, sampling)
    assert together == [decoder.generate([prompt], sampling)[0] for prompt in prompts]
    assert [answer.slots > 0 for answer in together] == [True, False, True, True, False, True]
    assert len({answer.text for answer in together}) == len(prompts)
    assert decoder.generate([]) == []


# Streams


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_stream_gives_the_same_text_in_pieces(decoder: TransformersDecoder, prompts: list[Any], which: int) -> None:
    sampling = Sampling(max_new_tokens=16)
    *pieces, last = decoder.stream(prompts[which], sampling)
    [whole] = decoder.generate([prompts[which]], sampling)
    assert last == whole
    assert "".join(str(piece) for piece in pieces) == whole.text
    assert len(pieces) > 3 and all(isinstance(piece, str) and piece for piece in pieces)


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


def test_a_thread_that_holds_the_decoder_may_generate_but_not_stream(decoder: TransformersDecoder) -> None:
    def consume() -> list[Generation]:
        with decoder.bundle.text_decoder():
            with pytest.raises(CtxCompressError, match="this thread holds the decoder"):
                next(decoder.stream(QUESTION))
            return decoder.generate([QUESTION], Sampling(max_new_tokens=4))

    assert in_thread(consume) == decoder.generate([QUESTION], Sampling(max_new_tokens=4))


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
