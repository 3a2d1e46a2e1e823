"""Raw text to token pairs, and what is done with whole pairs. Torch-free.

text_input ─► records (in the processes of workers) ─► pair_writer (in a working_folder) ─► pair_metadata: that story is told by prepare,
and progress reports on it. merging, verification and statistics take pairs that are there already.
"""
