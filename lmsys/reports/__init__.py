"""Tables, plots and a page from result files: `lmsys report`. Needs jinja2 and matplotlib, not torch.

`__main__.build` calls the other modules in order: `load` reads the files; `views` holds the cases of a benchmark, which
are records of one row (an implementation) each; `layout` draws these cases by the functions of `steps` that the
benchmark's layout names; `answers` makes the summary at the top of the page; `page` writes all into a folder.
"""
