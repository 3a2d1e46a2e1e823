"""What goes wrong with checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as asked: the message names the folder, the key and what differs."""
