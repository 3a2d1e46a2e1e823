"""Pipeline schedules: plans are data (`schedule_plan`), one runner executes them (`schedule_runner`), `schedules` is the public entry."""

from .schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
