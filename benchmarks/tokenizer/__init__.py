"""The rows of the tokenizer's benchmark: this library, and what a user would take instead. Imports no torch.

The trait `processes` says how many a row always has, whatever is asked.
"""

from lmsys.registry import Entry, Table


def _peer(name: str, cls: str, label: str) -> Entry:
    rows = "benchmarks.tokenizer.rows:"
    return Entry(name, rows + cls, label, peer=True, supports=f"{rows}{name}_supports", extra="peers")


TOKENIZERS = Table(
    "tokenizer",
    [
        Entry("lmsys", "benchmarks.tokenizer.rows:Ours", "this library"),
        Entry("lmsys_serial", "benchmarks.tokenizer.rows:Ours", "this library, one process", traits={"processes": 1}),
        _peer("tiktoken", "Tiktoken", "tiktoken"),
        _peer("huggingface", "HuggingFace", "Hugging Face tokenizers"),
    ],
)
