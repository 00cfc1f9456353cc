# ruff: noqa: E501
# mypy: ignore-errors
"""Make the tiny checkpoints and reference tensors of the tests: run by hand, with the projects' own code.

    python benchmarks/published/make_references.py UPSTREAM tests/published/checkpoints README.md

UPSTREAM holds clones: lclm (LeonLixyz/LCLM@e04ceb9), clara (apple/ml-clara@857c3cf), xrag (Hannibal046/xRAG@121fa41)
and icae (getao/icae@469a468). Run with torch 2.13.0, transformers 4.57.6 and peft 0.21.2 on a CPU. Each project's code
loads the checkpoint, compresses the texts and answers in float32; none of it is here. PISCO's files are made by CLaRa's
code, which has the same equations: its own differs in names and in the length of a passage. The tokenizers are tiny
ones of the published families, made from any English text. Llama's has two kinds: one puts a space before every text
that follows a control token, the other ("legacy": false) only at the very start; first/ has the second kind's files.

Weights are random, with a large scale so that every wrong variant shows, and rounded to bfloat16 where the published
ones are. A checkpoint that exists is kept, and only its references are made anew.
"""

import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import sentencepiece
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

UPSTREAM, OUT, ENGLISH = (Path(arg).resolve() for arg in sys.argv[1:])
SHORT = "The Golden Gate Bridge spans the strait between San Francisco Bay and the Pacific Ocean."
OTHER = "It was opened in May 1937, and its two towers are 227 metres high."
LONG = " ".join(
    f"In year {year} the council of the town met {year % 7 + 2} times and built {year % 5 + 1} bridges over the river."
    for year in range(1901, 1925)
)
QUESTION = "How high are the towers?"
PROMPTS = {"one": [SHORT], "several": [OTHER, SHORT]}
NEW = 12
SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
INSTRUCT = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] + '\n\n' %}{% elif m['role'] == 'user' %}"
    "{{ ' [INST] ' + ns.system + m['content'] + ' [/INST]' }}"
    "{% set ns.system = '' %}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def drawn(module, std=0.2, rounded=True):
    for name, p in module.named_parameters():
        with torch.no_grad():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=std)
            if rounded:
                p.copy_(p.bfloat16().float())
    return module.eval()


def llama_tokenizer(folder):
    sentencepiece.SentencePieceTrainer.train(
        input=str(ENGLISH), model_prefix=str(folder / "sp"), vocab_size=500, model_type="bpe", byte_fallback=True,
        character_coverage=0.99, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, split_digits=True,
        allow_whitespace_only_pieces=True, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    (folder / "sp.model").rename(folder / "tokenizer.model")
    (folder / "sp.vocab").unlink()
    slow = transformers.LlamaTokenizer(str(folder / "tokenizer.model"), legacy=True, clean_up_tokenization_spaces=False)
    slow.chat_template = INSTRUCT
    slow.save_pretrained(folder)
    fast = transformers.LlamaTokenizerFast.from_pretrained(folder)
    fast.chat_template = INSTRUCT
    fast.save_pretrained(folder)
    return len(fast)


def with_tokenizer(source, kind):
    """A folder with the weights of a transformers folder and one kind of tokenizer."""
    if not kind:
        return source
    own = OUT / kind / source.name
    if not own.exists():
        own.mkdir(parents=True)
        slow = transformers.LlamaTokenizer.from_pretrained(source, legacy=False)
        slow.chat_template = NO_SYSTEM
        slow.save_pretrained(own)
        transformers.LlamaTokenizerFast.from_pretrained(own, legacy=False, from_slow=True).save_pretrained(own)
        (own / "tokenizer.model").unlink()  # that of `source`
    folder = Path(tempfile.mkdtemp(), source.name)
    shutil.copytree(source, folder)
    return Path(shutil.copytree(own, folder, dirs_exist_ok=True))


def qwen_tokenizer(folder, extra, eos_after=False):
    tokenizer = Tokenizer(models.BPE())
    # As in Qwen's own, which newer versions of transformers would put here anyway.
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    words += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(ENGLISH)], trainer)
    fast = transformers.Qwen2TokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *extra]})
    fast.eos_token, fast.pad_token, fast.chat_template = "<|im_end|>", "<|endoftext|>", CHATML
    if eos_after:
        from tokenizers.processors import TemplateProcessing

        fast.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", fast.convert_tokens_to_ids("<|endoftext|>"))]
        )
    fast.save_pretrained(folder)
    return fast


