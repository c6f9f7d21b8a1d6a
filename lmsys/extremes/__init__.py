"""Inputs as training has them and a normal draw has not: what is drawn for each family, in one place."""
