"""Eight architectures with tiny random weights, a tokenizer in each family's style, and one in none's.

Weights are drawn wide, so that logits depend strongly on every input; windows of sliding attention are
shorter than the tests' prompts. Chat templates are the families' own, shortened to their main branch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

from helpers.marks import slowly

SLIDING_WINDOW = 8
TEXTS = [
    "The lighthouse of Brenmoor was built in 1874 by Ada Quill. It stands on a basalt cliff, and it has two lamps.",
    "Question: who built it? Answer in few words. Context information is below.",
    "user assistant system model He said: no, never! (1, 2, 3)",
]

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}%s{%% for m in messages %%}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim"
    " + '<end_of_turn>\\n' }}{%% endfor %%}{%% if add_generation_prompt %%}{{ '<start_of_turn>model\\n' }}{%% endif %%}"
)
_GEMMA_2 = _GEMMA % "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
_GEMMA_3 = _GEMMA % (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
    "{% set messages = [{'role': 'user', 'content': first + messages[1].content}] + messages[2:] %}{% endif %}"
)
_PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)


_PLAIN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A model family: its class, what differs from the common tiny shape, and its tokenizer's habits."""

    name: str
    template: str
    bos: str | None
    eos: str
    adds_bos: bool
    extra: tuple[str, ...] = ()
    metaspace: bool = False
    pad: str = "<pad>"
    shape: dict[str, Any] = field(default_factory=dict)


_GEMMA_SHAPE = {"sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 16}
FAMILIES = [
    Family("Llama", _LLAMA, "<|begin_of_text|>", "<|eot_id|>", True, ("<|start_header_id|>", "<|end_header_id|>")),
    Family("Qwen2", _CHATML, None, "<|im_end|>", False, ("<|im_start|>",)),
    Family("Qwen3", _CHATML, None, "<|im_end|>", False, ("<|im_start|>",)),
    Family(
        "Mistral", _MISTRAL, "<s>", "</s>", True, ("[INST]", "[/INST]"), metaspace=True,
        shape={"sliding_window": SLIDING_WINDOW},
    ),
    Family(
        "Gemma2", _GEMMA_2, "<bos>", "<end_of_turn>", True, ("<start_of_turn>",), metaspace=True,
        shape=_GEMMA_SHAPE,
    ),
    Family(
        "Gemma3", _GEMMA_3, "<bos>", "<end_of_turn>", True, ("<start_of_turn>",), metaspace=True,
        shape=_GEMMA_SHAPE | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family(
        "Phi3", _PHI, "<s>", "<|end|>", False, ("<|user|>", "<|system|>", "<|assistant|>"), metaspace=True,
        shape={"sliding_window": SLIDING_WINDOW},
    ),
    Family(
        "Granite", _GRANITE, "<|end_of_text|>", "<|end_of_text|>", False, ("<|start_of_role|>", "<|end_of_role|>"),
        shape={
            "embedding_multiplier": 4.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2
        },
    ),
]  # fmt: skip
_ALIKE = {"Qwen2", "Qwen3", "Gemma3"}  # what they are made of is in the others
NAMES = slowly((each.name for each in FAMILIES), _ALIKE)
PLAIN = Family("", _PLAIN, None, "<|end|>", False, ("<|system|>", "<|user|>", "<|assistant|>"), pad="<|pad|>")
"""The style of the fixture `tiny_tokenizer`."""


def family(name: str) -> Family:
    return next(each for each in FAMILIES if each.name == name)


@cache
def tokenizer(name: str) -> Any:
    """A small tokenizer with the family's special tokens, BOS rule and chat template."""
    return train_tokenizer(family(name), TEXTS * 2, 400)


def train_tokenizer(
    style: Family, texts: Iterable[str], vocab_size: int, prefix_space: bool = False, **settings: Any
) -> Any:
    """A tokenizer of this style, trained on texts; keywords are transformers'."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = list(dict.fromkeys([style.pad, *([style.bos] if style.bos else []), style.eos, *style.extra]))
    bpe = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if style.metaspace:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        bpe.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted({character for text in TEXTS for character in text} | {"\n", "_", "▁"})
    else:
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
        bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=list(alphabet), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    if style.adds_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{style.bos} $A", special_tokens=[(style.bos, bpe.token_to_id(str(style.bos)))]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=style.pad,
        bos_token=style.bos,
        eos_token=style.eos,
        extra_special_tokens=list(style.extra),
        chat_template=style.template,
        padding_side="left",
        **settings,
    )


def model(name: str, seed: int = 0, **shape: Any) -> Any:
    """A causal LM of the family with tiny, wide random weights that half precision holds exactly.

    Keywords are its config's, in place of these.
    """
    tok = tokenizer(name)
    prefix = "Gemma3Text" if name == "Gemma3" else name
    settings = {
        "vocab_size": len(tok),
        "hidden_size": 64,  # sqrt(64) is Gemma's embedding scale, exact in half precision
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": tok.pad_token_id,
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        **({"head_dim": 16} if name in ("Qwen3", "Gemma2", "Gemma3") else {}),
    }
    config = getattr(transformers, f"{prefix}Config")(**settings | family(name).shape | shape)
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(parameter.half().float())
    return made


def bos(name: str) -> list[int]:
    """What the family's tokenizer puts before a text: its BOS, or nothing."""
    return [tokenizer(name).bos_token_id] if family(name).adds_bos else []


def random_ids(name: str, lengths: Iterable[int], seed: int = 0) -> list[torch.Tensor]:
    """Token ids of these lengths, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    first = len(tokenizer(name).all_special_ids)
    return [torch.randint(first, len(tokenizer(name)), (n,), generator=generator) for n in lengths]
