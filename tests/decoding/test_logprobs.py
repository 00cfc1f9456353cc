"""Log-probabilities of answers, and a decoder's own generation settings, beside transformers' `generate`."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.logprobs import LogprobRecorder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import open_decoder_model, splice_prompts
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt
from helpers import architectures
from helpers.decoding import apart

TOKENS = 8


def by_transformers(decoder: Decoder, prompt: Prompt) -> tuple[list[int], list[float]]:
    """Token ids of a greedy answer, and transformers' own scores of them."""
    backbone = decoder.bundle.backbone
    batch = splice_prompts(backbone.embeddings, [prompt])
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
        ids, wanted = by_transformers(decoder, prompt)
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


def test_tokens_join_to_the_text_where_a_tokenizer_drops_the_first_space() -> None:
    tokenizer = architectures.tokenizer("Mistral")
    ids = tokenizer("Who kept the bees?", add_special_tokens=False)["input_ids"]
    recorder = LogprobRecorder(tokenizer, 0)
    for id in ids:
        recorder.take(id, torch.zeros(len(tokenizer)))
    tokens = "".join(each.token for each in recorder.of_text(ids, tokenizer.decode(ids)))
    assert tokens == f" {tokenizer.decode(ids)}"


@pytest.fixture
def model(decoder: Decoder) -> Iterator[Any]:
    own = decoder.bundle.backbone.model.generation_config
    yield decoder.bundle.backbone.model
    decoder.bundle.backbone.model.generation_config = own


SETTINGS = ["repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"]


@pytest.mark.parametrize("name", [*SETTINGS, "sequence_bias", "min_new_tokens"])
def test_settings_act_as_in_transformers(decoder: Decoder, prompts: list[Any], model: Any, name: str) -> None:
    sampling = Sampling(max_tokens=TOKENS)
    plain = [answer.text for answer in decoder.generate(prompts, sampling)]
    first = by_transformers(decoder, decoder.preparer.prepare(prompts[:1])[0])[0]
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
        ids, _ = by_transformers(decoder, prompt)
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
