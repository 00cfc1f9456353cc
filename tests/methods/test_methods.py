"""What holds for every method, in each of its forms; and methods of other packages."""

import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.world.world import world_examples
from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.methods.base.compressor import SlotBatch, TokenCompressor, TokenizedPassage
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.reader import LinearMap, Reader
from ctx_compress_rag.training.engine.layers import bundle_decoder_layers, checkpoint_layers
from ctx_compress_rag.training.prompts import passage_examples
from ctx_compress_rag.training.run import SHIPPED, load_recipe, run_recipe
from ctx_compress_rag.training.stages.compression import CompressionRecipe
from helpers.forked import COMMAND, run_python
from helpers.marks import slowly
from helpers.methods import IMPORTED, MATRIX, PASSAGES, trained
from helpers.store import assert_same
from helpers.training import save_decoder, write_recipe

METHODS = MethodConfig.methods
RARE = {"plain", "first layer, full", "frozen", "last layer", "passage", "no lora"}
CASES = [
    pytest.param((name, form), id=f"{name}: {form}", marks=[pytest.mark.slow] * (form in RARE))
    for name in METHODS
    for form in MATRIX.get(name, ())
]


def test_every_method_is_in_the_matrix() -> None:
    assert MATRIX.keys() >= METHODS.keys() - IMPORTED, "give the new method its smallest config in MATRIX"


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def bundle(make: Any, case: tuple[str, str]) -> Bundle:
    """Shared by tests that leave it as it is."""
    return make(*case)


def bits(bundle: Bundle) -> dict[str, Tensor]:
    """Every weight of a bundle, by where it is kept."""
    states = {"decoder": bundle.backbone.own_state()}
    states |= {"compressor": bundle.compressor.saved_state(), "reader": bundle.reader.saved_state()}
    states |= {f"{name} adapter": bundle.backbone.adapter_state(name) for name in bundle.backbone.adapters}
    return {f"{part}: {name}": value.clone() for part, state in states.items() for name, value in state.items()}


def ratios_of(bundle: Bundle) -> list[int]:
    """Ratios that its compressor makes; RAM's slots stand for its segments, at whatever ratio it reads."""
    return [bundle.config.base_ratio] if bundle.config.method.name == "ram" else [4, 8]


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
        assert np.array_equal(one.slots, other.slots) and np.array_equal(one.token_counts, other.token_counts)
        assert torch.equal(bundle.embed(one), loaded.embed(other))


