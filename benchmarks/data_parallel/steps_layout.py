"""The layout of the report on training steps of large models: speed, memory, where time goes, and losses.

`bench_steps.py` declares STEPS as its `layout`; result files carry it, and `lmsys report` draws it. It is plain data:
to change or add a table or plot, edit its "lead" and "more"; then `python -m dev.layouts` writes it into the committed
results. `lmsys/reports/layout.py` explains these keys and "prepare", and `benchmarks/layouts.py` the steps, `word` and
the signs in lists of fields, such as "model?". A *step* of a layout is a list that begins with a name, such as
["only", "time_s"]; it has nothing to do with training steps.
"""

from benchmarks.layouts import COMPILED, KEPT, WORDS, Layout

# The first columns of all tables here.
STEP_KEYS = ["size", "context", "strategy", "model?", "optimizer?", "checkpoint?", "residual?", "compile?"]
STEPS: Layout = {
    "place": 80,  # the page has the benchmarks in the order of these numbers
    "words": WORDS,  # {field: {value: the word that the page shows for it}}
    "prepare": [
        # Adds a text to the end of captions. The argument is an expression, so the text in it has quotes of its own.
        ["said_also", '"each row had the GPUs to itself, one after another"'],
        # Older files lack these axes: their cases get the value that stands third. It comes first in reading order, the
        # order in tables and legends. The list after it may name values that come next; [] names none. False: captions
        # state the model even if it is "ours" in all cases.
        *KEPT,
        ["defaulted", "model", "ours", [], False],
        ["defaulted", "optimizer", "adamw"],
        # Refuses cases in which a field of the first list is not a number, or a field of the second is not a text.
        [
            "checked",
            ["context", "batch", "world_size", "steps"],
            ["section", "size", "precision", "compile", "strategy"],
        ],
        ["fields", COMPILED],  # adds `way` and `how`: how blocks are compiled, in file names and in headings
        ["styled", "impl", "strategy"],  # gives each `impl` the colour and marker of its strategy
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
                            ["named", "steps-{section}"],  # goes into file names
                            # Adds `peer_s`: the least `time_s` of the cases of torch's rows ("peer") that share this
                            # case's `comparison`.
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
                            ["only", "time_s"],  # an expression: cases with a time
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
                            # Splits cases by the fields in braces. The first text goes into file names, the second
                            # into headings.
                            ["cut", "steps-{section}-{size}-S{context}", "{size}, context {context}"],
                            ["only", "time_s"],
                            # Replaces each case by one for each number of its list `losses`. The number goes into the
                            # field `loss`, and its place in the list, from 1 on, into `step`.
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
