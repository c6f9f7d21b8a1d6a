"""No synchronization: every rank trains for itself. The cost of the other strategies is measured against it."""

from lmsys.parallel.wrapper import Wrapper


class NoSync(Wrapper):
    """Gradients stay each rank's own."""

    synchronizes = False

    def _synchronize(self) -> None:
        """Does nothing."""
