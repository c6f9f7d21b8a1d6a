"""Values of traits (see `lmsys.traits.StrategyTraits`) that several strategies share: reasons, as users read them."""

SURROUNDS_BLOCKS = "it waits for the parameters of a block when that is called, and fused blocks are not called"
RESIZES_PARAMETERS = (  # why_not_graphed of strategies of stage 3
    "it allocates and frees whole parameters inside of every step, and the memory of what a CUDA graph replays stays"
    " where it is: --compile compiled runs it"
)
