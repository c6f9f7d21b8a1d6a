"""Everything that training a model needs except the model.

`__main__.py` is the command `lmsys train`; pipeline.py has its steps, of which one runs the training loop, loop.py. The
settings of all of them are in config.py. Users' own loops import the other files, such as optimizer.py, one by one.
"""
