"""A tiny bundle on a GGUF decoder, for a real llama.cpp."""

from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.engines.gguf_weights import export_for_llama_cpp
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.loading import load_decoder
from helpers.decoding import PASSAGES
from helpers.gguf import write_gguf
from helpers.models import draw_lora, tiny_config, tiny_llama


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("llama_cpp")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    made = SoftContextStore(chromadb.EphemeralClient(), bundle, collection="llama", key=b"k" * 16)
    made.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
    return made


@pytest.fixture(scope="session")
def files(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's files in float32, which answer as transformers does."""
    made = tmp_path_factory.mktemp("f32")
    assert export_for_llama_cpp(bundle, made, "F32") == []
    return made


@pytest.fixture(scope="session")
def decoder(bundle: Bundle, store: SoftContextStore, files: Path) -> Decoder:
    return Decoder(bundle, store, engine="llama.cpp", weights=str(files))
