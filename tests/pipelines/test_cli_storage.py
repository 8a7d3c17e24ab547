"""Every command on S3 by settings alone, what a bucket that cannot be used is answered, and no secret anywhere."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_outcome import Cli

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from features.lake import Lake
from features.storage import Store
from features.testing import tiny_lake
from features.testing_s3 import ServedS3

pytestmark = pytest.mark.s3

DRAFTLAKE = Path(sys.executable).with_name("draftlake")
KEY, SECRET, TOKEN = "AKIATESTKEY0001", "wJalrSECRETsecretSECRET0001", "FwoTOKENtokenTOKENtoken0001"
VERBS = (
    ("ls",), ("show", "lake"), ("show", "heads"), ("explain",), ("registry", "ls"), ("compact",), ("gc",),
    ("retain", "--keep-versions", "5"), ("fsck", "--level", "2"), ("doctor",),
)  # fmt: skip
ENCRYPTION = "x-amz-server-side-encryption"


@pytest.fixture(scope="module")
def s3() -> Iterator[ServedS3]:
    with ServedS3(access_key=KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: ServedS3) -> None:
    """A working folder with settings of the served S3, and credentials of one user."""
    import s3fs

    for name in [n for n in os.environ if n.startswith(("AWS_", "FSSPEC_", "DRAFTLAKE_"))]:
        monkeypatch.delenv(name)
    aws = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": str(tmp_path / "aws"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }  # fmt: skip
    for name, value in aws.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()  # clients of other environments
    monkeypatch.chdir(tmp_path)
    settings(tmp_path, s3.endpoint)
    s3.reset()


def settings(folder: Path, endpoint: str, more: str = "") -> None:
    (folder / "draftlake.toml").write_text(
        f'[lake.storage]\nendpoint_url = "{endpoint}"\nregion = "us-east-1"\naddressing_style = "path"\n{more}'
    )


@pytest.fixture(scope="module")
def bucket(s3: ServedS3) -> str:
    return s3.make_bucket("settled")


def test_every_command_works_on_s3_by_settings_alone(cli: Cli, bucket: str) -> None:
    url = f"{bucket}/verbs"
    tiny_lake(url, versions=2, samples_per_version=2)
    for verb in VERBS:
        done = cli(*verb, "--lake", url, "--json")
        assert done.code in (0, 4), (verb, done.err)
        assert done.json is not None
    assert cli("show", "lake", "--lake", url, "--json").json["windows"] == 4


def test_doctor_says_which_service_and_encryption_are_used(
    cli: Cli, bucket: str, s3: ServedS3, tmp_path: Path
) -> None:
    settings(tmp_path, s3.endpoint, 'server_side_encryption = "AES256"\nreader = "s3fs"\n')
    tiny_lake(f"{bucket}/doctor", versions=1, samples_per_version=1)
    findings = cli("doctor", "--lake", f"{bucket}/doctor", "--json").json["findings"]
    (found,) = [finding["found"] for finding in findings if finding["what"] == "storage"]
    assert found == f"{bucket}/doctor at {s3.endpoint}; encryption: AES256; ranges read by s3fs"


def test_settings_of_the_environment_do_as_well(
    cli: Cli, bucket: str, s3: ServedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draftlake.toml").unlink()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    tiny_lake(f"{bucket}/environment", versions=1, samples_per_version=2)
    assert cli("show", "lake", "--lake", f"{bucket}/environment", "--json").json["windows"] == 2


def test_a_profile_holds_the_credentials(
    cli: Cli, bucket: str, s3: ServedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/profile"
    tiny_lake(url, versions=1, samples_per_version=2)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[lake]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    settings(tmp_path, s3.endpoint, 'profile = "lake"\n')
    assert cli("fsck", "--level", 2, "--lake", url, "--json").code == 0
    settings(tmp_path, s3.endpoint, 'profile = "absent"\n')
    refused = cli("ls", "--lake", url)
    assert (refused.code, "profile (absent) could not be found" in refused.line) == (2, True)


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ('server_side_encryption = "AES256"\n', {ENCRYPTION: "AES256"}),
        (
            'server_side_encryption = "aws:kms"\nsse_kms_key_id = "alias/lake"\n',
            {ENCRYPTION: "aws:kms", f"{ENCRYPTION}-aws-kms-key-id": "alias/lake"},
        ),
    ],
)
def test_encryption_is_asked_for_with_every_object_that_is_written(
    bucket: str, s3: ServedS3, tmp_path: Path, more: str, sent: dict[str, str]
) -> None:
    settings(tmp_path, s3.endpoint, more)
    s3.reset()
    lake = tiny_lake(f"{bucket}/{len(more)}", versions=1, samples_per_version=1)
    writes = [request for request in s3.requests if request.kind in ("PUT", "CREATE", "POST")]
    assert len(writes) > 5
    for request in writes:
        assert sent.items() <= request.headers.items(), request
    assert len(lake.commit_paths()) == 1
    reads = [request for request in s3.requests if request.kind == "GET"]
    assert not any(ENCRYPTION in request.headers for request in reads)


def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != ("doctor",)], ids=" ".join)
def test_an_unknown_bucket_is_named_in_one_line(cli: Cli, verb: tuple[str, ...]) -> None:
    refused = cli(*verb, "--lake", "s3://no-such-bucket/lake", "--json")
    assert refused.code == 2
    assert "has no bucket 'no-such-bucket'" in refused.line


@pytest.mark.parametrize("command", ["ls", "init", "doctor"])
@pytest.mark.parametrize("why", ["credentials", "refused", "unreachable", "bucket"])
def test_a_bucket_that_cannot_be_used_is_explained_in_one_line(
    cli: Cli,
    bucket: str,
    why: str,
    command: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, said = f"{bucket}/none", ""
    match why:
        case "credentials":
            without_credentials(monkeypatch)
            said = "no usable credentials were found"
        case "refused":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASOMEBODYELSE")
            said = "refused the credentials or what they may do (HTTP 403, InvalidAccessKeyId)"
        case "unreachable":
            settings(tmp_path, "http://127.0.0.1:9")
            said = "the S3 service at http://127.0.0.1:9 could not be reached"
        case "bucket":
            url, said = "s3://no-such-bucket/lake", "has no bucket 'no-such-bucket'"
    named = (url, "--target", target, "--target-id", "x") if command == "init" else ("--lake", url)
    refused = cli(command, *named)
    if command == "doctor":  # it goes on to look at the rest
        assert (refused.code, "Traceback" in refused.err) == (1, False)
        assert said.split(" (")[0][:20] in " ".join(refused.out.replace("│", " ").split())
        return
    assert refused.code == 2
    assert said in refused.line
    assert SECRET not in refused.line


def test_rights_that_end_in_the_middle_are_explained_too(
    cli: Cli, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/middle"
    tiny_lake(url, versions=1, samples_per_version=2)
    opened = Lake.open

    def open_then_lose(place: str) -> Lake:
        import s3fs

        lake = opened(place)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASOMEBODYELSE")
        s3fs.S3FileSystem.clear_instance_cache()
        return Lake(Store.open(place), lake.target)

    monkeypatch.setattr("pipelines.maintain.Lake.open", staticmethod(open_then_lose))
    stopped = cli("compact", "--lake", url)
    assert stopped.code == 1
    assert "refused the credentials" in stopped.line


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(DRAFTLAKE), *arguments], capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"DRAFTLAKE_LOG": "DEBUG", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_no_secret_is_logged_at_any_level_or_stored_in_the_lake(
    bucket: str, s3: ServedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/secret"
    lake = tiny_lake(url, versions=2, samples_per_version=2)
    sound = run("fsck", "--level", "2", "--lake", url)
    assert sound.returncode == 0, sound
    assert any(request.headers.get("x-amz-security-token") == TOKEN for request in s3.requests)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASOMEBODYELSE")
    failed = run("ls", "--lake", url)
    assert failed.returncode == 2
    assert "where the error came from" in failed.stderr  # the log is on
    for done in (sound, failed):
        assert not [s for s in (SECRET, TOKEN) if s in done.stdout + done.stderr]
    names = lake.store.list("")
    assert len(names) > 10
    assert not [n for n in names if any(s.encode() in lake.store.read(n) for s in (KEY, SECRET, TOKEN))]
