"""Whole trainings, from the command line to the files they leave."""
