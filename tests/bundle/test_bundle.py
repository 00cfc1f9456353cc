"""Bundles: what is saved is what is loaded, the decoder's weights when something needs them; damage is named."""

import io
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers.utils import logging as transformers_logging

from ctx_compress_rag import Bundle, Decoder, Passage, SoftContextStore
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.loading import load_decoder, progress_line
from ctx_compress_rag.models.sentence_embedding import MiniLm
from helpers.models import read_both_ways, widen

PROMPT = torch.arange(20, 50).unsqueeze(0)
TEXT = "Orla kept bees in Pellmouth."


@pytest.fixture(scope="module")
def made(make_tiny_bundle: Any) -> Any:
    bundle = make_tiny_bundle(seed=6)
    widen(bundle.backbone.model, bundle.compressor, bundle.reader, seed=5)
    return bundle


@pytest.fixture(scope="module")
def saved(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    made.report = {"steps": 3, "loss": 0.5}
    made.save_pretrained(folder)
    return Path(folder)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved bundle, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "bundle"))


def test_a_saved_bundle_loads_and_saves_again_with_the_same_bits(made: Any, saved: Path, tmp_path: Path) -> None:
    """Of every method, and in all of its forms: methods/test_methods.py."""
    second = Bundle.from_pretrained(saved, device="cpu")
    assert second.fingerprint == made.fingerprint and len(made.fingerprint) == 64
    text, soft = read_both_ways(made, PROMPT)
    assert all(torch.equal(a, b) for a, b in zip((text, soft), read_both_ways(second, PROMPT), strict=True))
    assert not torch.equal(text, soft)
    assert second.tokenizer("Orla kept bees.")["input_ids"] == made.tokenizer("Orla kept bees.")["input_ids"]
    assert second.tokenizer.chat_template == made.tokenizer.chat_template
    assert second.report == {"steps": 3, "loss": 0.5} and "mean_pooling" in (saved / "README.md").read_text()
    assert not any(parameter.requires_grad for parameter in second.backbone.model.parameters())
    second.save_pretrained(tmp_path)
    files = {path.relative_to(saved) for path in saved.rglob("*")}
    assert files == {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    for name in files:
        assert name.suffix not in (".bin", ".pt", ".pth", ".pkl")
        if name.suffix == ".safetensors":
            assert (saved / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_a_bundle_that_is_half_overwritten_does_not_load(folder: Path, make_tiny_bundle: Any) -> None:
    other = make_tiny_bundle(seed=7)
    weights = folder / "reader" / "adapter_model.safetensors"
    weights.unlink()
    weights.mkdir()  # cannot be written
    with pytest.raises(Exception, match="directory|denied|exists"):
        other.save_pretrained(folder)
    with pytest.raises(BundleError, match="not a bundle"):
        Bundle.from_pretrained(folder, device="cpu")
    weights.rmdir()
    other.save_pretrained(folder)
    assert Bundle.from_pretrained(folder, device="cpu").fingerprint == other.fingerprint


def test_the_fingerprint_covers_every_weight(made: Any) -> None:
    def fingerprint() -> str:
        return Bundle(made.config, made.backbone, made.compressor, made.reader).fingerprint

    original = fingerprint()
    parameters = {**dict(made.backbone.model.named_parameters()), **dict(made.reader.named_parameters())}
    seen = {original}
    for parameter in parameters.values():
        kept = parameter.flatten()[0].clone()
        with torch.no_grad():
            parameter.view(-1)[0] += 1
            seen.add(fingerprint())
            parameter.view(-1)[0] = kept
    assert len(seen) == len(parameters) + 1
    assert fingerprint() == original


def test_the_fingerprint_covers_the_config_but_not_names(made: Any) -> None:
    def fingerprint(**changes: Any) -> str:
        settings = {**made.config.model_dump(), **changes}
        return Bundle(BundleConfig(**settings), made.backbone, made.compressor, made.reader).fingerprint

    original = fingerprint()
    assert fingerprint(name="other", reads="recipes", extractive=True) == original
    method = made.config.method.model_dump()
    changes: list[dict[str, Any]] = [
        {"base_ratio": 8, "ratios": [8, 16]},
        {"ratios": [4, 8]},
        {"window": 128},
        {"decoder": "someone/model"},
        {"decoder": "someone/model", "revision": "v2"},
        {"decoder": {"path": "a.gguf", "sha256": "0" * 64}},
        {"decoder": {"path": "a.gguf", "sha256": "1" * 64}},
        {"decoder": {"path": "a.gguf", "sha256": "1" * 64, "tokenizer": "someone/model"}},
        {"method": {**method, "embedding_skip": True}},
        {"method": {**method, "linear": False}},
        {"method": {**method, "encoder": {"rank": 8}}},
    ]
    assert len({original, *(fingerprint(**change) for change in changes)}) == len(changes) + 1


WEIGHTS = [f"{part}/{file}model.safetensors" for part in ("compressor", "reader") for file in ("", "adapter_")]


@pytest.mark.parametrize("name", ["config.json", "decoder/model.safetensors", *WEIGHTS])
@pytest.mark.parametrize("damage", ["missing", "truncated", "pickled"])
def test_missing_and_damaged_files_are_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "pickled" and path.suffix == ".safetensors":
        # A pickle in place of safetensors, under the name that other libraries load it from.
        torch.save(load_file(path), path.with_name(path.name.replace("model.safetensors", "pytorch_model.bin")))
        path.unlink()
    else:
        path.unlink()
    with pytest.raises((BundleError, ConfigError)) as caught:
        Bundle.from_pretrained(folder, device="cpu")
    named = "decoder" if name.startswith("decoder") else path.name
    assert named in str(caught.value) and str(folder) in str(caught.value)


def test_a_damaged_shard_of_the_decoder_is_named(folder: Path) -> None:
    whole = folder / "decoder" / "model.safetensors"
    for number, (name, tensor) in enumerate(load_file(whole).items()):
        save_file({name: tensor}, part := folder / "decoder" / f"model-{number}.safetensors")
    whole.unlink()
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(BundleError, match=re.escape(str(part))):
        Bundle.from_pretrained(folder, device="cpu")


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "itself": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
    "large": lambda path: (path.touch(), os.truncate(path, 2**36)),  # a hole: it takes no space
}
READ = ["config.json", "training_report.json", "reader/model.safetensors", "decoder/config.json"]


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", [*READ, "decoder/tokenizer_config.json", "decoder/tokenizer.json"])
def test_only_regular_files_of_bounded_size_are_opened(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    IRREGULAR[kind](path)
    with pytest.raises(BundleError, match=re.escape(str(path))):
        Bundle.from_pretrained(folder, device="cpu")


def test_links_to_regular_files_are_as_good_as_files(folder: Path) -> None:
    """So are the files of the hub's cache."""
    original = (folder / "config.json").rename(folder / "blob")
    (folder / "config.json").symlink_to(original)
    Bundle.from_pretrained(folder, device="cpu")


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    path = folder / "reader" / "model.safetensors"
    original = load(path.read_bytes())  # not mapped, because safetensors below 0.8 overwrites a file in place
    save_file({"projection.weight": torch.zeros(3, 3)}, path)
    with pytest.raises(BundleError, match=r"projection.weight has shape \(3, 3\), its config needs \(32, 32\)"):
        Bundle.from_pretrained(folder, device="cpu")
    save_file({**original, "extra": torch.zeros(1)}, path)
    with pytest.raises(BundleError, match="1 names differ, for example extra"):
        Bundle.from_pretrained(folder, device="cpu")
    save_file(original, path)

    path = folder / "compressor" / "adapter_model.safetensors"
    adapter = load(path.read_bytes())
    name = next(iter(adapter))
    save_file({key: value for key, value in adapter.items() if key != name}, path)
    with pytest.raises(BundleError, match="1 keys differ") as caught:
        _ = Bundle.from_pretrained(folder, device="cpu").backbone.model
    assert name in str(caught.value)
    save_file({**adapter, name: torch.zeros(2, 2)}, path)
    bundle = Bundle.from_pretrained(folder, device="cpu")
    for _ in range(2):  # a failed load leaves nothing behind
        with pytest.raises(BundleError, match=r"has shape \(2, 2\)"):
            _ = bundle.backbone.model


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"num_hidden_layers": 9}])
def test_a_decoder_whose_files_lack_weights_is_refused(folder: Path, change: dict[str, Any]) -> None:
    """transformers would make them at random."""
    path = folder / "decoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BundleError, match=r"names \d+ weights that are not in its files, such as model\.layers\."):
        load_decoder(folder / "decoder", device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unknown": 1}, "unknown=1"),
        ({"method": {"name": "max_pooling"}}, r"method.name: 'max_pooling' is unknown: give one of .*'mean_pooling'"),
        ({"method": {"name": "mean_pooling", "encoder": {"rank": 0}}}, r"method.mean_pooling.encoder.rank: .*got 0"),
        ({"method": {"name": "mean_pooling", "positions": 2**40}}, r"positions: .*less than or equal to 65536"),
        ({"base_ratio": "four"}, r"base_ratio: .*got 'four'"),
        ({"ratios": [4, 6]}, "ratio 6 cannot be made from slots stored at 4"),
        ({"window": 62}, "window 62 is not a multiple of base_ratio 4"),
    ],
)
def test_unknown_and_impossible_values_are_refused_by_name(folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        Bundle.from_pretrained(folder, device="cpu")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", ["compressor", "reader"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3])
def test_weights_that_are_not_finite_numbers_are_named(folder: Path, part: str, value: float) -> None:
    path = folder / part / "adapter_model.safetensors"
    state = load_file(path)
    name = max(state)
    state[name] = torch.full_like(state[name], value, dtype=torch.int32 if value == 3 else None)
    save_file(state, path)
    with pytest.raises(BundleError, match=f"{re.escape(str(path))} is damaged .*{re.escape(name)} holds a NaN"):
        Bundle.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "training_report.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises((BundleError, ConfigError), match=re.escape(name)):
        Bundle.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize("name", ["no-such-bundle", "./nowhere", "/no/where", "a/b/c", "~/bundle", "", None, 5])
def test_unknown_names_are_refused(name: Any) -> None:
    with pytest.raises((BundleError, ConfigError), match=r"give a folder, one of \['smollm2-135m'\]") as caught:
        Bundle.from_pretrained(name)
    assert repr(name) in str(caught.value)


def test_a_revision_is_the_hubs(folder: Path) -> None:
    for name, what in (("smollm2-135m", "comes with this package"), (str(folder), "is a folder")):
        with pytest.raises(ConfigError, match=rf"revision='v1': the bundle .* {what} and has none: leave revision out"):
            Bundle.from_pretrained(name, revision="v1")


def test_impossible_changes_are_told_like_an_impossible_config(folder: Path) -> None:
    with pytest.raises(ConfigError, match="config: ratio 6 cannot be made from slots stored at 4"):
        Bundle.from_pretrained(folder, device="cpu", changes={"ratios": [6]})


def test_what_is_neither_here_nor_on_the_hub_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BundleError, match="cannot fetch the bundle 'someone/nothing' from the hub"):
        Bundle.from_pretrained("someone/nothing")
    with pytest.raises(BundleError, match=r"cannot fetch 'tiny.gguf' of 'someone/tiny' from the hub"):
        load_decoder(GgufDecoder(repo="someone/tiny", file="tiny.gguf"))
    with pytest.raises(BundleError, match="cannot load the decoder '/no/where': there is no such folder"):
        load_decoder("/no/where", device="cpu")
    with pytest.raises(BundleError, match="'no/where': there is no such folder, and the hub says"):
        load_decoder("no/where", device="cpu")


