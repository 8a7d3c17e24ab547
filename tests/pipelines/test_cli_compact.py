"""compact at the command line: plans, exit codes, JSON; what it prunes is tested with the snapshots."""

from pathlib import Path

from command_outcome import Cli, objects

from features.testing import commit_tiny, tiny_head, tiny_lake, tiny_window


def test_compact_says_first_then_does_and_then_has_nothing_to_do(cli: Cli, tmp_path: Path) -> None:
    url = tmp_path / "lake"
    lake = tiny_lake(str(url), versions=2, samples_per_version=4)
    before = objects(url)
    planned = cli("compact", "--lake", url, "--dry-run", "--json")
    assert (planned.code, planned.json["outcome"], planned.json["new_commits"]) == (0, "planned", 2)
    assert objects(url) == before
    shown = cli("show", "lake", "--lake", url, "--json").json
    done = cli("compact", "--lake", url, "--json")
    assert done.code == 0
    assert {k: done.json[k] for k in ("outcome", "snapshot", "windows", "new_commits", "pruned_commits")} == {
        "outcome": "written", "snapshot": 1, "windows": 8, "new_commits": 2, "pruned_commits": 0,
    }  # fmt: skip
    assert cli("show", "lake", "--lake", url, "--json").json == shown
    again = cli("compact", "--lake", url)
    assert again.code == 4
    commit_tiny(lake, 0, tiny_head().head_id, [tiny_window(tiny_head(), sample=9)])
    assert cli("compact", "--lake", url, "--min-commits", 2).code == 4


def test_a_grace_too_short_for_writers_is_refused_before_anything_is_written(
    cli: Cli, tmp_path: Path
) -> None:
    url = tmp_path / "lake"
    tiny_lake(str(url), versions=1, samples_per_version=2)
    before = objects(url)
    refused = cli("compact", "--lake", url, "--grace-hours", 0)
    assert refused.code == 2
    assert "--force" in refused.err
    assert objects(url) == before
    forced = cli("compact", "--lake", url, "--grace-hours", 0, "--force", "--json")
    assert (forced.code, forced.json["pruned_commits"]) == (0, 1)
    assert cli("show", "lake", "--lake", url, "--json").json["windows"] == 2
