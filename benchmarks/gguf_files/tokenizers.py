"""Each tokenizer that is read from GGUF files, against llama.cpp's of the same file."""

import ctypes
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctx_compress_rag.decoding.engines.llama_cpp_context import load_llama_cpp
from ctx_compress_rag.models.gguf import BY_NAME, gguf_tokenizer

_SIZE = 4000
_ORDINARY = [
    "It's 1874, isn't it? We'LL see 12345 of 3,000.50 bees.\n\nNew  line\r\n\ttab",
    "def f(x):\n    return x**2  # 100%\n\n\nclass A: pass",
    "नमस्ते दुनिया, यह १२३ है।",
    "Ünïcödé Straße 北京 東京 カタカナ 한국어 мир 123456789 ² ½ ٣ x² 3½",
    "a/b\\c <p>Hi</p> {json: [1,2,3]} e-mail@x.org  $100 + €5 = ? ~`^| hello…world “quoted” — dash 🙂👍🏽",
    "ALLCAPS CamelCase snake_case don't DON'T I've i'm we'd\n\n\n   leading and trailing   ",
]
_LETTERS = "abcXYZ 0123456789  \n\n\t.,!?'\"-_/(){}[]$%éßñ北京१²½٣ابمир\r"


def compared(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield names of `tokenizer.ggml.pre`, and how many of 6 ordinary and 300 random texts become other tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(1)
    drawn = ["".join(draw.choices(_LETTERS, k=40)) for _ in range(300)]
    texts = [*_ORDINARY, *drawn]
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(vocab_size=_SIZE, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([text[at : at + 12] for text in texts for at in range(0, len(text), 5)], trainer)
    model = json.loads(bpe.to_str())["model"]
    llama = load_llama_cpp()
    for name in BY_NAME:
        file, metadata = _written(name, model, folder)
        ours, options = gguf_tokenizer(file, metadata), llama.llama_model_default_params()
        options.vocab_only = True
        opened = llama.llama_model_load_from_file(bytes(file), options)
        vocabulary = llama.llama_model_get_vocab(opened)
        other = [ours(text)["input_ids"] != _tokens(llama, vocabulary, text) for text in texts]
        llama.llama_model_free(opened)
        yield name, sum(other[: len(_ORDINARY)]), sum(other[len(_ORDINARY) :])


def _written(name: str, model: Any, folder: Path) -> tuple[Path, dict[str, Any]]:
    import gguf

    file, tokens = folder / "tokens.gguf", sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(str(file), "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([*tokens, "<s>"])
    writer.add_token_types([1] * len(tokens) + [3])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = {"model": "gpt2", "pre": name, "eos_token_id": len(tokens)}
    return file, {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def _tokens(llama: Any, vocabulary: Any, text: str) -> list[int]:
    encoded, room = text.encode(), (ctypes.c_int32 * 2000)()
    return list(room[: llama.llama_tokenize(vocabulary, encoded, len(encoded), room, len(room), True, False)])
