"""The engine llama.cpp answers as transformers does, whatever is asked, and by however many callers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.loading import load_decoder
from helpers.decoding import begun, prompts_of, wait_for
from helpers.engines import EngineTests


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


def test_files_of_another_bundle_are_refused(
    bundle: Bundle, files: Path, tmp_path: Path, store: SoftContextStore, prompts: list[Any]
) -> None:
    config = bundle.config.model_copy(update={"reader_share": 1.0})  # it has no teacher
    other = Bundle.build(config, Backbone(*load_decoder(bundle.config.decoder, device="cpu")))
    for opened, weights, error in ((other, str(files), BundleError), (bundle, "Q2", ConfigError)):
        with pytest.raises(error, match="another bundle|Q2"):
            Decoder(opened, engine="llama.cpp", weights=weights).generate(["Who?"])


def test_nothing_is_written_by_itself_for_a_decoder_of_another_format(tiny_bundle: Bundle, cache: Path) -> None:
    before = set(cache.rglob("*"))
    with pytest.raises(ConfigError, match="not a GGUF file"):
        Decoder(tiny_bundle, engine="llama.cpp")
    assert set(cache.rglob("*")) == before
