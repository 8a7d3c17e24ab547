"""Historical rollouts: files of RL frameworks and engines, as :class:`~features.collect.rollouts.Rollout`.

    partitions = open_source(["s3://runs/a/*.jsonl.gz"], format=None, options=SourceOptions())
    for partition in partitions:
        for item in read_partition(partition, options):  # Rollout | Refusal
            ...

Where to go: ``partitions`` (what is read, with which statements of the user), ``opening`` and
``reading``, ``files`` (names and bytes), ``lines`` (lines and row groups), ``formats`` (the table of
formats), ``records`` and ``row`` (typed fields of a foreign record), ``versions`` (which weights
sampled it), ``normalised`` (the same records as Arrow), and one module per source. Pickles are never
opened.
"""

from features.collect.sources.opening import open_source
from features.collect.sources.partitions import SourceCounts, SourceOptions, SourcePartition
from features.collect.sources.reading import read_partition

__all__ = ["SourceCounts", "SourceOptions", "SourcePartition", "open_source", "read_partition"]