def test_pushing_uploads_a_folder_that_loads(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        """Keeps what HfApi would upload."""

        def __init__(self, token: str | None = None) -> None:
            calls.append(("token", {"token": token}))

        def create_repo(self, repo_id: str, **settings: Any) -> None:
            calls.append((repo_id, settings))

        def upload_folder(self, *, repo_id: str, folder_path: str) -> str:
            shutil.copytree(folder_path, tmp_path / repo_id)
            return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert made.push_to_hub("someone/bundle", private=True, token="t") == "https://hub/someone/bundle/commit/1"
    assert calls == [("token", {"token": "t"}), ("someone/bundle", {"private": True, "exist_ok": True})]

    asked: dict[str, Any] = {}

    def download(repo_id: str, **settings: Any) -> str:
        asked.update(settings)
        return str(tmp_path / repo_id)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path / "someone")  # a folder of that name is not in the way
    loaded = Bundle.from_pretrained("someone/bundle", device="cpu", revision="v1")
    assert loaded.fingerprint == made.fingerprint
    assert asked["revision"] == "v1"
    # All that was uploaded for loading is asked for; pickles never are.
    from huggingface_hub.utils import filter_repo_objects

    uploaded = [p.relative_to(tmp_path / "someone/bundle").as_posix() for p in (tmp_path / "someone").rglob("*.*")]
    wanted = set(filter_repo_objects([*uploaded, "pytorch_model.bin"], allow_patterns=asked["allow_patterns"]))
    assert set(uploaded) - wanted == {"README.md"} and "pytorch_model.bin" not in wanted


