"""Reading a selection at training speed: planned epochs, ranged reads into reused memory, exact resume.

Where to go:

- ``spec``     what a reader is told, and positions in an epoch
- ``table``    a selection's rows as columns, and what of a fragment is read at once
- ``plan``     which rank reads which windows at which step: a pure function of seed and epoch
- ``slabs``    memory that is used again when the last view of it is gone
- ``caches``   token tables and open files, kept between reads
- ``landing``  bytes from the store into slabs, checked as they land
- ``reader``   the pipeline: reads ahead, yields steps
- ``dataset``  the same as a PyTorch ``IterableDataset``, for loader processes; the only part that needs torch

``training.reader`` reads windows one by one, for loops that visit them in an order of their own.
"""
