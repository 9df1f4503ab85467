"""Documents to a store: a recipe says what becomes of each, and `MaskBuilder` does it.

`config` and `recipes` are what users write · `conversation` marks what of a rendered chat is
trained · `encoding` makes ids and masks of it · `masks` puts records together · `plain` is the way
of text that needs none of this · `plan` cuts the input into works · `worker` does one, `part` is
what it makes, in `chunk`s · `pool` and `run` have them done by processes · `finish` puts parts in
their places · `pipeline` is all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.prepare.config import InputConfig, OutputConfig, PipelineConfig, ProcessingConfig
from penstock.prepare.outcome import Built, Dropped
from penstock.prepare.recipes import recipe

if TYPE_CHECKING:
    from penstock.prepare.masks import MaskBuilder
    from penstock.prepare.pipeline import Pipeline

__all__ = [
    "Built",
    "Dropped",
    "InputConfig",
    "MaskBuilder",
    "OutputConfig",
    "Pipeline",
    "PipelineConfig",
    "ProcessingConfig",
    "recipe",
]


def __getattr__(name: str) -> Any:
    if name == "MaskBuilder":  # it renders templates and tokenises; a recipe does not
        return import_module("penstock.prepare.masks").MaskBuilder
    if name == "Pipeline":
        return import_module("penstock.prepare.pipeline").Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