def mistral(
    folder, model_class=transformers.MistralForCausalLM, config_class=transformers.MistralConfig, extra=0, **more
):
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    size = llama_tokenizer(folder) + extra
    model = drawn(model_class(config_class(vocab_size=size, **SIZES, **more)))
    model.bfloat16().save_pretrained(folder)
    return folder


def greedy(embeds, embed, run):
    """`NEW` tokens, the likeliest each, by passes over the whole sequence; and the first logits."""
    ids, first = [], None
    for _ in range(NEW):
        logits = run(embeds)[0, -1]
        first = logits if first is None else first
        ids.append(int(logits.argmax()))
        embeds = torch.cat([embeds, embed(torch.tensor([[ids[-1]]]))], dim=1)
    return torch.tensor(ids), first


def keep(folder, tensors, kind=""):
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"reference{kind and '-'}{kind}.safetensors")


def make_lclm(folder, ratio, seed, adapter_class):
    torch.manual_seed(seed)
    (folder / "adapter").mkdir(parents=True)
    for part in ("decoder", "encoder"):
        (folder / part).mkdir()
    tokenizer = qwen_tokenizer(folder / "decoder", ["<|memory_start|>", "<|memory_end|>", "<|memory|>"])
    sizes = {**SIZES, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    decoder = drawn(
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=len(tokenizer), head_dim=16, **sizes))
    )
    decoder.bfloat16().save_pretrained(folder / "decoder")
    tokenizer = qwen_tokenizer(folder / "encoder", [], eos_after=True)
    sizes |= {"hidden_size": 32, "intermediate_size": 64}
    encoder = drawn(transformers.Qwen3Model(transformers.Qwen3Config(vocab_size=len(tokenizer), head_dim=16, **sizes)))
    encoder.bfloat16().save_pretrained(folder / "encoder")
    settings = dict(
        compression_ratio=ratio, encoder_window_size=64, pooling="mean", encoder_mask_type="causal",
        boundary_overlap=0, adapter_type="mlp",
    )  # fmt: skip
    (folder / "model_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "processor_config.json").write_text("{}")
    adapter = drawn(adapter_class(32, 64), rounded=ratio == 4)
    adapter = adapter.bfloat16() if ratio == 4 else adapter  # its converter writes float32
    save_file(adapter.state_dict(), folder / "adapter/adapter.safetensors")


def lclm():
    sys.path.insert(0, str(UPSTREAM / "lclm"))
    from inference.hf import load_model
    from latent_context.adapter import Adapter

    for ratio, seed in ((4, 4), (16, 17)):  # whose answers do not end early
        folder = OUT / f"lclm-{ratio}x"
        if not folder.exists():
            make_lclm(folder, ratio, seed, Adapter)
        model, _, processor = load_model(str(folder), device="cpu", dtype="fp32")
        tensors = {}
        with torch.no_grad():
            for name, text in {"short": SHORT, "long": LONG}.items():
                ids = processor.embed_tokenizer.encode(text, add_special_tokens=False)
                tensors[f"{name}.slots"] = model.encoder([ids])[0]
                tensors[f"{name}.vectors"] = model.adapter(tensors[f"{name}.slots"])
            for name, texts in PROMPTS.items():
                marked = "\n".join(f"<|memory_start|>{text}<|memory_end|>" for text in texts)
                asked = f"<|im_start|>user\n{marked}\n\nQuestion: {QUESTION}<|im_end|>\n<|im_start|>assistant\n"
                p = processor.process_wrapped_batch([asked])
                tensors[f"{name}.ids"] = p["input_ids"][0]
                names = ("input_ids", "attention_mask", "memory_token_ids", "memory_positions", "latent_counts")
                given = {each: p[each] for each in names}
                options = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
                tensors[f"{name}.answer"] = model.generate(**given, **options)[0]
                tensors[f"{name}.logits"] = model(**given)["logits"][0, -1]
        keep(folder, tensors)


def make_clara(folder, base, settings, upstream):
    torch.manual_seed(2)
    config = upstream.CLaRaConfig(
        decoder_model_name=str(base), sep=True, compr_model_name=None, lora=True, lora_compressor=False,
        different_mem_tokens=True, optimize_mem_tokens=True, training_form="both_separately",
        training_stage="stage1", doc_max_length=settings["doc_max_length"], compr_rate=settings["compr_rate"],
    )  # fmt: skip
    model = upstream.CLaRa(config)
    known = len(transformers.AutoTokenizer.from_pretrained(base))
    for key, p in model.decoder.named_parameters():
        with torch.no_grad():
            if "lora_" in key:
                p.copy_(torch.randn(p.shape).mul_(0.15))
            elif "embed_tokens" in key or "lm_head" in key:
                p[known:] = torch.randn(p[known:].shape).mul_(0.2)
    model.bfloat16().save_pretrained(str(folder))
    state = torch.load(folder / "adapters.pth", weights_only=True)
    if "e2e" in folder.name:
        state["query_reasoner_adapter"] = state["encoder_adapter"]
    torch.save(state, folder / "adapters.pth")
    settings = json.loads((folder / "config.json").read_text()) | settings
    pisco = settings["model_type"] == "COCOM"
    settings["decoder_model_name"] = f"{'mistralai' if pisco else '/mnt/model'}/Mistral-7B-Instruct-v0.2"
    settings = {k: v for k, v in settings.items() if k != "auto_map"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2))


