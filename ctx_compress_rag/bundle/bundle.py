"""The bundle, which training makes and everything else loads."""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from ctx_compress_rag.bundle import files
from ctx_compress_rag.bundle.card import model_card
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.bundle.files import TEACHER, bundle_fingerprint, decoder_digest, state_digest
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.errors import BundleError, ConfigError, RatioError
from ctx_compress_rag.methods.base.compressor import Compressor, TokenizedPassage
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder, pin_gguf
from ctx_compress_rag.models.identity import write_decoder
from ctx_compress_rag.models.loading import INT8_FILE, open_decoder, progress_line
from ctx_compress_rag.models.transformers_internals import hub_commit
from ctx_compress_rag.models.weights import load_own_tensors, own_buffers, weights_from_int8, weights_to_int8
from ctx_compress_rag.prompt import Side
from ctx_compress_rag.soft_context import SoftContext, check_ratio_divides_window
from ctx_compress_rag.strict import as_int
from ctx_compress_rag.text.tokenizing import text_ids

logger = logging.getLogger(__name__)

_Pack = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class Bundle(PlainDecoder):
    """A compressor and a reader, with the decoder that they were trained for.

    Attributes:
        config: the bundle's settings.
        backbone: the decoder's weights, shared by compressor, reader and full-text decoding.
        compressor: makes slots of texts.
        reader: makes input embeddings of slots.
        report: how the bundle was trained; empty if unknown.

    ```python
    bundle = Bundle.from_pretrained("smollm2-135m")
    [soft] = bundle.compress(["The pump's warranty lasts five years."])
    soft.slots.shape  # (slots, hidden size of the decoder)
    ```
    """

    def __init__(
        self,
        config: BundleConfig,
        backbone: Backbone,
        compressor: Compressor,
        reader: Reader,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(backbone, config.decoder_name, config.separator, config.answer_prefix)
        self.config = config
        self.compressor = compressor
        self.reader = reader
        self.report = dict(report or {})
        self._fingerprint: str | None = None
        self._folder: Path | None = None
        if "blend" in self.sides and not (reader.mergeable and TEACHER in backbone.adapters):
            raise BundleError(f"reader_share={config.reader_share} needs a reader with LoRA and a teacher: set it to 1")

    def __repr__(self) -> str:
        config, decoder = self.config, f"{self.decoder_name or 'its own decoder'} on {self.backbone.device}"
        return f"Bundle({config.name!r}, {config.method.name}, ratios {config.ratios}, {decoder})"

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        revision: str | None = None,
        changes: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        quantization_config: Any = None,
    ) -> Self:
        """Load a bundle from a folder, by a shipped name (`smollm2-135m`), or from the hub.

        The decoder's weights are loaded at their first use (compressing, answering with transformers, training).

        Args:
            name_or_path: a folder, a shipped name, or a hub id such as `someone/bundle`.
            device: where to put the bundle; None chooses CUDA, MPS or the CPU, in that order.
            revision: a hub revision (None: the newest); must be None for a folder or a shipped name.
            changes: settings that replace those of the stored config, for a further stage of training; None: no change.
                The stored weights must fit the new settings.
            dtype: dtype of the decoder's weights, such as "bfloat16"; None takes bfloat16 on CUDA GPUs that have it,
                else float32. The fingerprint does not depend on the dtype.
            device_map: the device of each part of the decoder, in the form of transformers; only without `device`.
            quantization_config: any config of transformers (`BitsAndBytesConfig`, `TorchAoConfig`, ...), to quantize
                the decoder's weights during loading. Such a decoder cannot be saved or exported.

        Raises:
            BundleError: the bundle is missing or damaged; the message names the file.
            ConfigError: the config or an argument has unknown or impossible values, or `quantization_config` is given
                but the method needs a copy of the decoder.
        """
        with progress_line(f"opening the bundle {name_or_path}"):
            folder = files.find_bundle(name_or_path, revision)
            config = files.read_bundle_config(folder / files.CONFIG_FILE, changes)
            files.check_bundle_files(folder)
            model, tokenizer = open_decoder(
                folder / files.DECODER_FOLDER if config.decoder is None else config.decoder,
                config.revision,
                device=device,
                subfolder=config.subfolder,
                dtype=dtype,
                device_map=device_map,
                quantization_config=quantization_config,
            )
            tokenizer.chat_template = config.chat_template or tokenizer.chat_template
            teacher = folder / TEACHER
            backbone = Backbone(model, tokenizer)
            decoder = _unchanged_decoder(config, backbone, folder)  # first, because parts are made in its sizes
            parts = (part for part in ("compressor", "reader") if (folder / part / files.ADAPTER_CONFIG_FILE).exists())
            adapters = {part: files.read_adapter_tensors(folder / part) for part in parts}
            backbone.adapter_layers |= {part: files.adapter_layers(tensors) for part, tensors in adapters.items()}
            bundle = cls.build(config, backbone, teacher if teacher.exists() else None)
            bundle._read(folder, decoder, adapters)
            if device_map is not None or quantization_config is not None:
                _ = bundle.backbone.model  # an impossible value shows only now
        if bundle.backbone.quantized:
            logger.warning("bundle %s is quantized: its slots differ slightly, under the same fingerprint", config.name)
        logger.info("bundle %s (%s), fingerprint %s", config.name, config.method.name, bundle.fingerprint[:12])
        return bundle

    def _read(self, folder: Path, decoder: str, adapters: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Read the bundle's folder, but not the decoder's weights, which must be those of the fingerprint."""
        config, backbone = self.config, self.backbone
        self._folder = self.compressor.folder = folder
        unchanged = partial(files.check_bundle_weights_unchanged, folder, files.weight_file_stamps(folder))
        backbone.when_loaded(unchanged)
        if TEACHER in backbone.adapters:
            backbone.when_used(TEACHER, unchanged)
        stored: dict[str, Mapping[str, Tensor]] = {}
        for part, module in self.parts.items():
            stored[part] = own = files.read_bundle_tensors(folder / part / files.WEIGHTS_FILE)
            module.load_saved_state(own)
            if part in backbone.adapters:
                stored[f"{part} adapter"] = adapters.get(part) or files.read_adapter_tensors(folder / part)
                backbone.when_used(part, unchanged)
                backbone.when_used(part, partial(_load_adapter, backbone, part, folder))
        if config.decoder is None:
            stored[files.DECODER_FOLDER] = files.read_decoder_tensors(folder / files.DECODER_FOLDER)
        # From the files: weights in memory may be rounded to bfloat16, which would give another fingerprint.
        self._fingerprint = bundle_fingerprint(config, hub_commit(backbone.config), decoder, stored)
        self.report = files.read_bundle_report(folder / files.REPORT_FILE)

    @classmethod
    def build(cls, config: BundleConfig, backbone: Backbone, teacher: Path | None = None) -> Self:
        """Make an untrained bundle for `backbone`, from which training starts.

        `teacher` is the folder of a peft adapter that makes the decoder the full-text teacher; None if the decoder
        itself is the teacher. Raises BundleError if there is no adapter, or the adapter does not fit the decoder.
        """
        if isinstance(config.decoder, GgufDecoder):
            config = config.model_copy(update={"decoder": pin_gguf(config.decoder, config.revision)})
        compressor = config.method.compressor(backbone)
        reader = config.method.reader(backbone, compressor)
        if teacher is not None:
            add_teacher(backbone, teacher)
        return cls(config, backbone, compressor, reader)

    def adapter_shares(self, side: Side) -> dict[str, float]:
        """Return the LoRA adapters that read prompts of one side, each with its share; {} if none does."""
        share = self.config.reader_share if side == "blend" else 1.0 if side == "reader" else 0.0
        shares = {self.reader.part: share, TEACHER: 1 - share}
        return {name: part for name, part in shares.items() if part and name in self.backbone.adapters}

    @property
    def sides(self) -> tuple[Side, ...]:  # type: ignore[override]
        """The sides that the bundle has; without "blend", the reader also reads slots with text beside them."""
        return ("text", "reader", "blend") if self.config.reader_share < 1 else ("text", "reader")

    def positions(self, slots: int) -> int:
        """Return how many positions of a prompt so many slots of a passage take, with the reader's own vectors."""
        return self.reader.positions(slots)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the config, the weights and the decoder (see `files.bundle_fingerprint`), as 64 hex digits."""
        if self._fingerprint is None:
            states = {part: module.saved_state() for part, module in self.parts.items()}
            adapters = self.backbone.adapters & states.keys()
            states |= {f"{part} adapter": self.backbone.adapter_state(part) for part in adapters}
            if self.config.decoder is None:
                states[files.DECODER_FOLDER] = self.backbone.own_state()
            decoder = decoder_digest(self.config, self.backbone)
            self._fingerprint = bundle_fingerprint(self.config, hub_commit(self.backbone.config), decoder, states)
        return self._fingerprint

    @property
    def teacher_digest(self) -> str:
        """64 hex digits that identify the full-text teacher's adapter, whatever its dtype; "" if it has none."""
        if TEACHER not in self.backbone.adapters:
            return ""
        if self._folder is None or self.backbone.loaded:
            return state_digest(self.backbone.adapter_state(TEACHER))
        return state_digest(files.read_adapter_tensors(self._folder / TEACHER))

    @property
    def parts(self) -> dict[str, Compressor | Reader]:
        """The compressor and the reader by name, which is also the name of the folder and the adapter of each."""
        return {"compressor": self.compressor, "reader": self.reader}

    def save_pretrained(self, folder: str | Path, *, int8: bool = False) -> None:
        """Write the bundle's config, its weights (safetensors in half precision), training report and model card.

        The weights in memory are rounded to what is written, so that this object and the saved bundle have
        the same fingerprint. All adapters, including the teacher's, are written as ordinary peft adapters.

        Args:
            folder: where to write; an existing bundle is overwritten.
            int8: whether to write all matrices (of decoder, copies and adapters) in 8 bits, at half the size. Only this
                library reads such files; for others, such as peft or vLLM, load the bundle and save it without `int8`.

        Raises:
            ConfigError: `folder` is a file, has a README.md or config.json that is not a bundle's, or has a folder
                `teacher` that is not a bundle's and would be loaded as this bundle's teacher.
        """
        _save(self, Path(folder), int8=int8)
        self._fingerprint = None
        self.save_report(folder)

    def save_report(self, folder: str | Path) -> None:
        """Write only the training report and the model card into `folder`, which must exist."""
        Path(folder, files.REPORT_FILE).write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        Path(folder, "README.md").write_text(model_card(self.config, self.report, self.fingerprint), encoding="utf-8")

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the bundle to the Hugging Face hub and return the commit's URL.

        `private` is for a new repository; an existing one stays as it is. `token` None takes the hub's stored login.
        Raises ConfigError if `private` is False and the licenses of an imported bundle do not let anyone publish it.
        """
        import tempfile

        source = self.config.source
        if source is not None and not source.shareable and not private:
            raise ConfigError(
                f"bundle {self.config.name!r} was imported from {source}; they restrict who may publish it: give "
                "private=True, or let others import it themselves"
            )

        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder))

    def check_ratio(self, ratio: int) -> None:
        """Raise RatioError if the compressor cannot make this ratio, or it does not divide `config.window`."""
        check_ratio_divides_window(ratio, self.config.window)
        self.compressor.check_ratio(ratio, ratio)

    def can_read(self, ratio: int, stored: int | None = None) -> bool:
        """Whether slots stored at the ratio `stored` (None: the base ratio) can be read at the ratio `ratio`."""
        try:
            self.compressor.check_ratio(ratio, self.config.base_ratio if stored is None else stored)
        except RatioError:
            return False
        return True

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> list[SoftContext]:
        """Compress passages, and return their soft contexts in order.

        `ratio` is the number of source tokens per slot; None takes the base ratio. A passage longer than the
        encoder's window (`config.window`, in tokens) is compressed window by window.

        Raises:
            ConfigError: a passage is blank, not a str, or has no tokens, or `texts` is one str.
            RatioError: the compressor cannot make this ratio.
        """
        ratio = self.config.base_ratio if ratio is None else as_int("ratio", ratio)
        self.check_ratio(ratio)
        if isinstance(texts, str):
            raise ConfigError("texts is one string: give a list of passages")
        passages = [self._tokenized(text, index) for index, text in enumerate(texts)]
        made = self.compressor.compress(passages, ratio, self.config.window)
        return [each.soft_context() for each in made]

    def _tokenized(self, text: str, index: int) -> TokenizedPassage:
        if not isinstance(text, str):
            raise ConfigError(f"passage {index} is a {type(text).__name__}: give its text")
        ids = text_ids(self.tokenizer, text) if text.strip() else []
        if not ids:
            raise ConfigError(f"passage {index} is blank: there is nothing to compress in {text[:40]!r}")
        return TokenizedPassage(text, ids)

    @torch.inference_mode()
    def embed(self, soft: SoftContext) -> Tensor:
        """Return a soft context as input embeddings (`positions(slots)`, dim), with the decoder's dtype and device."""
        slots, counts = (torch.as_tensor(each, device=self.backbone.device) for each in (soft.slots, soft.token_counts))
        embedded: Tensor = self.reader(slots, counts)
        return embedded.to(self.backbone.dtype)

    def soft_decoder(self, slot_mask: Tensor, side: Side = "reader") -> AbstractContextManager[Any]:
        """Return a context manager that gives the transformers model, locked for this thread, to read soft contexts.

        `slot_mask` is bool (batch, length), True at the slots of the prompts that the decoder will read. `side` is
        "reader", or "blend" if that is one of the bundle's `sides`.
        """
        return self.reader.decoder(slot_mask) if side == "reader" else self.backbone.use(self.adapter_shares(side))


def _unchanged_decoder(config: BundleConfig, backbone: Backbone, folder: Path) -> str:
    """Return the `decoder_digest` of a bundle's decoder. Raise BundleError if it is not that of its training."""
    shipped = folder / files.DECODER_FOLDER
    if (decoder := decoder_digest(config, backbone, shipped)) != config.decoder_digest:
        raise BundleError(
            f"{config.decoder_name or shipped} changed after bundle {str(folder)!r} was trained: restore its files"
        )
    return decoder


def _load_adapter(backbone: Backbone, name: str, bundle: Path) -> None:
    backbone.load_adapter_state(name, files.read_adapter_tensors(bundle / name))


def add_teacher(backbone: Backbone, folder: Path) -> None:
    """Add the peft adapter in `folder` to a decoder, as full-text teacher. Raise BundleError if it holds no adapter.

    The adapter is loaded when it is first used, and raises BundleError then if it does not fit the decoder.
    """
    if not (folder / files.ADAPTER_CONFIG_FILE).exists():
        lacks = f"it has no {files.ADAPTER_CONFIG_FILE}"
        raise BundleError(f"the teacher {str(folder)!r} is not a peft adapter folder: {lacks}")
    tensors = files.read_adapter_tensors(folder)  # a damaged one shows at once
    backbone.adapter_layers[TEACHER] = files.adapter_layers(tensors)

    def add() -> None:
        from peft import LoraConfig

        try:
            backbone.add_adapter(TEACHER, lambda: LoraConfig.from_pretrained(str(folder)))
            backbone.load_adapter_state(TEACHER, files.read_adapter_tensors(folder))
        except Exception as error:  # of peft, which checks no setting, or if the decoder has none of the modules
            decoder = type(backbone.base).__name__
            raise BundleError(
                f"the teacher {str(folder)!r} does not fit the decoder, a {decoder} ({error}): give one trained on it"
            ) from error

    backbone.adapters.add(TEACHER)
    backbone.when_used(TEACHER, add)


def _save(bundle: Bundle, folder: Path, *, int8: bool) -> None:
    files.check_bundle_folder_free(folder)
    _ = bundle.backbone.model  # it may come from this folder, so it is loaded before anything is written
    old_teacher = TEACHER not in bundle.backbone.adapters and (folder / TEACHER).exists()
    if old_teacher and not (folder / files.CONFIG_FILE).exists():
        raise ConfigError(f"{folder / TEACHER} would be read as this bundle's teacher: give a new folder")
    # Until all weights are written, what is left of an earlier bundle must not load.
    for name in (files.CONFIG_FILE, files.REPORT_FILE, "README.md"):
        (folder / name).unlink(missing_ok=True)
    if old_teacher:
        shutil.rmtree(folder / TEACHER)
    pack: _Pack = weights_to_int8 if int8 else _half if bundle.config.source is None else _exact
    for part, module in bundle.parts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        packed = pack(module.saved_state())
        module.load_saved_state(weights_from_int8(packed))
        save_file(packed, folder / part / files.WEIGHTS_FILE)
    bundle.compressor.save_files(folder)
    for name in bundle.backbone.adapters & {*bundle.parts, TEACHER}:
        lossless = name == TEACHER and not int8
        _save_adapter(bundle, name, folder / name, _exact if lossless else pack, int8=int8)
    shipped = folder / files.DECODER_FOLDER
    if bundle.config.decoder is None:
        _save_decoder(bundle, shipped, pack, int8=int8)
    digest = decoder_digest(bundle.config, bundle.backbone, shipped)
    bundle.config = bundle.config.model_copy(update={"decoder_digest": digest})
    config = bundle.config.model_dump_json(indent=2)
    (folder / files.CONFIG_FILE).write_text(config + "\n", encoding="utf-8")


def _save_adapter(bundle: Bundle, name: str, folder: Path, pack: _Pack, *, int8: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packed = pack(bundle.backbone.adapter_state(name))
    bundle.backbone.load_adapter_state(name, weights_from_int8(packed))
    save_file(packed, folder / (files.INT8_ADAPTER_FILE if int8 else files.ADAPTER_FILE))
    # An older file of the other kind could be read instead.
    (folder / (files.ADAPTER_FILE if int8 else files.INT8_ADAPTER_FILE)).unlink(missing_ok=True)
    bundle.backbone.model.peft_config[name].save_pretrained(str(folder))  # now it is an ordinary peft adapter


def _save_decoder(bundle: Bundle, folder: Path, pack: _Pack, *, int8: bool) -> None:
    """Write the decoder as a transformers folder, without adapters."""
    folder.mkdir(parents=True, exist_ok=True)
    write_decoder(bundle.backbone.model, bundle.tokenizer, folder)
    state, exact = bundle.backbone.own_state(), own_buffers(bundle.backbone.model)
    packed = pack({name: value for name, value in state.items() if name not in exact}) | {
        name: state[name] for name in exact
    }
    load_own_tensors(bundle.backbone.model, weights_from_int8(packed))
    save_file(packed, folder / (INT8_FILE if int8 else files.WEIGHTS_FILE), metadata={"format": "pt"})
    # An older file of the other kind could be read instead.
    (folder / (files.WEIGHTS_FILE if int8 else INT8_FILE)).unlink(missing_ok=True)


def _exact(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a tensor to two bytes only if that is exact, because teachers and imported weights stay as given."""
    return {name: _halved(value) for name, value in state.items()}


def _halved(value: Tensor) -> Tensor:
    halves = (value.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((half for half in halves if torch.equal(half.to(value.dtype), value)), value)


def _half(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(torch.float16) for name, value in state.items()}
