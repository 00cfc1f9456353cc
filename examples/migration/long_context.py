"""From a prompt that holds everything as text to one that holds everything as soft contexts.

`python -m migration.long_context` in the folder `examples` measures both, the new one at three ratios.
"""

from typing import Any

from langchain_ctx_compress import CompressedContextPostprocessor
from migration.app import App, answering, compare, make_app

K, RATIO = 8, 16


def before(app: App) -> Any:
    """Return the chain with all passages as text."""
    return answering(app.retriever(K), app.llm)


def after(app: App, ratio: int) -> Any:
    """Return the chain with one more step, after the retriever."""
    return answering(app.retriever(K) | CompressedContextPostprocessor(store=app.store, ratio=ratio), app.llm)


if __name__ == "__main__":
    print(compare(make_app(), before, after))  # noqa: T201
