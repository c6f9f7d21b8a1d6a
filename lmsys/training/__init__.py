"""What training a model needs beside the model."""
