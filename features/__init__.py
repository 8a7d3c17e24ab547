"""The feature lake: what it holds, how it is written and read.

Where to go:

- ``errors``      every error raised on purpose, grouped by what a handler does
- ``schema``      value types and Arrow schemas: the words of the lake
- ``paths``       paths of objects and urls of stores, checked and printable
- ``storage``     the one place that talks to storage; ``create`` is its commit primitive
- ``s3_store``    a bucket behind it; ``s3_ranges`` reads it through obstore, ``s3_access`` says why it cannot be used
- ``storage_settings`` ``draftlake.toml``: settings that are no secret, and what wins over what
- ``cached_store`` fragments of a remote store through a local folder; ``read_cache``: the folder
- ``target``      what a target's directory says about its identity
- ``checkpoint``  a Hugging Face checkpoint tensor by tensor, refused when broken; writing safetensors
- ``bfloat16``    stored numbers to float32 and back
- ``digests``     how content is named: canonical JSON and tensor digests
- ``fragments``   a fragment's objects: ranged, checked reads
- ``seals``       the digest of a table's values inside its own file
- ``windows``     a window in memory, and its checks
- ``heads``       head snapshots: from final hidden state to logits
- ``head_delta``  a head as its difference to a keyframe, exact to the bit; ``head_store``: which is written when
- ``zarr_layout`` arrays as Zarr v3 shards whose rows are byte ranges; ``zarr_bfloat16`` for zarr-python
- ``aux_codec``   aux features in one byte each, and what that loses
- ``commits``     commit objects and token tables as bytes; ``documents``: the JSON ones
- ``writer``      data first, commit last
- ``stream_writer`` windows as they come: bounded memory, background uploads; ``stream_options``: its settings
- ``lake``        open a lake; versions, heads, windows
- ``catalog``     polars view of the commits: select, explain, revisions
- ``snapshots``   many commits read as one, and the tail beside it; ``snapshot_format``: their objects as bytes
- ``compaction``  makes snapshots, and deletes what they made superfluous
- ``revisions``   the rows of a lake revision, present or pinned
- ``content``     one digest over a lake's logical windows, however they came to lie where they lie
- ``selection``   an exact, hashed list of windows; read without polars
- ``quarantine``  refused input, with reasons and counts
- ``check``       a lake against its commits
- ``tombstones``  what was given up or is damaged, and is hidden from readers
- ``retention``   which versions may go, and letting them go; ``leases`` says who still reads
- ``gc``          data that no commit names: fenced, then deleted; ``survey``: what it decides from
- ``testing``     small synthetic lakes; ``testing_crash`` kills at every step, ``testing_s3`` is an S3 that can fail
- ``collect``     from rollouts and a target's forward to windows

This file imports nothing: the collector runs inside other people's trainers.
"""
