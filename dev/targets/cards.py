"""CARDS: kinds of GPUs, and how much of a multiprocessor a block of threads may take. A new card is a line in CARDS.

The other files here use it: `__main__.py` lists the cards, and `recording.py` compiles kernels for one of them.

Sources: NVIDIA's CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", and AMD's CDNA 3
instruction set architecture, chapter 3; the numbers of multiprocessors are from the cards' data sheets.
"""

from dataclasses import dataclass

KIB = 1024
FLOAT8 = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True)
class Card:
    """A kind of GPU: all products that have one architecture, for which the compiler makes equal binaries.

    arch             the compiler's name, such as sm_86 or gfx942
    names            the names of products, such as "H100, H200"
    block_bytes      the most bytes of shared memory that a block may have
    shared_bytes     bytes of shared memory of a multiprocessor
    threads, blocks  the most threads and blocks that a multiprocessor holds at once
    processors       the number of multiprocessors of the first product in `names`
    lacks            dtypes that its tensor cores do not multiply
    """

    arch: str
    names: str
    block_bytes: int
    shared_bytes: int
    threads: int
    blocks: int
    processors: int
    lacks: tuple[str, ...] = ()

    @property
    def is_nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability (major, minor) as torch gives it, for AMD's cards too: (9, 4) for gfx942."""
        digits = self.arch.removeprefix("sm_") if self.is_nvidia else self.arch[3:5]
        return int(digits[:-1]), int(digits[-1])

    @property
    def warp(self) -> int:
        return 32 if self.is_nvidia else 64

    def held(self, registers: int, shared_bytes: int, warps: int) -> int:
        """How many blocks a multiprocessor holds at once; 0 if a block does not fit.

        A block has `warps` warps, `registers` registers for each thread, and `shared_bytes` of shared memory.
        """
        if shared_bytes > self.block_bytes:
            return 0
        # From compute capability 8.0 on, CUDA reserves 1 KiB of shared memory for each block.
        reserved = KIB if self.is_nvidia and self.capability >= (8, 0) else 0
        by_shared = self.shared_bytes // max(shared_bytes + reserved, 1)
        by_threads = self.threads // (self.warp * warps)
        # How many warps the registers are enough for. NVIDIA: a multiprocessor has 64 Ki registers, given to warps in
        # units of 256, and four schedulers, which hold equally many warps. AMD: each of four schedulers has 512
        # registers for each lane of a warp, given in units of 8.
        of_warp = -(-max(registers, 1) * 32 // 256) * 256
        by_registers = 64 * KIB // of_warp // 4 * 4 if self.is_nvidia else 4 * (512 * 32 // of_warp)
        return min(self.blocks, by_shared, by_threads, by_registers // warps)


CARDS = {
    card.arch: card
    for card in (
        Card("sm_75", "T4, RTX 2080", 64 * KIB, 64 * KIB, 1024, 16, 40, ("bfloat16", *FLOAT8)),
        Card("sm_80", "A100, A30", 163 * KIB, 164 * KIB, 2048, 32, 108, FLOAT8),
        Card("sm_86", "RTX 3090, A10, A6000", 99 * KIB, 100 * KIB, 1536, 16, 82, FLOAT8),
        Card("sm_89", "RTX 4090, L4, L40S", 99 * KIB, 100 * KIB, 1536, 24, 128),
        Card("sm_90", "H100, H200", 227 * KIB, 228 * KIB, 2048, 32, 132),
        Card("sm_100", "B200, GB200", 227 * KIB, 228 * KIB, 2048, 32, 148),
        Card("sm_120", "RTX 5090", 99 * KIB, 100 * KIB, 1536, 24, 170),
        Card("gfx942", "MI300X", 64 * KIB, 64 * KIB, 2048, 32, 304, FLOAT8),
    )
}
