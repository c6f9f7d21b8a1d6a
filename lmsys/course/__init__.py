"""An assignment of CS336 as it lies in a folder: what is right, what is wrong, what is not written. docs/course.md."""
