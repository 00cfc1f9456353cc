"""What holds for every method: each one in METHODS goes through the same matrix, in each of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.data.examples import world_examples
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.methods.base.compressor import PassageBatch, SlotBatch, Tokenized
from ctx_compress_rag.methods.registry import METHODS
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.stores.markers import Marker
from ctx_compress_rag.text.prompt_tokenizer import PromptTokenizer, chat_text
from ctx_compress_rag.training.checkpointing import checkpoint_layers, layers_of
from ctx_compress_rag.training.config import CompressionRecipe, ReconstructionRecipe
from ctx_compress_rag.training.objectives.reconstruction import passages_of
from ctx_compress_rag.training.recipes import SHIPPED, load_recipe
from ctx_compress_rag.training.sharding import sharded
from ctx_compress_rag.training.stages.compression import OBJECTIVES
from helpers.sentences import DIM, save_encoder
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaPostprocessor

FULL, FROZEN = {"mode": "full"}, {"mode": "frozen"}
SENTENCES = {"encoder": "a tiny one", "encoder_dim": DIM}
SMALL_LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
COMPREXIT = {"gate_dim": 8, "slot_dim": 12, "transport_dim": 8, "segment_tokens": 16}

# The smallest configs of each method, one for each of its forms; the first goes through the frameworks, too.
MATRIX: dict[str, dict[str, dict[str, Any]]] = {
    "mean_pooling": {
        "lora": {},
        "full": {"encoder": FULL, "decoder": FULL, "embedding_skip": True},
        "plain": {"encoder": FROZEN, "decoder": {"mode": "lora"}, "linear": False},
        "first layer": {"layers": 1, "positions": 4, "embedding_skip": True, "hidden_map": True},
        "first layer, full": {"layers": 1, "positions": 4, "encoder": FULL, "decoder": FROZEN},
    },
    "compression_tokens": {
        "bidirectional": {"attention": "bidirectional"},
        "causal": {"attention": "causal", "encoder": FULL, "decoder": FROZEN},
        "frozen": {"encoder": FROZEN},
    },
    "comprexit": {
        "transport": COMPREXIT,
        "window attention": COMPREXIT | {"allocation": "window_attention"},
        "last layer": COMPREXIT | {"layers": "last"},
    },
    "sentence_slots": {
        "tokens": SENTENCES | {"unit": "tokens"},
        "sentence": SENTENCES | {"unit": "sentence", "decoder": {"mode": "lora"}},
        "passage": SENTENCES | {"unit": "passage"},
    },
    "arcaligner": {
        "gates": SENTENCES | {"unit": "tokens", "lora": SMALL_LORA, "loops": 2},
        "no recursion": SENTENCES | {"unit": "tokens", "lora": SMALL_LORA, "loops": 0},
        "no lora": SENTENCES | {"unit": "sentence", "lora": None, "loops": 0},
    },
    "ram": {
        "both": {"segment_tokens": 4, "encoder": FULL, "decoder": {"mode": "lora"}},
        "no skimming": {"segment_tokens": 4, "encoder": {"mode": "lora"}, "decoder": FROZEN, "skimming": "none"},
        "no close reading": {"segment_tokens": 4, "encoder": FULL, "decoder": FULL, "close_reading": False},
    },
}
CASES = [(name, form) for name in METHODS for form in MATRIX.get(name, ())]
PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees. The honey is sold under the name of Old Gold, at the door of the town hall.",
    "Oda Brink was a mason.",
    "The river Issel freezes every January, and the people of Velmora then hold a market on the ice. " * 4,
]
QUESTION = "Who built the harbour of Velmora?"
TOKENS = 8


def test_every_method_is_in_the_matrix() -> None:
    assert MATRIX.keys() >= METHODS.keys(), "give the new method its smallest config in MATRIX"


# Bundles


@pytest.fixture(scope="module")
def encoder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny sentence-transformers model."""
    return str(save_encoder(tmp_path_factory.mktemp("sentences"), tiny_tokenizer))


