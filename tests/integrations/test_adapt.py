"""`llm.adapt(demonstrations)`: models side by side on one decoder, saved and loaded, cached apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.runnables import ConfigurableField
from peft import PeftConfig

from benchmarks.adaptation.systems import BaseAdapter
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, load_predictor
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import marker as markers
from helpers.adaptation import DEMONSTRATIONS, QUESTIONS, merged_copy, save_predictor
from helpers.decoding import by_transformers, prefills
from helpers.frameworks import FRAMEWORKS, every_way
from helpers.langchain import QUESTION, TOKENS, App, open_app


@pytest.fixture(scope="module")
def predictor(talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_predictor(talkative, tmp_path_factory.mktemp("predictor"))


@FRAMEWORKS
async def test_it_answers_with_the_predicted_update(app: App, predictor: Path, framework: Any) -> None:
    """As a plain transformers model into which the update is merged; the original answers as before."""
    llm = framework.llm(store=app.store, max_tokens=TOKENS, predictor=predictor)
    before = framework.ask(llm, QUESTION)
    weights = {name: p.clone() for name, p in app.bundle.backbone.model.named_parameters()}
    adapted = llm.adapt(DEMONSTRATIONS)
    decoder = AdaptiveDecoder(app.bundle)
    update = PredictedUpdate.from_pretrained(predictor, decoder).adapt(decoder, DEMONSTRATIONS).adapter
    plain = merged_copy(app.bundle.backbone.model, update)
    expected = by_transformers(plain, app.bundle.tokenizer, [{"role": "user", "content": QUESTION}], TOKENS), 0
    assert await every_way(framework, adapted, QUESTION) == {expected} != {before}
    assert type(adapted) is type(llm) and adapted.max_tokens == llm.max_tokens
    assert framework.ask(llm, QUESTION) == before
    assert all(torch.equal(p, weights[name]) for name, p in app.bundle.backbone.model.named_parameters())
    assert adapted.decoder.bundle.backbone.model is llm.decoder.bundle.backbone.model


def test_several_side_by_side_in_threads_are_cached_apart(app: App, predictor: Path) -> None:
    llm = app.llm(predictor=predictor)
    models = [llm, llm.adapt(QUESTIONS), llm.adapt([QUESTIONS[0], *DEMONSTRATIONS[1:]])]
    question = f"{app.store.marker('tower', 8)} {QUESTION}"
    alone = [model.invoke(question).text for model in models]
    assert len(set(alone)) == len({model._get_llm_string() for model in models}) == len(models)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda model: model.invoke(question).text, models * 2)) == alone * 2
    cache = InMemoryCache()
    for model in models:
        model.cache = cache
        model.invoke(question)
    with prefills(app.bundle.backbone.model) as seen:
        assert [model.invoke(question).text for model in models] == alone
        # Adapted anew to the same demonstrations it is the same model.
        assert llm.adapt(QUESTIONS, BaseAdapter(models[1].decoder.adapted.adapter)).invoke(question).text == alone[1]
    assert seen == []


def test_an_adapted_model_is_saved_as_a_peft_adapter(app: App, predictor: Path, tmp_path: Path) -> None:
    llm = app.llm(predictor=predictor)
    adapted = llm.adapt(DEMONSTRATIONS)
    adapted.save_adapter(tmp_path / "saved")
    assert PeftConfig.from_pretrained(str(tmp_path / "saved")).peft_type == "LORA"
    answer = adapted.invoke(QUESTION).content
    assert llm.with_adapter(tmp_path / "saved").invoke(QUESTION).content == answer
    with pytest.raises(ConfigError, match="not adapted"):
        llm.save_adapter(tmp_path / "none")


def test_demonstrations_are_read_from_the_store(talkative: Any, tmp_path: Path) -> None:
    app = open_app(tmp_path / "app", talkative, indexed=False)
    predictor = save_predictor(talkative, tmp_path / "predictor", ratio=8)
    llm = app.llm(predictor=predictor, scope="anna")
    soft = llm.adapt(DEMONSTRATIONS, ratio=8)
    passages = {passage for demonstration in DEMONSTRATIONS for passage in demonstration.passages}
    stored = app.store.get_passages(app.store.ids("anna"), "anna")
    assert {passage.text for passage in stored} == passages  # compressed once, and kept
    assert len(app.store) == len(passages)
    # The update is that of the slots, read in the model's scope.
    decoder = AdaptiveDecoder(app.bundle, app.store)
    with markers.scope("anna"):
        marked = [demonstration.marked(app.store, 8) for demonstration in DEMONSTRATIONS]
        expected = PredictedUpdate.from_pretrained(predictor, decoder).adapt(decoder, marked).adapter
    got = soft.decoder.adapted.adapter
    assert all(torch.equal(got.a[n], expected.a[n]) and torch.equal(got.b[n], expected.b[n]) for n in expected.a)
    assert load_predictor(predictor, decoder) is load_predictor(predictor, llm.decoder)  # its files are read once


def test_configurable_fields_never_lose_the_adaptation(app: App, predictor: Path) -> None:
    llm, field = app.llm(predictor=predictor), ConfigurableField(id="longest")
    shorter = llm.configurable_fields(max_tokens=field).with_config(configurable={"longest": 2})
    assert shorter.invoke(QUESTION).content == llm.invoke(QUESTION, max_tokens=2).content
    with pytest.raises(ConfigError, match=r"max_tokens to bind\(\)"):
        llm.adapt(DEMONSTRATIONS).configurable_fields(max_tokens=field)


def test_without_a_predictor_nothing_is_adapted(app: App) -> None:
    with pytest.raises(ConfigError, match="no predictor"):
        app.llm().adapt(DEMONSTRATIONS)
