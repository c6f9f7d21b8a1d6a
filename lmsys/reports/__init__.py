"""Tables, plots and a page from result files: `lmsys report`. Needs jinja2 and matplotlib, not torch.

`__main__.build` has the order: `load` reads the files, `views` holds a benchmark's cases, `layout` draws them as the
benchmark declares by the functions of `steps`, `answers` puts a summary in front, and `page` writes all into a folder.
"""
