"""Where texts end, how tokens are drawn, log-probabilities, and a decoder's own settings beside transformers'."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import GenerationConfig

from ctx_compress_rag.decoding.answering import GrowingAnswer
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import LogprobRecorder, Sampling
from ctx_compress_rag.decoding.splice import open_decoder_model, splice_prompts
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt
from helpers import architectures
from helpers.decoding import QUESTION, apart, prompt_of
from helpers.marks import slowly


def answering(bundle: Any, sampling: Sampling, on_text: Any = None) -> GrowingAnswer:
    settings = bundle.backbone.model.generation_config
    return GrowingAnswer(prompt_of(), sampling, bundle.tokenizer, settings, None, on_text=on_text)


def test_end_tokens_and_budgets(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = decoder.bundle.tokenizer
    [free] = decoder.generate([QUESTION], Sampling(max_tokens=8))
    assert (free.completion_tokens, free.finish_reason) == (8, "length")
    ids = tokenizer(QUESTION)["input_ids"]
    given = torch.tensor([ids])
    with decoder.bundle.text_decoder() as model:
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False)
    out = out[0, len(ids) :].tolist()
    # The model's own list of end tokens counts, as Llama 3 has several.
    fifth = out.index(out[4])
    monkeypatch.setattr(decoder.bundle.backbone.model.generation_config, "eos_token_id", [out[4]])
    [ended] = decoder.generate([QUESTION], Sampling(max_tokens=8))
    assert (ended.completion_tokens, ended.finish_reason) == (fifth + 1, "stop")
    assert ended.text == tokenizer.decode(out[:fifth])


def test_a_special_token_can_be_a_stop_string(bundle: Any) -> None:
    special = bundle.tokenizer.convert_tokens_to_ids("<|user|>")
    for stop, ends in (("<|user|>", True), ("user", False)):
        assert (special in answering(bundle, Sampling(stop=(stop,))).end_ids) is ends


texts = st.text(alphabet="ab é🙂\n", max_size=20)


@given(text=texts, stop=st.lists(st.text(alphabet="ab é🙂\n", min_size=1, max_size=4), max_size=3), end=st.booleans())
@settings(deadline=None, max_examples=100)
def test_what_is_streamed_is_never_taken_back(bundle: Any, text: str, stop: list[str], end: bool) -> None:
    """Byte by byte, against str.find on the whole text."""
    tokenizer = bundle.tokenizer
    ids = [tokenizer.convert_tokens_to_ids(t) for t in byte_tokens(text)]
    if end or not ids:
        ids.append(tokenizer.eos_token_id)
    sent: list[str] = []
    watch = answering(bundle, Sampling(max_tokens=len(ids), stop=tuple(stop)), sent.append)
    for id in ids:
        if done := watch.take(torch.zeros(1), id):
            break
        assert all("\ufffd" not in piece for piece in sent)
    assert done is not None
    final, reason = done.text, done.finish_reason
    ends = [text.find(s) for s in stop if s in text]
    assert "".join(sent) == final
    if not ends:
        assert (final, reason) == (text, "stop" if ids[-1] == tokenizer.eos_token_id else "length")
    else:
        # It ends at the first stop string to be complete; of several complete ones, at the leftmost.
        first = min(text.find(s) + len(s) for s in stop if s in text)
        assert final == text[: min(text[:first].find(s) for s in stop if s in text[:first])]
        assert reason == "stop"


def byte_tokens(text: str) -> list[str]:
    """One token per UTF-8 byte, in the byte-level alphabet."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [character for piece, _ in pieces for character in piece]


def test_a_seed_makes_sampling_reproducible(decoder: Decoder, prompts: list[Any]) -> None:
    sampling = Sampling(max_tokens=12, temperature=2.0, top_p=0.95, top_k=50, seed=7)
    state = torch.get_rng_state()
    first = decoder.generate(prompts, sampling)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12345)
    assert decoder.generate(prompts, sampling) == first
    assert decoder.generate(prompts[::-1], sampling)[::-1] == first  # whatever the batch
    *_, streamed = decoder.stream(prompts[2], sampling)
    assert streamed == first[2]
    hot = {"max_tokens": 12, "temperature": 2.0}
    others = [decoder.generate([QUESTION], Sampling(**hot, seed=seed))[0].text for seed in (1, 2, None, None)]
    assert len(set(others)) == 4