@pytest.fixture(scope="module")
def make(make_tiny_bundle: Callable[..., Any], encoder: str) -> Callable[[str, str], Bundle]:
    """A bundle of a method in one of its forms, whose every weight matters: none is what it was initialised to."""

    def made(name: str, form: str, seed: int = 1) -> Bundle:
        settings = MATRIX[name][form]
        if "encoder_dim" in settings:
            settings = settings | {"encoder": encoder}
        bundle: Bundle = make_tiny_bundle(seed=seed, name=name, **settings)
        with torch.no_grad():
            for weight_name, weight in bundle.backbone.own_state().items():
                if ".layers." in weight_name and weight.ndim == 2:
                    weight.mul_(15)
            slots = torch.cat([soft.slots for soft in bundle.compress(PASSAGES)])
            bundle.reader.initialise(float(slots.pow(2).mean().sqrt()))
            for parameter in trained(bundle):
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.02))
        return bundle

    return made


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}: {case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A method, and one of its forms."""
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def bundle(make: Callable[..., Bundle], case: tuple[str, str]) -> Bundle:
    """Shared by tests that leave it as it is."""
    return make(*case)


def trained(bundle: Bundle) -> list[torch.nn.Parameter]:
    return bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()


def bits(bundle: Bundle) -> dict[str, Tensor]:
    """Every weight of a bundle, by where it is kept."""
    states = {"decoder": bundle.backbone.own_state()}
    states |= {"compressor": bundle.compressor.saved_state(), "reader": bundle.reader.saved_state()}
    states |= {f"{name} adapter": bundle.backbone.adapter_state(name) for name in bundle.backbone.adapters}
    return {f"{part}: {name}": value.clone() for part, state in states.items() for name, value in state.items()}


def ratios_of(bundle: Bundle) -> list[int]:
    """Ratios that its compressor makes; RAM's slots stand for its segments, at whatever ratio it reads."""
    return [bundle.config.base_ratio] if bundle.compressor.question_aware else [4, 8]


def tokenized(bundle: Bundle, texts: list[str]) -> list[Tokenized]:
    return [Tokenized(text, bundle.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def assert_close(actual: SoftContext, expected: SoftContext, tolerance: float = 1e-4) -> None:
    assert actual.token_counts.tolist() == expected.token_counts.tolist()
    assert torch.linalg.norm(actual.slots - expected.slots) <= tolerance * torch.linalg.norm(expected.slots)


# Saving and storing


def test_a_saved_bundle_is_the_same(bundle: Bundle, tmp_path: Path) -> None:
    bundle.save_pretrained(tmp_path)
    loaded = Bundle.from_pretrained(tmp_path, device="cpu")
    assert loaded.config == bundle.config
    assert loaded.fingerprint == bundle.fingerprint
    before, after = bits(bundle), bits(loaded)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    # What is trained is among them, in the same place.
    for mine, theirs in zip(trained(bundle), trained(loaded), strict=True):
        assert torch.equal(mine, theirs)
    for one, other in zip(bundle.compress(PASSAGES), loaded.compress(PASSAGES), strict=True):
        assert torch.equal(one.slots, other.slots) and torch.equal(one.token_counts, other.token_counts)
        assert torch.equal(bundle.embed(one), loaded.embed(other))


def test_another_weight_is_another_fingerprint(make: Callable[..., Bundle], case: tuple[str, str]) -> None:
    """A single entry of each trained tensor counts."""
    other = make(*case)
    seen = {other.fingerprint}
    for parameter in trained(other):
        with torch.no_grad():
            parameter.view(-1)[0] += 1.0
        seen.add(Bundle(other.config, other.backbone, other.compressor, other.reader).fingerprint)
    assert len(seen) == len(trained(other)) + 1


@pytest.mark.parametrize(("codec", "tolerance"), [("int8", 0.01), ("fp16", 1e-3), ("int4", 0.2)])
def test_a_store_gives_back_what_was_compressed(bundle: Bundle, tmp_path: Path, codec: str, tolerance: float) -> None:
    for ratio in ratios_of(bundle):
        with SoftContextStore(tmp_path / str(ratio), bundle, codec=codec, ratio=ratio) as store:
            ids = store.ensure(PASSAGES)
        with SoftContextStore(tmp_path / str(ratio), bundle) as store:
            for soft, expected in zip(store.get(ids), bundle.compress(PASSAGES, ratio), strict=True):
                assert soft is not None
                assert_close(soft, expected, tolerance)


# Batches


def test_a_batch_is_compressed_as_each_passage_alone(bundle: Bundle) -> None:
    """The last passage is longer than the window."""
    assert len(tokenized(bundle, PASSAGES)[-1].ids) > bundle.config.max_tokens
    for ratio in ratios_of(bundle):
        together = bundle.compress(PASSAGES, ratio)
        alone = [bundle.compress([text], ratio)[0] for text in PASSAGES]
        for soft, expected, passage in zip(together, alone, tokenized(bundle, PASSAGES), strict=True):
            assert_close(soft, expected)
            assert soft.n_tokens == len(passage.ids)
            assert bool((soft.token_counts > 0).all())


def test_training_has_the_slots_of_a_store(bundle: Bundle) -> None:
    """A passage longer than the window among others, at ratios that the window holds whole."""
    passages = tokenized(bundle, PASSAGES)
    with torch.no_grad():
        batch = bundle.compressor(PassageBatch.of(passages), ratios_of(bundle), bundle.config.max_tokens)
    for ratio, slots in batch.items():
        for trained, stored in zip(slots.rows(), bundle.compress(PASSAGES, ratio), strict=True):
            assert_close(trained, stored)


def test_padding_changes_nothing_in_training(bundle: Bundle) -> None:
    passages = tokenized(bundle, PASSAGES[:3])
    with torch.no_grad():
        batch = bundle.compressor(PassageBatch.of(passages), ratios_of(bundle), bundle.config.max_tokens)
        assert list(batch) == ratios_of(bundle)
        for i, passage in enumerate(passages):
            alone = bundle.compressor(PassageBatch.of([passage]), ratios_of(bundle), bundle.config.max_tokens)
            for ratio, slots in batch.items():
                assert_close(slots.rows()[i], alone[ratio].rows()[0])
                padding = slots.token_counts == 0
                assert not slots.slots[padding].any()
                assert int(slots.token_counts[i].sum()) == len(passage.ids)
                assert isinstance(slots, SlotBatch)


def test_padding_changes_nothing_for_the_decoder(bundle: Bundle) -> None:
    """Prompts of unlike length, one with two passages: each has the logits that it has alone."""
    first, second, third = (bundle.embed(soft) for soft in bundle.compress(PASSAGES[:3]))
    text = torch.arange(40, 60)
    rows = [[text, first, text[:3], second, text[:7]], [text[:2], third, text[:5]], [text[:1], second, text[:9]]]

    def last(rows: list[list[Tensor]]) -> Tensor:
        batch = splice(bundle.backbone.embeddings, [Prompt.of(*row) for row in rows])
        with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
            return model(**batch.model_inputs(), use_cache=False).logits[:, -1]

    together = last(rows)
    for row, logits in zip(rows, together, strict=True):
        torch.testing.assert_close(logits, last([row])[0], atol=2e-4, rtol=1e-3)
    assert (together[0] - together[1]).abs().max() > 1e-2


# Training


@dataclass(frozen=True)
class _Unread:
    """Trained parameters that no loss over text can reach in a decoder of two layers, and why."""

    part: str
    but: tuple[str, ...]


# What the last layer makes of slots is read by nobody but through its keys and values.
UNREAD = {"arcaligner": (_Unread("lora.1.", ("k_proj", "v_proj")), _Unread("gates.1.", ()))}


@cache
def shipped() -> dict[str, CompressionRecipe]:
    """All recipes that train a compressor, the demo's left out, by name."""
    files = [file for file in sorted(SHIPPED.glob("*/*.yaml")) if file.parent.name != "demo"]
    loaded = {f"{file.parent.name}/{file.stem}": load_recipe(file) for file in files}
    return {name: recipe for name, recipe in loaded.items() if isinstance(recipe, CompressionRecipe)}


def method_of(recipe: CompressionRecipe) -> str:
    """A recipe's method; that of the recipe whose bundle it starts from, if it names none."""
    if recipe.method is not None:
        return recipe.method.name
    assert recipe.bundle is not None
    [before] = [other for other in shipped().values() if other.output == recipe.bundle.parent]
    return method_of(before)


def recipes(method: str) -> dict[str, CompressionRecipe]:
    """A method's recipes by name."""
    return {name: recipe for name, recipe in shipped().items() if method_of(recipe) == method}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ships_recipes_whose_stages_follow_each_other(method: str) -> None:
    found = recipes(method)
    assert found
    outputs = {recipe.output for recipe in found.values()}
    assert len(outputs) == len(found)
    for name, recipe in found.items():
        assert recipe.bundle is None or recipe.bundle.parent in outputs, f"{name} starts from a bundle no recipe makes"


def test_a_step_of_each_stage_moves_what_is_trained_and_nothing_else(
    make: Callable[..., Bundle], case: tuple[str, str]
) -> None:
    name, form = case
    examples = world_examples("train", 900, 4, max_turns=2, passages=(2,))
    stages = {recipe.stage: recipe for recipe in recipes(name).values()}  # type: ignore[attr-defined]
    for stage, recipe in stages.items():
        if stage not in OBJECTIVES:  # packed rows: tests/training/test_packing.py
            continue
        bundle = make(name, form, seed=4)
        short = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_context_tokens": 96})})
        objective, collate = OBJECTIVES[short.stage](short, bundle)
        objective.train()
        rows = passages_of(examples) if isinstance(recipe, ReconstructionRecipe) else examples
        objective.ratios = [2, 4] if bundle.compressor.question_aware else [4]
        parameters = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        assert {id(p) for p in parameters.values()} == {id(p) for p in trained(bundle)}
        before = {n: p.detach().clone() for n, p in parameters.items()}
        all_before = bits(bundle)
        objective(**collate(rows))["loss"].backward()
        torch.optim.SGD(parameters.values(), lr=10.0).step()
        still = [n for n, p in parameters.items() if torch.equal(p, before[n])]
        assert [n for n in still if not unread(name, n)] == [], stage
        moved = {n for n, value in bits(bundle).items() if not torch.equal(value, all_before[n])}
        assert [weight for weight in moved if weight.startswith("decoder: ")] == [], stage
        assert len(moved) == len(parameters) - len(still), stage


@pytest.fixture
def loss_of(case: tuple[str, str]) -> Callable[[Bundle], tuple[torch.nn.Module, Tensor]]:
    """The objective of a method's first recipe, and its loss, over the same examples each time."""
    recipe: Any = next(recipe for recipe in recipes(case[0]).values() if cast(Any, recipe).stage in OBJECTIVES)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_context_tokens": 96})})
    examples = world_examples("train", 900, 4, max_turns=2, passages=(2,))

    def made(bundle: Bundle) -> tuple[torch.nn.Module, Tensor]:
        objective, collate = OBJECTIVES[recipe.stage](recipe, bundle)
        objective.train()
        objective.ratios = [2, 4] if bundle.compressor.question_aware else [4]
        torch.manual_seed(0)
        batch = collate(passages_of(examples) if isinstance(recipe, ReconstructionRecipe) else examples)
        return objective, objective(**batch)["loss"]

    return made


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() != set()
    for parameter, gradient in one.items():
        torch.testing.assert_close(other[parameter], gradient)


def gradients_of(objective: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}


def test_checkpointed_layers_give_the_same_gradients_and_keep_less(
    make: Callable[..., Bundle], case: tuple[str, str], loss_of: Callable[[Bundle], tuple[torch.nn.Module, Tensor]]
) -> None:
    """Compressor and reader take turns on one decoder, under adapters and hooks of their own."""
    gradients: list[dict[str, Tensor]] = []
    kept: list[int] = []
    for checkpointed in (False, True):
        bundle = make(*case, seed=4)
        if checkpointed:
            assert checkpoint_layers(bundle) >= 2
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, held: dict[int, int] = storages) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective, loss = loss_of(bundle)
        kept.append(sum(storages.values()))
        loss.backward()
        gradients.append(gradients_of(objective))
    assert_same_gradients(*gradients)
    assert kept[1] < kept[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_whose_frozen_weights_are_shared_out_give_the_same_gradients(
    make: Callable[..., Bundle],
    case: tuple[str, str],
    loss_of: Callable[[Bundle], tuple[torch.nn.Module, Tensor]],
    process_group: None,
    checkpointed: bool,
) -> None:
    """By one process here; by two in tests/training/test_whole_batch.py."""
    plain, bundle = make(*case, seed=4), make(*case, seed=4)
    objective, loss = loss_of(plain)
    loss.backward()
    if checkpointed:
        checkpoint_layers(bundle)
    layers, before = layers_of(bundle), bits(bundle)
    assert len(layers) >= 2
    with sharded(layers, torch.nn.Module(), "cpu"):
        held = [p for layer in layers for p in layer.parameters()]
        shares = {p.placements for p in held if isinstance(p, DTensor)}
        assert shares == ({(Shard(0),)} if not all(p.requires_grad for p in held) else set())
        shared_objective, loss = loss_of(bundle)
        loss.backward()
    assert_same_gradients(gradients_of(objective), gradients_of(shared_objective))
    after = bits(bundle)
    assert before.keys() == after.keys()
    assert [name for name, weight in before.items() if not torch.equal(after[name], weight)] == []
    bundle.compress(PASSAGES)


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process alone, as torch.distributed sees it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def unread(method: str, parameter: str) -> bool:
    return any(
        each.part in parameter and not any(part in parameter for part in each.but) for each in UNREAD.get(method, ())
    )


# Asking


@pytest.fixture(params=[(name, next(iter(MATRIX[name]))) for name in METHODS if name in MATRIX], ids=lambda c: c[0])
def app(request: pytest.FixtureRequest, make: Callable[..., Bundle], tmp_path: Path) -> Iterator[SoftContextStore]:
    """A store of a bundle whose decoder says something: special tokens have no embedding to be likely by."""
    bundle = make(*request.param, seed=2)
    with torch.no_grad():
        bundle.backbone.embeddings.weight[bundle.tokenizer.all_special_ids] = 0
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        store.add(PASSAGES[:3], ids=["a", "b", "c"], progress=False)
        yield store


def options(store: SoftContextStore) -> dict[str, Any]:
    """How a postprocessor is to be asked: at the store's ratio, or 4 of close reading."""
    return {"reduction": 4} if store.bundle.compressor.question_aware else {}


def plain_answer(store: SoftContextStore, chat: list[dict[str, str]]) -> tuple[str, int]:
    """The answer to a chat with markers, the whole prompt read again for every token; and the slots in it."""
    bundle = store.bundle
    assert isinstance(bundle, Bundle)
    parts = store.split(chat_text(bundle.tokenizer, chat))
    texts, markers = [""], []
    for part in parts:
        if isinstance(part, Marker):
            markers.append(part)
            texts.append("")
        else:
            texts[-1] += part
    ids = PromptTokenizer(bundle.tokenizer).encode(texts)
    slots = [bundle.embed(soft) for soft in store.fetch(markers)]
    row = [piece for pair in zip(ids, slots, strict=False) for piece in pair] + [ids[-1]]
    said: list[int] = []
    for _ in range(TOKENS):
        batch = splice(bundle.backbone.embeddings, [Prompt.of(*row, torch.tensor(said, dtype=torch.long))])
        with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
            best = int(model(**batch.model_inputs(), use_cache=False).logits[0, -1].argmax())
        if best == bundle.tokenizer.eos_token_id:
            break
        said.append(best)
    return bundle.tokenizer.decode(said, skip_special_tokens=True), sum(len(part) for part in slots)


def test_the_decoder_answers_from_several_passages(app: SoftContextStore) -> None:
    """With its cache, in a batch, as without: and the answer depends on each passage's slots."""
    bundle = app.bundle
    assert isinstance(bundle, Bundle)
    decoder = TransformersDecoder(bundle, app)
    chats = []
    for texts in (PASSAGES[:3], PASSAGES[1:3], PASSAGES[:1]):
        context = "\n\n".join(mark(app, texts, question=QUESTION, **options(app)))
        chats.append([{"role": "user", "content": f"{context}\n\nQuestion: {QUESTION}"}])
    made = decoder.generate(chats, Sampling(max_new_tokens=TOKENS))
    for chat, generation in zip(chats, made, strict=True):
        assert (generation.text, generation.slots) == plain_answer(app, chat)
    assert len({generation.text for generation in made}) > 1


class Fixed(BaseRetriever):
    """Retrieves the same documents for every question."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


def test_langchain_from_retriever_to_answer(app: SoftContextStore) -> None:
    documents = [Document(id=i, page_content=text) for i, text in zip("abc", PASSAGES[:3], strict=True)]
    retriever = ContextualCompressionRetriever(
        base_compressor=CompressedContextPostprocessor(store=app, **options(app)),
        base_retriever=Fixed(documents=documents),
    )
    prompt = ChatPromptTemplate([("system", "Answer.\n\n{context}"), ("human", "{input}")])
    llm = ChatCompressedContext(store=app, max_tokens=TOKENS)
    answered = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt)).invoke({"input": QUESTION})
    context = "\n\n".join(document.page_content for document in answered["context"])
    chat = [{"role": "system", "content": f"Answer.\n\n{context}"}, {"role": "user", "content": QUESTION}]
    expected, slots = plain_answer(app, chat)
    assert (answered["answer"], slots > 0) == (expected, True)
    assert [d.id for d in answered["context"]] == ["a", "b", "c"]
    assert all("[[ctx:" in d.page_content for d in answered["context"])


def test_llama_index_from_retriever_to_answer(app: SoftContextStore) -> None:
    nodes = [TextNode(id_=i, text=text) for i, text in zip("abc", PASSAGES[:3], strict=True)]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    llm = CompressedContextLLM(store=app, max_tokens=TOKENS)
    seen: list[list[dict[str, str]]] = []
    engine = RetrieverQueryEngine.from_args(
        index.as_retriever(similarity_top_k=3),
        llm=llm,
        node_postprocessors=[LlamaPostprocessor(app, **options(app))],
        response_mode="simple_summarize",
    )
    real = type(llm).chat

    def watched(self: Any, messages: Any, **kwargs: Any) -> Any:
        seen.append([{"role": m.role.value, "content": m.content or ""} for m in messages])
        return real(self, messages, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(llm), "chat", watched)
        response = engine.query(QUESTION)
    [chat] = seen
    expected, slots = plain_answer(app, chat)
    # An engine says "Empty Response" for an answer of nothing but spaces.
    assert str(response).strip() == expected.strip() and expected.strip()
    assert slots > 0
    assert {node.text for node in response.source_nodes} == set(PASSAGES[:3])
    assert not any(text in str(chat) for text in PASSAGES[:3])
