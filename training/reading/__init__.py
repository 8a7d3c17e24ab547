"""Reading a selection at training speed: planned epochs, ranged reads into reused memory, exact resume.

Where to go:

- ``spec``     what a reader is told, and positions in an epoch
- ``table``    a selection's rows as columns, and what of a fragment is read at once
- ``plan``     which rank reads which windows at which step: a pure function of seed and epoch
- ``slabs``    memory that is used again when the last view of it is gone
- ``caches``   token tables and open files, kept between reads
- ``landing``  bytes from the store into slabs, checked as they land
- ``reader``   the pipeline: reads ahead, yields steps
- ``lease``    what retention must leave alone meanwhile
- ``dataset``  the same as a PyTorch ``IterableDataset``, for loader processes
- ``transfer`` page-locked memory and asynchronous copies to an accelerator

Only ``dataset`` and ``transfer`` need torch. The slow and readable reference of what is read is
``Lake.read_window``: windows are equal to its, bit for bit.
"""