def test_samples_follow_the_distribution(bundle: Any) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    draws = 1500

    def frequencies(sampling: Sampling) -> torch.Tensor:
        answer = answering(bundle, sampling.model_copy(update={"max_tokens": draws + 1}))
        for _ in range(draws):
            answer.take(logits)
        drawn = Counter(answer.ids)
        return torch.tensor([drawn[token] / draws for token in range(5)])

    for sampling, expected in (
        (Sampling(temperature=1.0, seed=0), logits.softmax(-1)),
        (Sampling(temperature=2.0, seed=1), (logits / 2).softmax(-1)),
        (Sampling(temperature=1.0, top_k=2, seed=2), torch.cat([logits[:2].softmax(-1), torch.zeros(3)])),
        (Sampling(temperature=1.0, top_p=0.8, seed=3), torch.cat([logits[:2].softmax(-1), torch.zeros(3)])),
    ):
        error = (frequencies(sampling) - expected).abs()
        assert (error <= 4 * (expected * (1 - expected) / draws).sqrt()).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-38, 1e-45, 1e-300])
def test_the_colder_the_likelier_and_never_another_token(bundle: Any, temperature: float) -> None:
    """Divided by the temperature, the likelier logits would all be infinite, and the first of them taken."""
    answer = answering(bundle, Sampling(temperature=temperature, seed=0))
    for _ in range(20):
        answer.take(torch.tensor([-3.0, 25.0, 40.0, 39.9]))
    assert set(answer.ids) == {2}


@pytest.mark.parametrize(
    ("values", "value"),
    [
        ({"max_tokens": 0}, "max_tokens.*0"),
        ({"max_tokens": None}, "max_tokens.*None"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": "warm"}, "temperature.*warm"),
        ({"top_p": 0.0}, r"top_p.*0\.0"),
        ({"top_k": -2}, "top_k.*-2"),
        ({"stop": iter(["end", ""])}, "stop.*''"),
        ({"stop": "x" * 1001}, "stop.*xxx"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 2**70}, "seed.*1180591620717411303424"),
        ({"top_logprobs": 2}, "top_logprobs=2"),
        ({"extractive": True, "json_schema": '{"type": "object"}'}, "extractive .* JSON"),
        ({"temprature": 1}, "temprature.*'temperature'"),
    ],
)
def test_impossible_sampling_is_refused(values: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError, match=value):
        Sampling(**values)


TOKENS = 8


def scored_by_transformers(decoder: Decoder, prompt: Prompt) -> tuple[list[int], list[float]]:
    """Token ids of a greedy answer, and transformers' own scores of them."""
    backbone = decoder.bundle.backbone
    batch = splice_prompts(backbone.inputs, [prompt])
    with torch.no_grad(), open_decoder_model(decoder.bundle, prompt.side, batch.slot_mask) as model:
        out = model.generate(
            inputs_embeds=batch.inputs_embeds,
            attention_mask=batch.attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=backbone.tokenizer.eos_token_id
            ),
            output_scores=True,
            return_dict_in_generate=True,
        )
        scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    return out.sequences[0].tolist(), scores[0].tolist()


@pytest.mark.parametrize("alone", [False, True])
def test_logprobs_are_transformers_own(decoder: Decoder, prompts: list[Any], alone: bool) -> None:
    sampling = Sampling(max_tokens=TOKENS, logprobs=True, top_logprobs=3)
    answers = [apart(decoder, p, sampling) for p in prompts] if alone else decoder.generate(prompts, sampling)
    for answer, prompt in zip(answers, decoder.preparer.prepare(prompts), strict=True):
        ids, wanted = scored_by_transformers(decoder, prompt)
        assert answer.logprobs is not None and len(answer.logprobs) in (len(ids), len(ids) - 1)  # without the end
        for token, value, noted in zip(ids, wanted, answer.logprobs, strict=False):
            assert noted.token == decoder.bundle.tokenizer.decode([token])  # byte-level: nothing is lost alone
            assert noted.logprob == pytest.approx(value, abs=1e-4)
            values = [probability for _, probability in noted.top]
            assert values == sorted(values, reverse=True) and noted.logprob == pytest.approx(values[0])
            assert len(values) == 3 and sum(map(math.exp, values)) <= 1


