"""TransformersDecoder: batches, streams, stop strings, sampling, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import chromadb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.decoding.decoder import Generation, Sampling, TransformersDecoder
from ctx_compress_rag.decoding.generation import TextWatch, choosers, end_ids
from ctx_compress_rag.errors import (
    ConfigError,
    CtxCompressError,
    FingerprintMismatchError,
    MissingPassageError,
    PayloadError,
    UnreadableMarkerError,
)
from ctx_compress_rag.stores import SoftContextStore

PASSAGES = {
    "a": "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast.",
    "b": "Pellmouth is a town.",
    "c": "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood. " * 5,
}
QUESTION = "Where was Orla Drumwell born?"
NO_SLOTS = torch.zeros(1, 1, dtype=torch.bool)
WAIT = 120  # seconds after which a test counts as hanging; nothing here takes a fraction of it, but machines are shared


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    """Adapters and weights drawn wide: text and soft decoding differ, and so do answers."""
    made = make_tiny_bundle(seed=3)
    torch.manual_seed(4)
    for name, parameter in made.backbone.model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_" in name else 0.5)
    with torch.no_grad():  # embeddings and head are tied: no text ends before its budget
        made.backbone.embeddings.weight[made.tokenizer.eos_token_id] = 0
    made.reader.initialise(1.0)
    return made


@pytest.fixture(scope="module")
def store(bundle: Any) -> SoftContextStore:
    made = SoftContextStore(chromadb.EphemeralClient(), bundle, collection="decoder", key=b"k" * 16)
    made.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
    return made


@pytest.fixture(scope="module")
def decoder(bundle: Any, store: SoftContextStore) -> TransformersDecoder:
    return TransformersDecoder(bundle, store, batch_size=3)


@pytest.fixture(scope="module")
def prompts(store: SoftContextStore) -> list[Any]:
    """With one passage, three, none; neighbours without text between them; raw and chat; several ratios."""
    a, b, c = store.markers(["a", "b", "c"], ratio=4)
    return [
        [{"role": "user", "content": f"{a}\n\nQuestion: {QUESTION}"}],
        [{"role": "user", "content": QUESTION}],
        f"{a}{b}{store.marker('c', ratio=16)} {QUESTION}",
        [{"role": "system", "content": f"Use this: {c}"}, {"role": "user", "content": QUESTION}],
        "Who kept bees?",
        b,
    ]


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, run by another thread; fails where it hangs."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result(timeout=WAIT)
    finally:
        pool.shutdown(wait=False)


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


def test_pieces_come_while_the_model_still_runs(decoder: TransformersDecoder) -> None:
    """Closing a stream ends the generation early and frees the model."""
    passes: list[None] = []
    hook = decoder.bundle.backbone.embeddings.register_forward_hook(lambda *_: passes.append(None))
    try:
        stream = decoder.stream(QUESTION, Sampling(max_new_tokens=900))
        assert isinstance(next(stream), str)
        stream.close()  # type: ignore[attr-defined]
        in_thread(lambda: decoder.generate([QUESTION], Sampling(max_new_tokens=2)))
    finally:
        hook.remove()
    assert len(passes) < 600


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


def test_threads_at_once_get_what_each_gets_alone(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    sampling = Sampling(max_new_tokens=6)
    alone = decoder.generate(prompts, sampling)

    def ask(index: int) -> Generation:
        if index % 2:
            return decoder.generate([prompts[index]], sampling)[0]
        *_, last = decoder.stream(prompts[index], sampling)
        assert isinstance(last, Generation)
        return last

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(len(prompts)), timeout=WAIT)) == alone


# Where texts end


def test_stop_strings_end_the_text_before_them(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    free = decoder.generate(prompts[:3], Sampling(max_new_tokens=24))
    for prompt, answer in zip(prompts, free, strict=False):
        middle = len(answer.text) // 2
        stop = answer.text[middle : middle + 5]
        sampling = Sampling(max_new_tokens=24, stop=("never appears", stop))
        [cut] = decoder.generate([prompt], sampling)
        assert cut.text == answer.text.split(stop)[0]
        assert cut.finish_reason == "stop"
        assert cut.completion_tokens < answer.completion_tokens
        *pieces, last = decoder.stream(prompt, sampling)
        assert last == cut and "".join(str(piece) for piece in pieces) == cut.text


def test_one_rows_stop_string_leaves_the_others_alone(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    one, other = decoder.generate([prompts[1], prompts[4]], Sampling(max_new_tokens=12))
    stop = one.text[3:8]
    assert stop not in other.text
    cut, same = decoder.generate([prompts[1], prompts[4]], Sampling(max_new_tokens=12, stop=(stop,)))
    assert (cut.text, same) == (one.text.split(stop)[0], other)


def test_end_tokens_and_budgets(decoder: TransformersDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = decoder.bundle.tokenizer
    [free] = decoder.generate([QUESTION], Sampling(max_new_tokens=8))
    assert (free.completion_tokens, free.finish_reason) == (8, "length")
    ids = tokenizer(QUESTION)["input_ids"]
    out = decoder.bundle.backbone.model.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), max_new_tokens=8, do_sample=False
    )[0, len(ids) :].tolist()
    # The model's own list of end tokens counts, as Llama 3 has several.
    fifth = out.index(out[4])
    monkeypatch.setattr(decoder.bundle.backbone.model.generation_config, "eos_token_id", [out[4]])
    [ended] = decoder.generate([QUESTION], Sampling(max_new_tokens=8))
    assert (ended.completion_tokens, ended.finish_reason) == (fifth + 1, "stop")
    assert ended.text == tokenizer.decode(out[:fifth])


def test_a_special_token_can_be_a_stop_string(decoder: TransformersDecoder) -> None:
    tokenizer = decoder.bundle.tokenizer
    special = tokenizer.convert_tokens_to_ids("<|user|>")
    assert special in end_ids(tokenizer, None, ["<|user|>"])
    assert special not in end_ids(tokenizer, None, ["user"])


texts = st.text(alphabet="ab é🙂\n", max_size=20)


@given(text=texts, stop=st.lists(st.text(alphabet="ab é🙂\n", min_size=1, max_size=4), max_size=3), end=st.booleans())
@settings(deadline=None, max_examples=200)
def test_what_is_streamed_is_never_taken_back(tiny_tokenizer: Any, text: str, stop: list[str], end: bool) -> None:
    """Byte by byte, against str.find on the whole text."""
    ids = [tiny_tokenizer.convert_tokens_to_ids(t) for t in byte_tokens(text)]
    if end or not ids:
        ids.append(tiny_tokenizer.eos_token_id)
    sent: list[str] = []
    watch = TextWatch(tiny_tokenizer, stop, {tiny_tokenizer.eos_token_id}, [len(ids)], sent.append)
    for n in range(1, len(ids) + 1):
        if bool(watch(torch.tensor([ids[:n]]), None)[0]):
            break
        assert all("\ufffd" not in piece for piece in sent)
    assert watch.done[0] is not None
    final, _, reason = watch.done[0]
    ends = [text.find(s) for s in stop if s in text]
    assert "".join(sent) == final
    if not ends:
        assert (final, reason) == (text, "stop" if ids[-1] == tiny_tokenizer.eos_token_id else "length")
    else:
        # It ends at the first stop string to be complete; of several complete ones, at the leftmost.
        first = min(text.find(s) + len(s) for s in stop if s in text)
        assert final == text[: min(text[:first].find(s) for s in stop if s in text[:first])]
        assert reason == "stop"


def byte_tokens(text: str) -> list[str]:
    """One token per UTF-8 byte, in the byte-level alphabet."""
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [character for piece, _ in pieces for character in piece]


# Sampling


def test_a_seed_makes_sampling_reproducible(decoder: TransformersDecoder, prompts: list[Any]) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=2.0, top_p=0.95, top_k=50, seed=7)
    state = torch.get_rng_state()
    first = decoder.generate(prompts, sampling)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12345)
    assert decoder.generate(prompts, sampling) == first
    assert decoder.generate(prompts[::-1], sampling)[::-1] == first  # whatever the batch
    *_, streamed = decoder.stream(prompts[2], sampling)
    assert streamed == first[2]
    others = [decoder.generate([QUESTION], Sampling(12, 2.0, seed=seed))[0].text for seed in (1, 2, None, None)]
    assert len(set(others)) == 4
    assert (
        decoder.generate([QUESTION], Sampling(12, 1e-4, seed=1))[0].text
        == decoder.generate([QUESTION], Sampling(12))[0].text
    )


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    draws = 1500

    def frequencies(sampling: Sampling) -> torch.Tensor:
        processors = choosers(sampling, None, (), 1)
        drawn = Counter(int(processors(torch.zeros(1, 0).long(), logits.clone()).argmax()) for _ in range(draws))
        return torch.tensor([drawn[token] / draws for token in range(5)])

    for sampling, expected in (
        (Sampling(temperature=1.0, seed=0), logits[0].softmax(-1)),
        (Sampling(temperature=2.0, seed=1), (logits[0] / 2).softmax(-1)),
        (Sampling(temperature=1.0, top_k=2, seed=2), torch.cat([logits[0, :2].softmax(-1), torch.zeros(3)])),
        (Sampling(temperature=1.0, top_p=0.8, seed=3), torch.cat([logits[0, :2].softmax(-1), torch.zeros(3)])),
    ):
        error = (frequencies(sampling) - expected).abs()
        assert (error <= 4 * (expected * (1 - expected) / draws).sqrt()).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, r"temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0"),
        ({"top_p": 1.5}, r"top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"stop": "end"}, "stop='end': give a tuple"),
        ({"stop": ("",)}, "none of them empty"),
        ({"stop": 5}, "stop=5"),
        ({"stop": [5]}, "stop="),
        ({"seed": "a"}, "seed='a'"),
        ({"seed": 2**70}, "seed=1180591620717411303424"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"temperature": float("inf")}, "temperature=inf"),
    ],
)
def test_impossible_sampling_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


def test_numbers_may_be_written_as_people_do(decoder: TransformersDecoder) -> None:
    written = Sampling("12", 1, 1, "5", ["END"], 3.0)  # type: ignore[arg-type]
    plain = Sampling(12, 1.0, 1.0, 5, ("END",), 3)
    assert written == plain and type(written.temperature) is float and hash(written) == hash(plain)
    assert decoder.generate([QUESTION], written) == decoder.generate([QUESTION], plain)
    assert decoder.generate([QUESTION], Sampling(4, 1, seed=2**64 - 1))
    assert TransformersDecoder(decoder.bundle, batch_size="2").batch_size == 2  # type: ignore[arg-type]


# Counting


def test_markers_count_as_their_slots(decoder: TransformersDecoder, store: SoftContextStore) -> None:
    tokenizer = decoder.bundle.tokenizer
    [soft] = store.get(["c"])
    assert soft is not None
    for ratio in (4, 8, 64):
        slots = soft.merge(ratio // 4).n_slots
        ids = decoder.token_ids(f"Context:{store.marker('c', ratio)}")
        assert ids == tokenizer("Context:")["input_ids"] + [tokenizer.pad_token_id] * slots
    assert decoder.count_tokens("Context: none") == len(tokenizer("Context: none")["input_ids"])
    assert decoder.count_tokens("") == 0
    forged = store.marker("c", 4).replace("[[ctx:", "[[ctx:a")
    assert decoder.count_tokens(forged) == len(tokenizer(forged)["input_ids"])


# What goes wrong


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 1 is empty"),
        (" \n", "prompt 1 is empty"),
        ([], "prompt 1 is empty"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": " "}], "prompt 1 is empty"),
        ([{"role": "user"}], "prompt 1: a message needs a role and a content"),
        ({"role": "user", "content": "hi"}, "prompt 1: a message needs"),
        ([{"role": "user", "content": ["hi"]}], "prompt 1: a message needs"),
        (None, "prompt 1 is a NoneType"),
        (5, "prompt 1 is a int"),
    ],
)
def test_unusable_prompts_are_refused(decoder: TransformersDecoder, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.generate([QUESTION, prompt])


def test_one_string_for_many_prompts_is_refused(decoder: TransformersDecoder) -> None:
    with pytest.raises(ConfigError, match="give a list"):
        decoder.generate(QUESTION)
    with pytest.raises(ConfigError, match="prompts is one NoneType: give a list"):
        decoder.generate(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a NoneType is no text"):
        decoder.count_tokens(None)  # type: ignore[arg-type]


def test_half_a_character_is_read_as_a_replacement(decoder: TransformersDecoder) -> None:
    assert decoder.token_ids("bees \ud83d fly") == decoder.token_ids("bees \ufffd fly")
    broken = [[{"role": "user", "content": "bees \udc1d?"}], "bees \udc1d?"]
    whole = [[{"role": "user", "content": "bees \ufffd?"}], "bees \ufffd?"]
    assert decoder.generate(broken, Sampling(4)) == decoder.generate(whole, Sampling(4))
    assert decoder.bundle.compress(["bees \udc1d fly"])[0].n_slots > 0


def test_a_prompt_far_beyond_the_window_is_not_even_tokenised(
    decoder: TransformersDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(decoder, "_tokenizer", SimpleNamespace(as_text=never, encode=never))
    question = "why? " * 4_000_000
    for prompt in (question, [{"role": "system", "content": question}, {"role": "user", "content": "Well?"}]):
        with pytest.raises(ConfigError, match=r"prompt 0 has 20\d{6} characters.*window of 1024"):
            decoder.generate([prompt])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # no system message, where the context is
        "",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
    ],
)
def test_a_chat_template_that_drops_the_context_is_named(
    store: SoftContextStore, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TransformersDecoder(store.bundle, store)  # type: ignore[arg-type]
    monkeypatch.setattr(decoder.bundle.tokenizer, "chat_template", template or "{#empty#}")
    first = {"role": "user", "content": "Hello."}
    for context in (store.marker("c", 4), "The bees are on the roof."):
        chat = [{"role": "system", "content": context}, first, {"role": "assistant", "content": "Hi."}, first]
        with pytest.raises(ConfigError, match="chat template leaves out or alters the user message"):
            decoder.generate([chat])


def test_a_system_message_that_a_template_drops_goes_before_the_first_question(
    decoder: TransformersDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(decoder.bundle.tokenizer, "chat_template", template)
    chat = [{"role": "system", "content": "Bees hum."}, {"role": "user", "content": "Who hums?"}]
    [prompt] = decoder.prepare([chat])
    assert decoder.bundle.tokenizer.decode(prompt.ids()).strip() == "Bees hum.\n\nWho hums?"


def test_a_prompt_beyond_the_window_is_refused(decoder: TransformersDecoder, store: SoftContextStore) -> None:
    window = decoder.bundle.backbone.model.config.max_position_embeddings
    marker = store.marker("c", 4)
    slots, one = decoder.count_tokens(marker), len(decoder.bundle.tokenizer(" bees")["input_ids"])
    prompt = marker + " bees" * (window // one)
    length = decoder.count_tokens(prompt)
    with pytest.raises(
        ConfigError, match=rf"prompt 0 has {length} tokens \({slots} of them slots\).*window of {window}"
    ):
        decoder.generate([prompt])
    with pytest.raises(ConfigError, match=f"window of {window}"):
        decoder.stream(prompt)  # already at the call
    fits = marker + " bees" * ((window - slots - 3) // one)
    room = window - decoder.count_tokens(fits)
    [answer] = decoder.generate([fits], Sampling(max_new_tokens=room + 40))
    assert (answer.completion_tokens, answer.finish_reason) == (room, "length")


def test_missing_passages(bundle: Any, store: SoftContextStore, caplog: pytest.LogCaptureFixture) -> None:
    text = "Stavely lies on the river Ash."
    store.add([text, PASSAGES["b"]], ["d", "e"], progress=False)
    d, e, b = store.markers(["d", "e", "b"], ratio=4)
    prompt = f"Context: {d}\n{e}\nQuestion: {QUESTION}"
    strict = TransformersDecoder(bundle, store)
    lenient = TransformersDecoder(bundle, store, on_missing="text")
    sampling = Sampling(max_new_tokens=6)
    whole = strict.generate([prompt], sampling)
    assert lenient.generate([prompt], sampling) == whole and not caplog.records

    raw = chromadb.EphemeralClient().get_collection("decoder-ctx", embedding_function=None)
    [record] = raw.get(ids=["d"])["metadatas"] or []
    raw.update(ids=["d"], metadatas=[{"payload": str(record["payload"])[:-8]}])
    with pytest.raises(PayloadError, match="'d' is damaged"):
        strict.generate([prompt], sampling)
    # The damaged passage's text, the other's slots; and no slots left where it was the only one.
    mixed, plain = lenient.generate([prompt, f"{d} {QUESTION}"], sampling)
    assert [mixed, plain] == strict.generate([prompt.replace(d, text), f"{text} {QUESTION}"], sampling)
    assert mixed.slots == strict.count_tokens(e) and plain.slots == 0
    assert "texts are used" in caplog.text

    store.delete(["d"])
    caplog.clear()
    literal = TransformersDecoder(bundle).generate([f"{d} {QUESTION}"], sampling)
    for policy in ("warn", "text"):  # a prompt whose passage is gone does not fail the others
        others = TransformersDecoder(bundle, store, on_unreadable=policy)
        gone, kept = others.generate([f"{d} {QUESTION}", f"{b} {QUESTION}"], sampling)
        assert [gone] == literal and kept.slots == strict.count_tokens(b)
        assert ("cannot be read" in caplog.text) == (policy == "warn")
        caplog.clear()
    for decoder in (strict, lenient):
        with pytest.raises(MissingPassageError, match="retrieve again"):
            decoder.generate([prompt], sampling)
    assert strict.generate([f"{b} {QUESTION}"], sampling)
    store.delete(["e"])


def test_markers_of_others_stay_text(
    decoder: TransformersDecoder, store: SoftContextStore, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = store.marker("a", 4, scope="someone else")
    with pytest.raises(UnreadableMarkerError, match="not made with this key for scope 'default'"):
        decoder.generate([f"{foreign} {QUESTION}"], Sampling(max_new_tokens=4))
    assert not caplog.records
    decoder = TransformersDecoder(decoder.bundle, store, on_unreadable="warn")
    [answer] = decoder.generate([f"{foreign} {QUESTION}"], Sampling(max_new_tokens=4))
    tokenizer = decoder.bundle.tokenizer
    assert (answer.slots, answer.prompt_tokens) == (0, len(tokenizer(f"{foreign} {QUESTION}")["input_ids"]))
    assert "left as literal text" in caplog.text
    [without_store] = TransformersDecoder(decoder.bundle).generate(
        [f"{foreign} {QUESTION}"], Sampling(max_new_tokens=4)
    )
    assert without_store == answer


def test_wrong_arguments_are_refused(
    bundle: Any, store: SoftContextStore, make_tiny_bundle: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match="on_missing='skip'"):
        TransformersDecoder(bundle, store, on_missing="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_unreadable='skip'"):
        TransformersDecoder(bundle, store, on_unreadable="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size=0"):
        TransformersDecoder(bundle, store, batch_size=0)
    with pytest.raises(FingerprintMismatchError, match=bundle.fingerprint[:12]):
        TransformersDecoder(make_tiny_bundle(seed=9), store)


def test_no_thread_is_left_behind(decoder: TransformersDecoder) -> None:
    list(decoder.stream(QUESTION, Sampling(max_new_tokens=2)))
    until = time.monotonic() + WAIT
    while any(thread.name.startswith("ctx-compress-stream") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
