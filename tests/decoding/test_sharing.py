"""Engines: batches, streams and concurrent calls share passes, and each prompt gets what it gets alone."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.errors import ConfigError, DecoderMemoryError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.store.marker import scope
from helpers import architectures
from helpers.decoding import QUESTION, WAIT, apart, begun, held, in_thread, wait_for
from helpers.engines import EngineTests
from helpers.forked import run_python
from helpers.langchain import TEXTS
from helpers.serving import listening
from helpers.vllm import KEY, FakeVllm


@pytest.fixture(scope="module")
def here(decoder: Decoder) -> Decoder:
    return decoder


class TestMerged(EngineTests):
    @pytest.fixture(scope="class")
    def there(self, bundle: Any, store: SoftContextStore) -> Decoder:
        return Decoder(bundle, store, merge=True)


class TestVllm(EngineTests):
    cannot = frozenset({"stop", "sampled", "quotation", "json"})  # the stand-in is greedy; vLLM cannot quote

    @pytest.fixture(scope="class")
    def there(self, bundle: Any, store: SoftContextStore) -> Iterator[Decoder]:
        with listening(FakeVllm(bundle).app) as url:
            yield Decoder(bundle, store, engine=url, api_key=KEY)


def test_what_an_engine_does_not_know_is_refused(bundle: Any, make_tiny_bundle: Any) -> None:
    for engine, options, value in (
        ("transfomers", {}, "'transfomers'"),
        ("transformers", {"timeout": 5.0}, "'timeout'"),
        ("http://localhost:1", {"batch_size": 4}, "'batch_size'"),
    ):
        with pytest.raises(ConfigError, match=value):
            Decoder(bundle, engine=engine, **options)
    with pytest.raises(ConfigError, match="merge=True"):
        Decoder(make_tiny_bundle(decoder={"mode": "frozen"}), merge=True)


QUESTIONS = [f"What about {name}, and what else? {'Say more. ' * length}" for length, name in enumerate(TEXTS)]


@contextmanager
def passes(decoder: Decoder) -> Iterator[list[int]]:
    """The number of rows of each forward pass."""
    seen: list[int] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("inputs_embeds")
        seen.append(len(kwargs["input_ids"] if given is None else given))

    with decoder.bundle.backbone.model.register_forward_pre_hook(look, with_kwargs=True):
        yield seen


def test_callers_with_settings_of_their_own_get_what_they_get_alone(decoder: Decoder, prompts: list[Any]) -> None:
    free = apart(decoder, prompts[0], Sampling(max_tokens=10)).text
    settings = [
        Sampling(max_tokens=10),
        Sampling(max_tokens=3),
        Sampling(max_tokens=12, temperature=1.3, seed=1),
        Sampling(max_tokens=10, stop=(free[6:9],)),
        Sampling(max_tokens=7, temperature=0.7, top_k=5, seed=2),
        Sampling(max_tokens=10, temperature=2.0, top_p=0.8, seed=3),
        Sampling(max_tokens=1),
        Sampling(max_tokens=14, stop=("never",)),
    ]
    cases = [(prompt, settings[(place + turn) % 8]) for turn in range(2) for place, prompt in enumerate(prompts)]
    alone = [apart(decoder, *case) for case in cases]

    def ask(number: int) -> Generation:
        prompt, sampling = cases[number]
        if number % 3:
            return decoder.generate([prompt], sampling)[0]
        *pieces, last = decoder.stream(prompt, sampling)
        assert isinstance(last, Generation) and "".join(map(str, pieces)) == last.text
        return last

    with passes(decoder) as seen, ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(len(cases)), timeout=WAIT))
    assert together == alone
    assert max(seen) > 2 and len(seen) < sum(answer.completion_tokens for answer in alone) / 2


def test_the_consumer_may_generate_between_pieces_and_change_threads(decoder: Decoder) -> None:
    def consume() -> tuple[str, str]:
        stream = decoder.stream(QUESTION, Sampling(max_tokens=8))
        text = str(next(stream))
        [nested] = decoder.generate([QUESTION], Sampling(max_tokens=8))
        while not isinstance(piece := in_thread(lambda: next(stream)), Generation):
            text += piece
        return text, nested.text

    text, nested = in_thread(consume)
    assert text == nested


def test_no_thread_is_left_behind(decoder: Decoder) -> None:
    list(decoder.stream(QUESTION, Sampling(max_tokens=2)))
    wait_for(lambda: not any(thread.name.startswith("ctx-compress-answers") for thread in threading.enumerate()))


def test_short_answers_do_not_wait_for_long_ones(decoder: Decoder) -> None:
    ended: list[int] = []
    started, asked = threading.Event(), threading.Event()

    def put(piece: Any) -> None:
        if isinstance(piece, Generation):
            ended.append(piece.completion_tokens)
        started.set()
        assert asked.wait(WAIT)

    begun(decoder, "Tell all.", Sampling(max_tokens=100), put)
    assert started.wait(WAIT)
    begun(decoder, QUESTIONS[0], Sampling(max_tokens=4), put)
    asked.set()
    wait_for(lambda: len(ended) == 2)
    assert ended == [4, 100]


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1200)}}
"""A schema that compiles, and that llguidance gives up after the first character."""


def test_a_failure_leaves_the_others(decoder: Decoder) -> None:
    """A prompt for which there is no memory, schemas that cannot be followed, and callers whose own code raises."""
    alone = [apart(decoder, prompt, Sampling(max_tokens=12)) for prompt in QUESTIONS]
    longest = max(len(decoder.preparer.token_ids(prompt)) for prompt in QUESTIONS) + 20
    told: list[Any] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("inputs_embeds")
        if given is not None and given.shape[1] > longest:
            torch.empty(1 << 50)

    def refuses(piece: Any) -> None:
        told.append(piece)
        raise ValueError("the caller's own")

    def asked(prompt: str, schema: Any = None) -> Any:
        return pool.submit(decoder.generate, [prompt], Sampling(max_tokens=12, json_schema=schema))

    model = decoder.bundle.backbone.model
    with model.register_forward_pre_hook(look, with_kwargs=True), ThreadPoolExecutor(12) as pool:
        with held(decoder.bundle):
            good = [asked(prompt) for prompt in QUESTIONS]
            large = asked("more " * longest)
            at_start = asked(QUESTIONS[0], {"type": "object", "unevaluatedItems": {"$ref": "x"}})
            in_the_middle = asked(QUESTIONS[0], WIDE)
            for tokens in (1, 12):
                begun(decoder, QUESTIONS[1], Sampling(max_tokens=tokens), refuses)
            time.sleep(0.3)
        with pytest.raises(DecoderMemoryError, match="use a coarser ratio"):
            large.result(WAIT)
        with pytest.raises(ConfigError, match="json_schema"):
            at_start.result(WAIT)
        with pytest.raises(ConfigError, match="json_schema=.*items"):
            in_the_middle.result(WAIT)
        assert [each.result(WAIT)[0] for each in good] == alone
    assert told


def test_one_tenants_many_prompts_do_not_keep_another_waiting(talkative: Any) -> None:
    narrow = Decoder(talkative, batch_size=2)
    ended: list[str] = []

    def note(who: str, piece: Any) -> None:
        if not isinstance(piece, str):
            ended.append(who)

    with held(talkative):
        for who, count in (("anna", 12), ("bert", 2)):
            with scope(who):
                for number in range(count):
                    begun(narrow, f"Tell me of {number}.", Sampling(max_tokens=10), partial(note, who))
    wait_for(lambda: len(ended) == 14)
    assert {"bert"} == set(ended[:4]) - {"anna"} and ended[:6].count("bert") == 2


class Caller:
    def __call__(self, piece: Any) -> None: ...


def test_a_canceled_prompt_is_forgotten_before_its_turn(talkative: Any) -> None:
    """Prompts of a client that asks and goes, again and again, while others fill the passes."""
    narrow, alive = Decoder(talkative, batch_size=1), WeakSet[Caller]()
    long = narrow.stream("Tell all.", Sampling(max_tokens=900))
    next(long)
    for _ in range(40):
        alive.add(caller := Caller())
        begun(narrow, "And this?", Sampling(max_tokens=900), caller)()
        del caller
    kept = len(alive)
    long.close()  # type: ignore[attr-defined]
    assert kept <= 3


def test_a_thread_that_needs_the_model_gets_it_between_passes(decoder: Decoder) -> None:
    """A passage is compressed while answers are written, not after them."""
    stop, lock = threading.Event(), decoder.bundle.backbone.lock
    waiting: list[int] = []  # threads that wait for the model, at the start of each pass

    def ask() -> None:
        while not stop.is_set():
            decoder.generate([QUESTIONS[0]], Sampling(max_tokens=60))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    with decoder.bundle.backbone.model.register_forward_pre_hook(lambda *_: waiting.append(lock.waiting)):
        for asker in askers:
            asker.start()
        wait_for(lambda: len(waiting) > 5)
        with decoder.bundle.backbone.use(None):
            stop.set()
        for asker in askers:
            asker.join(WAIT)
    assert sum(waiting) < 5


@pytest.mark.parametrize("name", architectures.NAMES)
def test_rows_come_and_go_on_every_architecture(name: str) -> None:
    """Two at a time, each prompt joining where one has left, against transformers' generate on each alone."""
    alone = PlainDecoder(Backbone(architectures.model(name), architectures.tokenizer(name)))
    decoder = Decoder(alone, batch_size=2)
    texts = [text * (1 + place % 3) for place, text in enumerate(architectures.TEXTS * 2) if text.strip()][:6]
    asked = [(text, Sampling(max_tokens=6 + 3 * (place % 3))) for place, text in enumerate(texts)]
    with passes(decoder) as seen, ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda each: decoder.generate([each[0]], each[1])[0], asked))
    assert set(seen) <= {1, 2} and 2 in seen
    assert together == [apart(decoder, *each) for each in asked]


def test_a_program_that_leaves_a_stream_ends_in_peace(talkative: Any, tmp_path: Path) -> None:
    """Python ends what other threads do; within torch that would abort the process.

    A fork ends without what Python does at its end, unless it asks for that.
    """
    talkative.save_pretrained(tmp_path / "bundle")
    program = """
import ctypes
import sys
from ctx_compress_rag import Bundle, Decoder
from ctx_compress_rag.decoding.sampling import Sampling
decoder = Decoder(Bundle.from_pretrained(sys.argv[1]))
pieces = decoder.stream("What about it?", Sampling(max_tokens=500))
print(next(pieces))
ctypes.pythonapi.Py_Exit(0)
"""
    done = run_python(program, tmp_path / "bundle")
    assert done.returncode == 0, done.stderr
    assert done.stdout
