"""Tables, plots and a page from result files: `lmsys report`. Needs jinja2 and matplotlib, not torch.

A benchmark is reported by the fields that it declares; one that has a chapter of its own is in `chapters`.
"""