def clara_family():
    sys.path.insert(0, str(UPSTREAM / "clara/openrlhf/models"))
    sys.modules.setdefault("requests", types.ModuleType("requests"))
    import modeling_clara as upstream

    base = mistral(OUT / "mistral")
    settings = {
        "pisco": dict(model_type="COCOM", doc_max_length=128, compr_rate=16, training_stage="stage1"),
        "clara-instruct": dict(doc_max_length=256, compr_rate=16, training_stage="stage1_2", pure_inference=False),
        "clara-e2e-128": dict(doc_max_length=256, compr_rate=128, training_stage="stage2"),
    }
    for name, kind in [("pisco", ""), ("pisco", "first"), ("clara-instruct", ""), ("clara-e2e-128", "")]:
        folder = OUT / name
        if not folder.exists():
            make_clara(folder, base, settings[name], upstream)
        loading = Path(tempfile.mkdtemp(), name)
        shutil.copytree(folder, loading)
        # What its evaluation passes, so that both adapters are loaded.
        trusted = json.loads((folder / "config.json").read_text())
        trusted |= {"pure_inference": True, "model_type": "CLaRa"}
        trusted["decoder_model_name"] = str(with_tokenizer(base, kind))
        (loading / "config.json").write_text(json.dumps(trusted))
        model = upstream.CLaRa.from_pretrained(str(loading)).float().eval()
        keep(folder, clara_reference(model, upstream), kind)


