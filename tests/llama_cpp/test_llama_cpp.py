"""A real llama.cpp gives the scores of transformers, whatever a family does, and its answers, however many ask."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gguf_files.trial import tried
from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.engines.gguf_weights import export_for_llama_cpp
from ctx_compress_rag.decoding.engines.llama_cpp_context import LlamaCppContext
from ctx_compress_rag.decoding.engines.llama_cpp_proof import _compare, distance, prove, scores_of, spread
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import BundleError, ConfigError, CtxCompressError
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.loading import load_decoder
from helpers import architectures
from helpers.architectures import random_ids
from helpers.decoding import PASSAGES, QUESTION, WITHOUT_TORCH, begun, passage_store, prompt_of, prompts_of, wait_for
from helpers.engines import EngineTests
from helpers.gguf import write_gguf
from helpers.models import draw_lora, tiny_config, tiny_llama

pytestmark = pytest.mark.llama_cpp

ANSWER = """
import json
from ctx_compress_rag import Decoder, ExportedBundle, Sampling, SoftContextStore

folder, chroma, text = sys.argv[1:]
with SoftContextStore(chroma, ExportedBundle(folder)) as store:
    [answer] = Decoder(store.bundle, store, engine="llama.cpp", weights=folder).generate([text], Sampling(max_tokens=8))
print(json.dumps([answer.text, answer.slots]))
"""


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where unpacked and written files are kept."""
    folder = tmp_path_factory.mktemp("assets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", folder)
        yield folder


@pytest.fixture(scope="session")
def folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved bundle with a teacher, whose random decoder answers in text that depends on all of its prompt."""
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    model = tiny_llama(tiny_tokenizer, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.get_input_embeddings().weight[tiny_tokenizer.all_special_ids] = 0  # it never ends by itself
        write_gguf(model, made / "tiny.gguf", tiny_tokenizer, int8=True)
    decoder = GgufDecoder(path=str(made / "tiny.gguf"))
    bundle = Bundle.build(tiny_config(decoder=decoder), Backbone(*load_decoder(decoder, device="cpu")))
    bundle.reader.initialize(1.0)
    bundle.backbone.add_adapter("teacher", lambda: lora_config(TuneConfig(rank=2)))
    bundle.config = bundle.config.model_copy(update={"reader_share": 0.75})
    draw_lora(bundle.backbone.model, std=0.3)
    bundle.save_pretrained(made / "bundle")
    return made / "bundle"


@pytest.fixture(scope="session")
def bundle(folder: Path) -> Bundle:
    return Bundle.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="session")
def store(bundle: Bundle) -> SoftContextStore:
    return passage_store(bundle, "llama")


@pytest.fixture(scope="session")
def files(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's files in float32, which answer as transformers does."""
    made = tmp_path_factory.mktemp("f32")
    export_for_llama_cpp(bundle, made, "F32")
    return made


@pytest.fixture(scope="session")
def decoder(bundle: Bundle, store: SoftContextStore, files: Path) -> Decoder:
    return Decoder(bundle, store, engine="llama.cpp", weights=str(files))


# llama.cpp knows only this family's own pattern: five sliding layers, then a full one.
GEMMA_3 = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}


def tiny_model(name: str) -> Any:
    shape: dict[str, Any] = GEMMA_3 if name == "Gemma3" else {}
    return architectures.model(name, 4, head_dim=16, tie_word_embeddings=True, **shape)


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3"])
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, LlamaCppContext]:
    """A family's name, a model, and the same model in llama.cpp."""
    name = request.param
    model, file = tiny_model(name), tmp_path_factory.mktemp("family") / "tiny.gguf"
    write_gguf(model, file, description="right")
    return name, model, LlamaCppContext(file, "right", 64, model.config.vocab_size, 200, 3)


def scores(model: Any, pieces: list[torch.Tensor]) -> torch.Tensor:
    embed = model.get_input_embeddings()
    vectors = torch.cat([piece if piece.is_floating_point() else embed(piece) for piece in pieces])
    with torch.no_grad():
        found: torch.Tensor = model(inputs_embeds=vectors.unsqueeze(0)).logits[0, -1]
    return found


