"""What each step computes: pure functions of a state and of events, which know neither arrays nor a model."""

from jmx.serving.scheduling.scheduler import plan
from jmx.serving.scheduling.state import Drawn, End, Event, Plan, Settings, State, Submit, Tokens

__all__ = ["Drawn", "End", "Event", "Plan", "Settings", "State", "Submit", "Tokens", "plan"]
