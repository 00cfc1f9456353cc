"""The server, asked by the clients that people use: the openai package, LangChain's ChatOpenAI, and plain HTTP."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.server.app import create_app
from ctx_compress_rag.server.guard import ServerLimits
from helpers.decoding import held, wait_for
from helpers.langchain import QUESTION, TEXTS, Tower
from helpers.serving import ANNA, BERT, WAIT, chat, client, directly, json_format, listening, marker, post


def test_a_chat_completion_is_the_decoders_own_answer(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    expected = directly(decoder, chat(store))
    assert expected.slots > 0
    reply = client(url).chat.completions.create(model="tiny", messages=chat(store))
    assert reply.object == "chat.completion" and reply.model == "tiny"
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == expected.prompt_tokens
    assert reply.usage.completion_tokens == expected.completion_tokens == 12
    assert reply.usage.total_tokens == expected.prompt_tokens + 12
    assert reply.usage.model_extra == {"slots": expected.slots}


def test_options_reach_the_decoder(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    free = directly(decoder, chat(store)).text
    stop = free[4:7]
    options = {"max_tokens": 20, "temperature": 1.5, "top_p": 0.9, "seed": 3}
    for given, sampling in (
        ({"stop": ["nothing", stop]}, {"stop": ("nothing", stop)}),
        ({"max_completion_tokens": 3, "max_tokens": 5}, {"max_tokens": 3}),
        ({"max_tokens": 9, "extra_body": {"extractive": True}}, {"max_tokens": 9, "extractive": True}),
        (
            {**options, "extra_body": {"top_k": 7}},
            {"max_tokens": 20, "temperature": 1.5, "top_p": 0.9, "seed": 3, "top_k": 7},
        ),
    ):
        reply = client(url).chat.completions.create(model="tiny", messages=chat(store), **given)  # type: ignore[call-overload]
        expected = directly(decoder, chat(store), **sampling)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
            expected.text,
            expected.finish_reason,
        )


def test_answers_are_json_of_the_schema(url: str, store: SoftContextStore) -> None:
    """The decoder's weights are random: it would write none by itself."""
    asked: Any = {"model": "tiny", "messages": chat(store), "max_tokens": 100}
    wanted = json_format(Tower.model_json_schema())
    whole = client(url).chat.completions.create(**asked, response_format=wanted).choices[0]
    Tower.model_validate_json(whole.message.content or "")
    stream = client(url).chat.completions.create(**asked, response_format=wanted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content
    parsed = client(url).chat.completions.parse(**asked, response_format=Tower).choices[0].message.parsed
    assert parsed == Tower.model_validate_json(whole.message.content or "")
    loose = client(url).chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
    assert (loose.message.content or "").startswith("{")


def test_content_parts_and_roles(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    parts = [{"type": "text", "text": marker(store, "mill")}, {"type": "text", "text": " Who?"}]
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": marker(store, "mill") + " Who?"}]
    reply = client(url).chat.completions.create(model="tiny", messages=messages)
    assert reply.choices[0].message.content == directly(decoder, same).text


def test_an_answer_goes_back_as_the_client_has_it(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    """With a null for each field that the answer lacks; null options, too, are absent."""
    messages = chat(store)
    answer = client(url).chat.completions.create(model="tiny", messages=messages).choices[0].message
    dumped = answer.model_dump()
    assert {"refusal", "tool_calls", "audio"} <= {name for name, value in dumped.items() if value is None}
    absent = ["top_logprobs", "functions", "reasoning_effort", "max_tokens", "temperature", "stop", "stream", "n"]
    empty = {"tools": [], "logit_bias": {}, "frequency_penalty": 0.0, "verbosity": "", "logprobs": False, "n": 1}
    for turn in (dumped, {"role": "assistant", "content": None, "tool_calls": []}):
        asked = [*messages, turn, {"role": "user", "content": "And when?"}]
        plain = [*messages, {"role": "assistant", "content": turn["content"] or ""}, asked[-1]]
        expected = directly(decoder, plain).text
        for options in ({}, dict.fromkeys(absent), empty):
            reply = post(url, "chat/completions", {"model": "tiny", "messages": asked, "user": "anna", **options})
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["message"]["content"] == expected


def test_logprobs_are_those_of_the_decoder(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    """In a chat's shape, whole and streamed, and in that of completions."""
    expected = directly(decoder, chat(store), logprobs=True, top_logprobs=2).logprobs
    asked: dict[str, Any] = {"model": "tiny", "messages": chat(store), "logprobs": True, "top_logprobs": 2}
    *_, last = client(url).chat.completions.create(**asked, stream=True)
    for choice in (client(url).chat.completions.create(**asked).choices[0], last.choices[0]):
        found = choice.logprobs.content
        assert [(each.token, len(each.top_logprobs)) for each in found] == [(each.token, 2) for each in expected]
        assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    for top in (0, 2):
        raw = client(url).completions.create(model="tiny", prompt="Who kept bees?", logprobs=top).choices[0]
        found = raw.logprobs
        assert found is not None and "".join(found.tokens or []) == raw.text
        assert (found.text_offset or [])[1] == len((found.tokens or [])[0])
        assert found.top_logprobs is None if top == 0 else {len(each) for each in found.top_logprobs or []} == {2}


def test_completions_take_raw_prompts_one_or_several(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    prompts = [f"{marker(store, 'ferry')} When?", "Who kept bees?"]
    reply = client(url).completions.create(model="tiny", prompt=prompts)
    expected = [directly(decoder, prompt) for prompt in prompts]
    assert [choice.text for choice in reply.choices] == [answer.text for answer in expected]
    assert [choice.index for choice in reply.choices] == [0, 1]
    [one] = client(url).completions.create(model="tiny", prompt=prompts[1]).choices
    assert one.text == expected[1].text


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_streams_give_the_answer_in_pieces(url: str, store: SoftContextStore, decoder: Decoder, kind: str) -> None:
    prompt: Any = chat(store) if kind == "chat" else "Who kept bees?"
    expected = directly(decoder, prompt)
    asked: Any = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        chunks: list[Any] = list(client(url).chat.completions.create(messages=prompt, **asked))
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    else:
        chunks = list(client(url).completions.create(prompt=prompt, **asked))
        texts = [c.choices[0].text for c in chunks if c.choices]
    assert "".join(texts) == expected.text and len([text for text in texts if text]) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * (len(texts) - 1) + ["length"]
    assert chunks[-1].usage.prompt_tokens == expected.prompt_tokens
    [id] = {c.id for c in chunks}
    assert id.startswith("chatcmpl-" if kind == "chat" else "cmpl-")


def measured(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"ctx_compress_requests_{name}"))


def running(url: str) -> float:
    return measured(url, "running")


@contextmanager
def leaving(url: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client asks, waits for no answer, and is gone at the end of the context, which the server has then noticed."""
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=WAIT)) as connection:
        headers = {"Authorization": f"Bearer {ANNA}", "Content-Type": "application/json"}
        connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
        yield
    wait_for(lambda: running(url) == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_stops_the_decoder(
    url: str, store: SoftContextStore, decoder: Decoder, stream: bool
) -> None:
    passes: list[int] = []
    noticed = threading.Event()
    body = {"model": "tiny", "messages": chat(store), "max_tokens": 900, "stream": stream}

    def count(*_: Any) -> None:
        passes.append(1)
        assert len(passes) < 10 or noticed.wait(WAIT)

    with decoder.bundle.backbone.model.register_forward_pre_hook(count):
        with leaving(url, "chat/completions", body):
            wait_for(lambda: len(passes) == 10)
        noticed.set()
        client(url).chat.completions.create(model="tiny", messages=chat(store), max_tokens=1)
    assert len(passes) < 15


def test_who_goes_before_the_first_piece_gives_the_place_back(url: str, decoder: Decoder) -> None:
    gone, lock = 'total{route="/v1/chat/completions",status="499"}', decoder.bundle.backbone.lock
    before = measured(url, gone)
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    with held(decoder.bundle), leaving(url, "chat/completions", body):
        wait_for(lambda: lock.waiting)
    assert measured(url, gone) == before + 1


def test_many_texts_keep_no_other_tenant_waiting(url: str, store: SoftContextStore, decoder: Decoder) -> None:
    texts = [f"House {number} of Stavely was built of oak." for number in range(320)]

    def ask(text: str | list[str], key: str) -> float:
        assert post(url, "compress", {"input": text}, key).is_success
        return time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        with held(decoder.bundle):
            many = pool.submit(ask, texts, ANNA)
            wait_for(lambda: decoder.bundle.backbone.lock.waiting)
            one = pool.submit(ask, "The mill of Stavely was built of oak.", BERT)
            wait_for(lambda: running(url) == 2)
        assert one.result(WAIT) < many.result(WAIT)
    for scope in ("anna", "bert"):
        store.delete(store.ids(scope), scope)


def test_of_many_texts_only_the_part_that_has_begun_is_compressed_for_nobody(
    url: str, store: SoftContextStore, decoder: Decoder
) -> None:
    texts = [f"Barn {number} of Stavely was built of oak." for number in range(100)]
    with held(decoder.bundle), leaving(url, "compress", {"input": texts}):
        wait_for(lambda: decoder.bundle.backbone.lock.waiting)
    post(url, "compress", {"input": "The mill of Stavely was built of oak."})  # waits for what has begun
    stored = store.stored_ids(texts, scope="anna")
    assert stored[0] and not stored[-1]
    store.delete(store.ids("anna"), "anna")


def test_what_is_too_much_is_told_to_come_again(decoder: Decoder, store: SoftContextStore) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with listening(create_app(decoder, limits=ServerLimits(requests=2, answer_tokens=2))) as url:

        def ask() -> Any:
            return client(url).chat.completions.create(model="tiny", messages=messages).choices

        with ThreadPoolExecutor(2) as pool:
            with held(decoder.bundle):
                waiting = [pool.submit(ask) for _ in range(2)]
                wait_for(lambda: running(url) == 2)
                with pytest.raises(openai.RateLimitError, match="try again"):
                    ask()
                assert httpx.get(f"{url}/health").status_code == 200
            assert all(each.result(WAIT) for each in waiting)
        assert ask()


def test_stopping_lets_running_answers_end(decoder: Decoder, store: SoftContextStore) -> None:
    with listening(create_app(decoder)) as url:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        stream = client(url).chat.completions.create(model="tiny", messages=messages, max_tokens=100, stream=True)
        pieces = [next(iter(stream))]
        # The context's end asks the server to stop while the answer runs.
        reader = threading.Thread(target=lambda: pieces.extend(stream))
        reader.start()
    reader.join(WAIT)
    assert pieces[-1].choices[0].finish_reason == "length"


def test_no_answer_is_longer_than_the_operator_allows(decoder: Decoder) -> None:
    with listening(create_app(decoder, limits=ServerLimits(longest_answer=5))) as url:
        for asked, got in ((None, 5), (500, 5), (3, 3)):
            messages: Any = [{"role": "user", "content": QUESTION}]
            reply = client(url).chat.completions.create(model="tiny", messages=messages, max_tokens=asked)
            assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (got, "length")  # type: ignore[union-attr]


def test_metrics_say_what_was_done(decoder: Decoder, store: SoftContextStore) -> None:
    with listening(create_app(decoder, limits=ServerLimits(answer_tokens=5))) as url:
        asked = [{"role": "user", "content": f"{store.marker(store.ids()[0], 8)} {QUESTION}"}]
        expected = decoder.generate([asked], Sampling(max_tokens=5))[0]
        client(url).chat.completions.create(model="tiny", messages=asked)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError):
            client(url).chat.completions.create(model="tiny", messages=[])
        post(url, "compress", {"input": [TEXTS["mill"]]})
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    for line in (
        'ctx_compress_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'ctx_compress_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'ctx_compress_requests_total{route="/v1/compress",status="200"} 1.0',
        f'ctx_compress_tokens_total{{kind="prompt"}} {float(expected.prompt_tokens)}',
        f'ctx_compress_tokens_total{{kind="slot"}} {float(expected.slots)}',
        'ctx_compress_tokens_total{kind="completion"} 5.0',
        "ctx_compress_passages_total 1.0",
        "ctx_compress_requests_running 0.0",
        "ctx_compress_first_token_seconds_count 1.0",
    ):
        assert line in lines


def test_models_are_listed(url: str) -> None:
    assert [model.id for model in client(url).models.list()] == ["tiny"]
    assert client(url).models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client(url).models.retrieve("other")
    assert post(url, "completions", {"model": "other", "prompt": "x"}).status_code == 404


def test_a_server_needs_a_store(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="has no store"):
        create_app(Decoder(decoder.bundle))
