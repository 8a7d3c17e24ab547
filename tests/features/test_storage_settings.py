"""``draftlake.toml``: what it may say, what wins over what, and that it never takes a secret."""

from pathlib import Path
from typing import Any

import fsspec.config
import pytest

from features.errors import InputError
from features.storage import Store
from features.storage_settings import (
    CONFIG_FILE,
    CONFIG_VARIABLE,
    Addressing,
    Reader,
    StorageSettings,
    parse_settings,
    read_settings,
    s3_options,
)

SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and nothing said elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name in (CONFIG_VARIABLE, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fsspec.config, "conf", {})
    return tmp_path


def written(folder: Path, text: str, name: str = CONFIG_FILE) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def storage(**values: Any) -> dict[str, Any]:
    return {"lake": {"storage": values}}


def test_without_a_file_everything_is_left_to_the_client() -> None:
    assert read_settings() == StorageSettings()
    assert s3_options({"key": "x"}) == {"key": "x"}


def test_every_setting_reaches_the_client_under_its_own_name(folder: Path) -> None:
    written(
        folder,
        """
        [lake.storage]
        endpoint_url = "https://minio.example:9000"
        region = "eu-central-1"
        profile = "lake"
        addressing_style = "path"
        server_side_encryption = "aws:kms"
        sse_kms_key_id = "alias/lake"
        reader = "s3fs"
        """,
    )
    assert read_settings().addressing_style is Addressing.PATH
    assert s3_options({}) == {
        "endpoint_url": "https://minio.example:9000",
        "profile": "lake",
        "reader": Reader.S3FS,
        "client_kwargs": {"region_name": "eu-central-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/lake"},
    }
    assert parse_settings(storage(anon=True), where="x").options() == {"anon": True}


def test_what_stands_nearer_to_the_lake_wins_key_by_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = {
        "endpoint_url": "http://fsspec:1",
        "client_kwargs": {"region_name": "fsspec", "verify": False},
        "anon": True,
    }
    monkeypatch.setattr(fsspec.config, "conf", {"s3": below})
    assert s3_options({}) == below
    written(folder, '[lake.storage]\nendpoint_url = "http://file:1"\nregion = "file"\n')
    from_file = s3_options({})
    assert from_file["endpoint_url"] == "http://file:1"
    assert from_file["client_kwargs"] == {"region_name": "file", "verify": False}
    assert from_file["anon"] is True
    given = s3_options({"client_kwargs": {"endpoint_url": "http://given:1"}})
    assert given["endpoint_url"] == "http://given:1"
    assert given["client_kwargs"] == {"region_name": "file", "verify": False}


def test_a_named_file_stands_for_the_one_in_the_folder_and_nothing_for_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, '[lake.storage]\nregion = "here"\n')
    other = written(folder, '[lake.storage]\nregion = "there"\n', "other.toml")
    assert read_settings().region == "here"
    monkeypatch.setenv(CONFIG_VARIABLE, str(other))
    assert read_settings().region == "there"
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    assert read_settings() == StorageSettings()
    monkeypatch.setenv(CONFIG_VARIABLE, str(folder / "absent.toml"))
    with pytest.raises(InputError, match="DRAFTLAKE_CONFIG names .*absent.toml, which cannot be read"):
        read_settings()


@pytest.mark.parametrize(
    "name",
    ["key", "secret", "token", "aws_secret_access_key", "AWS_SESSION_TOKEN", "access-key-id", "db_password"],
)
@pytest.mark.parametrize("table", ["", "[lake]\n", "[lake.storage]\n"])
def test_a_secret_in_the_file_is_refused_and_not_repeated(folder: Path, name: str, table: str) -> None:
    written(folder, f'{table}{name} = "{SECRET}"\n')
    with pytest.raises(InputError, match=f"'{name}' is a secret") as caught:
        Store.open("s3://bucket/lake")
    assert SECRET not in str(caught.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"endpoint": "http://x"}, "no setting 'endpoint'; expected addressing_style, anon"),
        ({"endpoint_url": "minio:9000"}, "endpoint_url must be http://HOST:PORT"),
        ({"endpoint_url": f"http://me:{SECRET}@minio"}, "without user, password"),
        ({"endpoint_url": f"http://minio/?X-Amz-Signature={SECRET}"}, "without user, password, query"),
        ({"endpoint_url": f"http://minio:{SECRET}"}, "endpoint_url must be"),
        ({"endpoint_url": f"http://[::{SECRET}"}, "endpoint_url must be"),
        ({"addressing_style": "dns"}, "must be one of auto, path, virtual; found 'dns'"),
        ({"server_side_encryption": "kms"}, "must be one of AES256, aws:kms"),
        ({"sse_kms_key_id": "x"}, "sse_kms_key_id needs server_side_encryption"),
        ({"server_side_encryption": "AES256", "sse_kms_key_id": "x"}, "sse_kms_key_id needs"),
        ({"anon": "yes"}, "anon must be true or false"),
        ({"anon": True, "profile": "x"}, "profile cannot be given too"),
        ({"region": 3}, "region must be a text"),
        ({"region": ""}, "region must be a text"),
        ({"reader": "rust"}, "must be one of auto, s3fs, obstore"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_settings(storage(**values), where="draftlake.toml")
    assert SECRET not in str(caught.value)
    assert str(caught.value).startswith("draftlake.toml: ")


@pytest.mark.parametrize("document", [{"lake": 3}, {"lake": {"storage": "x"}}])
def test_a_table_that_is_none_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a table"):
        parse_settings(document, where="x")


def test_a_misspelt_table_is_refused_and_not_passed_over() -> None:
    with pytest.raises(InputError, match=r"\[lake\] has no setting 'storrage'; expected storage"):
        parse_settings({"lake": {"storrage": {"region": "x"}}}, where="x")


def test_a_file_that_is_no_toml_is_refused_in_one_line(folder: Path) -> None:
    written(folder, f"[lake.storage\nsecret = {SECRET}\n")
    with pytest.raises(InputError, match="is no TOML") as caught:
        read_settings()
    assert SECRET not in str(caught.value)


def test_an_address_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(InputError, match="AWS_ENDPOINT_URL must be http://HOST:PORT"):
        s3_options({})


@pytest.mark.parametrize("url", [f"s3://me:{SECRET}@bucket/lake", "s3:///lake"])
def test_a_url_with_a_secret_or_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="expected s3://BUCKET/PREFIX") as caught:
        Store.open(url)
    assert SECRET not in str(caught.value)
