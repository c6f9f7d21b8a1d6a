"""`lse.attend_with_lse` as a call at which torch.compile breaks its graph.

`custom_ops.flash` imports this file only while torch.compile traces: `torch.compiler.disable` imports the compiler,
which takes about a second.
"""

import torch

from lmsys.attention import lse

attend_with_lse = torch.compiler.disable(lse.attend_with_lse)
