"""The layout of training steps of large models, of which each row had the GPUs to itself.

`lmsys.reports.layout` explains the keys and steps of a layout.
"""

from benchmarks.layouts import COMPILED, KEPT, WORDS, Layout

STEP_KEYS = ["size", "context", "strategy", "model?", "optimizer?", "checkpoint?", "residual?", "compile?"]
STEPS: Layout = {
    "place": 80,
    "words": WORDS,
    "prepare": [
        ["said_also", '"each row had the GPUs to itself, one after another"'],
        *KEPT,
        ["defaulted", "model", "ours", [], False],
        ["defaulted", "optimizer", "adamw"],
        [
            "checked",
            ["context", "batch", "world_size", "steps"],
            ["section", "size", "precision", "compile", "strategy"],
        ],
        ["fields", COMPILED],
        ["styled", "impl", "strategy"],
        [
            "ordered",
            "section",
            "num_parameters",
            "context",
            "batch",
            "world_size",
            "steps",
            "strategy",
            "model",
            "optimizer",
            "checkpoint",
            "residual",
            "compile",
        ],
    ],
    "chapters": [
        {
            "title": "Training steps: {section}",
            "blocks": [
                {
                    "title": "",
                    "lead": [
                        [
                            ["named", "steps-{section}"],
                            ["least", "peer_s", "time_s", "comparison", "peer"],
                            [
                                "fields",
                                [
                                    {
                                        "name": "over_peer",
                                        "label": "Speed over torch's",
                                        "role": "detail",
                                        "about": "Time of torch's fastest row of this model over that of the row; they"
                                        " ran one after another",
                                        "shown": "×",
                                        "of": "peer_s / time_s",
                                    }
                                ],
                            ],
                            [
                                "listing",
                                STEP_KEYS,
                                [
                                    "time_s",
                                    "tokens_per_s",
                                    "over_peer",
                                    "mfu",
                                    "matmul_ceiling_fraction",
                                    "sustained_ceiling_fraction",
                                ],
                                "speed",
                                "Speed, and share of what the GPUs reach",
                            ],
                        ],
                        [
                            ["named", "steps-{section}"],
                            ["only", "time_s"],
                            [
                                "listing",
                                STEP_KEYS,
                                ["held_bytes", "peak_bytes", "total_bytes", "first_loss", "last_loss"],
                                "memory",
                                "Memory of a rank, and the losses",
                            ],
                        ],
                        [
                            ["named", "steps-{section}"],
                            ["only", "time_s"],
                            [
                                "listing",
                                STEP_KEYS,
                                [
                                    "profiled_s",
                                    "matmul_s",
                                    "attention_s",
                                    "elementwise_s",
                                    "reduction_s",
                                    "copy_s",
                                    "other_s",
                                    "optimizer_s",
                                    "exposed_s",
                                    "power_w!",
                                    "sm_clock_mhz!",
                                ],
                                "kinds",
                                "Where the time goes",
                            ],
                        ],
                    ],
                    "more": [
                        [
                            ["cut", "steps-{section}-{size}-S{context}", "{size}, context {context}"],
                            ["only", "time_s"],
                            ["points", "step", "loss", "losses"],
                            [
                                "fields",
                                [
                                    {"name": "step", "label": "step"},
                                    {
                                        "name": "loss",
                                        "unit": "nats",
                                        "label": "Loss",
                                        "about": "Loss of each timed step, all on one batch: of a right step it falls",
                                    },
                                ],
                            ],
                            ["lines", ["loss"], "step", {"word": "losses", "xlabel": "step"}],
                        ]
                    ],
                }
            ],
        }
    ],
}
