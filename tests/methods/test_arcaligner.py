"""ArcAligner (sections 3.3-3.5 and algorithm 1): selective LoRA, recursive gates, the cache."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.decoders.build import tiny_model
from benchmarks.decoders.methods import merged_model
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.arcaligner import ArcAlignerReader
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.layers import decoder_layers, linear_layers
from ctx_compress_rag.models.loading import load_decoder
from helpers import architectures
from helpers.arcaligner import alone, make_reader, prompts, read
from helpers.marks import slowly
from helpers.models import draw_lora


@pytest.mark.parametrize("train", [False, True])
def test_the_reader_is_algorithm_1(train: bool) -> None:
    """Logits and loops; in training also the gradients of slots and parameters, by eq. 7 and 8."""
    reader = make_reader(double=True).train(train)
    batch = alone(prompts(reader), 0)
    added = {name: p.detach().clone().requires_grad_() for name, p in reader.named_parameters()}
    plain = merged_model(reader, batch.slot_mask, added)
    trained = {id(p) for p in reader.trained_parameters()}
    ours, theirs = (batch.inputs_embeds.clone().requires_grad_() for _ in range(2))
    with torch.set_grad_enabled(train), reader.decoder(batch.slot_mask) as model:
        expected = plain(**batch.model_inputs() | {"inputs_embeds": theirs}, use_cache=False).logits
        logits = model(**batch.model_inputs() | {"inputs_embeds": ours}).logits
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
    counts = [sum(layer.decided).squeeze(-1).long() for layer in plain.model.layers]
    for layer, count in enumerate(counts):
        assert torch.equal(reader.last_loops[layer], count.masked_fill(~batch.slot_mask, -1))
    assert len({int(n) for count in counts for n in count[batch.slot_mask]}) > 2  # none, all, and part of the way
    if train:
        weights = torch.randn(logits.shape).double()
        for each in (logits, expected):
            (each * weights).sum().backward()
        pairs = [(ours, theirs), *((p, added[n]) for n, p in reader.named_parameters() if "projection" not in n)]
        for mine, wanted in pairs:
            scale = float(wanted.grad.abs().max())
            assert scale > 0 and (mine is ours or id(mine) in trained)
            torch.testing.assert_close(mine.grad / scale, wanted.grad / scale, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", slowly(("Gemma3", "Llama", "Mistral"), ("Llama", "Mistral")))
def test_cached_generation_equals_recomputation(name: str) -> None:
    """Prompts of a left-padded batch, read once with a cache, against each prompt read anew for each token."""
    reader = make_reader(name)
    batch, steps = prompts(reader, name), 5
    with torch.no_grad(), reader.decoder(batch.slot_mask) as model:
        made = model.generate(
            **batch.model_inputs(), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    loops = reader.last_loops
    assert set(loops) == {0, 1} and all(record[batch.slot_mask].max() > 0 for record in loops.values())
    embed = reader.backbone.embeddings
    for row in range(2):
        prompt = alone(batch, row)
        reference, h = merged_model(reader, prompt.slot_mask), prompt.inputs_embeds
        for step in range(steps):
            with torch.no_grad():
                logits = reference(inputs_embeds=h, use_cache=False).logits[0, -1]
                with reader.decoder(prompt.slot_mask) as model:  # text beyond the mask, and no cache
                    anew = model(inputs_embeds=h, use_cache=False).logits[0, -1]
                h = torch.cat([h, embed(made.sequences[row, step].view(1, 1))], dim=1)
            torch.testing.assert_close(made.logits[step][row], logits, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(anew, logits, atol=2e-3, rtol=2e-3)
            allowed = logits.clone()
            allowed[model.generation_config.eos_token_id] = -math.inf
            assert made.sequences[row, step] == allowed.argmax()
    # The cache has what the frozen decoder's has: each position once.
    with torch.no_grad():
        frozen = reader.backbone.model.generate(
            **batch.model_inputs(), max_new_tokens=steps, min_new_tokens=steps, return_dict_in_generate=True
        )
    positions = batch.inputs_embeds.shape[1] + steps - 1
    for layer, (ours, theirs) in enumerate(zip(made.past_key_values, frozen.past_key_values, strict=True)):
        assert made.past_key_values.get_seq_length(layer) == positions
        assert ours[0].shape == theirs[0].shape and ours[1].shape == theirs[1].shape


@pytest.mark.parametrize("name", ["XGLM", "BioGpt", "GPTNeoX", "Falcon", "Bloom"])
def test_decoders_with_calling_habits_of_their_own(name: str) -> None:
    """Arguments by place (XGLM's mask, the trunk's ids), a cache called `layer_past`, layers that return a tuple."""
    tokenizer = architectures.tokenizer("Llama")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, max_position_embeddings=256, ffn_dim=64, intermediate_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    reader = make_reader(model=getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False))
    batch = prompts(reader)
    out = read(reader, batch, use_cache=True)
    assert sum(int((record > 0).sum()) for record in reader.last_loops.values()) > 2
    for layer in range(2):
        assert out.past_key_values.get_seq_length(layer) == batch.inputs_embeds.shape[1]
    for row in range(2):
        prompt, real = alone(batch, row), batch.attention_mask[row].bool()
        with torch.no_grad():
            expected = merged_model(reader, prompt.slot_mask)(**prompt.model_inputs(), use_cache=False).logits[0]
        torch.testing.assert_close(out.logits[row, real], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("left_out", ["mamba2 out_proj", "deepseek_v3 kv_b_proj", "llama4_text router"])
def test_layers_that_a_change_at_slots_cannot_be_in_take_none(left_out: str) -> None:
    """A kernel reads past hooks, cached latents of all positions are read again, an expert is chosen."""
    name, layer = left_out.split()
    model = tiny_model(name)
    adapted = {own for each in decoder_layers(model) for own, _ in linear_layers(each)}
    assert adapted and not any(layer in own.split(".") for own in adapted)
    assert any(layer in own.split(".") for own, _ in model.named_modules())


def test_a_decoder_with_offloaded_weights(tmp_path: Path) -> None:
    """accelerate replaces the `forward` of modules whose weights are elsewhere; a second prompt meets it, too."""
    plain = make_reader()
    batch = prompts(plain)
    plain.backbone.model.save_pretrained(tmp_path)
    plain.backbone.tokenizer.save_pretrained(tmp_path)
    parts = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}
    backbone = Backbone(*load_decoder(tmp_path, dtype="float32", device_map=device_map))
    reader = ArcAlignerReader(backbone, 12, plain.config)
    reader.load_saved_state(plain.saved_state())
    for _ in range(2):
        assert torch.equal(read(reader, batch).logits, read(plain, batch).logits)


@pytest.mark.parametrize("name", architectures.NAMES)
def test_an_untrained_reader_is_the_frozen_decoder(name: str) -> None:
    """LoRA's B is zero and the gates are closed: the same bits, with loops and without."""
    for loops in (0, 3):
        reader = make_reader(name, wide=False, loops=loops)
        batch = prompts(reader, name)
        with torch.no_grad():
            frozen = reader.backbone.model(**batch.model_inputs()).logits
        assert torch.equal(read(reader, batch).logits, frozen)


