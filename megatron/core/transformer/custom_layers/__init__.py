"""A former path of Transformer Engine's names."""
