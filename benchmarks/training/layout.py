"""The layout of whole trainings: attention rows by strategies, their speed, memory and loss curves.

`lmsys.reports.layout` explains the keys and steps of a layout.
"""

from benchmarks.layouts import COMPILED, WORDS, Layout

ENDED = '("" if valid_loss is None else f"{valid_loss:.4f}") + f" ({curve_difference:.1e})"'
SAME = ["attention", "comparison"]
TRAINING: Layout = {
    "place": 100,
    "words": WORDS,
    "prepare": [
        ["said_also", '"one process (none) accumulates the batches of all ranks; cases run one after another"'],
        [
            "checked",
            ["context", "batch", "num_ranks", "train_tokens", "val_tokens", "epochs"],
            ["section", "size", "attention", "strategy", "row", "precision", "compile"],
        ],
        "quiet attention_label attention_peer strategy_peer global_batch world_size bucket_mb vocab_size".split(),
        ["fields", COMPILED],
        ["styled", "attention"],
        ["styled", "row", "strategy", "row"],
        [
            "ordered",
            "section",
            "size",
            "context",
            "batch",
            "num_ranks",
            "train_tokens",
            "val_tokens",
            "epochs",
            "precision",
            "compile",
            "attention",
            "row",
        ],
    ],
    "chapters": [
        {
            "title": "Training: {section}",
            "blocks": [
                {
                    "of": [
                        [
                            "cut",
                            "training-{section}-{size}-S{context}B{batch}-{precision}{way}-W{num_ranks}-T{train_tokens}x{epochs}",
                            "{size}, context {context}, batch {batch} of each of {num_ranks} ranks, {precision}{how}",
                        ],
                        ["greatest", "budget", "curve_budget"],
                        ["beside_baseline", "strategy", SAME],
                        [
                            "fields",
                            [
                                {
                                    "name": "right",
                                    "role": "detail",
                                    "of": 'f" (right: {budget:g} or less)" if budget else ""',
                                },
                                {
                                    "name": "speedup",
                                    "label": "Speed-up over {base}",
                                    "role": "detail",
                                    "about": "Median time of an epoch by the strategy {base} over that of the row",
                                    "shown": "×",
                                    "of": 'beside["time_s"] / time_s',
                                },
                            ],
                        ],
                        ["beside_baseline", "strategy", SAME, "none"],
                        [
                            "fields",
                            [
                                {
                                    "name": "efficiency",
                                    "label": "scaling",
                                    "role": "detail",
                                    "about": "Tokens/s of a rank over those of {base}",
                                    "shown": "%",
                                    "of": 'beside["time_s"] / time_s / world_size',
                                },
                                {"name": "ended", "label": "Loss", "role": "detail", "of": ENDED},
                            ],
                        ],
                    ],
                    "lead": [
                        ["pivot", ["tokens_per_s"], ["attention"], "row", {"word": "rate"}],
                        ["bars", ["tokens_per_s"], "row", "attention", "rate"],
                        ["pivot", ["speedup"], ["attention"], "row", {"word": "speedup"}],
                        ["lines", ["speedup"], "row", "attention", "chain", {"ceilings": {"speedup": ["", 1.0]}}],
                        [
                            ["fields", [{"name": "plain", "role": "detail", "of": 'without(row, "-reproducible")'}]],
                            ["matched", "plain_case", "row", "plain", SAME],
                            ["only", 'ends(row, "-reproducible")'],
                            [
                                "fields",
                                [
                                    {
                                        "name": "cost",
                                        "label": "Cost of the same bits",
                                        "role": "detail",
                                        "about": "Median time of an epoch over that of the same row without"
                                        " --reproducible",
                                        "shown": "×",
                                        "of": 'time_s / plain_case["time_s"]',
                                    }
                                ],
                            ],
                            ["pivot", ["cost"], ["attention"], "row", {"word": "cost", "data": ["weights"]}],
                        ],
                        [
                            "pivot",
                            ["ended"],
                            ["attention"],
                            "row",
                            {
                                "word": "loss",
                                "about": "Loss after the last epoch on {val_tokens} held-out tokens, nats; in brackets"
                                " how far the loss of a step was at most from that of naive attention in one process,"
                                " over the first 100 steps{right}",
                                "data": ["valid_loss", "loss", "curve_difference", "norm_difference"],
                            },
                        ],
                        [
                            ["points", "step", "height", "curve_losses", "curve_steps"],
                            [
                                "fields",
                                [
                                    {"name": "step"},
                                    {
                                        "name": "curve_losses",
                                        "unit": "nats",
                                        "label": "Loss by step",
                                        "about": "The loss over the global batch by step, with one attention",
                                        "of": "abs(height or 0)",
                                    },
                                ],
                            ],
                            ["one_of_each", ["row", "step"]],
                            ["lines", ["curve_losses"], "step", "row", "curves"],
                        ],
                        [
                            ["points", "step", "height", "curve_differences", "curve_steps"],
                            [
                                "fields",
                                [
                                    {"name": "step"},
                                    {
                                        "name": "curve_differences",
                                        "unit": "nats",
                                        "label": "Loss beside the reference",
                                        "about": "How far the loss of a step is from that of naive attention in one"
                                        " process, for each strategy with the attention row that is farthest; where"
                                        " there is no point it is equal",
                                        "of": "abs(height or 0)",
                                    },
                                ],
                            ],
                            ["one_of_each", ["row", "step"], "curve_differences"],
                            [
                                "lines",
                                ["curve_differences"],
                                "step",
                                "row",
                                "differences",
                                {"ceilings": {"curve_differences": ["allowed", "budget"]}},
                            ],
                        ],
                    ],
                    "more": [
                        ["pivot", ["mean_s"], ["attention"], "row", {"word": "time"}],
                        ["bars", ["mean_s"], "row", "attention", "time"],
                        ["pivot", ["peak_bytes"], ["attention"], "row", {"word": "memory"}],
                        ["bars", ["peak_bytes"], "row", "attention", "memory"],
                        [
                            "listing",
                            ["attention", "row"],
                            ["mean_s", "speedup", "efficiency", "*", "-time_s"],
                            "runs",
                            "Every run",
                        ],
                    ],
                }
            ],
        }
    ],
}
