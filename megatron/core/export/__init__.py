"""Models under other projects' names: the table of Hugging Face families, and the conversion of weights by it."""
