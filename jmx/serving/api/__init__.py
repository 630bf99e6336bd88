"""The HTTP API: OpenAI's endpoints for completions and chat, health, metrics, and a page to try the model."""

from jmx.serving.api.app import make_app
from jmx.serving.api.service import Service

__all__ = ["Service", "make_app"]
