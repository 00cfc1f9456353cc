"""One decoder through all that the library does with decoders; each way is right, or refused with a reason."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.decoders.build import TEXTS, tiny_model, tiny_tokenizer
from benchmarks.decoders.outcome import STEPS, Wrong, check_answers, check_close, greedy, outcome, spliced
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.engines.gguf_weights import weights_digests, write_checkpoint
from ctx_compress_rag.decoding.export import export_for_vllm
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.models.transformers_internals import can_share_cache
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.run import run_recipe
from ctx_compress_rag.training.stages.answer import AnswerCollator, LikelihoodLoss
from ctx_compress_rag.training.stages.repeat_and_answer import PackedSlotData, PackedSlotLoss, RepeatAndAnswerRecipe

WAYS = ("answer", "train", "quote", "shared passes", "merge", "vLLM", "llama.cpp")
_ASKED = ["The lighthouse of Brenmoor", "user: who built it? Answer in few words. Context is below", "He said"]
EXAMPLES = [
    Example(("Orla Reedwen keeps a goat.",), (Turn("Which pet?", ("a goat",)),)),
    Example(("Kormoor lies on the river Halen.",), (Turn("Where?", ("on the river Halen, near the sea",)),)),
    Example(("Pell trades in salt.",), (Turn("What?", ("salt",)),)),
    Example(("The ferry leaves at dawn.",), (Turn("When?", ("at dawn, every day but on Sundays",)),)),
]
_NO_SLOTS = torch.zeros(1, 1, dtype=torch.bool)


def try_decoder(name: str, folder: Path, ways: tuple[str, ...] = WAYS) -> dict[str, str]:
    """Return for each way "yes", "refused: ...", "wrong: ..." or "error: ...", of a tiny decoder of a type."""
    model = tiny_model(name)
    decoder = folder / "decoder"
    model.save_pretrained(decoder)
    tiny_tokenizer().save_pretrained(decoder)
    found = {"answer": outcome(lambda: _answers(decoder))}
    trained: dict[str, Any] = {}

    def train() -> str | None:
        trained["trial"] = _Trial(decoder, folder)
        return None

    found["train"] = outcome(train)
    if trial := trained.get("trial"):
        tries: dict[str, Callable[[], str | None]] = {
            "quote": trial.quotes, "shared passes": trial.shares, "merge": trial.merges, "vLLM": trial.serves,
            "llama.cpp": trial.converts,
        }  # fmt: skip
        found |= {way: outcome(own) for way, own in tries.items() if way in ways}
        trial.close()
    return {way: found.get(way, found["train"]) for way in ways}


def _answers(folder: Path) -> None:
    decoder = Decoder(PlainDecoder.load(folder))
    reference = decoder.bundle.backbone.model
    ids = [torch.from_numpy(prompt.ids()) for prompt in decoder.preparer.prepare(_ASKED)]
    wanted = [greedy(reference, partial(_continued, own)) for own in ids]
    check_answers(decoder, _ASKED, wanted)


def _continued(ids: Tensor, answer: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.cat([ids, answer])[None]}


class _Trial:
    """A bundle trained for a decoder, whose adapters are then drawn wide, saved and loaded."""

    def __init__(self, decoder: Path, folder: Path) -> None:
        self.folder = folder
        write_jsonl(folder / "data.jsonl", EXAMPLES)
        optim = {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, "warmup_ratio": 0.0, "log_every": 1}
        recipe = {
            "stage": "distillation", "output": str(folder / "run"), "decoder": str(decoder), "name": "tiny",
            "data": {"files": [str(folder / "data.jsonl")]}, "method": {"name": "mean_pooling"}, "ratios": [4, 8],
            "window": 64, "optim": optim | {"checkpoint_layers": True},
        }  # fmt: skip
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        run_recipe(folder / "recipe.yaml")
        trained = Bundle.from_pretrained(folder / "run" / "bundle")
        apart = (".experts.", "lm_head.")  # experts that no token chose; the compressor has no head
        moved = self._lora(trained, "lora_B")
        still = [name for name, weight in moved if not weight.any() and not any(part in name for part in apart)]
        if still:
            raise Wrong(f"training left {len(still)} adapters as they were, such as {still[0]}")
        with torch.no_grad():
            for _, weight in self._lora(trained, "lora_B"):
                weight.copy_(weight.normal_(std=0.1).half())
        trained.save_pretrained(folder / "again")
        self.bundle = Bundle.from_pretrained(folder / "again")
        for found, wanted in zip(self._logits(self.bundle), self._logits(trained), strict=True):
            check_close(found, wanted, "a saved bundle's logits")
        together, alone = self.bundle.compress(TEXTS), [self.bundle.compress([text])[0] for text in TEXTS]
        for one, other in zip(together, alone, strict=True):
            check_close(one.slots, other.slots, "slots of a batch")
        check_close(self._logits(self.bundle)[0], PlainDecoder.load(decoder).backbone.model(**_ids()).logits, "logits")
        self._check_losses()
        self.store = SoftContextStore(str(folder / "store"), self.bundle)
        self.store.add(TEXTS, ids=["a", "b", "c"])
        mark = {key: self.store.marker(key, ratio=4) for key in "abc"}
        contents = [f"{mark['a']}\n\nwho built it?", f"Context: {mark['b']} {mark['c']} {mark['a']}\n\nwho?", "never?"]
        self.chats: list[Any] = [[{"role": "user", "content": content}] for content in contents]
        decoder_ = Decoder(self.bundle, self.store)
        prompts = decoder_.preparer.prepare(self.chats)
        self.wanted = []
        for prompt in prompts:
            with self.bundle.backbone.use(self.bundle.adapter_shares(prompt.side)) as model:
                self.wanted.append(greedy(model, partial(spliced, self.bundle.backbone.inputs, prompt)))
        check_answers(decoder_, self.chats, self.wanted)

    @staticmethod
    def _lora(bundle: Bundle, kind: str) -> Iterator[tuple[str, Any]]:
        return ((name, weight) for name, weight in bundle.backbone.model.named_parameters() if kind in name)

    @staticmethod
    @torch.no_grad()
    def _logits(bundle: Bundle) -> list[Tensor]:
        """Of text, of the reader's side, and the slots of a passage."""
        with bundle.text_decoder() as model:
            text = model(**_ids()).logits
        with bundle.soft_decoder(_NO_SLOTS) as model:
            soft = model(**_ids()).logits
        return [text, soft, bundle.compress(TEXTS[:1])[0].slots]

    def _check_losses(self) -> None:
        """A batch in packed rows, or in rows of their own, has the loss of prompts one by one."""
        recipe = RepeatAndAnswerRecipe.model_validate({
            "stage": "repeat_and_answer", "output": str(self.folder / "packed"), "bundle": str(self.folder / "again"),
            "data": {"files": [str(self.folder / "data.jsonl")]}, "ratios": [4], "window": 256,
            "packing": {"rows": 2, "passage_rows": 2, "length": 256, "examples": 4},
            "repeat": [{"step": 0, "share": 0.0}],
        })  # fmt: skip
        builder = TrainingPromptBuilder(self.bundle.tokenizer)
        batch = PackedSlotData(builder, EXAMPLES, ["salt"], recipe)[0]
        plain, packed = LikelihoodLoss(self.bundle), PackedSlotLoss(self.bundle)
        plain.ratios = [4]
        collate = AnswerCollator(builder, recipe.data.templates, 256, recipe.seed)
        with torch.no_grad():
            whole = [plain(**collate([example]))["loss"] * self._targets(collate, example) for example in EXAMPLES]
            wanted = sum(whole) / sum(self._targets(collate, example) for example in EXAMPLES)
            check_close(packed(batch)["loss"], wanted, "losses", 1e-3)

    @staticmethod
    def _targets(collate: AnswerCollator, example: Example) -> int:
        return sum(collate([example])["prompts"].answer_lengths())

    def quotes(self) -> None:
        decoder = Decoder(self.bundle, self.store)
        for answer in decoder.generate(self.chats[:2], Sampling(max_tokens=STEPS, extractive=True)):
            if answer.text.strip() not in " ".join([*TEXTS, "Context:"]):
                raise Wrong(f"{answer.text!r} is no quotation")

    def shares(self) -> str | None:
        return None if can_share_cache(self.bundle.backbone.model) else "one by one"

    def merges(self) -> None:
        check_answers(Decoder(self.bundle, self.store, merge=True), self.chats, self.wanted)

    @torch.no_grad()
    def serves(self) -> None:
        """The files for vLLM are those of the decoder and of an adapter for it."""
        export_for_vllm(self.bundle, self.folder / "vllm")
        text, soft, _ = self._logits(self.bundle)
        decoder = PlainDecoder.load(self.folder / "vllm" / "decoder").backbone.model
        check_close(decoder(**_ids()).logits, text, "the logits of vLLM's decoder")
        adapter = load_file(self.folder / "vllm" / "reader" / "adapter_model.safetensors")
        for name, down in adapter.items():
            if ".lora_A." in name:  # its alpha is its rank
                layer = decoder.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A.")[0])
                delta = adapter[name.replace(".lora_A.", ".lora_B.")] @ down
                layer.weight += delta if isinstance(layer, torch.nn.Linear) else delta.T
        check_close(decoder(**_ids()).logits, soft, "the logits of vLLM's adapter")

    @torch.no_grad()
    def converts(self) -> None:
        """The checkpoints for llama.cpp's converter hold what reads text and slots."""
        sides = [side for side in ("text", "reader") if side in weights_digests(self.bundle)]
        for side, wanted in zip(sides, self._logits(self.bundle), strict=False):
            write_checkpoint(self.bundle, side, self.folder / "llama_cpp" / side)
            merged = PlainDecoder.load(self.folder / "llama_cpp" / side).backbone.model
            check_close(merged(**_ids()).logits, wanted, f"the logits of llama.cpp's {side}")

    def close(self) -> None:
        self.store.close()


def _ids() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(10, 34)[None] * 11 % len(tiny_tokenizer())}