def test_a_batch_is_compressed_as_each_passage_alone_and_in_training_as_for_a_store(bundle: Bundle) -> None:
    """The last passage is longer than the window, which holds whole slots of the ratios."""
    passages = [
        TokenizedPassage(text, bundle.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PASSAGES
    ]
    assert len(passages[-1].ids) > bundle.config.window
    with torch.no_grad():
        batch = bundle.compressor(passages, ratios_of(bundle), bundle.config.window)
    assert list(batch) == ratios_of(bundle)
    for ratio, slots in batch.items():
        assert not slots.slots[slots.token_counts == 0].any()  # padding
        together = bundle.compress(PASSAGES, ratio)
        for in_training, stored, passage in zip(slots.rows(), together, passages, strict=True):
            [alone] = bundle.compress([passage.text], ratio)
            assert_same(stored, alone, 1e-4)
            assert_same(in_training.soft_context(), alone, 1e-4)
            assert stored.n_tokens == len(passage.ids)
            assert bool((stored.token_counts > 0).all())


QUESTION = "Who built the harbour of Velmora?"
TOKENS = 8


def plain_answer(decoder: Decoder, chat: list[dict[str, str]]) -> tuple[str, int]:
    """The answer to a chat with markers, the whole prompt read again for every token; and the slots in it."""
    bundle, [prompt] = cast(Bundle, decoder.bundle), decoder.preparer.prepare([chat])
    said: list[int] = []
    for _ in range(TOKENS):
        batch = splice_prompts(bundle.backbone.inputs, [prompt.then(said)])
        with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
            best = int(model(**batch.model_inputs(), use_cache=False).logits[0, -1].argmax())
        if best == bundle.tokenizer.eos_token_id:
            break
        said.append(best)
    return bundle.tokenizer.decode(said, skip_special_tokens=True), prompt.slots


@pytest.mark.parametrize("method", MATRIX)
def test_the_decoder_answers_from_several_passages(make: Any, method: str, tmp_path: Path) -> None:
    """With its cache, in a batch, as without: and the answer depends on each passage's slots."""
    bundle = make(method, next(iter(MATRIX[method])), seed=2)
    with torch.no_grad():  # so that the decoder says something, not special tokens
        bundle.backbone.embeddings.weight[bundle.tokenizer.all_special_ids] = 0
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        chats = []
        for texts in (PASSAGES[:3], PASSAGES[1:3], PASSAGES[:1]):
            context = "\n\n".join(mark_texts(store, texts, ratio=4, question=QUESTION))
            chats.append([{"role": "user", "content": f"{context}\n\nQuestion: {QUESTION}"}])
        decoder = Decoder(bundle, store)
        made = decoder.generate(chats, Sampling(max_tokens=TOKENS))
        for chat, generation in zip(chats, made, strict=True):
            assert (generation.text, generation.slots) == plain_answer(decoder, chat)
    assert len({generation.text for generation in made}) > 1


def unread(method: str, parameter: str) -> bool:
    """Whether a trained parameter is out of reach of any loss over text in a decoder of two layers.

    What ArcAligner's last layer makes of slots is read by nobody but through its keys and values.
    """
    if method != "arcaligner":
        return False
    read = "k_proj" in parameter or "v_proj" in parameter
    return "gates.1." in parameter or ("lora.1." in parameter and not read)


@cache
def recipes(method: str) -> list[CompressionRecipe]:
    """The shipped recipes that train a method's compressor."""
    loaded = [load_recipe(file) for file in sorted((SHIPPED / method).glob("*.yaml"))]
    return [recipe for recipe in loaded if isinstance(recipe, CompressionRecipe)]


@pytest.mark.parametrize("method", sorted(METHODS.keys() - IMPORTED))
def test_every_method_ships_recipes_whose_stages_follow_each_other(method: str) -> None:
    found = recipes(method)
    assert {recipe.method.name for recipe in found if recipe.method is not None} == {method}
    outputs = {recipe.output for recipe in found}
    assert len(outputs) == len(found)
    for recipe in found:
        assert recipe.bundle is None or recipe.bundle.parent in outputs, "it starts from a bundle that no recipe makes"


def objective_and_batch(recipe: Any, bundle: Bundle) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A recipe's objective, and a batch of the same examples each time."""
    short = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_context_tokens": 96})})
    examples = world_examples("train", 900, 4, max_turns=2, passages=(2,))
    objective, collate, examples = short.objective(bundle, passage_examples(examples) if recipe.recites else examples)
    objective.train()
    objective.ratios = [2, 4] if bundle.config.method.name == "ram" else [4]
    return objective, collate(examples)


def test_a_step_of_each_stage_moves_what_is_trained_and_nothing_else(make: Any, case: tuple[str, str]) -> None:
    name, form = case
    stages = {recipe.stage: recipe for recipe in recipes(name)}  # type: ignore[attr-defined]
    first = form == next(iter(MATRIX[name]))  # the other forms make a step of the last stage alone
    for stage, recipe in list(stages.items())[0 if first else -1 :]:
        bundle = make(name, form, seed=4)
        objective, batch = objective_and_batch(recipe, bundle)
        parameters = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        assert {id(p) for p in parameters.values()} == {id(p) for p in trained(bundle)}
        before = {n: p.detach().clone() for n, p in parameters.items()}
        all_before = bits(bundle)
        objective(**batch)["loss"].backward()
        torch.optim.SGD(parameters.values(), lr=10.0).step()
        still = [n for n, p in parameters.items() if torch.equal(p, before[n])]
        assert [n for n in still if not unread(name, n)] == [], stage
        moved = {n for n, value in bits(bundle).items() if not torch.equal(value, all_before[n])}
        assert [weight for weight in moved if weight.startswith("decoder: ")] == [], stage
        assert len(moved) == len(parameters) - len(still), stage


@pytest.mark.parametrize("method", slowly(MATRIX, MATRIX.keys() - {"mean_pooling", "arcaligner"}))
def test_checkpointed_layers_give_the_same_gradients(make: Any, method: str) -> None:
    """Compressor and reader take turns on one decoder, under adapters and hooks of their own."""
    gradients: list[dict[str, Tensor]] = []
    kept: list[int] = []
    for checkpointed in (False, True):
        bundle = make(method, next(iter(MATRIX[method])), seed=4)
        layers = bundle_decoder_layers(bundle)
        assert len(layers) >= 2
        if checkpointed:
            checkpoint_layers(layers, bundle.reader)
        objective, batch = objective_and_batch(recipes(method)[0], bundle)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, held: dict[int, int] = storages) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.manual_seed(0)
            loss = objective(**batch)["loss"]
        kept.append(sum(storages.values()))
        loss.backward()
        gradients.append({n: p.grad for n, p in objective.named_parameters() if p.grad is not None})
    assert kept[1] < kept[0] and gradients[0]
    torch.testing.assert_close(gradients[1], gradients[0])


