"""Continuous batching: an engine whose slots requests join and leave between rounds, and batch jobs over files."""

from specjax.serving.engine import Engine, Event
from specjax.serving.metrics import EngineMetrics
from specjax.serving.requests import QueueFull, Request

__all__ = ["Engine", "EngineMetrics", "Event", "QueueFull", "Request"]
