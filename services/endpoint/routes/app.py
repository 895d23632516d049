"""The app of an endpoint: vLLM's own front for what it serves, and the routes of sessions."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router as tokens_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.renderers.online_renderer import OnlineRenderer

from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.sessions.session import SessionError
from rolemesh.engine.sessions.store import Sessions
from rolemesh.engine.specs.sampling.endpoint import EndpointSpec
from rolemesh.services.endpoint.client import SamplerClient
from rolemesh.services.endpoint.replicas import Calls
from rolemesh.services.endpoint.routes import session_routes
from rolemesh.services.endpoint.routes.chat import SessionChat
from rolemesh.services.endpoint.routes.client_images import ClientImages
from rolemesh.services.endpoint.routes.guard import UNTRAINED, Guard
from rolemesh.services.endpoint.routes.parsers import tool_parser_of
from rolemesh.services.endpoint.routes.prompts import SessionPrompts
from rolemesh.services.endpoint.routes.tokenization import SessionTokenization
from rolemesh.services.endpoint.routes.tokens import NamedTokens


def make_app(
    spec: EndpointSpec,
    engine: Any,
    calls: Calls,
    sessions: Sessions,
    *,
    key: str | None,
    begun: Callable[[], None],
    images: ClientImages | None,
) -> FastAPI:
    """The app of an endpoint.

    Args:
        spec: Of the endpoint.
        engine: VLLM's LLMEngine, of which the front only reads.
        calls: On their way to what samples them.
        sessions: Those that are remembered.
        key: Of the endpoint; None: it asks for none.
        begun: Called on the loop when there is something to sample.
        images: Reads images of clients; None: the model takes none.

    Raises:
        ValueError: A parser or a template is not what it should be.
    """
    client = SamplerClient(engine, calls, sessions, max_waiting=spec.max_waiting_calls, begun=begun)
    template = None
    if spec.chat_template is not None:
        try:
            template = spec.chat_template.read_text()
        except OSError as error:
            raise ValueError(f"endpoint.chat_template cannot be read: {error}") from error
    parser = tool_parser_of(spec, engine)
    models = _Models(
        engine_client=client,
        base_model_paths=[
            BaseModelPath(name=name, model_path=str(engine.model_config.model))
            for name in (spec.model_name, f"{spec.model_name}{UNTRAINED}")
        ],
    )
    renderer = OnlineRenderer(
        client.model_config,
        client.renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        enable_auto_tools=parser is not None,
        tool_parser=parser,
        reasoning_parser=spec.reasoning_parser,
    )
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    state = app.state
    state.args = Namespace(sse_keep_alive_interval=0, log_error_stack=False)
    state.engine_client = client
    state.vllm_config = client.vllm_config
    state.enable_server_load_tracking = False
    state.sessions = sessions
    state.openai_serving_models = models
    state.online_renderer = renderer
    state.openai_serving_chat = SessionChat(
        client,
        models,
        "assistant",
        online_renderer=renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
        reasoning_parser=spec.reasoning_parser or "",
        enable_auto_tools=parser is not None,
        tool_parser=parser,
    )
    tokenizer: Any = client.renderer.get_tokenizer()
    prompts = SessionPrompts(
        Renderer(tokenizer, template=template), tokenizer, template=template, images=images
    )
    state.openai_serving_chat.prompts = prompts
    shown = template or str(getattr(tokenizer, "chat_template", None) or "")
    state.openai_serving_chat.renders_tools = re.search(r"\btools\b", shown) is not None
    state.openai_serving_chat_batch = None
    state.openai_serving_completion = OpenAIServingCompletion(
        client, models, online_renderer=renderer, request_logger=None
    )
    state.serving_tokens = NamedTokens(client, models, renderer, request_logger=None)
    state.serving_tokenization = SessionTokenization(
        models,
        renderer,
        chat_template=template,
        chat_template_content_format="auto",
        request_logger=None,
    )
    state.serving_tokenization.prompts = prompts
    for router in (models_router, chat_router, completion_router, tokens_router, tokenize_router):
        app.include_router(router)
    app.include_router(session_routes.router)
    app.add_api_route("/health", _health, methods=["GET"])
    init_exception_handler(app)
    app.exception_handler(SessionError)(_session_problem)
    app.add_middleware(Guard, sessions=sessions, key=key, max_body_bytes=spec.max_body_bytes)
    return app


class _Models(OpenAIServingModels):  # type: ignore[misc]
    """The policy under two names, of which one is shown: the other says how it is asked."""

    async def show_available_models(self) -> Any:
        shown = await super().show_available_models()
        shown.data = [card for card in shown.data if not card.id.endswith(UNTRAINED)]
        return shown


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _session_problem(request: Request, error: Exception) -> JSONResponse:
    problem = {"message": str(error), "type": "SessionError", "param": None, "code": 400}
    return JSONResponse({"error": problem}, status_code=400)
