"""The methods other than mean pooling on one decoder, trained and asked, against plain computations with its passes."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.decoders.build import TEXTS, tiny_model, tiny_tokenizer
from benchmarks.decoders.outcome import check_answers, check_close, greedy, outcome, spliced
from benchmarks.decoders.trial import EXAMPLES
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.methods.arcaligner import ArcAlignerReader
from ctx_compress_rag.methods.compression_tokens import CompressionTokensCompressor
from ctx_compress_rag.methods.comprexit import ComprexitCompressor
from ctx_compress_rag.models.inputs import NO_TOKEN
from ctx_compress_rag.models.layers import decoder_layers, decoder_trunk
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.training.run import run_recipe

_IDS = torch.arange(20, 26)[None]  # with two compression tokens as long as the tiny decoders' windows


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "compression tokens": ("answer", {"name": "compression_tokens"}),
    "RAM": ("ram", {"name": "ram", "segment_tokens": 4, "encoder": {"mode": "lora"}, "decoder": {"mode": "lora"}}),
    "ComprExIT": (
        "answer", {"name": "comprexit", "gate_dim": 8, "slot_dim": 12, "transport_dim": 8, "segment_tokens": 16},
    ),
    "ArcAligner": (
        "answer",
        {
            "name": "arcaligner", "encoder": "minilm", "unit": "tokens", "gate_width": 8,
            "lora": {"rank": 4, "alpha": 6, "dropout": 0.0},
        },
    ),
}  # fmt: skip


def try_methods(name: str, folder: Path) -> dict[str, str]:
    """Return for each method "yes", "refused: ...", "wrong: ..." or "error: ...", of a tiny decoder of a type."""
    tiny_model(name).save_pretrained(folder / "decoder")
    tiny_tokenizer().save_pretrained(folder / "decoder")
    write_jsonl(folder / "data.jsonl", EXAMPLES)
    return {
        title: outcome(partial(_try, method, stage, folder, folder / method["name"]))
        for title, (stage, method) in METHODS.items()
    }


def _try(method: Mapping[str, Any], stage: str, given: Path, folder: Path) -> None:
    """Train a bundle with a method, draw its weights wide, save and load it; raise Wrong for a wrong result."""
    optim = {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, "warmup_ratio": 0.0}
    recipe = {
        "stage": stage, "output": str(folder / "run"), "decoder": str(given / "decoder"), "name": "tiny",
        "data": {"files": [str(given / "data.jsonl")]}, "method": dict(method), "base_ratio": 4, "ratios": [4, 8],
        "window": 64, "optim": optim,
    }  # fmt: skip
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run_recipe(folder / "recipe.yaml")
    trained = Bundle.from_pretrained(folder / "run" / "bundle")
    _draw(trained)
    trained.save_pretrained(folder / "again")
    bundle = Bundle.from_pretrained(folder / "again")
    together = bundle.compress(TEXTS)
    for text, one, before in zip(TEXTS, together, trained.compress(TEXTS), strict=True):
        check_close(one.slots, before.slots, "a saved bundle's slots")
        check_close(one.slots, bundle.compress([text])[0].slots, "slots of a batch")
    with torch.no_grad():
        _PLAIN[method["name"]](bundle)
    if not bundle.compressor.needs_question:
        _answers(bundle, folder)


@torch.no_grad()
def _draw(bundle: Bundle) -> None:
    torch.manual_seed(2)
    own = [*bundle.compressor.named_parameters(), *bundle.reader.named_parameters()]
    for name, weight in own + [each for each in bundle.backbone.model.named_parameters() if "lora_B" in each[0]]:
        weight.copy_(weight.normal_(std=0.5 if name.startswith("gates.") else 0.1).half())


def _answers(bundle: Bundle, folder: Path) -> None:
    """Answers with a cache are those of whole passes without one."""
    with SoftContextStore(str(folder / "store"), bundle) as store:
        store.add(TEXTS, ids=["a", "b", "c"])
        mark = {key: store.marker(key, ratio=4) for key in "abc"}
        contents = [f"{mark['a']}\n\nwho built it?", f"Context: {mark['b']} {mark['c']} {mark['a']}\n\nwho?", "never?"]
        chats: list[Any] = [[{"role": "user", "content": content}] for content in contents]
        decoder = Decoder(bundle, store)
        wanted = []
        for prompt in decoder.preparer.prepare(chats):
            with bundle.soft_decoder(torch.from_numpy(prompt.vector_mask())[None], prompt.side) as model:
                wanted.append(greedy(model, partial(spliced, bundle.backbone.inputs, prompt)))
        check_answers(decoder, chats, wanted)


def _plain_tokens(bundle: Bundle) -> None:
    """Causal compression tokens are further tokens of a prompt."""
    compressor: Any = bundle.compressor
    assert isinstance(compressor, CompressionTokensCompressor)
    ids = F.pad(_IDS, (0, 2), value=NO_TOKEN)
    vectors = torch.cat([bundle.backbone.inputs.embed(_IDS), compressor.token.expand(1, 2, -1)], 1)
    with compressor.trunk() as trunk:
        wanted = trunk(**bundle.backbone.inputs.of(vectors, ids), use_cache=False).last_hidden_state[:, -2:]
    compressor.bidirectional = False
    check_close(compressor.hidden_states(_IDS, torch.ones_like(_IDS), [3])[0], wanted, "compression tokens")
    compressor.bidirectional = True


def _plain_segments(bundle: Bundle) -> None:
    """A segment's slot is the mean of its states, read alone (eq. 1)."""
    compressor: Any = bundle.compressor
    ids = [bundle.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    for text, soft in zip(ids, bundle.compress(TEXTS), strict=True):
        with compressor.trunk() as trunk:
            pieces = [torch.tensor([text[start : start + 4]]) for start in range(0, len(text), 4)]
            wanted = [trunk(input_ids=piece, use_cache=False).last_hidden_state.mean(1) for piece in pieces]
        check_close(soft.slots, torch.cat(wanted), "segments")


def _plain_layers(bundle: Bundle) -> None:
    """The states of layers are what the next layer gets, of the last what comes out of the final norm."""
    compressor, model = bundle.compressor, bundle.backbone.model
    assert isinstance(compressor, ComprexitCompressor)
    found, given = compressor.hidden_states(_IDS), list[Tensor]()

    def note(layer: Any, args: Any, kwargs: Any) -> None:
        given.append(args[0] if args else kwargs["hidden_states"])

    with bundle.backbone.use(None), ExitStack() as hooks:
        for layer in decoder_layers(model)[1:]:
            hooks.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        last = decoder_trunk(model)(input_ids=_IDS, use_cache=False).last_hidden_state
    for one, wanted in zip(found, [*given, last], strict=True):
        check_close(one, F.rms_norm(wanted, wanted.shape[-1:]), "states of layers")


def _plain_gates(bundle: Bundle) -> None:
    """Algorithm 1 is the decoder with merged weights at slots, its layers run again where gates open."""
    reader = bundle.reader
    assert isinstance(reader, ArcAlignerReader)
    vectors, ids, mask = bundle.backbone.inputs.embed(_IDS), _IDS.clone(), torch.zeros_like(_IDS, dtype=torch.bool)
    mask[:, 1:4], ids[:, 1:4] = True, NO_TOKEN
    vectors[:, 1:4] = torch.randn(1, 3, vectors.shape[-1]) * bundle.backbone.embedding_rms()
    given = bundle.backbone.inputs.of(vectors, ids)
    with reader.decoder(mask) as model:
        found = model(**given, use_cache=False).logits
    check_close(found, merged_model(reader, mask)(**given, use_cache=False).logits, "logits by algorithm 1")


_PLAIN: dict[str, Callable[[Bundle], None]] = {
    "compression_tokens": _plain_tokens, "ram": _plain_segments, "comprexit": _plain_layers, "arcaligner": _plain_gates
}  # fmt: skip


def _first(made: Any) -> Tensor:
    states: Tensor = made[0] if isinstance(made, tuple) else made
    return states


class PerPosition(nn.Module):
    """A linear layer with merged weights at slots and its own elsewhere; inputs may be flat."""

    def __init__(self, linear: nn.Linear, merged: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.linear, self.merged, self.mask = linear, merged, mask

    def forward(self, x: Tensor) -> Tensor:
        length = x.numel() // x.shape[-1] // len(self.mask)
        mask = F.pad(self.mask, (0, length - self.mask.shape[1])).view(*x.shape[:-1], 1)
        return torch.where(mask, F.linear(x, self.merged, self.linear.bias), self.linear(x))


class Looped(nn.Module):
    """A decoder layer and its loops, without a cache, decided at every position and kept at slots.

    `decided` is what each loop's gates decided at the last input: (batch, length, 1), 0 or 1.
    """

    def __init__(self, layer: nn.Module, gate: dict[str, Tensor], mask: Tensor, loops: int) -> None:
        super().__init__()
        self.layer, self.gate, self.mask, self.loops = layer, gate, mask, loops

    def __getattr__(self, name: str) -> Any:
        """What a decoder asks of its layers, such as the kind of their attention."""
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["layer"], name)

    def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = self.layer(h, *args, **kwargs)  # eq. 3, 4
        h = _first(made)
        mask = F.pad(self.mask, (0, h.shape[1] - self.mask.shape[1])).unsqueeze(-1)
        self.decided = []
        for _ in range(self.loops):
            inner = F.silu(F.linear(h, self.gate["0.weight"], self.gate["0.bias"]))
            soft = F.linear(inner, self.gate["2.weight"], self.gate["2.bias"]).sigmoid()  # eq. 5
            hard = (soft >= 0.5).to(h.dtype)
            self.decided.append(hard)
            g = mask * (hard + (soft - soft.detach()))  # eq. 7
            h = g * _first(self.layer(h, *args, **kwargs)) + (1 - g) * h  # eq. 6, 8, 9
        return (h, *made[1:]) if isinstance(made, tuple) else h


def merged_model(reader: ArcAlignerReader, mask: Tensor, weights: dict[str, Tensor] | None = None) -> Any:
    """The reader's decoder for prompts with these slots, built from merged weights; without a cache only.

    `weights` take the place of the reader's, and get gradients.
    """
    model = copy.deepcopy(reader.backbone.model)
    state, settings = weights or reader.state_dict(), reader.config.lora
    layers = decoder_layers(model)
    assert settings is not None
    for number, layer in enumerate(layers):
        for name, linear in list(layer.named_modules()):
            place = f"lora.{number}.updates.{name.replace('.', '_')}"
            if isinstance(linear, nn.Linear) and f"{place}.a" in state:
                delta = settings.alpha / settings.rank * state[f"{place}.b"] @ state[f"{place}.a"]
                layer.set_submodule(name, PerPosition(linear, linear.weight + delta, mask))
        gate = {n.removeprefix(f"gates.{number}."): p for n, p in state.items() if n.startswith(f"gates.{number}.")}
        layers[number] = Looped(layer, gate, mask, reader.config.loops)
    return model
