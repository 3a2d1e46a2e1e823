"""What goes wrong with checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as asked: the message names the folder, the key and what differs."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut off or has other bytes than were written: the message names it."""
