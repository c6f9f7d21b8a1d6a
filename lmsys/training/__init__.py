"""Everything that training a model needs except the model."""
