"""From datasets to the batches of each data-parallel rank."""
