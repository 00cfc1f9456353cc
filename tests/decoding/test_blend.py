"""Which weights read a prompt: the teacher's text, the reader's slots, a blend of both slots with text beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.decoding.export import export_for_vllm
from ctx_compress_rag.decoding.splice import open_decoder_model, splice_prompts
from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.prompt import Side
from helpers.decoding import PASSAGES, QUESTION

SHARES: dict[Side, dict[str, float]] = {
    "text": {"teacher": 1},
    "reader": {"reader": 1},
    "blend": {"reader": 0.75, "teacher": 0.25},
}


def alone(bundle: Bundle, shares: dict[str, float]) -> Any:
    """A decoder without adapters, whose weights are the bundle's with these shares of each LoRA added by hand."""
    state = bundle.backbone.own_state()
    for adapter, share in shares.items():
        lora = bundle.backbone.model.peft_config[adapter]
        matrices = bundle.backbone.adapter_state(adapter)
        for name, a in matrices.items():
            if "lora_A" in name:
                weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
                b = matrices[name.replace("lora_A", "lora_B")]
                state[weight] = state[weight] + share * lora.lora_alpha / lora.r * b @ a
    model = type(bundle.backbone.model)(bundle.backbone.config)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("side", SHARES)
def test_each_side_has_its_own_weights(decoder: Decoder, store: SoftContextStore, side: Side) -> None:
    marker = store.markers(["a"], 4, beside_text=side == "blend")[0]
    text = {"text": PASSAGES["a"], "reader": marker, "blend": f"{PASSAGES['b']} {marker}"}[side]
    [prompt] = decoder.preparer.prepare([[{"role": "user", "content": f"{text}\n\n{QUESTION}"}]])
    assert prompt.side == side
    bundle = decoder.bundle
    assert isinstance(bundle, Bundle)
    batch = splice_prompts(bundle.backbone.embeddings, [prompt])
    with torch.no_grad():
        expected = alone(bundle, SHARES[side])(**batch.model_inputs()).logits
        for _ in range(2):  # what another side used leaves no trace
            with open_decoder_model(bundle, "blend", batch.slot_mask):
                pass
            with open_decoder_model(bundle, side, batch.slot_mask) as model:
                torch.testing.assert_close(model(**batch.model_inputs()).logits, expected, atol=1e-4, rtol=1e-4)


def test_only_a_bundle_that_blends_reads_slots_beside_text_so(bundle: Bundle, store: SoftContextStore) -> None:
    marked = [store.marker("b", 4), *store.markers(["a"], 4, beside_text=True)]
    plain = Bundle(
        bundle.config.model_copy(update={"reader_share": 1.0}), bundle.backbone, bundle.compressor, bundle.reader
    )
    for one, side in ((bundle, "blend"), (plain, "reader")):
        [prompt] = Decoder(one, store).preparer.prepare([f"She kept bees. {' '.join(marked)} Who?"])
        assert prompt.side == side


def test_an_exported_blend_is_one_adapter_for_peft(bundle: Bundle, tmp_path: Path) -> None:
    command = export_for_vllm(bundle, tmp_path)
    folder = tmp_path / "reader-teacher"
    assert f"tiny-reader-teacher={folder}" in command and command[command.index("--max-loras") + 1] == "4"
    assert command[command.index("--max-lora-rank") + 1] == "32"  # 16 + 3, and the next rank that vLLM has
    ids = torch.tensor([[5, 9, 2, 7, 30]])
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "decoder"), folder)
    with torch.no_grad():
        expected = alone(bundle, SHARES["blend"])(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_blend_needs_two_adapters(make_tiny_bundle: Any) -> None:
    made = make_tiny_bundle()
    config = made.config.model_copy(update={"reader_share": 0.5})
    with pytest.raises(BundleError, match=r"reader_share=0.5"):
        Bundle(config, made.backbone, made.compressor, made.reader)
