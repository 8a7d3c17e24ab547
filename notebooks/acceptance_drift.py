# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why did acceptance fall?
#
# A draft is trained on one state of the target and serves a later one. This notebook looks at a lake and
# the registry beside it, and answers three questions in order: **when** did acceptance fall (engine
# counters), **where** in the draft's proposal was it lost (positions), and **how far** had the target moved
# by then (head drift). It only reads.
#
# Point `DRAFTLAKE_LAKE` at a lake; the default is the demo's.

# %%
import os

import matplotlib.pyplot as plt
import polars as pl

from features.catalog import Catalog
from features.lake import Lake
from features.schema import SelectionFilter, Split
from pipelines.inspect import list_versions
from publish.registry import Registry
from publish.telemetry import pooled, read_telemetry
from training.drift import version_drift

STALE, FRESH = "#c44e52", "#2f7f5f"
lake = Lake.open(os.environ.get("DRAFTLAKE_LAKE", "draftlake-demo/lake"))
registry = Registry(lake.store, lake.target.target_id)
catalog = Catalog.load(lake)
print(f"{lake.target.target_id}: {catalog.summary()}; revision {catalog.revision.digest[:12]}")

# %%
versions = pl.DataFrame(list_versions(lake.url)).select("version", "windows", "tokens", "groups", "verified")
versions

# %% [markdown]
# ## When: acceptance as the engines counted it
#
# `tau = 1 + accepted / rounds`. Each interval is labelled with the target version and with the draft that
# the engine held, so the swap shows as a change of colour and nothing has to be guessed from times.

# %%
intervals = read_telemetry(lake.store)
counted = pl.DataFrame(
    [
        {
            "draft": i.draft_fingerprint[:8],
            "version": i.target_version,
            "label": i.label,
            "rounds": i.drafts,
            "tau": i.tau,
        }
        for i in intervals
    ]
).sort("version", "label")
counted

# %%
by_draft = {}
for interval in intervals:
    key = (interval.draft_fingerprint[:8], interval.target_version)
    by_draft.setdefault(key, []).append(interval)
measured = pl.DataFrame(
    [
        {"draft": draft, "version": version, "tau": pooled(part).tau}
        for (draft, version), part in sorted(by_draft.items())
    ]
)
first_draft = min(intervals, key=lambda i: i.started_at).draft_fingerprint[:8]
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (draft,), part in measured.group_by("draft", maintain_order=True):
    first = draft == first_draft
    label = f"{'first' if first else 'published'} draft ({draft})"
    axis.plot(part["version"], part["tau"], "o-", color=STALE if first else FRESH, label=label, markersize=7)
axis.set(xlabel="target version", ylabel="tau (engine counters)", title="Acceptance by version and draft")
axis.set_xticks(versions["version"].to_list())
axis.grid(alpha=0.3)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Where: which position of the proposal was lost
#
# The share of rounds in which the draft token at position *i* was accepted, for the first draft. If position 1
# falls, the draft no longer knows the target; if only later positions fall, it has lost the thread of its own
# proposals and more training-time-test steps may help.

# %%
rates = pl.DataFrame(
    [
        {"version": version, "position": position + 1, "accepted": count / total.drafts}
        for (draft, version), part in sorted(by_draft.items())
        if draft == first_draft
        for total in [pooled(part)]
        for position, count in enumerate(total.accepted_per_position)
    ]
)
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
shades = ["#1f3b57", "#4c7fb0", "#a8c8e4", "#c9c9c9"]
for (position,), part in rates.group_by("position", maintain_order=True):
    axis.plot(
        part["version"],
        part["accepted"],
        "o-",
        color=shades[min(position, 4) - 1],
        label=f"position {position}",
    )
axis.set(
    xlabel="target version",
    ylabel="share of rounds",
    title="First draft: accepted by position",
    ylim=(0, None),
)
axis.set_xticks(versions["version"].to_list())
axis.grid(alpha=0.3)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The same, offline: every draft on every version
#
# Offline walks of held-out groups repeat the engine's rounds for any draft, also for one that was never served.
# Bars are 95 % intervals (bootstrap over rollout groups).

# %%
walks = []
for digest in registry.digests():
    for report in registry.evaluations(digest):
        if report.split == "held_out" and len(report.by_version) > 1:
            walks += [
                {
                    "draft": digest[:8],
                    "trained_on": str(registry.manifest(digest).versions),
                    "version": v,
                    **t.tau.model_dump(),
                }
                for v, t in report.by_version.items()
            ]
offline = pl.DataFrame(walks).sort("draft", "version")
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for number, ((draft, trained_on), part) in enumerate(
    offline.group_by("draft", "trained_on", maintain_order=True)
):
    errors = [part["value"] - part["low"], part["high"] - part["value"]]
    place = part["version"] + 0.06 * number
    axis.errorbar(
        place, part["value"], yerr=errors, fmt="o-", capsize=3, label=f"{draft}, trained on {trained_on}"
    )
axis.set(
    xlabel="target version", ylabel="tau (offline walk)", title="Each draft on each version, held-out groups"
)
axis.set_xticks(versions["version"].to_list())
axis.grid(alpha=0.3)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## How far: the target's head against its first version
#
# Relative L2 distance and row-wise cosine of the LM head. Linear CKA would stay at 1.0 under a rotation that
# already breaks a draft, so it is not used. Distances of states and the KL of distributions need rollouts that
# were replayed under both versions (`shared_tokens`); without any they are null, not guessed.

# %%
selection = catalog.select(SelectionFilter(split=Split.ALL))
pairs = [(versions["version"][0], v) for v in versions["version"][1:]]
drift = pl.DataFrame([d.as_row() for d in version_drift(lake, selection, pairs=pairs)])
drift.select("older", "newer", "lm_head_relative_l2", "lm_head_cosine", "kl", "shared_tokens")

# %%
stale = measured.filter(pl.col("draft") == first_draft)
together = stale.join(drift, left_on="version", right_on="newer").sort("version")
figure, axis = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
start = stale.filter(pl.col("version") == pairs[0][0])["tau"].to_list()
axis.plot([0.0, *together["lm_head_relative_l2"]], [*start, *together["tau"]], "o-", color=STALE)
axis.margins(0.1)
for row in together.iter_rows(named=True):
    place = (row["lm_head_relative_l2"], row["tau"])
    axis.annotate(f"v{row['version']}", place, textcoords="offset points", xytext=(6, 6))
axis.set(
    xlabel="head moved since v0 (relative L2)",
    ylabel="tau of the first draft",
    title="Acceptance against drift",
)
axis.grid(alpha=0.3)
plt.show()

# %%
assert measured["tau"].is_finite().all()
assert drift["lm_head_relative_l2"].is_sorted(), "the head should move further away with every version"
assert set(together["version"]) == {newer for _, newer in pairs}
