"""`adapt(llm, demonstrations, adaptation)`: LLMs of both frameworks side by side on one decoder."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.runnables import ConfigurableField

from ctx_compress_rag.adaptation.adapt import adapt, with_adapter
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.adaptation.predicted import PredictedUpdate
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import ConfigError
from helpers.adaptation import DEMONSTRATIONS, QUESTIONS, merged_copy, save_predictor
from helpers.decoding import by_transformers
from helpers.frameworks import FRAMEWORKS, every_way
from helpers.langchain import QUESTION, TOKENS, App


@pytest.fixture(scope="module")
def update(talkative: Any, tmp_path_factory: pytest.TempPathFactory) -> PredictedUpdate:
    folder = save_predictor(talkative, tmp_path_factory.mktemp("predictor"))
    return PredictedUpdate.from_pretrained(folder, Decoder(talkative))


@FRAMEWORKS
async def test_it_answers_with_the_predicted_update(app: App, update: PredictedUpdate, framework: Any) -> None:
    """As a plain transformers model into which the update is merged; the original answers as before."""
    llm = framework.llm(store=app.store, max_tokens=TOKENS)
    before = framework.ask(llm, QUESTION)
    weights = {name: p.clone() for name, p in app.bundle.backbone.model.named_parameters()}
    adapted = adapt(llm, DEMONSTRATIONS, update)
    plain = merged_copy(app.bundle.backbone.model, update.adapt(Decoder(app.bundle), DEMONSTRATIONS))
    expected = by_transformers(plain, app.bundle.tokenizer, [{"role": "user", "content": QUESTION}], TOKENS), 0
    assert await every_way(framework, adapted, QUESTION) == {expected} != {before}
    assert type(adapted) is type(llm) and adapted.max_tokens == llm.max_tokens
    assert framework.ask(llm, QUESTION) == before
    assert all(torch.equal(p, weights[name]) for name, p in app.bundle.backbone.model.named_parameters())
    assert adapted.decoder.bundle.backbone.model is llm.decoder.bundle.backbone.model


def test_several_side_by_side_in_threads(app: App, update: PredictedUpdate, tmp_path: Path) -> None:
    """None of them answers from a cache that another has filled; one can be adapted again, and its adapter saved."""
    llm = app.llm()
    models = [llm, adapt(llm, QUESTIONS, update), adapt(llm, [QUESTIONS[0], *DEMONSTRATIONS[1:]], update)]
    question = f"{app.store.marker('tower', 8)} {QUESTION}"
    alone = [model.invoke(question).text for model in models]
    assert len(set(alone)) == len(models)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda model: model.invoke(question).text, models * 2)) == alone * 2
    cached = app.llm(cache=InMemoryCache())
    assert [cached.invoke(question).text for _ in range(2)] == alone[:1] * 2
    assert adapt(cached, QUESTIONS, update).invoke(question).text == alone[1]
    assert adapt(models[2], QUESTIONS, update).invoke(question).text == alone[1]  # not on top of the first update
    models[1].decoder.bundle.adapter.save_pretrained(tmp_path)
    saved = Adapter.from_pretrained(tmp_path, app.bundle.backbone.model)
    assert with_adapter(llm, saved).invoke(question).text == alone[1]


def test_what_cannot_be_adapted_says_so(app: App, update: PredictedUpdate) -> None:
    with pytest.raises(ConfigError, match="nothing to adapt to"):
        adapt(app.llm(), [], update)
    with pytest.raises(ConfigError, match="with 3 demonstrations and was given 2"):
        adapt(app.llm(), DEMONSTRATIONS[:2], update)
    shown = replace(DEMONSTRATIONS[1], passages=(app.store.marker("tower", 8),))
    with pytest.raises(ConfigError, match="demonstration 1 holds markers"):
        adapt(app.llm(), [DEMONSTRATIONS[0], shown, DEMONSTRATIONS[2]], update)
    with pytest.raises(ConfigError, match="http://localhost:1"):
        adapt(app.llm(engine="http://localhost:1"), DEMONSTRATIONS, update)
    # LangChain would make a new model from the options alone.
    with pytest.raises(ConfigError, match=r"max_tokens to bind\(\)"):
        adapt(app.llm(), DEMONSTRATIONS, update).configurable_fields(max_tokens=ConfigurableField(id="longest"))
