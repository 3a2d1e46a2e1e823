"""How `save` and `load` divide their work among ranks, by the names that Megatron-LM's users know."""
