"""The command `ctx-compress serve`, which runs an OpenAI-compatible server on an index."""

from contextlib import ExitStack
from typing import Annotated

from typer import Option

from ctx_compress_rag.cli import shared
from ctx_compress_rag.errors import ConfigError


@shared.command("--index ./chroma --port 8000")
def serve(
    index: shared.Index = shared.INDEX,
    bundle: shared.OwnBundle = None,
    engine: shared.Engine = "transformers",
    server_key: shared.ServerKey = None,
    weights: shared.Weights = None,
    retrieve: Annotated[
        int | None, Option(metavar="N", min=1, help="Retrieve N passages for each chat without markers.")
    ] = None,
    ratio: shared.Ratio = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_keys: Annotated[
        str | None,
        Option(
            metavar="FILE", help="An API key and its scope on each line.  [default: the variable CTX_COMPRESS_API_KEYS]"
        ),
    ] = None,
    collection: Annotated[
        str | None,
        Option(metavar="NAME", help="Serve soft contexts of your app's collection, not of an index (needs --bundle)."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        Option(
            metavar="NAME...", help="Names besides localhost that requests may be sent to, if there are no API keys."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, Option(metavar="N", min=1, help="Prompts per forward pass.  [default: 8]")
    ] = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    max_tokens: Annotated[int, Option(metavar="N", help="Longest answer if a request gives no limit.")] = 512,
    longest_answer: Annotated[
        int | None, Option(metavar="N", help="Longest answer that a request may ask for.  [default: no limit]")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="Longest prompt.  [default: the decoder's window]")
    ] = None,
    max_body: Annotated[int, Option(metavar="BYTES", help="Longest request.")] = 4 << 20,
    max_requests: Annotated[int, Option(metavar="N", help="Maximum requests at a time.")] = 256,
    grace: Annotated[int, Option(metavar="S", min=0, help="Seconds for running answers to finish after SIGTERM.")] = 30,
) -> None:
    """Serve an index to OpenAI clients.

    Chats and completions read markers, which `POST /v1/compress` makes; it stores what is missing. With --retrieve,
    chats also take questions, to which the reply names its `sources`; the page at `/` asks them. Markers are of the
    scope of the request's API key. Without keys, the server answers only this machine, in the store's scope.
    """
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding.decoder import Decoder, quotes_by_default
    from ctx_compress_rag.indexing.index import open_index
    from ctx_compress_rag.indexing.retrieval import IndexRetrieval
    from ctx_compress_rag.marking.mark import Marking
    from ctx_compress_rag.server import run
    from ctx_compress_rag.server.app import create_app
    from ctx_compress_rag.server.guard import ServerLimits, find_api_keys
    from ctx_compress_rag.store import SoftContextStore

    options = shared.engine_options(engine, server_key, weights=weights, batch_size=batch_size)
    keys = find_api_keys(api_keys)
    if keys is not None and allowed_host:
        raise ConfigError(f"--allowed-host {allowed_host[0]}: with API keys, every name is served: leave it out")
    shared.check_options_apart(retrieve=retrieve, collection=collection)
    if ratio is not None and retrieve is None:
        raise ConfigError(f"--ratio {ratio} is for passages that are retrieved: give --retrieve N, too")
    limits = ServerLimits(max_body, max_requests, max_tokens, longest_answer)
    retrieval = None
    with ExitStack() as stack:
        listener = stack.enter_context(run.open_server_socket(host, port, keys is not None))
        if collection is None:
            found = stack.enter_context(open_index(index, bundle, device=device, dtype=dtype))
            served, opened = found.bundle, found.store
            if retrieve is not None:
                marking = Marking(opened, ratio)
                retrieval = IndexRetrieval(found, retrieve, marking, extractive=quotes_by_default(served, engine))
        elif bundle is None:
            raise ConfigError(f"--collection {collection} needs the bundle of its soft contexts: give --bundle")
        else:
            served = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
            opened = stack.enter_context(SoftContextStore(index, served, collection=collection))
            opened.warn_if_empty()
        name = served.config.name
        decoder = Decoder(served, opened, engine=engine, max_prompt_tokens=max_prompt_tokens, **options)
        app = create_app(decoder, keys, limits, allowed_host or (), retrieval)

        def started(url: str) -> None:
            page = url.removesuffix("v1")
            how = "clients send markers" if retrieval is None else f"clients send questions; a browser asks at {page}"
            print(f"serving {name!r} at {url}: {how}", flush=True)

        run.run_server(app, listener, grace=grace, started=started)
