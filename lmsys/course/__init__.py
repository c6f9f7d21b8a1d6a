"""`lmsys course`: judges an assignment of CS336 in a folder, part by part. docs/course.md describes it.

parts.py lists the parts and judges them; basics.py, basics_training.py and systems.py ask the checkout's adapters;
checkout.py imports these. `measure`, in __main__.py, times the parts that are right.
"""
