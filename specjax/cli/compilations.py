"""What JAX compiled while a command ran, for ``--verbose``."""

import dataclasses

COMPILED = "/jax/core/compile/backend_compile_duration"
FOUND = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass
class Compilations:
    """Counts, from :meth:`watch` on.

    Attributes:
      programs: programs that were compiled, or found compiled.
      found: those of them that were in the user's cache folder.
      seconds: of compiling and of fetching.

    Example:
      >>> str(Compilations(programs=12, found=10, seconds=1.5))
      'compiled 2 programs and fetched 10 compiled ones in 1.5 s'
    """

    programs: int = 0
    found: int = 0
    seconds: float = 0.0

    def watch(self) -> None:
        """Counts from now on to the end of the process."""
        import jax

        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)

    def _event(self, event: str, **_) -> None:
        self.found += event == FOUND

    def _duration(self, event: str, duration_secs: float, **_) -> None:
        if event == COMPILED:
            self.programs += 1
            self.seconds += duration_secs

    def __str__(self) -> str:
        return f"compiled {self.programs - self.found} programs and fetched {self.found} compiled ones in {self.seconds:.1f} s"