class FirstTokensConfig(MethodConfig):
    paper = "A toy"

    name: Literal["first_tokens"] = "first_tokens"
    gain: float = 1.0

    def compressor(self, backbone: Any) -> Any:
        return FirstTokens(backbone, self)

    def reader(self, backbone: Any, compressor: Any) -> Reader:
        return Reader(backbone, LinearMap(compressor.dim, backbone.dim), TuneConfig(mode="frozen"))


del METHODS["first_tokens"]  # tests that use it put it back


class FirstTokens(TokenCompressor):
    """Of every so many tokens the first one's embedding, times a gain that is trained."""

    def __init__(self, backbone: Any, config: FirstTokensConfig) -> None:
        super().__init__(backbone)
        self.dim = backbone.dim
        self.gain = nn.Parameter(torch.tensor([config.gain]), requires_grad=False)

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        embedded = self.gain * self.backbone.embeddings(input_ids)
        counts = {r: torch.stack([m.sum(1) for m in attention_mask.split(r, dim=1)], dim=1) for r in ratios}
        return {r: SlotBatch(embedded[:, ::r] * (counts[r] > 0).unsqueeze(-1), counts[r]) for r in ratios}


@pytest.fixture
def registered() -> Iterator[None]:
    METHODS["first_tokens"] = FirstTokensConfig
    yield
    del METHODS["first_tokens"]


def recipe(folder: Path, tokenizer: Any) -> Path:
    """A recipe that trains the toy on a tiny decoder, both in `folder`."""
    decoder = save_decoder(folder / "decoder", tokenizer)
    optim = {"steps": 2, "learning_rate": 1e-2, "final_learning_rate": 0.0}
    return write_recipe(decoder, "answer", folder / "run", optim, method={"name": "first_tokens"}, ratios=[4])


def test_a_method_from_outside_is_trained_saved_loaded_stored_and_asked(
    registered: None, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    folder = run_recipe(recipe(tmp_path, tiny_tokenizer)) / "bundle"
    assert "first_tokens (A toy)" in (folder / "README.md").read_text(encoding="utf-8")
    bundle = Bundle.from_pretrained(folder)
    assert isinstance(bundle.config.method, FirstTokensConfig)
    gain = float(bundle.compressor.gain)
    assert gain != 1.0
    [soft] = bundle.compress(PASSAGES[:1])
    ids = bundle.tokenizer(PASSAGES[0], add_special_tokens=False)["input_ids"]
    np.testing.assert_allclose(soft.slots, gain * bundle.backbone.embeddings.weight.detach()[ids[::4]], atol=1e-6)
    store = SoftContextStore(str(tmp_path / "chroma"), bundle)
    decoder = Decoder(bundle, store)
    [answer] = decoder.generate([f"{mark_texts(store, PASSAGES[:1])[0]} Who built the harbour?"])
    assert answer.slots == soft.n_slots and answer.completion_tokens > 0


def test_without_registering_it_is_unknown(tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method.name: 'first_tokens' is unknown: .*'mean_pooling'"):
        run_recipe(recipe(tmp_path, tiny_tokenizer))


# A package of methods, known by its entry point, without an import by the user

_PACKAGE = """
import sys
for name in [name for name in sys.modules if name.startswith("ctx_compress_rag")]:
    del sys.modules[name]  # they are imported anew, where the package is installed
sys.path.insert(0, sys.argv.pop(1))
"""
_MODULE = """
from typing import Literal
from ctx_compress_rag.methods.base.config import MethodConfig
class ToyConfig(MethodConfig):
    name: Literal["toy"] = "toy"
    gain: float = 1.0
"""
_USER = """
from ctx_compress_rag.bundle.config import BundleConfig
config = BundleConfig(name="b", method={"name": "toy", "gain": 2.5}, base_ratio=4, ratios=[4], window=64)
print(type(config.method).__name__, config.method.gain)
"""


def test_an_installed_package_of_methods_is_found(tmp_path: Path) -> None:
    done = _run(tmp_path, _MODULE, _USER)
    assert done.stdout == "ToyConfig 2.5\n", done.stderr


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Every command fails then, whichever method it uses."""
    done = _run(tmp_path, "import no_such_module", COMMAND, "export", "smollm2-135m", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "'toy' of the package toy-methods cannot be loaded (ModuleNotFoundError: No module named" in done.stderr
    assert "Traceback" not in done.stderr


def _run(folder: Path, module: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a package with this module is installed in `folder`."""
    (folder / "toy_methods.py").write_text(module)
    about = folder / "toy_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-methods\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[ctx_compress_rag.methods]\ntoy = toy_methods\n")
    return run_python(_PACKAGE + code, folder, *arguments)
