"""The content digest: the same for the same windows, however they came to lie where they lie."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from features.content import content_digest
from features.lake import Lake
from features.schema import FeatureDtype, FragmentLayout, TargetVersion
from features.testing import TINY_TARGET, commit_tiny, register_tiny_version, tiny_head, tiny_window
from features.windows import Window

HEAD = tiny_head()
WINDOWS = [tiny_window(HEAD, sample=n, num_rows=8 + n) for n in range(6)]


def lake_of(folder: Path, *fragments: list[Window]) -> Lake:
    lake = Lake.init(str(folder), TINY_TARGET)
    head_id = register_tiny_version(lake, 0, HEAD)
    for windows in fragments:
        commit_tiny(lake, 0, head_id, windows)
    return lake


def test_fragments_their_order_and_repeated_windows_do_not_matter(tmp_path: Path) -> None:
    digests = {
        content_digest(lake_of(tmp_path / "one", WINDOWS)),
        content_digest(lake_of(tmp_path / "two", WINDOWS[3:], WINDOWS[:3])),
        content_digest(lake_of(tmp_path / "many", *([w] for w in reversed(WINDOWS)))),
        content_digest(lake_of(tmp_path / "twice", WINDOWS, WINDOWS[:2])),
    }
    assert len(digests) == 1


def test_features_do_not_matter(tmp_path: Path) -> None:
    rounded = [replace(w, aux=w.aux ^ 1, final=w.final ^ 1) for w in WINDOWS]
    found = content_digest(lake_of(tmp_path / "other", rounded))
    assert found == content_digest(lake_of(tmp_path / "one", WINDOWS))


@pytest.mark.parametrize(
    "change",
    [
        lambda ws: ws[1:],
        lambda ws: [*ws[:-1], tiny_window(HEAD, sample=9)],
        lambda ws: [
            replace(ws[0], token_ids=np.append((ws[0].token_ids[:-1] + 1) % 60, ws[0].token_ids[-1])),
            *ws[1:],
        ],
        lambda ws: [replace(ws[0], sampled_mask=~ws[0].sampled_mask & (ws[0].token_ids >= 0)), *ws[1:]],
        lambda ws: [replace(ws[0], meta=replace(ws[0].meta, group_id="another")), *ws[1:]],
    ],
    ids=["a window less", "another sample", "other tokens", "another mask", "another group"],
)
def test_what_a_window_is_matters(tmp_path: Path, change: Callable[[list[Window]], list[Window]]) -> None:
    one = content_digest(lake_of(tmp_path / "one", WINDOWS))
    assert content_digest(lake_of(tmp_path / "changed", change(WINDOWS))) != one


def test_layout_matters(tmp_path: Path) -> None:
    layout = FragmentLayout(layer_ids=(2, 4, 5), dtype=FeatureDtype.FLOAT32, hidden_size=16)
    wide = [tiny_window(HEAD, sample=n, num_rows=8 + n, layout=layout) for n in range(6)]
    narrow = lake_of(tmp_path / "narrow", WINDOWS)
    assert content_digest(lake_of(tmp_path / "wide", wide)) != content_digest(narrow)


def test_one_version_or_all(tmp_path: Path) -> None:
    lake = lake_of(tmp_path / "lake", WINDOWS)
    alone = content_digest(lake, TargetVersion(0))
    assert alone == content_digest(lake)
    later = tiny_head(1)
    commit_tiny(lake, 1, register_tiny_version(lake, 1, later), [tiny_window(later, version=1)])
    assert content_digest(lake, TargetVersion(0)) == alone
    assert content_digest(lake) != alone
