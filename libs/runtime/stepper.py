"""One step of one core, the same under both hosts: time never goes back, every invariant holds,
and a broken promise tells its story.
"""

from __future__ import annotations

from libs.actor import Core, Effect, Event
from libs.errors import InvariantError
from libs.runtime.story import Story, ids_of, summary_of


class Stepper:
    """Feeds one core."""

    def __init__(self, core: Core, *, validate: bool) -> None:
        self.core = core
        self.story = Story(core.name)
        self.now_ns = 0
        self._validate = validate

    def step(self, event: Event) -> list[Effect]:
        """Handle one event; raises `InvariantError` for anything the core did not foresee."""
        self.now_ns = max(self.now_ns, event.at_ns)
        try:
            effects = self.core.handle(event, self.now_ns)
            if self._validate:
                self.core.validate()
        except Exception as error:
            raise InvariantError(self._report(event, error)) from error
        self.story.add(self.now_ns, event, effects)
        return effects

    def _report(self, event: Event, error: Exception) -> str:
        lines = [f"{self.core.name} failed on {summary_of(event)}: {type(error).__name__}: {error}"]
        touched = sorted(ids_of(event))
        about_list: list[str | None] = [*touched] or [None]
        for about in about_list:
            lines += self.story.tell(about)[-20:]
        return "\n".join(lines)