def clara_reference(model, upstream):
    tensors, tok = {}, model.decoder_tokenizer
    known = tok.convert_tokens_to_ids("<MEM0>")

    def compressed(texts):
        made = model._prepare_encoder_inputs(texts, max_length=model.doc_max_length)
        return torch.cat(
            [  # one by one, without padding
                model.compress(ids[None, mask.bool()], mask[None, mask.bool()])[0]
                for ids, mask in zip(made["input_ids"], made["attention_mask"], strict=True)
            ]
        )

    with torch.no_grad():
        tensors["short.slots"] = compressed([SHORT])[0]
        begin, *ids = tok(tok.bos_token + LONG, add_special_tokens=False)["input_ids"]
        assert len(ids) > model.doc_max_length
        windows = []
        for start in range(0, len(ids), model.doc_max_length):
            window = ids[start : start + model.doc_max_length]
            window = torch.tensor([[tok.convert_tokens_to_ids("<ENC>"), begin, *window, tok.eos_token_id]])
            given = upstream.add_memory_tokens_to_inputs(window, torch.ones_like(window), model.n_mem_tokens, tok)
            windows.append(model.compress(given[0], given[1].long())[0][0])
        tensors["long.slots"] = torch.cat(windows)
        for case, texts in PROMPTS.items():
            model.generation_top_k = len(texts)
            asked = model._blend_prompt_and_memory_tokens(query=QUESTION, stage="stage1_2")
            ids = tok([asked], return_tensors="pt", add_special_tokens=False)["input_ids"]
            tensors[f"{case}.ids"] = ids[0]
            embeds = model._replace_emb(compressed(texts), ids)
            model.decoder.set_adapter("decoder_adapter")
            found = greedy(
                embeds,
                model.decoder.get_input_embeddings(),
                lambda e: model.decoder(inputs_embeds=e).logits[:, :, :known],
            )  # without the rows of the added tokens
            tensors[f"{case}.answer"], tensors[f"{case}.logits"] = found
    return tensors


def make_xrag(folder, retriever, model_class, config_class, encoder_class):
    torch.manual_seed(3)
    mistral(folder, model_class, config_class, extra=2, retriever_hidden_size=32, projector_type="mlp2x_gelu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, use_fast=False)
    tokenizer.add_tokens(["<pad>", "<xRAG>"])
    tokenizer.save_pretrained(folder)
    fast = transformers.LlamaTokenizerFast.from_pretrained(folder)
    fast.chat_template = INSTRUCT
    fast.save_pretrained(folder)
    retriever.mkdir()
    llama_tokenizer(retriever)
    settings = json.loads((retriever / "tokenizer_config.json").read_text())
    settings["add_eos_token"] = True
    (retriever / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    fast = transformers.LlamaTokenizerFast.from_pretrained(retriever, add_eos_token=True)
    fast.chat_template, fast.pad_token = None, "</s>"
    fast.save_pretrained(retriever)
    (retriever / "chat_template.jinja").unlink(missing_ok=True)
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 64}
    drawn(encoder_class(transformers.MistralConfig(vocab_size=500, **sizes))).bfloat16().save_pretrained(retriever)


def xrag():
    sys.path.insert(0, str(UPSTREAM / "xrag"))
    from src.model.SFR.modeling_sfr import SFR
    from src.model.xMistral.modeling_xmistral import XMistralConfig, XMistralForCausalLM

    folder, retriever = OUT / "xrag", OUT / "sfr"
    if not folder.exists():
        make_xrag(folder, retriever, XMistralForCausalLM, XMistralConfig, SFR)
    model = XMistralForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    encoder = SFR.from_pretrained(retriever, torch_dtype=torch.float32).eval()
    for kind in ("", "first"):
        options = dict(add_eos_token=False, use_fast=False, padding_side="left")
        tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer(folder, kind), **options)
        of_encoder = transformers.AutoTokenizer.from_pretrained(with_tokenizer(retriever, kind))
        model.set_xrag_token_id(tokenizer.convert_tokens_to_ids("<xRAG>"))
        keep(folder, xrag_reference(model, tokenizer, encoder, of_encoder), kind)


def xrag_reference(model, tokenizer, encoder, of_encoder):
    tensors = {}

    def embedded(texts):
        rows = [of_encoder([t], max_length=180, padding=True, truncation=True, return_tensors="pt") for t in texts]
        return torch.cat([encoder.get_doc_embedding(r["input_ids"], r["attention_mask"]) for r in rows])

    with torch.no_grad():
        tensors["short.slots"] = embedded([SHORT])
        tensors["short.vectors"] = model.projector(tensors["short.slots"])
        # As in training: pieces of 180 tokens, two of which the tokenizer adds.
        ids = of_encoder(LONG, add_special_tokens=False)["input_ids"]
        pieces = [torch.tensor([[1, *ids[s : s + 178], 2]]) for s in range(0, len(ids), 178)]
        tensors["long.slots"] = torch.cat([encoder.get_doc_embedding(p, torch.ones_like(p)) for p in pieces])
        for case, texts in PROMPTS.items():
            background = " ".join(["<xRAG>"] * len(texts))
            asked = f"Background: {background}\n\nQuestion: {QUESTION}"
            asked = (
                f"[INST] Refer to the background document and answer the questions:\n\n{asked} [/INST] The answer is:"
            )
            ids = tokenizer(asked, return_tensors="pt").input_ids
            tensors[f"{case}.ids"] = ids[0]
            given = dict(input_ids=ids, retrieval_embeds=embedded(texts))
            tensors[f"{case}.logits"] = model(**given).logits[0, -1]
            options = dict(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, attention_mask=torch.ones_like(ids))
            tensors[f"{case}.answer"] = model.generate(**given, **options)[0]
    return tensors


