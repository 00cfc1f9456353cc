"""What cannot be imported is refused in one sentence that names it, and leaves nothing behind."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ctx_compress_rag import Bundle
from ctx_compress_rag.cli import main
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.published.importing import FORMATS, PublishedImport, import_published
from helpers.marks import slowly
from helpers.published import CASES, CHECKPOINTS, TEXTS, copied, imported
from helpers.serving import listening

Damage = Callable[[Path], object]


def rewrite(file: str, change: Callable[[Any], object]) -> Damage:
    """Change a checkpoint's file: JSON, pickled or safetensors."""

    def damage(folder: Path) -> None:
        path = folder / file
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            change(content)
            path.write_text(json.dumps(content))
        elif path.suffix == ".pth":
            content = torch.load(path, weights_only=True)
            change(content)
            torch.save(content, path)
        else:
            content = load_file(path)
            change(content)
            save_file(content, path)

    return damage


def put(**settings: Any) -> Callable[[Any], object]:
    return lambda state: state.update(settings)


def drop(name: str) -> Callable[[Any], object]:
    return lambda state: state.pop(name)


def scaled(name: str, factor: float) -> Callable[[Any], object]:
    return lambda state: state.update({name: state[name] * factor})


def write(file: str, text: str) -> Damage:
    return lambda folder: (folder / file).write_text(text)


