"""Token files, samples cut from them, and blends of corpora."""