def test_scores_are_those_of_transformers(opened: tuple[str, Any, LlamaCppContext]) -> None:
    """Longer than the sliding windows; sequences of one pass do not see each other."""
    name, model, context = opened
    ids = random_ids(name, [20, 7, 9, 3])
    rms = model.get_input_embeddings()(ids[0]).square().mean().sqrt()
    torch.manual_seed(0)
    vectors = [torch.randn(length, 64) * rms for length in (5, 11)]
    prompts = [[ids[0], vectors[0], ids[1]], [ids[2], vectors[0], ids[3], vectors[1]], [vectors[1], ids[1]]]
    for _ in range(2):  # the second time with what was kept of the last prompt's beginning
        found = context.read([(number, prompt_of(*pieces)) for number, pieces in enumerate(prompts)])
        tokens = [int(row.argmax()) for row in found]
        next_found = context.step([(n, sum(map(len, prompts[n])), token) for n, token in enumerate(tokens)])
        for pieces, token, now, after in zip(prompts, tokens, found, next_found, strict=True):
            expected = scores(model, pieces)
            torch.testing.assert_close(torch.as_tensor(now), expected, atol=0.02 * float(expected.abs().max()), rtol=0)
            expected = scores(model, [*pieces, torch.tensor([token])])
            torch.testing.assert_close(
                torch.as_tensor(after), expected, atol=0.02 * float(expected.abs().max()), rtol=0
            )
        for number in range(3):
            context.drop(number)


def test_a_prompts_beginning_is_kept(opened: tuple[str, Any, LlamaCppContext], monkeypatch: Any) -> None:
    name, _, context = opened
    ids = random_ids(name, [30, 4, 5], seed=1)
    context.clear()
    read = []
    monkeypatch.setattr(
        context,
        "_decode",
        lambda inputs, *rest: read.append(len(inputs)) or LlamaCppContext._decode(context, inputs, *rest),
    )
    for last in (ids[1], ids[2]):
        context.read([(0, prompt_of(torch.cat([ids[0], last])))])
        context.drop(0)
    context.read([(0, prompt_of(torch.cat([ids[0], ids[2]])))])
    context.drop(0)
    assert read == [34, 5, 1]