def test_logprobs_end_where_the_text_ends(decoder: Decoder, prompts: list[Any]) -> None:
    whole = decoder.generate(prompts[:1], Sampling(max_tokens=TOKENS, logprobs=True))[0]
    assert whole.logprobs is not None and "".join(each.token for each in whole.logprobs).endswith(whole.text)
    stop = whole.text[len(whole.text) // 2 :]
    [cut] = decoder.generate(prompts[:1], Sampling(max_tokens=TOKENS, logprobs=True, stop=(stop,)))
    assert cut.logprobs is not None and cut.logprobs == whole.logprobs[: len(cut.logprobs)]
    assert len(cut.logprobs) < len(whole.logprobs)
    [empty] = decoder.generate(prompts[:1], Sampling(max_tokens=TOKENS, logprobs=True, stop=(whole.text[0],)))
    assert (empty.text, empty.logprobs) == ("", ())


def test_tokens_join_to_the_text_where_a_tokenizer_drops_the_first_space() -> None:
    tokenizer = architectures.tokenizer("Mistral")
    ids = tokenizer("Who kept the bees?", add_special_tokens=False)["input_ids"]
    recorder = LogprobRecorder(tokenizer, 0)
    for id in ids:
        recorder.take(id, np.zeros(len(tokenizer), np.float32))
    tokens = "".join(each.token for each in recorder.of_text(ids, tokenizer.decode(ids)))
    assert tokens == f" {tokenizer.decode(ids)}"


@pytest.fixture
def model(decoder: Decoder) -> Iterator[Any]:
    own = decoder.bundle.backbone.model.generation_config
    yield decoder.bundle.backbone.model
    decoder.bundle.backbone.model.generation_config = own


ALIKE = ("no_repeat_ngram_size", "suppress_tokens")
SETTINGS = ("repetition_penalty", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "min_new_tokens", *ALIKE)


@pytest.mark.parametrize("name", slowly(SETTINGS, ALIKE))
def test_settings_act_as_in_transformers(decoder: Decoder, prompts: list[Any], model: Any, name: str) -> None:
    prompts, sampling = prompts[:2], Sampling(max_tokens=TOKENS)  # with slots, and without
    plain = [answer.text for answer in decoder.generate(prompts, sampling)]
    first = scored_by_transformers(decoder, decoder.preparer.prepare(prompts[:1])[0])[0]
    value: Any = {
        "repetition_penalty": 3.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": first[:2],
        "begin_suppress_tokens": first[:1],
        "bad_words_ids": [first[:1], first[1:3]],
        "sequence_bias": [[first[:1], -50.0]],
        "min_new_tokens": 4,
    }[name]
    model.generation_config = GenerationConfig(**{name: value})
    wanted = []
    for prompt in decoder.preparer.prepare(prompts):
        ids, _ = scored_by_transformers(decoder, prompt)
        wanted.append(decoder.bundle.tokenizer.decode(ids, skip_special_tokens=True))
    shared = [answer.text for answer in decoder.generate(prompts, sampling)]
    alone = [apart(decoder, prompt, sampling).text for prompt in prompts]
    assert shared == alone == wanted
    assert name == "min_new_tokens" or shared != plain
    off = Sampling(max_tokens=TOKENS, decoder_settings=False)
    assert [answer.text for answer in decoder.generate(prompts, off)] == plain
    assert [apart(decoder, prompt, off).text for prompt in prompts] == plain


def test_a_decoders_stop_strings_end_answers(decoder: Decoder, prompts: list[Any], model: Any) -> None:
    sampling = Sampling(max_tokens=TOKENS)
    [plain] = decoder.generate(prompts[:1], sampling)
    model.generation_config = GenerationConfig(stop_strings=[plain.text[3:5]])
    for answer in (decoder.generate(prompts[:1], sampling)[0], apart(decoder, prompts[0], sampling)):
        assert answer.text == plain.text[: plain.text.index(plain.text[3:5])] and answer.finish_reason == "stop"
    assert decoder.generate(prompts[:1], Sampling(max_tokens=TOKENS, decoder_settings=False)) == [plain]


def test_a_setting_that_is_not_supported_is_refused(decoder: Decoder, prompts: list[Any], model: Any) -> None:
    model.generation_config = GenerationConfig(encoder_repetition_penalty=2.0)
    for ask in (lambda: decoder.generate(prompts[:1]), lambda: apart(decoder, prompts[0], Sampling())):
        with pytest.raises(ConfigError, match="encoder_repetition_penalty"):
            ask()
