"""No synchronization: every rank trains for itself. What the others' cost is measured against."""

from lmsys.parallel.wrapper import Wrapper


class NoSync(Wrapper):
    """Gradients stay each rank's own."""

    def _synchronize(self) -> None:
        """Nothing."""
