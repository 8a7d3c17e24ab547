"""Prefect's view of the pipelines: names, retries, concurrency, run pages. No domain logic.

Where to go:

- ``retrain``          the ``retrain`` flow: pin, train, evaluate, gate, and when asked publish
- ``backfill``         the ``backfill`` flow: old rollouts to windows, a task for some partitions
- ``record``           what a run shows of itself: tags and the run page's table and report
- ``subprocess_step``  a pipeline step as its own process, watched and bound to its parent
- ``local_stack``      a Prefect server and worker on this machine
- ``commands``         ``draftlake flows ...``
- ``hooks``            lets a decision resume the runs that wait for it
- ``prefect.yaml``     the deployments

Only this package imports ``prefect``.
"""
