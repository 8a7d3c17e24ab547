"""Versions of the packages that decide the numbers."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("accelerate", "draftlake", "numpy", "safetensors", "torch")


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed version of each distribution; ``"absent"`` where one is not installed as such."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