def test_gates_decide_alike_in_training_and_at_inference_in_half_precision() -> None:
    """Training runs under autocast, an app does not: over six decoders, not one gate decides otherwise."""
    opened = 0
    for seed in range(6):
        reader = make_reader(model=architectures.model("Llama", seed=seed).bfloat16())
        batch = prompts(reader, rows=3, seed=seed)
        stored, made, decided = torch.randn(5, 12), [], []
        for train in (False, True):
            reader.train(train).requires_grad_(train)
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=train),
                torch.set_grad_enabled(train),
                reader.decoder(batch.slot_mask) as model,
            ):
                states = model(**batch.model_inputs(), output_hidden_states=True).hidden_states
                made.append([reader(stored, torch.ones(5)), *states])
            decided.append(reader.last_loops)
        assert all(torch.equal(a, b) for a, b in zip(*(each.values() for each in decided), strict=True))
        # Half a unit in bfloat16's last place, where matrix products of other sizes round otherwise.
        for a, b in zip(*made, strict=True):
            torch.testing.assert_close(a, b.detach(), atol=0.02, rtol=0.02)
        opened += sum(int((record > 0).sum()) for record in decided[0].values())
    assert opened > 25


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("layer", [0, 1])
def test_loops_leave_text_as_the_mandatory_pass_left_it(name: str, layer: int) -> None:
    """Equation 9, and closed gates, at the one gated layer: only slots whose gates opened change, to the bit."""
    looping, once = (make_reader(name, gated_layers=[layer], loops=loops) for loops in (3, 0))
    batch = prompts(looping, name)
    for _ in range(2):  # transformers' own hooks, which record the states, are there before ours the second time
        ours = read(looping, batch, output_hidden_states=True).hidden_states
    theirs = read(once, batch, output_hidden_states=True).hidden_states
    for before in range(layer + 1):
        assert torch.equal(ours[before], theirs[before])
    changed = (ours[layer + 1] != theirs[layer + 1]).any(-1)
    assert torch.equal(changed, looping.last_loops[layer] > 0)
    assert changed.any() and not changed[batch.slot_mask].all()


