"""What each step computes: pure functions of a state and of events, which know neither arrays nor a model."""

from jmx.serving.scheduling.scheduler import plan
from jmx.serving.scheduling.state import Block, Drawn, End, Event, Plan, Row, Settings, State, Submit

__all__ = ["Block", "Drawn", "End", "Event", "Plan", "Row", "Settings", "State", "Submit", "plan"]