def icae():
    sys.path.insert(0, str(UPSTREAM / "icae/code/icae_v2"))
    import modeling_icae_multi_span as upstream

    def without(name, *args, use_flash_attention_2=None, resume_download=None, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(
            name, *args, **options | {"torch_dtype": torch.float32}
        )

    upstream.AutoModelForCausalLM = types.SimpleNamespace(from_pretrained=without)
    torch.manual_seed(4)
    folder = OUT / "icae"
    file = folder / "mistral_7b_ft_icae.safetensors"
    for kind in ("", "first"):
        args = types.SimpleNamespace(model_name_or_path=str(with_tokenizer(OUT / "mistral", kind)), train=False)
        training = types.SimpleNamespace(bf16=True, fixed_mem_size=128, mean_compression_rate=4)
        model = upstream.ICAE(args, training, LoraConfig(r=64, lora_alpha=32, bias="none", task_type="CAUSAL_LM"))
        if not folder.exists():
            folder.mkdir()
            with torch.no_grad():
                for key, p in model.named_parameters():
                    if "lora_" in key or "memory_token_embed" in key:
                        p.copy_(torch.randn(p.shape).mul_(0.2 if "memory" in key else 0.1))
            state = {k: v for k, v in model.state_dict().items() if "lora_" in k or "memory_token_embed" in k}
            save_file({k: v.bfloat16() if "lora_" in k else v for k, v in state.items()}, file)
        model.load_state_dict({k: v.float() for k, v in load_file(file).items()}, strict=False)
        keep(folder, icae_reference(model.eval()), kind)


def icae_reference(model):
    tensors, tokenizer = {}, model.tokenizer
    with torch.no_grad():
        for name, text in {"short": SHORT, "long": LONG}.items():
            ids = tokenizer(text, truncation=True, max_length=5120)["input_ids"]
            tensors[f"{name}.slots"] = model._compress(torch.tensor([ids]))
        # Its script has the ids of these texts in Mistral's tokenizer: "[" begins with a space there.
        left = [1, *tokenizer("[INST]", add_special_tokens=False)["input_ids"]]
        right = tokenizer("[/INST]", add_special_tokens=False)["input_ids"]
        asked = [model.ft_token_id, *tokenizer(QUESTION, add_special_tokens=False)["input_ids"], *right]
        tensors["one.left"], tensors["one.right"] = torch.tensor(left), torch.tensor(asked)
        slots = tensors["short.slots"]
        parts = [model.tokens_to_embeddings(torch.tensor(left)), slots, model.tokens_to_embeddings(torch.tensor(asked))]
        with model.icae.disable_adapter():
            found = greedy(
                torch.cat(parts)[None], model.icae.get_base_model().model.embed_tokens,
                lambda e: model.icae(inputs_embeds=e).logits[:, :, : model.vocab_size - 1],
            )  # fmt: skip
        tensors["one.answer"], tensors["one.logits"] = found
    return tensors


OUT.mkdir(exist_ok=True)
(OUT / "texts.json").write_text(json.dumps({"short": SHORT, "long": LONG, "question": QUESTION, "prompts": PROMPTS}))
for make in (lclm, clara_family, xrag, icae):
    make()
for path in OUT.rglob("*"):
    if path.name in ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"):
        path.unlink()  # what tokenizer.json holds, too
