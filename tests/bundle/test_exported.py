"""A process without torch and transformers prepares the prompts that the bundle itself prepares."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctx_compress_rag import Bundle, Decoder, ExportedBundle, SoftContextStore
from ctx_compress_rag.bundle.exported import EXPORTED_FILE, FastTokenizer, write_exported_bundle
from ctx_compress_rag.errors import BundleError, ConfigError, StoreWriteError
from ctx_compress_rag.methods.base.config import WrapConfig
from ctx_compress_rag.methods.base.reader import SlotWrap, TwoLayerMap
from ctx_compress_rag.text.chat import PromptTokenizer, chat_text
from ctx_compress_rag.text.tokenizing import text_tokens
from helpers import architectures
from helpers.decoding import PASSAGES, QUESTION, WITHOUT_TORCH

PREPARE = """
import json
from ctx_compress_rag import ExportedBundle, SoftContextStore
from ctx_compress_rag.decoding.preparer import PromptPreparer
from ctx_compress_rag.marking.mark import mark_texts

folder, chroma, question, *texts = sys.argv[1:]
bundle = ExportedBundle(folder)
with SoftContextStore(chroma, bundle) as store:
    shown = mark_texts(store, [*texts, "A text that nobody has stored."], question=question, ratio=8)
    chat = [{"role": "user", "content": "\\n\\n".join([*shown, question])}]
    [prompt] = PromptPreparer(bundle, store).prepare([chat], extractive=True)
vectors = [piece.tolist() for piece in prompt.pieces if piece.ndim == 2]
print(json.dumps({"ids": prompt.ids().tolist(), "vectors": vectors, "quotes": len(prompt.quotable.tokens)}))
"""


@pytest.fixture
def exported(tiny_bundle: Bundle, tmp_path: Path) -> ExportedBundle:
    write_exported_bundle(tiny_bundle, tmp_path, {"text": "0" * 64}, tiny_bundle.window)
    return ExportedBundle(tmp_path)


def test_a_process_without_torch_prepares_the_same_prompt(tiny_bundle: Bundle, exported: Any, tmp_path: Path) -> None:
    texts = list(PASSAGES.values())
    with SoftContextStore(tmp_path / "chroma", tiny_bundle) as store:
        store.add(texts, progress=False)
        ids = [str(id) for id in store.stored_ids(texts)]
        chat = [*store.markers(ids, 8), "A text that nobody has stored.", QUESTION]
        [expected] = Decoder(tiny_bundle, store).preparer.prepare(
            [[{"role": "user", "content": "\n\n".join(chat)}]], extractive=True
        )
    command = [sys.executable, "-c", WITHOUT_TORCH + PREPARE, str(exported.folder), str(tmp_path / "chroma"), QUESTION]
    done = subprocess.run([*command, *texts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["ids"] == expected.ids().tolist() and expected.slots
    assert expected.quotable is not None and made["quotes"] == len(expected.quotable.tokens)
    slots = [piece for piece in expected.pieces if piece.ndim == 2]
    for vectors, piece in zip(made["vectors"], slots, strict=True):
        np.testing.assert_allclose(vectors, np.asarray(piece), atol=1e-5)


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("normed", [True, False])
def test_every_readers_map_has_the_same_vectors(
    make_tiny_bundle: Any, tmp_path: Path, normed: bool, every: int | None
) -> None:
    bundle = make_tiny_bundle(seed=4)
    bundle.reader.projection = TwoLayerMap(bundle.compressor.dim, bundle.backbone.dim, normed)
    bundle.reader.wrap = SlotWrap(WrapConfig(before=1, after=2, every=every), bundle.backbone.dim)
    with torch.no_grad():
        for parameter in bundle.reader.parameters():
            parameter.copy_(torch.randn_like(parameter))
    write_exported_bundle(bundle, tmp_path, {}, bundle.window)
    exported = ExportedBundle(tmp_path)
    for soft in bundle.compress(list(PASSAGES.values())):
        expected = bundle.embed(soft)
        np.testing.assert_allclose(exported.embed(soft), expected, atol=1e-4, rtol=1e-4)
        assert exported.positions(soft.n_slots) == len(expected)


@pytest.mark.parametrize("name", architectures.NAMES)
def test_its_tokenizer_is_that_of_transformers(name: str) -> None:
    tokenizer = architectures.tokenizer(name)
    tokenizer.backend_tokenizer.enable_padding(length=99)  # a file may say so, of what it was trained or tried on
    tokenizer.backend_tokenizer.enable_truncation(3)
    own = FastTokenizer(**json.loads(json.dumps(FastTokenizer.parts_of(tokenizer))))
    for text in [*architectures.TEXTS, "", " a</s><|system|> b", "東京 ½"]:
        assert text_tokens(own, text) == text_tokens(tokenizer, text)
        ids = tokenizer(text)["input_ids"]
        assert own(text)["input_ids"] == ids
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert own.decode(ids, **options) == tokenizer.decode(ids, **options)
    said = {"system": "Be brief.", "user": "Who?", "assistant": "Orla."}
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
        chat = [{"role": role, "content": said[role]} for role in roles]
        assert chat_text(own, chat) == chat_text(tokenizer, chat)
    both = (PromptTokenizer(each).encode(["a </s>", "b"], True) for each in (own, tokenizer))
    assert all(np.array_equal(a, b) for a, b in zip(*both, strict=True))
    assert len(own) == len(tokenizer)  # what prompts add is added to a copy


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}!{% endfor %}",  # as trainers write
        "{{ messages[0].content }}{% if tools is not none %}{{ tools | length }}{% endif %}",
        {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"},
    ],
)
def test_its_chat_format_is_that_of_transformers(tiny_tokenizer: Any, template: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template
    own = FastTokenizer(**FastTokenizer.parts_of(tokenizer))
    chat = [{"role": "user", "content": QUESTION}]
    assert own.apply_chat_template(chat) == tokenizer.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("tokenizer", {"backend": "{", "special": {}, "chat_template": None}),
        ("window", "wide"),
        ("wrap", {"before": 2}),
        ("embeddings", [3, 600]),
    ],
)
def test_a_damaged_one_is_refused(exported: ExportedBundle, key: str, value: Any) -> None:
    file = exported.folder / EXPORTED_FILE
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {key: value}))
    with pytest.raises(BundleError, match="ctx-compress export"):
        ExportedBundle(exported.folder)


def test_it_compresses_nothing_and_runs_with_llama_cpp_alone(exported: ExportedBundle, tmp_path: Path) -> None:
    with pytest.raises(StoreWriteError, match="the bundle itself"):
        exported.compress(["A text."])
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        Decoder(exported)
    with pytest.raises(BundleError, match="ctx-compress export"):
        ExportedBundle(tmp_path / "nothing")
