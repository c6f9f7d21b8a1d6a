"""The tests of collectives: what each is asked."""

from dataclasses import dataclass

from lmsys.bench import Case


@dataclass(frozen=True)
class CollectiveCase(Case):
    """An operation on so many megabytes, of 10^6 bytes, over so many ranks."""

    megabytes: int
    world_size: int
    backend: str

    @property
    def comparison(self) -> str:
        return f"{self.section}-W{self.world_size}-{self.backend}"

    @property
    def id(self) -> str:
        return f"{self.comparison}-{self.impl}-{self.megabytes}MB"

    @property
    def numel(self) -> int:
        """float32 elements of the whole tensor, a multiple of the world size."""
        return self.megabytes * 10**6 // 4 // self.world_size * self.world_size