def test_the_shared_decoder_is_never_touched() -> None:
    """Text reads the same bits before, beside, inside and after a prompt with slots, and after a failure in one."""
    reader = make_reader()
    batch = prompts(reader)
    model = reader.backbone.model

    def text() -> Tensor:
        with torch.no_grad(), reader.backbone.use(None) as plain:
            return plain(**batch.model_inputs()).logits

    frozen, soft = text(), read(reader, batch).logits
    assert (frozen - soft).abs().max() > 0.1
    with reader.decoder(batch.slot_mask) as aligned, torch.no_grad():
        assert torch.equal(text(), frozen)
        assert torch.equal(aligned(**batch.model_inputs()).logits, soft)
        with reader.decoder(torch.zeros(1, 1, dtype=torch.bool)) as without:
            assert torch.equal(without(**batch.model_inputs()).logits, frozen)
        assert torch.equal(aligned(**batch.model_inputs()).logits, soft)
    with (
        pytest.raises(ZeroDivisionError),
        reader.decoder(batch.slot_mask) as aligned,
        aligned.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0),
    ):
        aligned(**batch.model_inputs())
    assert torch.equal(text(), frozen)
    assert torch.equal(read(reader, batch).logits, soft)
    for made, shared in zip(aligned.parameters(), model.parameters(), strict=True):
        assert made is shared  # no second copy in memory


def test_adapters_of_others_do_not_matter() -> None:
    """Ordinary LoRA on the same decoder, there before the reader or added later, active or not."""
    plain = make_reader()
    batch = prompts(plain)
    soft = read(plain, batch).logits
    backbone = Backbone(architectures.model("Llama"), architectures.tokenizer("Llama"))
    backbone.add_adapter("compressor", lambda: lora_config(TuneConfig(rank=2)))
    reader = ArcAlignerReader(backbone, 12, plain.config)
    backbone.add_adapter("teacher", lambda: lora_config(TuneConfig(rank=3)))
    draw_lora(backbone.model)
    reader.load_saved_state(plain.saved_state())
    assert torch.equal(read(reader, batch).logits, soft)
    for adapter in ("compressor", "teacher"):
        with backbone.use(adapter) as model, torch.no_grad():
            tuned = model(**batch.model_inputs()).logits
            assert torch.equal(read(reader, batch).logits, soft)
            assert torch.equal(model(**batch.model_inputs()).logits, tuned)
            assert (tuned - soft).abs().max() > 0.1


def test_steps_after_the_prompt_cost_nothing_extra() -> None:
    """They call each linear layer of the decoder once, and nothing of the reader's."""
    reader = make_reader()
    batch = prompts(reader)
    calls: list[str] = []
    with torch.no_grad(), reader.decoder(batch.slot_mask) as model:
        cache = model(**batch.model_inputs(), use_cache=True).past_key_values
        linears = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
        for module in [*reader.lora.modules(), *reader.gates.modules(), *linears]:
            module.register_forward_pre_hook(lambda m, _: calls.append(type(m).__name__))
        mask = F.pad(batch.attention_mask, (0, 1), value=1)
        ids, place = torch.tensor([[30], [31]]), batch.position_ids[:, -1:] + 1
        model(input_ids=ids, attention_mask=mask, position_ids=place, past_key_values=cache)
        assert calls == ["Linear"] * len(linears)
        assert not any(module._forward_hooks for module in [*model.model.layers, *linears])


def test_prompts_that_do_not_fit_the_mask_are_refused() -> None:
    reader = make_reader()
    batch = prompts(reader)
    shorter = {name: value[:, 1:] for name, value in batch.model_inputs().items()}
    fewer = {name: value[:1] for name, value in batch.model_inputs().items()}
    for inputs in (shorter, fewer):
        with pytest.raises(ConfigError, match="slot_mask is for 2 prompts of 20 positions"):
            read(reader, batch, **inputs)