def test_other_files_are_not_written_over(make_tiny_bundle: Any, tmp_path: Path) -> None:
    bundle = make_tiny_bundle()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for taken, message in (("project", "files that are not a bundle's"), ("file", "is a file")):
        with pytest.raises(ConfigError, match=message):
            bundle.save_pretrained(tmp_path / taken)
    assert [f.name for f in (tmp_path / "project").iterdir()] == ["README.md"]
    bundle.save_pretrained(tmp_path / "new")
    bundle.save_pretrained(tmp_path / "new")  # a bundle's own files are


def test_what_is_shown_says_what_is_held_and_the_docstrings_examples_run(
    make_tiny_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        from_pretrained = staticmethod(lambda name: make_tiny_bundle())

    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {each.__name__: each for each in (Decoder, SoftContextStore, Passage)} | {"Bundle": Opened}
    for shown in (Bundle, Decoder, SoftContextStore, Passage):
        [example] = re.findall(r"```python\n(.*?)```", str(shown.__doc__), re.S)
        exec(textwrap.dedent(example), made)
    assert made["answer"].slots > 0
    assert all(part in repr(made["bundle"]) for part in ("'tiny'", "[4", " on cpu"))
    assert all(part in repr(made["decoder"]) for part in ("'tiny'", "1 passages", "'transformers'"))
    assert "[[ctx:" in made["prompt"] and "cannot be read" in repr(made["store"])  # it was closed
    with SoftContextStore("./chroma", made["bundle"]) as store:
        assert all(part in repr(store) for part in ("'chroma'", "'tiny'", "ratio 4", "int8", "2 passages"))
    assert repr(Passage("word " * 1000, "a", {"page": 3})).endswith("word ...', id='a', metadata={'page': 3})")


def test_loading_is_said_on_a_terminal(make_tiny_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line a model, in place of transformers' bars, which stay on for models that the app loads."""
    make_tiny_bundle().save_pretrained(tmp_path / "shown")
    transformers_logging.enable_progress_bar()
    for terminal in (True, False):
        said = io.StringIO()
        monkeypatch.setattr(said, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.stderr", said)
        Bundle.from_pretrained(tmp_path / "shown").backbone.model  # noqa: B018
        MiniLm()
        text = said.getvalue()
        for shown in ("opening the bundle", "loading the decoder", "loading MiniLM"):
            assert (shown in text) == terminal
        assert "Loading weights" not in text and transformers_logging.is_progress_bar_enabled()
    before, lines = transformers_logging.get_verbosity(), [progress_line("of one thread"), progress_line("of another")]
    for line in lines:
        line.__enter__()
    for line in lines:  # the second outlasts the first
        line.__exit__(None, None, None)
    assert transformers_logging.get_verbosity() == before and transformers_logging.is_progress_bar_enabled()


def test_what_needs_no_weights_loads_none(folder: Path, tmp_path: Path) -> None:
    whole, opened = Bundle.from_pretrained(folder, device="cpu"), Bundle.from_pretrained(folder, device="cpu")
    with SoftContextStore(tmp_path / "chroma", whole) as store:
        store.add([TEXT], ["bees"], progress=False)
    assert whole.backbone.loaded
    with SoftContextStore(tmp_path / "chroma", opened) as store:
        [soft] = store.get(["bees"])
        assert store.marker("bees", 8) and opened.can_read(16) and opened.positions(3) == 3
    assert soft is not None and torch.equal(opened.embed(soft), whole.embed(soft))
    for name in ("dim", "window", "device", "dtype", "adapters"):
        assert getattr(opened.backbone, name) == getattr(whole.backbone, name)
    assert opened.backbone.generation_config.eos_token_id == whole.backbone.model.generation_config.eos_token_id
    assert opened.fingerprint == whole.fingerprint and not opened.backbone.loaded


def test_an_adapter_is_made_when_it_is_used(folder: Path) -> None:
    backbone, whole = (Bundle.from_pretrained(folder, device="cpu").backbone for _ in range(2))
    ids = torch.tensor([[5, 6, 7]])

    def made() -> set[str]:
        return {part for part in backbone.adapters for n, _ in backbone.base.named_parameters() if f".{part}." in n}

    assert made() == set()
    with torch.inference_mode(), backbone.use("reader") as model, whole.use("reader") as other:
        assert whole.model and made() == {"reader"}
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    assert backbone.model is backbone.base and made() == backbone.adapters > {"reader"}


def test_weights_loaded_while_compressing_can_be_trained(folder: Path) -> None:
    bundle = Bundle.from_pretrained(folder, device="cpu")
    bundle.compress([TEXT])
    parameters = bundle.backbone.train_adapter("reader")
    with bundle.backbone.use("reader") as model:
        model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)


def test_weights_that_changed_since_the_opening_are_refused(folder: Path) -> None:
    bundle = Bundle.from_pretrained(folder, device="cpu")
    file = folder / "reader" / "adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    for _ in range(2):
        with pytest.raises(BundleError, match="changed after the bundle was opened"):
            bundle.compress([TEXT])


def test_it_can_be_saved_to_where_it_lies(folder: Path) -> None:
    bundle = Bundle.from_pretrained(folder, device="cpu")
    before = bundle.fingerprint
    bundle.save_pretrained(folder)
    assert Bundle.from_pretrained(folder, device="cpu").fingerprint == bundle.fingerprint == before