def remove(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def in_encoder(change: Callable[[Any], object]) -> Damage:
    return rewrite("adapters.pth", lambda state: change(state["encoder_adapter"]))


QUERY = "model.layers.0.self_attn.q_proj.lora_A.weight"
ADAPTERS, LAYERS, EMBEDDINGS = "adapters.pth", "decoder_first_last_layers.pth", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
CONFIG, MODEL, MAP = "config.json", "model_config.json", "adapter/adapter.safetensors"
ICAE, MEMORY = "mistral_7b_ft_icae.safetensors", "memory_token_embed.weight"
ICAE_QUERY = "icae.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
FAULTS: dict[str, tuple[str, Damage, str]] = {
    "no adapter of the reader": ("pisco", rewrite(ADAPTERS, drop("decoder_adapter")), "decoder_adapter"),
    "an unknown adapter": ("pisco", rewrite(ADAPTERS, put(other={})), "other"),
    "a layer's adapter missing": ("pisco", in_encoder(drop(QUERY)), "q_proj"),
    "another rank": ("pisco", rewrite(CONFIG, put(lora_r=8)), "(8, 64)"),
    "another decoder's embeddings": ("pisco", rewrite(LAYERS, scaled(EMBEDDINGS, 1.5)), EMBEDDINGS),
    "another decoder's head": ("pisco", rewrite(LAYERS, scaled("lm_head.weight", 1.5)), "lm_head"),
    "more memory tokens than rows": ("pisco", rewrite(CONFIG, put(compr_rate=8)), "511"),
    "one memory token for all": ("pisco", rewrite(CONFIG, put(different_mem_tokens=False)), "False"),
    "no file of layers": ("pisco", remove(LAYERS), LAYERS),
    "a cut file": ("pisco", lambda folder: os.truncate(folder / LAYERS, 999), LAYERS),
    "an infinity": ("pisco", in_encoder(scaled(QUERY, torch.inf)), "q_proj"),
    "a length as text": ("pisco", rewrite(CONFIG, put(doc_max_length="128")), "doc_max_length is '128'"),
    "a rate of zero": ("pisco", rewrite(CONFIG, put(compr_rate=0)), "compr_rate is 0"),
    "an adapter without names": ("pisco", rewrite(ADAPTERS, put(encoder_adapter=torch.ones(1))), "encoder_adapter"),
    "a number in an adapter": ("pisco", in_encoder(put(number=3)), "number"),
    "a trained norm": ("pisco", in_encoder(put(**{"model.norm.weight": torch.ones(64)})), "model.norm.weight"),
    "trained embeddings": ("pisco", in_encoder(put(**{EMBEDDINGS: torch.ones(511, 64)})), EMBEDDINGS),
    "a map's bias missing": ("lclm-4x", rewrite(MAP, drop("fc1.bias")), "fc1.bias"),
    "a map with attention": ("lclm-4x", rewrite(MODEL, put(adapter_type="mlp_attn")), "mlp_attn"),
    "an encoder that looks ahead": ("lclm-4x", rewrite(MODEL, put(encoder_mask_type="bidirectional")), "bidirectional"),
    "settings that are no JSON": ("lclm-4x", write(MODEL, "{"), MODEL),
    "settings that are no object": ("lclm-4x", write(MODEL, "[]"), "holds a list"),
    "a window that no ratio divides": ("lclm-4x", rewrite(MODEL, put(encoder_window_size=1023)), "1023"),
    "settings without end": ("lclm-4x", write(MODEL, "[" * 100_000), MODEL),
    "no ratio": ("lclm-4x", rewrite(MODEL, drop("compression_ratio")), "compression_ratio"),
    "no width": ("lclm-4x", rewrite(f"encoder/{CONFIG}", drop("hidden_size")), "hidden_size"),
    "no weights of the encoder": ("lclm-4x", remove("encoder/model.safetensors"), "encoder lacks 1 of 1"),
    "no shard": ("lclm-4x", write(f"decoder/{INDEX}", '{"weight_map": {"a": "b.safetensors"}}'), "b.safe"),
    "an odd index": ("lclm-4x", write(f"decoder/{INDEX}", '{"weight_map": ["a"]}'), "weight_map"),
    "an unknown decoder": ("lclm-4x", rewrite(f"decoder/{CONFIG}", put(model_type="odd")), "'odd'"),
    "an unknown encoder": ("lclm-4x", rewrite(f"encoder/{CONFIG}", put(model_type="odd")), "'odd'"),
    "a decoder's broken tokenizer": ("lclm-4x", write("decoder/tokenizer.json", "{}"), "tokenizer of"),
    "a map of another width": ("lclm-4x", rewrite(MAP, put(**{"norm.weight": torch.ones(8)})), "(8,)"),
    "a projector of another kind": ("xrag", rewrite(CONFIG, put(projector_type="linear")), "linear"),
    "no projector": ("xrag", rewrite("model.safetensors", drop("projector.projector.2.bias")), "projector.2.bias"),
    "a retriever of another width": ("xrag", rewrite(CONFIG, put(retriever_hidden_size=16)), "16"),
    "no architecture": ("xrag", rewrite(CONFIG, put(architectures=None)), "lclm, pisco"),
    "two checkpoints": (
        "icae",
        lambda folder: shutil.copy(folder / ICAE, folder / "other_ft_icae.safetensors"),
        "other_",
    ),
    "no memory": ("icae", rewrite(ICAE, drop(MEMORY)), MEMORY),
    "adapters of two ranks": ("icae", rewrite(ICAE, put(**{ICAE_QUERY: torch.ones(1, 64)})), "[1, "),
    "another architecture": ("lclm-4x", rewrite("decoder/model.safetensors", drop(EMBEDDINGS)), EMBEDDINGS),
    "an unknown tensor": ("icae", rewrite(ICAE, put(other=torch.ones(1))), "other"),
    "OSCAR": ("pisco", rewrite(CONFIG, put(compr_model_name="meta-llama/Llama-3.2-1B")), "lclm, pisco"),
    "COCOM": ("pisco", remove(ADAPTERS), "lclm, pisco"),
    "another model": ("pisco", rewrite(CONFIG, put(model_type="llama")), "lclm, pisco"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_imported(fault: str, tmp_path: Path) -> None:
    name, damage, named = FAULTS[fault]
    folder = copied(name, tmp_path)
    damage(folder)
    out = tmp_path / "made" / "bundle"
    with pytest.raises((BundleError, ConfigError)) as caught:
        import_published(folder, out, **CASES[name])
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = copied("pisco", tmp_path)
    torch.save({"encoder_adapter": Evil(), "decoder_adapter": {}}, folder / "adapters.pth")
    with pytest.raises(BundleError, match="adapters.pth") as caught:
        import_published(folder, tmp_path / "bundle", **CASES["pisco"])
    assert "weights_only" not in str(caught.value)  # torch's advice is to load it all the same
    assert not (tmp_path / "ran").exists()


def test_a_decoder_that_does_not_fit_has_to_be_replaced(tmp_path: Path) -> None:
    """One without BOS, one named by a path of its authors, and none."""
    with pytest.raises(BundleError, match="lclm-4x/decoder has no BOS"):
        import_published(CHECKPOINTS / "pisco", tmp_path / "bundle", decoder=str(CHECKPOINTS / "lclm-4x/decoder"))
    with pytest.raises(ConfigError, match="/mnt/model.*--decoder"):
        import_published(CHECKPOINTS / "clara-instruct", tmp_path / "bundle")
    rewrite(CONFIG, drop("decoder_model_name"))(copied("pisco", tmp_path))
    with pytest.raises(ConfigError, match="--decoder"):
        import_published(tmp_path / "pisco", tmp_path / "bundle")


@pytest.mark.parametrize("option", ["decoder", "encoder"])
def test_what_a_checkpoint_brings_cannot_be_replaced(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{option}='other'"):
        import_published(CHECKPOINTS / "lclm-4x", tmp_path / "bundle", **{option: "other"})


@pytest.mark.parametrize(
    ("place", "options", "named"),
    [
        (str(CHECKPOINTS / "pisco"), {"revision": "main"}, "revision='main'"),
        (str(CHECKPOINTS / "lclm-4x"), {"subfolder": "nowhere"}, "'decoder'"),
        ("nowhere", {}, "owner/name"),
    ],
)
def test_a_place_that_has_no_checkpoint(place: str, options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises((BundleError, ConfigError), match=named):
        import_published(place, tmp_path / "bundle", **options)


def test_a_folder_with_files_and_one_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="has files"):
        imported("lclm-4x", tmp_path)
    with pytest.raises(BundleError, match="mine"):
        imported("lclm-4x", tmp_path / "mine" / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_published_checkpoint_is_not_loaded_as_a_bundle(tmp_path: Path) -> None:
    for name in ("pisco", "lclm-4x"):
        with pytest.raises(BundleError, match=f"ctx-compress import .*{name}"):
            Bundle.from_pretrained(CHECKPOINTS / name)


@pytest.mark.parametrize("copy", [False, True])
def test_every_copied_parts_license_counts(copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a model card: quoted, or a list; and not what the card's text says."""
    cards = {"xrag": 'license: "apache-2.0"\n---\nlicense: mit', "sfr": "license: [cc-by-nc-4.0, mit]\n---"}
    for name, card in cards.items():
        (copied(name, tmp_path) / "README.md").write_text(f"---\n{card}\n")
    made = import_published(tmp_path / "xrag", tmp_path / "bundle", encoder=str(tmp_path / "sfr"), copy=copy)
    source = made.config.source
    licenses = {"checkpoint": "apache-2.0", "decoder": "apache-2.0", "encoder": "cc-by-nc-4.0, mit"}
    assert source is not None and source.licenses == licenses
    assert source.shareable is not copy and "cc-by-nc-4.0" in (tmp_path / "bundle/README.md").read_text()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: 1 / 0)  # no hub is asked
    error, said = (ConfigError, "cc-by-nc-4.0.*private=True") if copy else (ZeroDivisionError, "zero")
    with pytest.raises(error, match=said):
        made.push_to_hub("someone/xrag")
    with pytest.raises(ZeroDivisionError):
        made.push_to_hub("someone/xrag", private=True)


@pytest.mark.parametrize("name", slowly(("lclm-4x", "pisco"), ("pisco",)))
def test_a_copied_bundle_needs_nothing_else(name: str, tmp_path: Path) -> None:
    """Not the checkpoint, not its decoder; also moved, and also with a decoder in several files."""
    shutil.copytree(CHECKPOINTS, tmp_path / "here")
    given = {key: value.replace(str(CHECKPOINTS), str(tmp_path / "here")) for key, value in CASES[name].items()}
    shard(tmp_path / "here" / (f"{name}/decoder" if name.startswith("lclm") else "mistral"))
    import_published(tmp_path / "here" / name, tmp_path / "bundle", **given, copy=True)
    shutil.rmtree(tmp_path / "here")
    shutil.move(tmp_path / "bundle", tmp_path / "moved")
    assert not list((tmp_path / "moved").rglob("original*"))
    bundle = Bundle.from_pretrained(tmp_path / "moved", device="cpu", dtype="float32")
    assert bundle.fingerprint in (tmp_path / "moved/README.md").read_text()
    expected = imported(name, tmp_path / "other").compress([TEXTS["short"]])[0]
    assert np.array_equal(bundle.compress([TEXTS["short"]])[0].slots, expected.slots)
    bundle.save_pretrained(tmp_path / "again")
    again = Bundle.from_pretrained(tmp_path / "again", device="cpu", dtype="float32")
    [soft] = again.compress([TEXTS["short"]])  # its decoder was rounded from bfloat16 to float16
    np.testing.assert_allclose(soft.slots, expected.slots, atol=1e-3, rtol=1e-3)


def shard(folder: Path) -> None:
    """Split a transformers folder's weights into several files, beside a file and a folder of another program."""
    shutil.copytree(folder, folder / "original")
    (folder / "original.bin").touch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=50_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def test_loading_says_nothing_of_the_map_beside_a_decoder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = imported("xrag", tmp_path / "bundle")
    with caplog.at_level("WARNING", "transformers"):
        transformers_logging.add_handler(caplog.handler)
        bundle.backbone.model.eval()
        transformers_logging.remove_handler(caplog.handler)
    assert "projector" not in caplog.text


def test_a_changed_encoder_is_noticed(tmp_path: Path) -> None:
    folder = copied("lclm-4x", tmp_path)
    bundle = import_published(folder, tmp_path / "bundle", device="cpu")
    rewrite("encoder/model.safetensors", scaled("norm.weight", 1.5))(folder)
    with pytest.raises(BundleError, match="encoder"):
        bundle.compress([TEXTS["short"]])


COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """A Hugging Face hub, as far as downloads need one: folders as repositories, all at `COMMIT`."""

    folders: dict[str, Path]  # by id
    gated: set[str] = field(default_factory=set)  # ids of those that need an account
    cut: dict[str, int] = field(default_factory=dict)  # bytes of a file, by name, before the connection breaks once
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file, by "id/name"


def refused(status: int, code: str) -> Response:
    return Response(status_code=status, headers={"X-Error-Code": code})


def hub_app(hub: Hub) -> FastAPI:
    app = FastAPI()

    @app.get("/api/models/{owner}/{name}{rest:path}")
    def about(owner: str, name: str) -> Any:
        id = f"{owner}/{name}"
        if id not in hub.folders:
            return refused(404, "RepoNotFound")
        paths = sorted(path for path in hub.folders[id].rglob("*") if path.is_file())
        files = [{"rfilename": str(p.relative_to(hub.folders[id])), "size": p.stat().st_size} for p in paths]
        return {"id": id, "sha": COMMIT, "siblings": files, "cardData": {"license": "apache-2.0"}}

    @app.api_route("/{owner}/{name}/resolve/{revision}/{file:path}", methods=["GET", "HEAD"])
    def content(owner: str, name: str, file: str, request: Request) -> Any:
        id = f"{owner}/{name}"
        if id in hub.gated:
            return refused(403, "GatedRepo")
        if not (path := hub.folders[id] / file).is_file():
            return refused(404, "EntryNotFound")
        whole = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(whole).hexdigest()}"'}
        headers["Content-Length"] = str(len(whole))
        if request.method == "HEAD":
            return Response(headers=headers)
        sent = whole[: hub.cut.pop(path.name, None)]
        hub.sent[f"{id}/{file}"] = hub.sent.get(f"{id}/{file}", 0) + len(sent)
        return StreamingResponse(iter([sent]), headers=headers)

    return app


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process takes for the real one, with an empty cache."""
    checkpoint = copied("pisco", tmp_path)
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(b"old" * 1000)
    folders = {"naver/pisco-mistral": checkpoint, "mistralai/Mistral-7B-Instruct-v0.2": CHECKPOINTS / "mistral"}
    served = Hub(folders)
    with listening(hub_app(served)) as address:
        reach(address, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield served


def reach(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)


def test_the_command_imports_from_the_hub_what_is_needed_at_one_commit(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an interruption, too, and then without sending again what is complete."""
    layers = hub.folders["naver/pisco-mistral"] / LAYERS
    hub.cut[ADAPTERS] = 1000
    out = tmp_path / "bundle"
    main(["import", "naver/pisco-mistral", str(out)])
    assert out.exists() or main(["import", "naver/pisco-mistral", str(out)]) == 0
    assert hub.sent[f"naver/pisco-mistral/{LAYERS}"] == layers.stat().st_size
    config = json.loads((out / "config.json").read_text())
    assert (config["decoder"], config["revision"]) == ("mistralai/Mistral-7B-Instruct-v0.2", COMMIT)
    assert config["source"]["licenses"]["checkpoint"] == "cc-by-nc-4.0"
    assert config["source"]["revision"] == COMMIT and config["source"]["name"] == "naver/pisco-mistral"
    assert not any("00001" in name for name in hub.sent)
    assert main(["import", "naver/pisco-mistral", str(out)]) == 2 and "has files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "named"), [("gated", "hf auth login"), ("missing", "nobody/nothing"), ("down", "cannot fetch")]
)
def test_a_hub_that_refuses_is_explained(
    hub: Hub, fault: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nobody/nothing" if fault == "missing" else "naver/pisco-mistral"
    if fault == "gated":
        hub.gated.add("mistralai/Mistral-7B-Instruct-v0.2")
    if fault == "down":
        reach("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(BundleError, match=named) as caught:
        import_published(name, tmp_path / "out" / "bundle")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_the_command_shows_license_sizes_and_memory_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: object) -> str:
        assert main(["import", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    checkpoint = CHECKPOINTS / "lclm-4x"
    found, out = PublishedImport.of(checkpoint), shown(checkpoint, tmp_path / "bundle")
    assert found.licenses["checkpoint"] in out and f"{found.parameters * 2 / 1e9:.1f} GB in 16" in out
    assert Bundle.from_pretrained(tmp_path / "bundle", device="cpu").config.source is not None
    dry = shown(checkpoint)
    assert dry and out.startswith(dry)
    listed = [line.split()[0] for line in shown("--list").splitlines()]
    assert set(listed) <= {each.name for each in FORMATS} and len(listed) == sum(len(each.known) for each in FORMATS)
