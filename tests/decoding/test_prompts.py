"""Prompts: what they count for, which are refused, which weights read them; slots that are the text change nothing."""

import copy
import time
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.export import export_for_vllm
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import open_decoder_model, splice_prompts
from ctx_compress_rag.errors import (
    BundleError,
    ConfigError,
    FingerprintMismatchError,
    MissingPassageError,
    PayloadError,
)
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.inputs import DecoderInputs
from ctx_compress_rag.models.layers import lora_delta
from ctx_compress_rag.prompt import Side
from ctx_compress_rag.text.chat import PromptTokenizer, chat_text
from helpers import architectures
from helpers.decoding import PASSAGES, QUESTION, by_transformers, damage, marker_beside, prompt_of
from helpers.models import tiny_config


def test_markers_count_as_their_slots(decoder: Decoder, store: SoftContextStore) -> None:
    tokenizer = decoder.bundle.tokenizer
    [soft] = store.get(["c"])
    assert soft is not None
    for ratio in (4, 8, 64):
        slots = soft.merge(ratio // 4).n_slots
        ids = decoder.preparer.token_ids(f"Context:{store.marker('c', ratio)}")
        assert ids == tokenizer("Context:")["input_ids"] + [tokenizer.pad_token_id] * slots
    assert len(decoder.preparer.token_ids("Context: none")) == len(tokenizer("Context: none")["input_ids"])
    assert len(decoder.preparer.token_ids("")) == 0
    forged = store.marker("c", 4).replace("[[ctx:", "[[ctx:a")
    assert len(decoder.preparer.token_ids(forged)) == len(tokenizer(forged)["input_ids"])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (" \n", "prompt 1 is empty"),
        ([], "prompt 1 is empty"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": " "}], "prompt 1 is empty"),
        ([{"role": "user"}], "prompt 1: a message needs role and content"),
        ({"role": "user", "content": "hi"}, "prompt 1: a message needs"),
        ([{"role": "user", "content": ["hi"]}], "prompt 1: a message needs"),
        (None, "prompt 1 is a NoneType"),
    ],
)
def test_unusable_prompts_are_refused(decoder: Decoder, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.generate([QUESTION, prompt])
    with pytest.raises(ConfigError, match="give a list"):
        decoder.generate(QUESTION)


def test_half_a_character_is_read_as_a_replacement(decoder: Decoder) -> None:
    assert decoder.preparer.token_ids("bees \ud83d fly") == decoder.preparer.token_ids("bees \ufffd fly")
    broken = [[{"role": "user", "content": "bees \udc1d?"}], "bees \udc1d?"]
    whole = [[{"role": "user", "content": "bees \ufffd?"}], "bees \ufffd?"]
    assert decoder.generate(broken, Sampling(max_tokens=4)) == decoder.generate(whole, Sampling(max_tokens=4))
    assert decoder.bundle.compress(["bees \udc1d fly"])[0].n_slots > 0


def test_a_prompt_far_beyond_the_window_is_not_even_tokenized(decoder: Decoder) -> None:
    question = "why? " * 4_000_000
    began = time.process_time()
    for prompt in (question, [{"role": "system", "content": question}, {"role": "user", "content": "Well?"}]):
        with pytest.raises(ConfigError, match=r"prompt 0 has 20\d{6} characters.*window of 1024"):
            decoder.generate([prompt])
    assert time.process_time() - began < 1  # tokenized, each takes 20 s


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # no system message, where the context is
        "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
    ],
)
def test_a_chat_template_that_drops_the_context_is_named(
    store: SoftContextStore, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(store.bundle, store)  # type: ignore[arg-type]
    monkeypatch.setattr(decoder.bundle.tokenizer, "chat_template", template)
    first = {"role": "user", "content": "Hello."}
    for context in (store.marker("c", 4), "The bees are on the roof."):
        chat = [{"role": "system", "content": context}, first, {"role": "assistant", "content": "Hi."}, first]
        with pytest.raises(ConfigError, match="chat template leaves out or alters the user message"):
            decoder.generate([chat])


def test_a_system_message_that_a_template_drops_goes_before_the_first_question(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(decoder.bundle.tokenizer, "chat_template", template)
    chat = [{"role": "system", "content": "Bees hum."}, {"role": "user", "content": "Who hums?"}]
    [prompt] = decoder.preparer.prepare([chat])
    assert decoder.bundle.tokenizer.decode(prompt.ids()).strip() == "Bees hum.\n\nWho hums?"


def test_a_prompt_beyond_the_window_is_refused(decoder: Decoder, store: SoftContextStore) -> None:
    window = decoder.bundle.backbone.model.config.max_position_embeddings
    marker = store.marker("c", 4)
    slots, one = len(decoder.preparer.token_ids(marker)), len(decoder.bundle.tokenizer(" bees")["input_ids"])
    prompt = marker + " bees" * (window // one)
    length = len(decoder.preparer.token_ids(prompt))
    with pytest.raises(
        ConfigError, match=rf"prompt 0 has {length} tokens \({slots} of them slots\).*window of {window}"
    ):
        decoder.generate([prompt])
    with pytest.raises(ConfigError, match=f"window of {window}"):
        decoder.stream(prompt)  # already at the call
    fits = marker + " bees" * ((window - slots - 3) // one)
    room = window - len(decoder.preparer.token_ids(fits))
    [answer] = decoder.generate([fits], Sampling(max_tokens=room + 40))
    assert (answer.completion_tokens, answer.finish_reason) == (room, "length")


def test_missing_passages(bundle: Any, store: SoftContextStore, caplog: pytest.LogCaptureFixture) -> None:
    text = "Stavely lies on the river Ash."
    store.add([text, PASSAGES["b"]], ["d", "e"], progress=False)
    d, e, b = store.markers(["d", "e", "b"], ratio=4)
    prompt = f"Context: {d}\n{e}\nQuestion: {QUESTION}"
    strict = Decoder(bundle, store)
    lenient = Decoder(bundle, store, on_unreadable="text")
    sampling = Sampling(max_tokens=6)
    whole = strict.generate([prompt], sampling)
    assert lenient.generate([prompt], sampling) == whole and not caplog.records

    damage("decoder", "d")
    with pytest.raises(PayloadError, match="'d' is damaged"):
        strict.generate([prompt], sampling)
    # The damaged passage's text, the other's slots; and no slots left where it was the only one.
    chats = [[{"role": "user", "content": content}] for content in (prompt, f"{d} {QUESTION}")]
    with_text = [[{"role": "user", "content": chat[0]["content"].replace(d, text)}] for chat in chats]
    mixed, plain = lenient.generate(chats, sampling)
    assert [mixed, plain] == strict.generate(with_text, sampling)
    assert mixed.slots == len(strict.preparer.token_ids(e)) and plain.slots == 0
    assert "texts are used" in caplog.text

    store.delete(["d"])
    caplog.clear()
    literal = Decoder(bundle).generate([f"{d} {QUESTION}"], sampling)
    # A prompt whose passage is gone does not fail the others.
    gone, kept = lenient.generate([f"{d} {QUESTION}", f"{b} {QUESTION}"], sampling)
    assert [gone] == literal and kept.slots == len(strict.preparer.token_ids(b))
    assert "cannot be read" in caplog.text
    with pytest.raises(MissingPassageError, match="retrieve again"):
        strict.generate([prompt], sampling)
    assert strict.generate([f"{b} {QUESTION}"], sampling)
    store.delete(["e"])


def test_wrong_arguments_are_refused(bundle: Any, store: SoftContextStore, make_tiny_bundle: Any) -> None:
    wrong: list[tuple[str, Any]] = [("on_unreadable", "skip"), ("batch_size", 0), ("max_prompt_tokens", 0)]
    for name, value in wrong:
        with pytest.raises(ConfigError, match=name):
            Decoder(bundle, store, **{name: value})
    with pytest.raises(FingerprintMismatchError, match=bundle.fingerprint[:12]):
        Decoder(make_tiny_bundle(seed=9), store)


@pytest.mark.parametrize(("name", "begins"), [("Llama", True), ("Phi3", False)])
def test_prompts_of_base_models_begin_as_the_tokenizer_begins_a_text(name: str, begins: bool) -> None:
    tokenizer = copy.deepcopy(architectures.tokenizer(name))
    tokenizer.chat_template = None
    text = chat_text(tokenizer, [{"role": "user", "content": "Who?"}])
    assert text.startswith(tokenizer.bos_token) is begins
    [first, *_] = tokenizer(text.removeprefix(tokenizer.bos_token))["input_ids"]
    assert tokenizer(text, add_special_tokens=False)["input_ids"][0] == first


SHARES: dict[Side, dict[str, float]] = {
    "text": {"teacher": 1},
    "reader": {"reader": 1},
    "blend": {"reader": 0.75, "teacher": 0.25},
}


def with_shares(bundle: Bundle, shares: dict[str, float]) -> Any:
    """A decoder without adapters, whose weights are the bundle's with these shares of each LoRA added by hand."""
    state = bundle.backbone.own_state()
    for adapter, share in shares.items():
        lora = bundle.backbone.model.peft_config[adapter]
        matrices = bundle.backbone.adapter_state(adapter)
        for name, a in matrices.items():
            if "lora_A" in name:
                weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
                b = matrices[name.replace("lora_A", "lora_B")]
                state[weight] = state[weight] + share * lora.lora_alpha / lora.r * b @ a
    model = type(bundle.backbone.model)(bundle.backbone.config)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("side", SHARES)
def test_each_side_has_its_own_weights(decoder: Decoder, store: SoftContextStore, side: Side) -> None:
    marker = marker_beside(store, "a", 4, 0 if side == "blend" else None)
    text = {"text": PASSAGES["a"], "reader": marker, "blend": f"{PASSAGES['b']} {marker}"}[side]
    [prompt] = decoder.preparer.prepare([[{"role": "user", "content": f"{text}\n\n{QUESTION}"}]])
    assert prompt.side == side
    bundle = decoder.bundle
    assert isinstance(bundle, Bundle)
    batch = splice_prompts(bundle.backbone.inputs, [prompt])
    with torch.no_grad():
        expected = with_shares(bundle, SHARES[side])(**batch.model_inputs()).logits
        for _ in range(2):  # what another side used leaves no trace
            with open_decoder_model(bundle, "blend", batch.slot_mask):
                pass
            with open_decoder_model(bundle, side, batch.slot_mask) as model:
                torch.testing.assert_close(model(**batch.model_inputs()).logits, expected, atol=1e-4, rtol=1e-4)


def test_only_a_bundle_that_blends_reads_slots_beside_text_so(bundle: Bundle, store: SoftContextStore) -> None:
    marked = [store.marker("b", 4), marker_beside(store, "a", 4, 0)]
    plain = Bundle(
        bundle.config.model_copy(update={"reader_share": 1.0}), bundle.backbone, bundle.compressor, bundle.reader
    )
    for one, side in ((bundle, "blend"), (plain, "reader")):
        [prompt] = Decoder(one, store).preparer.prepare([f"She kept bees. {' '.join(marked)} Who?"])
        assert prompt.side == side


def test_an_exported_blend_is_one_adapter_for_peft(bundle: Bundle, tmp_path: Path) -> None:
    command = export_for_vllm(bundle, tmp_path)
    folder = tmp_path / "reader-teacher"
    assert f"tiny-reader-teacher={folder}" in command and command[command.index("--max-loras") + 1] == "4"
    assert command[command.index("--max-lora-rank") + 1] == "32"  # 16 + 3, and the next rank that vLLM has
    ids = torch.tensor([[5, 9, 2, 7, 30]])
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "decoder"), folder)
    with torch.no_grad():
        expected = with_shares(bundle, SHARES["blend"])(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_blend_needs_two_adapters(make_tiny_bundle: Any) -> None:
    made = make_tiny_bundle()
    config = made.config.model_copy(update={"reader_share": 0.5})
    with pytest.raises(BundleError, match=r"reader_share=0.5"):
        Bundle(config, made.backbone, made.compressor, made.reader)


def test_a_dora_is_neither_merged_nor_joined(make_tiny_bundle: Any, tmp_path: Path) -> None:
    made = make_tiny_bundle()
    made.backbone.add_adapter("teacher", lambda: LoraConfig(use_dora=True, target_modules=["q_proj"]))
    layer = made.backbone.model.model.layers[0].self_attn.q_proj
    assert lora_delta(layer, {"reader": 1.0}) is not None
    for work in (lambda: lora_delta(layer, {"reader": 0.5, "teacher": 0.5}), lambda: export_for_vllm(made, tmp_path)):
        with pytest.raises(ConfigError, match="'teacher' is a DoRA"):
            work()


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
    spliced = splice_prompts(DecoderInputs(model), rows)
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
    inputs = DecoderInputs(architectures.model("Llama"))
    rows = [
        prompt_of(*(torch.full((n, 64), 0.5) if hole else torch.randint(0, 50, (n,)) for n, hole in row))
        for row in lengths
    ]
    totals = [sum(n for n, _ in row) for row in lengths]
    if 0 in totals:
        with pytest.raises(ConfigError, match=f"prompt {totals.index(0)} is empty"):
            splice_prompts(inputs, rows)
        return
    spliced = splice_prompts(inputs, rows)
    longest = max(totals)
    assert spliced.inputs_embeds.shape == (len(rows), longest, 64)
    for number, total in enumerate(totals):
        padding = [0] * (longest - total)
        slots = [hole for n, hole in lengths[number] for _ in range(n)]
        assert spliced.attention_mask[number].tolist() == padding + [1] * total
        assert spliced.position_ids[number].tolist() == padding + list(range(total))
        assert spliced.slot_mask[number].tolist() == [False] * len(padding) + slots
        assert (rows[number].length, rows[number].slots) == (total, sum(slots))


def test_slots_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"differ in width: \[4, 64\]"):
        splice_prompts(DecoderInputs(architectures.model("Llama")), [prompt_of(torch.tensor([1]), torch.zeros(2, 4))])


@pytest.fixture(scope="module")
def identity(name: str, model: Any) -> Decoder:
    """Its slots are one token's embedding each: what it reads is the plain prompt."""
    frozen = {"mode": "frozen"}
    method = {"name": "mean_pooling", "layers": 0, "linear": False, "encoder": frozen, "decoder": frozen}
    config = tiny_config(name=name, method=method, base_ratio=1, ratios=[1], window=16)
    bundle = Bundle.build(config, Backbone(model, architectures.tokenizer(name)))
    store = SoftContextStore(
        chromadb.EphemeralClient(), bundle, collection=f"identity-{name}", codec="fp16", key=b"k" * 16
    )
    return Decoder(bundle, store)


WHO = "who built it?"
LIGHTHOUSE = ["The lighthouse of Brenmoor was built in 1874 by Ada Quill.", "It has two lamps."]


def chats(*contexts: str) -> list[list[dict[str, str]]]:
    """Chats as RAG chains make them: context in the user's message, in the system's, in an earlier turn."""
    first, second = contexts
    return [
        [{"role": "user", "content": f"Context: {first}\n\n{second}\nQuestion: {WHO}"}],
        [{"role": "system", "content": f"Answer in few words.\n{first}"}, {"role": "user", "content": WHO}],
        [
            {"role": "user", "content": second},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": WHO},
        ],
    ]


def test_greedy_answers_equal_transformers_own(identity: Decoder, model: Any) -> None:
    """Batched, chats with one and two passages and none, against generate() on each plain prompt."""
    tokenizer = identity.bundle.tokenizer
    assert identity.store is not None
    ids = identity.store.ensure(LIGHTHOUSE)
    with_markers = chats(*identity.store.markers(ids, ratio=1))
    plain = chats("", "")[:1]
    answers = identity.generate([*with_markers, *plain], Sampling(max_tokens=12))

    passage_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in LIGHTHOUSE]
    holes = ([0, 1], [0], [1], [])
    for answer, chat, used in zip(answers, [*chats("\ue000", "\ue000"), *plain], holes, strict=True):
        around = PromptTokenizer(tokenizer).encode(chat_text(tokenizer, chat).split("\ue000"))
        expected = around[0].tolist()
        for part, passage in zip(around[1:], used, strict=True):
            expected += passage_ids[passage] + part.tolist()
        assert answer.prompt_tokens == len(expected)
        assert answer.slots == sum(len(passage_ids[passage]) for passage in used)
        assert answer.text == by_transformers(model, tokenizer, expected, 12)


def test_prompts_are_tokenized_as_transformers_does(identity: Decoder, model: Any, name: str) -> None:
    """Chats and raw text without markers: the ids of apply_chat_template and of the tokenizer, one BOS."""
    tokenizer = identity.bundle.tokenizer
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
    answers = identity.generate([chat, raw, rendered], Sampling(max_tokens=12))
    for answer, ids in zip(answers, (by_template, by_tokenizer, by_template), strict=True):
        assert answer.prompt_tokens == len(ids)
        assert answer.text == by_transformers(model, tokenizer, ids, 12)


def test_holes_add_no_characters(name: str) -> None:
    """Around a hole the text's tokens are those of the whole text where no token crosses the hole."""
    tokenizer = architectures.tokenizer(name)
    before, after = PromptTokenizer(tokenizer).encode(["Context:\n", "\nQuestion: who built it?"])
    assert tokenizer.decode([*before, *after]) == "Context:\n\nQuestion: who built it?"
