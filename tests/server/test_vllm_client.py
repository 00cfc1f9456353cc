"""engine="http://...": what goes to vLLM, byte for byte, what comes back, and what is said where something is wrong."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.export import export_for_vllm, vllm_models
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, ServerError
from helpers.frameworks import FRAMEWORKS, every_way
from helpers.langchain import TEXTS
from helpers.serving import WAIT, listening, marker
from helpers.vllm import KEY, FakeVllm

TOKENS = Sampling(max_tokens=10)


@pytest.fixture
def fake(talkative: Any) -> FakeVllm:
    return FakeVllm(talkative)


@pytest.fixture
def url(fake: FakeVllm) -> Iterator[str]:
    with listening(fake.app) as url:
        yield url


@pytest.fixture
def there(talkative: Any, store: SoftContextStore, url: str) -> Decoder:
    return Decoder(talkative, store, engine=url, api_key=KEY, timeout=WAIT)


@pytest.fixture
def soft(store: SoftContextStore) -> str:
    return f"Context: {marker(store, 'tower', 'default')} Who built it?"


def test_the_bytes_are_the_prompts_vectors_and_nothing_else(
    fake: FakeVllm, there: Decoder, talkative: Any, store: SoftContextStore, soft: str
) -> None:
    [slots] = store.get(store.ensure([TEXTS["tower"]]))
    assert slots is not None
    tokenizer, embed = talkative.tokenizer, talkative.backbone.embeddings
    before, after = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("Context: ", " Who built it?"))
    inner = talkative.embed(slots.merge(2))
    expected = torch.cat([embed(torch.tensor(before)), inner, embed(torch.tensor(after))])
    there.generate([soft], Sampling(max_tokens=4, stop=("END",), seed=3, temperature=0.5, top_p=0.9, top_k=7))
    [body] = fake.bodies
    sent = base64.b64decode(body.pop("prompt_embeds"))
    assert torch.equal(torch.load(io.BytesIO(sent), weights_only=True), expected)
    buffer = io.BytesIO()
    torch.save(expected.clone(), buffer)
    assert sent == buffer.getvalue()  # a view's whole storage would be longer
    assert body == {
        "model": "tiny-reader",
        "prompt": None,
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["END"],
        "stop_token_ids": [],
        "logprobs": None,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_text_goes_as_token_ids_to_the_decoder_itself(fake: FakeVllm, there: Decoder, talkative: Any) -> None:
    there.generate(["Who kept bees?"], Sampling(max_tokens=2, stop=("<|user|>",)))
    [body] = fake.bodies
    assert body["model"] == "tiny" and "prompt_embeds" not in body
    assert body["prompt"] == talkative.tokenizer("Who kept bees?")["input_ids"]
    assert body["stop_token_ids"] == [talkative.tokenizer.convert_tokens_to_ids("<|user|>")]


def test_a_form_goes_without_fields_that_nobody_asked_for(fake: FakeVllm, there: Decoder) -> None:
    schema = {"type": "object", "properties": {"arches": {"type": "integer"}}}
    there.generate(["How many?"], Sampling(max_tokens=2, json_schema=json.dumps(schema)))
    [body] = fake.bodies
    sent = body["response_format"]
    assert sent["type"] == "json_schema" and sent["json_schema"]["schema"] == {**schema, "additionalProperties": False}
    for sampling, message in (
        (Sampling(max_tokens=2, json_schema="no json"), "json_schema="),
        (Sampling(max_tokens=2, extractive=True), "extractive"),
    ):
        with pytest.raises(ConfigError, match=message):
            there.generate(["How many?"], sampling)


def test_a_decoders_settings_go_to_the_server_or_are_refused(
    fake: FakeVllm, there: Decoder, talkative: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, sent in (({"repetition_penalty": 1.3}, 1.3), ({}, 1.0)):
        monkeypatch.setattr(talkative.backbone.model, "generation_config", GenerationConfig(**settings))
        there.generate(["Who?"], Sampling(max_tokens=1))
        there.generate(["Who?"], Sampling(max_tokens=1, decoder_settings=False))
        assert [body["repetition_penalty"] for body in fake.bodies[-2:]] == [sent, 1.0]
    monkeypatch.setattr(talkative.backbone.model, "generation_config", GenerationConfig(suppress_tokens=[5]))
    with pytest.raises(ConfigError, match="suppress_tokens.*decoder_settings=False"):
        there.generate(["Who?"], Sampling(max_tokens=1))
    assert there.generate(["Who?"], Sampling(max_tokens=1, decoder_settings=False))


@FRAMEWORKS
async def test_both_frameworks_classes_take_a_server(
    store: SoftContextStore, url: str, soft: str, framework: Any
) -> None:
    here = framework.llm(store=store, max_tokens=8)
    there = framework.llm(store=store, max_tokens=8, engine=url, api_key=KEY)
    assert await every_way(framework, there, soft) == {framework.ask(here, soft)}
    assert KEY not in f"{there!r} {there.model_dump()}"


def test_a_nan_never_leaves(
    fake: FakeVllm, there: Decoder, soft: str, monkeypatch: pytest.MonkeyPatch, talkative: Any
) -> None:
    embed = talkative.embed
    for value in (float("nan"), float("inf")):

        def spoiled(slots: Any, value: float = value) -> torch.Tensor:
            made: torch.Tensor = embed(slots).clone()
            made[0, 0] = value
            return made

        monkeypatch.setattr(talkative, "embed", spoiled)
        with pytest.raises(ServerError, match="NaN or infinity in float32 and was not sent"):
            there.generate([soft], TOKENS)
    assert fake.bodies == []


def test_the_servers_window_holds(fake: FakeVllm, there: Decoder, talkative: Any) -> None:
    one = len(talkative.tokenizer(" bees")["input_ids"])
    with pytest.raises(ConfigError, match="window of 256"):
        there.generate([" bees" * (260 // one)], TOKENS)
    there.generate([" bees" * (252 // one)], TOKENS)
    [body] = fake.bodies
    assert len(body["prompt"]) + body["max_tokens"] == 256


ODD = ["localhost:8000", "http://", "http://256.256.256.256", "http://[::1]:99999", "http://[::1", "http://host:x"]


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("engine", address) for address in ODD), ("timeout", 0), ("timeout", float("nan")), ("max_retries", -1)],
)
def test_impossible_options(talkative: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Decoder(talkative, **{"engine": "http://127.0.0.1:1", name: value})


def test_a_server_that_is_busy_or_only_starts_is_asked_again(fake: FakeVllm, there: Decoder, soft: str) -> None:
    fake.starting += [503, 502]
    fake.faults += [503, 429]
    assert there.generate([soft], TOKENS)[0].text
    assert len(fake.bodies) == 3
    fake.faults += [503, 503, 503]
    with pytest.raises(ServerError, match="status 503"):
        there.generate([soft], TOKENS)
    assert not fake.faults and not fake.starting


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (400, "400.*not now"),
        (422, "422"),
        ("cut", "ended in the middle of an answer"),
        ('data: {"error": {"message": "engine died"}}\n\n', "engine died"),
        ("data: <html>\n\n", "something other than"),
        ("data: 7\n\n", "something other than"),
    ],
)
def test_faults_reach_the_caller_once(fake: FakeVllm, there: Decoder, soft: str, fault: Any, message: str) -> None:
    for ask in (lambda: there.generate([soft], TOKENS), lambda: list(there.stream(soft, TOKENS))):
        fake.faults.append(fault)
        with pytest.raises(ServerError, match=message):
            ask()
    assert len(fake.bodies) == 2
    assert there.generate([soft], TOKENS)


def test_nobody_there_and_no_key(talkative: Any, url: str) -> None:
    nobody = Decoder(talkative, engine="http://127.0.0.1:1", max_retries=0, timeout=5)
    with pytest.raises(ServerError, match="check that it runs"):
        nobody.generate(["Who?"], TOKENS)
    with pytest.raises(ServerError, match=r"401.*give the server's api_key") as caught:
        Decoder(talkative, engine=url, api_key="wrong-key").generate(["Who?"], TOKENS)
    assert "wrong-key" not in str(caught.value)


def test_a_server_without_the_adapter_is_refused(
    fake: FakeVllm, there: Decoder, soft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "names", ["tiny"])
    with pytest.raises(ServerError, match="no model 'tiny-reader'.*ctx-compress export"):
        there.generate([soft], TOKENS)


def test_what_is_exported_is_what_transformers_and_peft_read(talkative: Any, tmp_path: Path) -> None:
    command = export_for_vllm(talkative, tmp_path)
    decoder, reader = tmp_path / "decoder", tmp_path / "reader"
    assert command[:3] == ["vllm", "serve", str(decoder)]
    for words in (
        ["--served-model-name", "tiny"],
        ["--enable-prompt-embeds", "--dtype", "float32", "--max-model-len", "1024"],
        ["--enable-lora", "--max-lora-rank", "16"],
        ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'],
        ["--max-loras", "2"],  # one place stays free: see export
        ["--lora-modules", f"tiny-reader={reader}"],
    ):
        at = command.index(words[0])
        assert command[at : at + len(words)] == words
    at = command.index("--lora-target-modules")
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(command[at + 1 : at + 8]) == layers

    ids = torch.tensor([[5, 9, 2, 7, 30]])
    model = AutoModelForCausalLM.from_pretrained(decoder)
    assert AutoTokenizer.from_pretrained(decoder).chat_template == talkative.tokenizer.chat_template
    for adapter in (None, "reader"):  # peft changes the model that it is given
        loaded: Any = model if adapter is None else PeftModel.from_pretrained(model, reader)
        with torch.no_grad(), talkative.backbone.use(adapter) as own:
            torch.testing.assert_close(loaded(input_ids=ids).logits, own(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "arcaligner", "encoder_dim": 8}, "changes the decoder's layers as it reads"),
        ({"decoder": {"mode": "full"}}, "a decoder of its own"),
    ],
)
def test_methods_that_a_server_cannot_run_are_refused(
    make_tiny_bundle: Any, tmp_path: Path, method: dict[str, Any], message: str
) -> None:
    bundle = make_tiny_bundle(**method)
    with pytest.raises(ConfigError, match=message):
        export_for_vllm(bundle, tmp_path)
    with pytest.raises(ConfigError, match=message):
        Decoder(bundle, engine="http://127.0.0.1:1")
    assert not list(tmp_path.iterdir())


def test_a_frozen_decoder_needs_no_adapter(make_tiny_bundle: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(decoder={"mode": "frozen"})
    assert "--enable-lora" not in export_for_vllm(bundle, tmp_path)
    assert vllm_models(bundle) == {"text": "tiny", "reader": "tiny"}
