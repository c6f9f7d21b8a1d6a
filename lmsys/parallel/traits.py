"""Values of traits that several strategies share: reasons why a strategy cannot do something, as users read them.

A trait is a fact about a strategy, an attribute of its class: `lmsys.traits.StrategyTraits` explains each. fsdp.py,
zero1.py and peers.py use these values.
"""

# Of `why_not_fused`.
SURROUNDS_BLOCKS = "it waits for the parameters of a block when that is called, and fused blocks are not called"
# Of `why_not_graphed`, for strategies that divide parameters among ranks (ZeRO stage 3).
RESIZES_PARAMETERS = (
    "it allocates and frees whole parameters inside of every step, and the memory of what a CUDA graph replays stays"
    " where it is: --compile compiled runs it"
)
