"""What the offline commands share."""

from __future__ import annotations

import dataclasses

import click

from moeserve import config, log
from moeserve.launch.children import LaunchError
from moeserve.llm import LLM


def open_llm(serve_config: config.ServeConfig) -> LLM:
    """The model, ready.

    Raises:
        click.ClickException: it could not start; the text says why.
    """
    log.setup("moeserve", serve_config.server.log_level)
    settings = {
        field.name: getattr(section, field.name)
        for section in (
            serve_config.model,
            serve_config.parallel,
            serve_config.experts,
            serve_config.cache,
            serve_config.scheduler,
        )
        for field in dataclasses.fields(section)
    }
    try:
        return LLM(**settings)
    except (LaunchError, ValueError) as error:
        raise click.ClickException(str(error)) from error
