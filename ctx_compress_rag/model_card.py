"""The model card that goes into every bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctx_compress_rag.config import BundleConfig
from ctx_compress_rag.methods.registry import METHODS


def model_card(config: BundleConfig, report: Mapping[str, Any], fingerprint: str) -> str:
    """The card's text, in the hub's format."""
    decoder = config.decoder_name or "in `decoder/`"
    facts = [
        ("Method", f"{config.method.name} ({METHODS[config.method.name].paper})"),
        ("Decoder", decoder),
        ("Reads", config.reads),
        ("Base ratio", f"{config.base_ratio} source tokens per slot"),
        ("Trained ratios", ", ".join(str(r) for r in config.ratios)),
        ("Window", f"{config.max_tokens} tokens"),
        ("Fingerprint", f"`{fingerprint}`"),
        ("Trained parameters", f"{report.get('trained_parameters', 'unknown')}"),
        ("Training steps", _steps(report)),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts)
    sources = {
        (each["data"], each["licence"]): each
        for stage in _stages(report)
        for each in stage.get("recipe", {}).get("sources", [])
    }.values()
    trained_on = (
        "\n## Trained on\n\n| data | licence |\n|---|---|\n"
        + "\n".join(f"| {source['data']} | {source['licence']} |" for source in sources)
        + "\n"
        if sources
        else ""
    )
    return f"""---
library_name: ctx-compress-rag
tags: [context-compression, rag]
---
# {config.name}

A bundle for [ctx_compress_rag](https://pypi.org/project/ctx-compress-rag/): it turns retrieved passages into
short soft contexts that the decoder reads in place of the text.

| | |
|---|---|
{table}

```python
from ctx_compress_rag import Bundle

bundle = Bundle.from_pretrained("path/to/this/folder")
```

{trained_on}
Compression loses detail: run `ctx-compress eval` on your own questions before you rely on it.
"""


def _steps(report: Mapping[str, Any]) -> str:
    """Steps of all stages, from the first."""
    stages = [stage.get("steps", "unknown") for stage in _stages(report)]
    if len(stages) < 2 or "unknown" in stages:
        return str(stages[-1]) if stages else "unknown"
    return f"{sum(stages):,}, in stages of {', '.join(f'{n:,}' for n in stages[:-1])} and {stages[-1]:,}"


def _stages(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The reports of all stages, from the first."""
    return [*_stages(report.get("earlier", {})), report] if report else []
