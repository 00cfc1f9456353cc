"""The engine llama.cpp answers as transformers does, whatever is asked, and by however many callers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.loading import load_decoder
from ctx_compress_rag.store import SoftContextStore
from helpers.decoding import QUESTION, wait_for

SCHEMA = '{"type": "object", "properties": {"built": {"type": "integer"}}, "required": ["built"]}'
ASKED = {
    "greedy": {},
    "sampled": {"temperature": 0.5, "seed": 7},
    "stop": {"stop": ["e", "a"]},
    "quotation": {"extractive": True},
    "json": {"json_schema": SCHEMA},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
}


@pytest.fixture(scope="module")
def prompts(store: SoftContextStore) -> list[Any]:
    a, b, c = store.markers(["a", "b", "c"], ratio=4)
    return [
        [{"role": "user", "content": f"{a}\n\nQuestion: {QUESTION}"}],
        [{"role": "user", "content": QUESTION}],
        f"{a}{b}{store.marker('c', ratio=16)} {QUESTION}",
        [{"role": "system", "content": f"Use this: {c}"}, {"role": "user", "content": QUESTION}],
        "Who kept bees?",
        b,
    ]


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_transformers(
    decoder: Decoder, bundle: Bundle, store: SoftContextStore, prompts: list[Any], name: str
) -> None:
    sampling = Sampling(max_tokens=4 if name == "sampled" else 16, **ASKED[name])  # the last bits soon decide a draw
    expected, found = Decoder(bundle, store).generate(prompts, sampling), decoder.generate(prompts, sampling)
    for one, other in zip(expected, found, strict=True):
        assert (other.text, other.prompt_tokens, other.slots, other.completion_tokens, other.finish_reason) == (
            one.text, one.prompt_tokens, one.slots, one.completion_tokens, one.finish_reason
        )  # fmt: skip
        for mine, theirs in zip(other.logprobs or (), one.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=0.05)
    assert len({answer.text for answer in found}) > 3


def test_pieces_come_as_tokens_do_and_a_canceled_answer_ends(decoder: Decoder, prompts: list[Any]) -> None:
    *pieces, whole = decoder.stream(prompts[0], Sampling(max_tokens=16))
    assert isinstance(whole, Generation) and "".join(map(str, pieces)) == whole.text and len(pieces) > 3
    got: list[Any] = []
    cancel = decoder.start(prompts[0], Sampling(max_tokens=400), got.append)
    wait_for(lambda: got)
    cancel()
    wait_for(lambda: not decoder.engine._running)  # type: ignore[attr-defined]
    assert not any(isinstance(piece, Generation) for piece in got) and len(got) < 400


def test_more_callers_than_places_get_what_each_gets_alone(decoder: Decoder, prompts: list[Any], files: Path) -> None:
    expected = decoder.generate(prompts, Sampling(max_tokens=12))
    crowded = Decoder(
        decoder.bundle, decoder.store, engine="llama.cpp", weights=str(files), batch_size=2, context_size=300
    )
    with ThreadPoolExecutor(12) as pool:
        tasks = [pool.submit(crowded.generate, [prompt], Sampling(max_tokens=12)) for prompt in prompts * 2]
    assert [task.result()[0] for task in tasks] == expected * 2
    crowded.engine.close()


def test_an_error_of_one_caller_is_that_callers(decoder: Decoder, prompts: list[Any]) -> None:
    class Broken(Exception):
        pass

    ended: list[Any] = []

    def put(piece: Any) -> None:
        if isinstance(piece, str):
            raise Broken
        ended.append(piece)

    decoder.start(prompts[0], Sampling(max_tokens=12), put)
    assert decoder.generate(prompts[:2], Sampling(max_tokens=12))
    wait_for(lambda: ended)
    assert isinstance(ended[0], Broken)


def test_too_long_a_prompt_is_refused_before_anything_runs(decoder: Decoder, files: Path) -> None:
    short = Decoder(decoder.bundle, decoder.store, engine="llama.cpp", weights=str(files), context_size=40)
    with pytest.raises(ConfigError, match="context_size=40"):
        short.generate(["Who?", "bees " * 60])
    [answer] = short.generate(["Who?"], Sampling(max_tokens=400))
    assert answer.finish_reason == "length" and answer.prompt_tokens + answer.completion_tokens == 40
    short.engine.close()


def test_a_closed_engine_tells_who_waits(decoder: Decoder, files: Path, prompts: list[Any]) -> None:
    closing = Decoder(decoder.bundle, decoder.store, engine="llama.cpp", weights=str(files), batch_size=1)
    got: list[Any] = []
    for prompt in prompts[:3]:
        closing.start(prompt, Sampling(max_tokens=400), got.append)
    wait_for(lambda: got)
    threads = [threading.Thread(target=closing.engine.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(isinstance(piece, ConfigError) for piece in got) == 3
    with pytest.raises(ConfigError, match="closed"):
        closing.generate(prompts[:1])


def test_opening_and_answering_load_no_transformers_model(
    folder: Path, store: SoftContextStore, decoder: Decoder, prompts: list[Any], cache: Path
) -> None:
    for written in (False, True):
        opened = Bundle.from_pretrained(folder, device="cpu")
        fast = Decoder(opened, store, engine="llama.cpp", weights="BF16")
        assert fast.generate(prompts[:2], Sampling(max_tokens=4))
        assert opened.backbone.loaded is not written
        fast.engine.close()
    assert list(cache.glob("ctx_compress_rag/llama.cpp/*/*-BF16/reader.gguf"))


def test_files_of_another_bundle_are_refused(
    bundle: Bundle, files: Path, tmp_path: Path, store: SoftContextStore, prompts: list[Any]
) -> None:
    other = Bundle.build(bundle.config, Backbone(*load_decoder(bundle.config.decoder, device="cpu")))
    for opened, weights, error in ((other, str(files), BundleError), (bundle, "Q2", ConfigError)):
        with pytest.raises(error, match="another bundle|Q2"):
            Decoder(opened, engine="llama.cpp", weights=weights).generate(["Who?"])
