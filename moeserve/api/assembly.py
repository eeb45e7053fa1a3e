"""Puts the HTTP process together: the only place where its parts meet."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from moeserve.api.app import build_app
from moeserve.api.chat_template import load_chat_template
from moeserve.api.convert import load_sampling_defaults
from moeserve.api.encoder import TextEncoder
from moeserve.api.engine_client import EngineClient
from moeserve.api.process import HttpProcessConfig
from moeserve.api.rank_links import CurveKeys, RankLinks
from moeserve.api.server import Server
from moeserve.api.service import Service
from moeserve.api.tokenizer import Tokenizer, tokenizer_folder
from moeserve.config import ModelConfig, resolve_model_path
from moeserve.metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HttpProcess:
    """A process that is ready to connect and serve."""

    process: HttpProcessConfig
    encoder: TextEncoder
    sampling_defaults: dict[str, float]

    def run(self, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
        """Serves until told to stop; ``on_ready`` is called when all ranks have answered."""
        uvloop.run(self._serve(listener, on_ready))

    async def _serve(self, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        config = self.process.config
        name = config.model.served_model_name or config.model.model
        metrics = Metrics(prefix=config.server.metrics_prefix, model_name=name)
        links = RankLinks(
            self.process.rank_endpoints,
            control_endpoint=self.process.control_endpoint,
            keys=self._keys(),
        )
        client = EngineClient(config, links, metrics, on_drain=lambda s: server.drain(s))
        service = Service(config, client, self.encoder, metrics, self.sampling_defaults)
        app = build_app(service, config.server)
        server = Server(app, client, config.server.shutdown_timeout)
        client.start()
        waiting = asyncio.create_task(_when_ready(client, on_ready))
        await server.serve([listener])
        waiting.cancel()
        client.close()
        self.encoder.close()

    def _keys(self) -> CurveKeys | None:
        public, secret = self.process.curve_public, self.process.curve_secret
        return CurveKeys(public, secret) if public and secret else None


async def _when_ready(client: EngineClient, on_ready: Callable[[], None]) -> None:
    await client.wait_ready()
    on_ready()


def assemble(process: HttpProcessConfig) -> HttpProcess:
    """Loads what the process needs before it can serve.

    Raises:
        TokenizerError: tokenizer, chat template or generation config can not be used.
        ConfigError: the model's folder is not there.
    """
    model = process.config.model
    defaults = load_sampling_defaults(resolve_model_path(model.model))
    if model.skip_tokenizer_init:
        return HttpProcess(process, TextEncoder(None, None), defaults)
    encoder = TextEncoder(Tokenizer.from_config(model), _chat_template(model))
    return HttpProcess(process, encoder, defaults)


def _chat_template(model: ModelConfig) -> str | None:
    override = Path(model.chat_template) if model.chat_template else None
    template = load_chat_template(tokenizer_folder(model), override)
    if template is None:
        logger.warning("the model has no chat template: /v1/chat/completions needs one; "
                       "give it with --chat-template")  # fmt: skip
    return template
