"""Recognize a published checkpoint's format, and convert the checkpoint into a bundle's folder."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import BundleConfig, BundleSource
from ctx_compress_rag.bundle.files import CONFIG_FILE, DECODER_FOLDER, adapter_layers
from ctx_compress_rag.drafts import draft
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.identity import decoder_files_digest, model_folder_digest
from ctx_compress_rag.published.format import ConvertedCheckpoint, PublishedDecoder, PublishedFormat
from ctx_compress_rag.published.icae import IcaeFormat
from ctx_compress_rag.published.lclm import LclmFormat
from ctx_compress_rag.published.pisco import PiscoFormat
from ctx_compress_rag.published.remote_files import PublishedCheckpoint
from ctx_compress_rag.published.xrag import XragFormat
from ctx_compress_rag.strict import faults_raised_as

FORMATS: tuple[PublishedFormat, ...] = (LclmFormat(), PiscoFormat(), XragFormat(), IcaeFormat())

_SHAREABLE = {"apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0"}


@dataclass(frozen=True)
class PublishedImport:
    """A published checkpoint to convert. `parameters` is the number of parameters of decoder and encoder together."""

    checkpoint: PublishedCheckpoint
    format: PublishedFormat
    decoder: PublishedDecoder
    encoder: PublishedCheckpoint | None
    parameters: int

    @classmethod
    def of(
        cls,
        name: str | Path,
        *,
        subfolder: str | None = None,
        revision: str | None = None,
        decoder: str | None = None,
        encoder: str | None = None,
    ) -> Self:
        """Recognize a checkpoint, given by hub id (its commit is pinned) or folder. Only small files are downloaded.

        `subfolder` is the checkpoint's folder in `name`; None is its root. `revision` is the hub's; None is the newest.
        `decoder` and `encoder` are folders or hub ids in place of those that it names. Errors: see `import_published`.
        """
        from transformers import AutoModel

        checkpoint = PublishedCheckpoint.open(str(name), revision, subfolder)
        found = _recognized(checkpoint)
        reads, own = PublishedDecoder(found.decoder(checkpoint, decoder)), found.encoder(checkpoint, encoder)
        models = [reads.model]
        if own is not None and own.of_transformers:  # which looks whether all weights are there
            models.append(own.model_without_weights(AutoModel))
        return cls(checkpoint, found, reads, own, sum(p.numel() for model in models for p in model.parameters()))

    @property
    def parts(self) -> dict[str, PublishedCheckpoint]:
        """The models that the bundle names or copies: "decoder" and, if it has weights of its own, "encoder"."""
        return {"decoder": self.decoder.files} | ({} if self.encoder is None else {"encoder": self.encoder})

    @property
    def licenses(self) -> dict[str, str]:
        """The license of the checkpoint and of each part. A part that comes with the checkpoint shares its license."""
        own, place = self.format.license(self.checkpoint), self.checkpoint.name
        return {"checkpoint": own} | {n: own if part.name == place else part.license for n, part in self.parts.items()}

    @property
    def read_now(self) -> int:
        """Number of bytes that `write` reads; some may have been downloaded before."""
        files = self.decoder.files
        own = self.checkpoint.bytes_of(self.format.files(self.checkpoint))
        return own + files.bytes_of({files.shard(key) for key in self.format.decoder_tensors})

    @property
    def read_in_use(self) -> int:
        """Number of bytes of the decoder and the encoder, which are read when the bundle is first used."""
        return sum(part.bytes_of(part.of_transformers) for part in self.parts.values())

    def write(self, folder: str | Path, *, copy: bool = False) -> None:
        """Write a bundle into a new or empty folder, completely or not at all. Errors are those of `import_published`.

        With `copy`, decoder and encoder are copied into the folder; otherwise the bundle names their place and commit.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} has files: give a new folder")
        try:
            with draft(folder) as made:
                self._write(made, copy)
        except OSError as error:
            raise BundleError(f"cannot write the bundle {folder}: {error}; free space, or choose another") from error

    def _write(self, folder: Path, copy: bool) -> None:
        conversion = self.format.convert(self.checkpoint, self.decoder)
        for part in (conversion.compressor, conversion.reader, *conversion.adapters.values()):
            if odd := [name for name, value in part.items() if not value.isfinite().all()]:
                raise BundleError(f"{self.checkpoint}: {odd[0]} holds a NaN or an infinity: fetch it again")
        method, encoder = dict(conversion.settings["method"]), self.encoder
        if encoder is not None:
            here = encoder.revision is None
            digest = model_folder_digest(Path(encoder.name, encoder.subfolder)) if here else None
            method |= encoder.reference("encoder") | {"digest": digest}
        bundle = self._bundle(conversion, {"method": method} | self.decoder.files.reference("decoder"), copy)
        bundle.save_pretrained(folder)
        if copy:
            self._copy(bundle, folder)

    def _copy(self, bundle: Bundle, folder: Path) -> None:
        decoder = folder / DECODER_FOLDER
        _copy_files(self.decoder.files, decoder)
        own: dict[str, Any] = {"decoder": None, "revision": None, "subfolder": None}
        if self.encoder is not None:
            _copy_files(self.encoder, folder / "encoder")
            digest = model_folder_digest(folder / "encoder")
            inside = {"encoder": None, "revision": None, "subfolder": None, "digest": digest}
            own["method"] = bundle.config.method.model_copy(update=inside)
        config = bundle.config.model_copy(update=own | {"decoder_digest": decoder_files_digest(decoder)})
        (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        Bundle.from_pretrained(folder, device="cpu").save_report(folder)  # with its own fingerprint

    def _bundle(self, conversion: ConvertedCheckpoint, settings: Mapping[str, Any], copy: bool) -> Bundle:
        checkpoint = self.checkpoint
        licenses = self.licenses
        held = licenses.values() if copy else [licenses["checkpoint"]]
        source = BundleSource(
            name=checkpoint.name if checkpoint.revision else Path(checkpoint.name).name,
            revision=checkpoint.revision,
            subfolder=checkpoint.subfolder.strip("/") or None,
            format=self.format.name,
            licenses=licenses,
            shareable=all(license.lower() in _SHAREABLE for license in held),
        )
        name = "-".join(filter(None, (Path(checkpoint.name).name, source.subfolder)))
        ratio = conversion.settings["method"]["ratio"]
        settings = {**conversion.settings, "base_ratio": ratio, "ratios": [ratio], "name": name, **settings}
        with faults_raised_as(BundleError, f"{checkpoint}: its settings make no bundle: "):
            config = BundleConfig(**settings, source=source)
        self.decoder.adapter_layers |= {part: adapter_layers(state) for part, state in conversion.adapters.items()}
        bundle = Bundle.build(config, self.decoder)
        for part, state in (("compressor", conversion.compressor), ("reader", conversion.reader)):
            bundle.parts[part].load_saved_state(dict(state))
        for part, state in conversion.adapters.items():
            self.decoder.load_adapter_state(part, dict(state))
        return bundle


def import_published(
    name_or_path: str | Path,
    folder: str | Path,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    decoder: str | None = None,
    encoder: str | None = None,
    copy: bool = False,
    **options: Any,
) -> Bundle:
    """Convert another project's published compressor into a bundle in a new folder, and return the loaded bundle.

    The arguments are those of `PublishedImport.of` and `.write`, and `options` those of `Bundle.from_pretrained`.

    Raises BundleError if the compressor is missing, incomplete, damaged, of no known format or for another decoder, or
    if the disk is full. Raises ConfigError if an argument does not fit the compressor, or the folder has files.
    """
    found = PublishedImport.of(name_or_path, subfolder=subfolder, revision=revision, decoder=decoder, encoder=encoder)
    found.write(folder, copy=copy)
    return Bundle.from_pretrained(folder, **options)


def _recognized(checkpoint: PublishedCheckpoint) -> PublishedFormat:
    for each in FORMATS:
        if each.matches(checkpoint):
            return each
    inside = f", or name one of its folders {checkpoint.folders} as subfolder" if checkpoint.folders else ""
    names = ", ".join(each.name for each in FORMATS)
    raise BundleError(f"{checkpoint} is of no format known here ({names}): give another checkpoint{inside}")


def _copy_files(part: PublishedCheckpoint, folder: Path) -> None:
    folder.mkdir()
    for name in part.of_transformers:
        shutil.copyfile(part.path(name), folder / name)