def test_memory_that_grows_keeps_what_sequences_have(tmp_path: Path) -> None:
    model, file = tiny_model("Llama"), tmp_path / "tiny.gguf"
    write_gguf(model, file, description="right")
    context, ids = LlamaCppContext(file, "right", 64, model.config.vocab_size, 4000, 2), random_ids("Llama", [20, 900])
    context.read([(1, prompt_of(ids[0]))])
    for room in (600, 1400):
        context.make_room(room)
        [found] = context.step([(1, 20, 7)])
        expected = scores(model, [ids[0], torch.tensor([7])])
        torch.testing.assert_close(torch.as_tensor(found), expected, atol=0.02 * float(expected.abs().max()), rtol=0)
        context._llama.llama_memory_seq_rm(context._memory, 1, 20, -1)
    [found] = context.read([(0, prompt_of(ids[1]))])
    expected = scores(model, [ids[1]])
    torch.testing.assert_close(torch.as_tensor(found), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


def test_what_would_end_the_process_is_refused(opened: tuple[str, Any, LlamaCppContext]) -> None:
    _, model, context = opened
    size = model.config.vocab_size
    for piece in (torch.zeros(2, 63), torch.tensor([size]), torch.tensor([-1])):
        with pytest.raises(ConfigError, match=r"width 64|decoder's"):
            context.check(prompt_of(torch.tensor([1]), piece))
    for number, place in ((3, 0), (0, 200)):
        with pytest.raises(CtxCompressError, match="too many"):
            context.step([(number, place, 1)])


def test_it_proves_itself_once_in_a_process_of_its_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = tiny_model("Llama"), tmp_path / "tiny.gguf"
    write_gguf(model, file, description="right")
    arguments = file, "right", 64, model.config.vocab_size, 200
    ids = spread(model.config.vocab_size)
    expected = scores(model, [torch.tensor(ids)])
    found = scores_of(*arguments, lengths=[5, len(ids)])
    assert distance(found[1][-1], expected.numpy()) < 0.01 and len(found[0]) == 5
    with pytest.raises(BundleError, match="another bundle"):
        scores_of(file, "wrong", *arguments[2:])
    prove(*arguments)
    monkeypatch.setattr(sys, "executable", "/bin/false")  # a process that ends at once
    prove(*arguments)
    with pytest.raises(ConfigError, match=r"ends the process.*tiny\.gguf.*transformers"):
        prove(*arguments[:4], 201)

    def here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        _compare(command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", here)
    rows = LlamaCppContext._rows
    monkeypatch.setattr(LlamaCppContext, "_rows", lambda self, ids: 2 * rows(self, ids))
    with pytest.raises(ConfigError, match="otherwise than the tokens"):
        prove(*arguments[:4], 202)


def test_files_of_other_weights_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    model, file = tiny_model("Llama"), tmp_path / "tiny.gguf"
    write_gguf(model, file, description="right")
    size = model.config.vocab_size
    for expected in (("wrong", 64, size), ("right", 32, size), ("right", 64, size + 1)):
        with pytest.raises(BundleError, match="another bundle"):
            LlamaCppContext(file, *expected, 100, 1)
    content = file.read_bytes()
    for damaged in (content[:500], content[:-100], b"GGUF" + content[200:], b""):
        file.write_bytes(damaged)
        with pytest.raises(BundleError, match=r"tiny\.gguf"):
            LlamaCppContext(file, "right", 64, size, 100, 1)
    file.unlink()
    with pytest.raises(BundleError, match="export"):
        LlamaCppContext(file, "right", 64, size, 100, 1)


@pytest.fixture(scope="module")
def prompts(store: SoftContextStore) -> list[Any]:
    return prompts_of(store)


class TestLlamaCpp(EngineTests):
    near = 0.05

    @pytest.fixture(scope="class")
    def here(self, bundle: Bundle, store: SoftContextStore) -> Decoder:
        return Decoder(bundle, store)

    @pytest.fixture(scope="class")
    def there(self, decoder: Decoder) -> Decoder:
        return decoder


def test_more_callers_than_places_get_what_each_gets_alone(decoder: Decoder, prompts: list[Any], files: Path) -> None:
    expected = decoder.generate(prompts, Sampling(max_tokens=12))
    crowded = Decoder(
        decoder.bundle, decoder.store, engine="llama.cpp", weights=str(files), batch_size=2, context_size=300
    )
    with ThreadPoolExecutor(12) as pool:
        tasks = [pool.submit(crowded.generate, [prompt], Sampling(max_tokens=12)) for prompt in prompts * 2]
    assert [task.result()[0] for task in tasks] == expected * 2
    crowded.close()


def test_too_long_a_prompt_is_refused_before_anything_runs(decoder: Decoder, files: Path) -> None:
    short = Decoder(decoder.bundle, decoder.store, engine="llama.cpp", weights=str(files), context_size=40)
    with pytest.raises(ConfigError, match="context_size=40"):
        short.generate(["Who?", "bees " * 60])
    [answer] = short.generate(["Who?"], Sampling(max_tokens=400))
    assert answer.finish_reason == "length" and answer.prompt_tokens + answer.completion_tokens == 40
    short.close()


def test_a_closed_engine_tells_who_waits(decoder: Decoder, files: Path, prompts: list[Any]) -> None:
    closing = Decoder(decoder.bundle, decoder.store, engine="llama.cpp", weights=str(files), batch_size=1)
    closing.generate(prompts[:3], Sampling(max_tokens=1))  # else the first may be answered while a model is loaded
    got: list[Any] = []
    for prompt in prompts[:3]:
        begun(closing, prompt, Sampling(max_tokens=400), got.append)
    wait_for(lambda: got)
    threads = [threading.Thread(target=closing.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(isinstance(piece, ConfigError) for piece in got) == 3
    with pytest.raises(ConfigError, match="closed"):
        closing.generate(prompts[:1])


def test_opening_and_answering_load_no_transformers_model(
    folder: Path, store: SoftContextStore, decoder: Decoder, prompts: list[Any], cache: Path
) -> None:
    for written in (False, True):
        opened = Bundle.from_pretrained(folder, device="cpu")
        fast = Decoder(opened, store, engine="llama.cpp", weights="BF16")
        assert fast.generate(prompts[:2], Sampling(max_tokens=4))
        assert opened.backbone.loaded is not written
        fast.close()
    assert list(cache.glob("ctx_compress_rag/llama.cpp/*/*-BF16/reader.gguf"))


def test_a_process_without_torch_answers_as_transformers_does(bundle: Bundle, files: Path, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path / "chroma", bundle) as store:
        store.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
        text = f"{store.marker(next(iter(PASSAGES)), 4)} {QUESTION}"
        [expected] = Decoder(bundle, store).generate([text], Sampling(max_tokens=8))
    command = [sys.executable, "-c", WITHOUT_TORCH + ANSWER, str(files), str(tmp_path / "chroma"), text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [expected.text, expected.slots] and expected.slots


def test_files_of_another_bundle_are_refused(
    bundle: Bundle, files: Path, tmp_path: Path, store: SoftContextStore, prompts: list[Any]
) -> None:
    config = bundle.config.model_copy(update={"reader_share": 1.0})  # it has no teacher
    other = Bundle.build(config, Backbone(*load_decoder(bundle.config.decoder, device="cpu")))
    for opened, weights, error in ((other, str(files), BundleError), (bundle, "Q2", ConfigError)):
        with pytest.raises(error, match="another bundle|Q2"):
            Decoder(opened, engine="llama.cpp", weights=weights).generate(["Who?"])


def test_longrope_is_read_as_far_as_its_short_factors_reach(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """transformers chooses factors by a prompt's length, llama.cpp by its memory's."""
    factors = {"short_factor": [1.0 + at / 4 for at in range(8)], "long_factor": [4.0 + at for at in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512, **factors}
    shape = {"original_max_position_embeddings": 512, "max_position_embeddings": 4096, "rope_parameters": rope}
    torch.manual_seed(0)
    model = architectures.model("Phi3", 4, vocab_size=len(tiny_tokenizer), pad_token_id=0, sliding_window=None, **shape)
    write_gguf(model, tmp_path / "tiny.gguf", tiny_tokenizer)
    decoder = GgufDecoder(path=str(tmp_path / "tiny.gguf"))
    bundle = Bundle.build(tiny_config(decoder=decoder), Backbone(*load_decoder(decoder, device="cpu")))
    export_for_llama_cpp(bundle, tmp_path / "made", "F32")  # compares the scores of a short text
    with pytest.raises(ConfigError, match="context_size=256"):
        Decoder(bundle, engine="llama.cpp", weights=str(tmp_path / "made")).generate(["bees " * 300])


def test_nothing_is_written_by_itself_for_a_decoder_of_another_format(tiny_bundle: Bundle, cache: Path) -> None:
    before = set(cache.rglob("*"))
    with pytest.raises(ConfigError, match="not a GGUF file"):
        Decoder(tiny_bundle, engine="llama.cpp")
    assert set(cache.rglob("*")) == before


def llama_cpp_source() -> Path:
    if "LLAMA_CPP_SOURCE" not in os.environ:
        pytest.skip("set LLAMA_CPP_SOURCE to the source of llama-cpp-python")
    return Path(os.environ["LLAMA_CPP_SOURCE"])


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("Qwen 3.5", "right"), ("Granite hybrid", "right"), ("Mistral, window", "right, to 8 positions")],
)
def test_what_llama_cpps_own_converter_writes(name: str, verdict: str, tmp_path: Path) -> None:
    """Layers that guess further tokens are not asked for, and recurrent layers keep their kind."""
    read = "right" if verdict == "right" else "as the file, not as the model"
    assert tried(name, llama_cpp_source(), tmp_path) == (read, verdict)


def test_a_decoder_of_another_format_is_converted(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Export compares the scores with transformers'."""
    with pytest.raises(ConfigError, match="convert_hf_to_gguf.py.*pip download"):
        export_for_llama_cpp(tiny_bundle, tmp_path / "none", "F32", tmp_path)
    export_for_llama_cpp(tiny_bundle, tmp_path / "made", "BF16", llama_cpp_source())
    answers = Decoder(tiny_bundle, engine="llama.cpp", weights=str(tmp_path / "made")).generate(["Who?"])
    assert answers[0].prompt_tokens
