"""The tokenizer in a GGUF file, which only names how text is split before merging: unknown names are refused.

Patterns are those of the tokenizers' own `tokenizer.json` files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s|"
_CASED += _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2's pattern is built into the step that follows; "digits" are split one by one before it.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4": (),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": ("digits",),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 dbrx smaug-bpe chatglm-bpe glm4": (_LLAMA3,),
    "qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (_CASED % ("", "", ""),),
    "gpt-4o llama4 kanana2 minimax-m2": (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),),
    "deepseek-v3 hunyuan-dense": (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK),
}
BY_NAME = {name: splits for names, splits in _SPLITS.items() for name in names.split()}
# These take a whole piece that is a token, and begin a text with their first token unless the file says otherwise.
_WHOLE = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken", "glm4"}
_BEGINS = _WHOLE - {"glm4"}


def gguf_tokenizer(file: Path, metadata: Mapping[str, Any]) -> Any:
    """Return the transformers tokenizer of a GGUF file; raise ValueError if it names one that is not known here."""
    from tokenizers import Regex, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    sentencepiece = kind == "llama" and str(metadata["general.architecture"]).startswith("gemma")
    if not sentencepiece and (kind != "gpt2" or name not in BY_NAME):
        raise ValueError(
            f"its tokenizer (tokenizer.ggml.model = {kind!r}, tokenizer.ggml.pre = {name!r}) is not one that is read "
            "from GGUF files: give tokenizer, the folder or hub id of the model's own, beside the file"
        )
    default: dict[str, Any] = {} if sentencepiece else {"add_bos_token": name in _BEGINS}
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, **default)
    if not sentencepiece:
        backend: Any = tokenizer.backend_tokenizer
        splits: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True)
            if split == "digits"
            else pre_tokenizers.Split(Regex(split), behavior="isolated")
            for split in BY_NAME[str(name)]
        ]
        # GPT-2's own pattern, but for tokenizers that have another.
        gpt2 = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=splits == [] or "digits" in BY_NAME[str(name)]
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, gpt2]) if splits else gpt2
        backend.model.ignore_merges = name in _WHOLE
    for token in ("eos", "pad"):
        # Some versions (5.17) give the tokenizer of such a file its start token as the end token, and no padding.
        key = f"tokenizer.ggml.{'padding' if token == 'pad' else token}_token_id"
        if (number := metadata.get(key)) is not None:
            setattr(tokenizer, f"{token}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer
